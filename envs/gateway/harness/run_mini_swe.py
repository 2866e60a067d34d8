"""Runs in a sandbox, with the Python of mini-swe-agent's own environment: one task from standard input, played to its
end.

The agent, its model and its environment are the package's own classes. What is written here are its settings.
"""

import json
import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

_SYSTEM = "You fix bugs with bash, one command a turn."
_INSTANCE = """{{task}}

When it is fixed: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"""
_OBSERVATION = "<returncode>{{output.returncode}}</returncode>\n{{output.output[:SHOWN]}}"


def main() -> None:
    given = json.load(sys.stdin)
    model = LitellmModel(
        model_name="openai/policy",
        model_kwargs={"max_retries": 2, "timeout": given["answer_s"]},
        cost_tracking="ignore_errors",
        observation_template=_OBSERVATION.replace("SHOWN", str(given["shown"])),
    )

    agent = DefaultAgent(
        model,
        LocalEnvironment(timeout=given["command_s"]),
        system_template=_SYSTEM,
        instance_template=_INSTANCE,
        step_limit=given["turns"],
        cost_limit=0,
    )
    ended = agent.run(given["task"])
    print(json.dumps({"exit_status": ended.get("exit_status", ""), "turns": agent.n_calls}))


if __name__ == "__main__":
    main()
