"""Complete runs with vLLM's parsers, through the command line: an agent with tools, on real vLLM and CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.gateway.tokenizers import make_folder
from launch.plan import ProcessSpec
from launch.supervisor import Supervisor
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.launch.test_supervisor import QUIET
from tests.test_end_to_end_real import nothing_is_left
from tests.test_end_to_end_simulated import pid_of, wait_for_step

ROOT = Path(__file__).parent.parent
PARSERS = "rollout.parsers.process"
SETTINGS = [
    "name=simulated",
    "chat.parser=vllm:hermes",
    "steps=8",
    "env.servers=2",
    "model.warm_start={demonstrations: 400, steps: 150, batch: 16}",  # fewer, and some models write no call at all
    "rollout.groups_per_batch=2",
    "rollout.group_size=4",
    "eval.every=0",
    "eval.tasks=0",
    "timeouts.hang_s=20",
    "chat.parse_deadline_s=100",
    "tracking.wandb=disabled",
]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "launch.cli", "run", "experiments/agent_tools_cpu.yaml", f"runs={tmp_path}"]
    environment = os.environ | {"FRESCO_CACHE": str(tmp_path / "cache")}
    begun = subprocess.Popen(
        [*command, *SETTINGS], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    yield begun
    begun.kill()
    begun.wait()


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.docs
def test_a_run_goes_on_when_its_parsers_die_and_hang(process: subprocess.Popen[str], tmp_path: Path) -> None:
    wait_for_step(tmp_path, 2)
    assert has_torch(pid_of(tmp_path, PARSERS)) and not has_torch(pid_of(tmp_path, "envs.server"))
    os.kill(pid_of(tmp_path, PARSERS), signal.SIGKILL)
    wait_for_step(tmp_path, 4)
    os.kill(pid_of(tmp_path, PARSERS, incarnation=1), signal.SIGSTOP)

    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output[-4000:]
    assert "parsers.0 killed by SIGKILL; starting it again (1 of 3)" in output
    assert "parsers.0 no heartbeat for 20 s; starting it again (2 of 3)" in output
    nothing_is_left(tmp_path)

    rows = [json.loads(line) for line in (tmp_path / "simulated" / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("env/tool_calls", 0) for row in rows) > 0  # vLLM's parser has found them
    last = [row for row in rows if "parsers.0/turns" in row][-1]
    assert last["parsers.0/turns"] > 0
    failures = [last[f"env_server.{index}/parse_failures"] for index in range(2)]
    assert failures == [0, 0]  # every turn was asked for again in time


def test_a_parser_that_does_not_fit_is_refused_at_the_start(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_run(*QUIET, "chat.parser=vllm:llama3_json", model_folder=make_folder("qwen3", tmp_path / "model"))
    sockets = made.folder / "ipc"
    sockets.mkdir()
    run: RunFile = made.model_copy(update={"socket_folder": sockets})
    run.save()
    plan = [ProcessSpec(role, 0, module) for role, module in (("parsers", PARSERS), ("env_server", "envs.server"))]

    assert Supervisor(run, plan).execute() == 1
    error = json.loads((run.folder / "summary.json").read_text())["error"]
    assert error.startswith("parsers.0: ParserRefused: chat.parser='vllm:llama3_json': it does not fit this model: ")
    assert "bot token" in error and "name the parsers of this model" in error and "\n" not in error
    assert "Traceback" not in capsys.readouterr().out
