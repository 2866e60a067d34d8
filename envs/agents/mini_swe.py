"""Unmodified mini-swe-agent on the repositories of the family `swe`, in a sandbox from which it reaches its model only.

It lives in a virtual environment of its own, because it wants another `openai` than Fresco has:

    python3 -m venv ~/.cache/fresco/mini-swe-agent
    ~/.cache/fresco/mini-swe-agent/bin/pip install --no-deps -r requirements/mini_swe.txt

What it has changed when it ends is judged by the repository's tests, in another sandbox (`envs/swe/evaluate.py`).
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from envs.gateway.command import Command, CommandFailed
from envs.sandbox import Sandbox, SandboxError
from envs.sandbox.base import last_line
from envs.sandbox.runtime import HARNESS, HOME
from envs.swe.checkout import Checkout, open_checkout
from envs.swe.environment import SweFamily, SweOptions
from envs.swe.evaluate import MAX_DIFF_CHARS
from envs.swe.tasks import SweTask
from envs.swe.tools import extract_diff
from rl.store.made_once import cache_folder
from rollout.episodes.environment import (
    ChatMessage,
    DemonstratedTurn,
    Demonstration,
    Endpoint,
    EnvironmentFamily,
    Needs,
    Outcome,
    RewardFailed,
)

_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_SCRIPT = f"{HARNESS}/run_mini_swe.py"
_SETTINGS = {
    "HOME": HOME,
    "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini-swe-agent",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # what the gateway refuses once, it refuses again
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "PYTHONDONTWRITEBYTECODE": "1",
}


class MiniSweOptions(SweOptions):
    """`env.options` of `env.name=mini_swe`; those of `swe`, and:"""

    python: Path = Field(default_factory=lambda: cache_folder() / "mini-swe-agent" / "bin" / "python")
    """The interpreter of mini-swe-agent's environment."""
    turns: int = Field(3, ge=1)
    """Answers of the model after which the agent gives up."""
    agent_s: float = Field(300.0, gt=0)
    """Longest time of an agent, its start included."""


class MiniSweFamily(SweFamily):
    Options: type[BaseModel] = MiniSweOptions
    options: MiniSweOptions
    foreign = True

    def __init__(self, options: MiniSweOptions, seed: int) -> None:
        super().__init__(options, seed)
        self.command = Command(
            [str(options.python), _SCRIPT],
            deadline_s=options.agent_s,
            memory_bytes=options.memory_mb << 20,
            variables=_SETTINGS,
        )

    @classmethod
    def needs(cls, options: SweOptions) -> Needs:
        """An agent's time, and then the tests."""
        assert isinstance(options, MiniSweOptions)
        why = f"an agent of env.options.agent_s={options.agent_s:g}, tests of test_s={options.test_s:g}"
        room = f"env.options.sandboxes={options.sandboxes}"
        return Needs(options.agent_s + options.test_s, why, 1, options.sandboxes, room)

    async def start(self) -> None:
        """Raises SandboxError, one line, also where mini-swe-agent is not installed."""
        if not self.options.python.exists():
            folder = self.options.python.parents[1]
            raise SandboxError(
                f"env.options.python={self.options.python}: no such interpreter; make it with `python3 -m venv "
                f"{folder}` and `{folder}/bin/pip install --no-deps -r requirements/mini_swe.txt`"
            )
        await super().start()

    def make(self) -> Any:
        return MiniSwe(self)

    def open_sandbox(self, task: SweTask) -> tuple[Checkout, Sandbox]:
        """A sandbox like that of `swe`, with mini-swe-agent in it."""
        backend = self.sandboxes.backend
        checkout = self._checkouts.prepare(task, images=False)
        template = replace(checkout.template, visible=self.command.visible_folders())
        limits = replace(self.command.limits(), output_bytes=2 * MAX_DIFF_CHARS)
        return open_checkout(backend, replace(checkout, template=template), limits)


class MiniSwe:
    """One episode."""

    def __init__(self, family: MiniSweFamily) -> None:
        self._family = family

    async def run(self, task: SweTask, endpoint: Endpoint) -> Outcome:
        family = self._family
        service = family.sandboxes
        async with family.episode_slots:
            checkout, opened = await service.entered(lambda: family.open_sandbox(task), lambda made: made[1].close())
            try:
                said = await self._play(task, opened, endpoint)
                diff = await service.run(lambda: extract_diff(opened, checkout.base, MAX_DIFF_CHARS))
            finally:
                await asyncio.shield(asyncio.ensure_future(service.run(opened.close)))

            try:
                judged = await service.run(lambda: family.evaluate(task, checkout, diff))
            except SandboxError as error:
                raise RewardFailed(f"mini-swe: the tests could not be run: {error}") from error

        info = {
            "submitted": float(said.get("exit_status") == "Submitted"),
            "failed": float(not said),
            "turns": float(said.get("turns", 0)),
            "fail_to_pass": judged.fail_to_pass,
            "pass_to_pass": judged.pass_to_pass,
            "diff_chars": float(len(diff)),
        }
        return Outcome(judged.reward(partial=family.options.partial_reward), judged.resolved, info=info)

    async def close(self) -> None:
        pass

    async def _play(self, task: SweTask, opened: Sandbox, endpoint: Endpoint) -> dict[str, Any]:
        """What the agent says at its end; nothing where it failed, by a deadline or a full context, say."""
        options = self._family.options
        given = {
            "task": shown(task, options.statement_chars),
            "turns": options.turns,
            "shown": options.output_bytes,
            "command_s": int(options.command_s),
            "answer_s": options.agent_s,
        }

        try:
            code, output, errors = await self._family.command.run_in(
                self._family.sandboxes, opened, json.dumps(given).encode(), endpoint
            )
        except CommandFailed as error:
            print(f"{task.instance_id}: {error}", file=sys.stderr)
            return {}

        if code != 0:
            print(f"{task.instance_id}: mini-swe-agent ended with {code}: {last_line(errors)}", file=sys.stderr)
            return {}
        found: dict[str, Any] = json.loads(last_line(output))
        return found


def shown(task: SweTask, limit: int) -> str:
    """The statement, cut in its middle."""
    text = task.problem_statement
    return text if len(text) <= limit else f"{text[: limit // 2]}\n...\n{text[-limit // 2 :]}"


def gold_command(task: SweTask) -> str | None:
    """A shell command that fixes the task, its gold patch without context; None for one that makes or deletes files."""
    if "/dev/null" in task.gold_patch:
        return None

    kept: list[str] = []
    old = new = 0
    group: list[str] = []
    begin = (0, 0)

    def end_group() -> None:
        if group:
            removed = sum(line.startswith("-") for line in group)
            added = len(group) - removed

            # Of an empty side the line before it is named.
            first, second = begin[0] - (not removed), begin[1] - (not added)
            kept.extend([f"@@ -{first},{removed} +{second},{added} @@", *group])
            group.clear()

    for line in task.gold_patch.splitlines():
        if line.startswith(("+++ ", "--- ")):
            end_group()
            kept.append(line)
        elif line.startswith("@@ "):
            end_group()

            sides = line.split()
            old, new = (int(side[1:].split(",")[0]) for side in sides[1:3])

        elif line.startswith(("-", "+")):
            begin = begin if group else (old, new)
            group.append(line)
            old += line[0] == "-"
            new += line[0] == "+"

        elif line.startswith(" "):
            end_group()
            old += 1
            new += 1

    end_group()
    patch = "\n".join(kept)
    return f"git apply --unidiff-zero - <<'END'\n{patch}\nEND"


async def demonstrate(
    family: EnvironmentFamily, count: int, *, seed: int, mistakes: float, max_turns: int
) -> list[Demonstration]:
    """The gold patch as one command, and the submission: the form that mini-swe-agent wants, and the fixes by heart."""
    assert isinstance(family, MiniSweFamily)
    shown_ones = []
    for index in range(family.task_count("train")):
        task: SweTask = family.task("train", index)
        command = gold_command(task)
        if command is None:
            continue

        opening = [
            ChatMessage("system", "You fix bugs with bash, one command a turn."),
            ChatMessage("user", f"{shown(task, family.options.statement_chars)}\n\nWhen it is fixed: {_SUBMIT}"),
        ]

        answer = [ChatMessage("tool", "<returncode>0</returncode>\n")]
        turns = [DemonstratedTurn(_call(command), True, answer), DemonstratedTurn(_call(_SUBMIT), True, [])]
        shown_ones.append(Demonstration(opening, turns))
    return [shown_ones[index % len(shown_ones)] for index in range(count)] if shown_ones else []


def _call(command: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {json.dumps({"command": command})}}}\n</tool_call>'
