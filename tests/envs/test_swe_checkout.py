"""Published images: their repository is made ready as a sandbox opens. A folder with a history stands for an image."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from envs.sandbox import Limits, Sandbox, SandboxError, Template, service
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.runtime import default_runtime
from envs.swe import checkout_cache
from envs.swe.checkout import Checkout, open_checkout
from envs.swe.environment import SweFamily, SweOptions
from envs.swe.evaluate import evaluate
from envs.swe.generate import write_tasks
from envs.swe.tasks import file_diff
from tests.envs.agents import agents_work, tool_call
from tests.envs.errors import raises_one_line
from tests.envs.repositories import BUGGY, FIX, TASK, make_published
from tests.envs.sandboxes import sh

LIMITS = Limits(timeout_s=120, output_bytes=4 << 20)
COMMIT = "git add -A && git -c user.name=a -c user.email=b commit -qm work"


@pytest.fixture
def published(tmp_path: Path) -> Checkout:
    return Checkout(Template(make_published(tmp_path / "published")), "", bug_patch=TASK.bug_patch)


def test_the_bug_is_in_and_the_history_is_cut(backend: BubblewrapBackend, published: Checkout) -> None:
    checkout, sandbox = open_checkout(backend, published, LIMITS)
    assert sh(sandbox, "cat ledger/__init__.py").text() == BUGGY
    assert sh(sandbox, "git log --all --format=%H").text() == f"{checkout.base}\n"
    assert sh(sandbox, "git status --porcelain; git tag; git stash list").text() == ""
    told = sh(sandbox, "git fsck --lost-found; git reflog -p; git log -p --all").text()
    assert "index <= rest" in told and "index < rest" not in told
    sandbox.close()


def test_committed_work_is_judged_and_no_work_earns_nothing(backend: BubblewrapBackend, published: Checkout) -> None:
    """Also from the checkout of the agent's sandbox, as an episode has it: the judge's sandbox has the bug again."""
    checkout, diff = agents_work(backend, published, f"{FIX} && {COMMIT}", LIMITS)
    outcome = evaluate(backend, checkout, TASK, diff, LIMITS)
    assert outcome.resolved
    assert outcome.restored == (), "what the image's git ignores (compiled, packaging) is not the agent's work"
    assert evaluate(backend, checkout, TASK, "", LIMITS).fail_to_pass == 0
    assert evaluate(backend, replace(checkout, bug_patch=""), TASK, "", LIMITS).resolved


def test_a_bug_that_does_not_apply_is_one_line(backend: BubblewrapBackend, published: Checkout) -> None:
    wrong = replace(published, bug_patch=file_diff("nowhere.py", "a\n", "b\n"))
    # More often than the backend has slots: none is left behind.
    for _ in range(10):
        with raises_one_line(SandboxError, "published: its repository cannot be made ready: ", "nowhere.py"):
            open_checkout(backend, wrong, LIMITS)


class Images:
    """A backend of images, each of them the same folder."""

    name = "docker"

    def __init__(self, inner: BubblewrapBackend, folder: Path) -> None:
        self._inner = inner
        self._folder = folder

    def open(self, template: Template, limits: Limits) -> Sandbox:
        assert template.image == "published:latest"
        return self._inner.open(Template(self._folder), limits)

    def close(self) -> None:
        pass


def test_an_episode_on_an_image(
    backend: BubblewrapBackend, published: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert published.template.folder is not None
    images = Images(backend, published.template.folder)
    monkeypatch.setattr(service, "make_backend", lambda *_: images)
    monkeypatch.setattr(checkout_cache, "_IMAGE_PYTHON", default_runtime().python)
    source = tmp_path / "tasks.jsonl"
    write_tasks([replace(TASK, package="", image="published:latest")], source)

    async def play(command: str) -> float:
        family = SweFamily(SweOptions(source=str(source), eval_count=0, threads=1, sandboxes=1), 0)
        await family.start()
        environment = family.make()
        await environment.reset(family.task("train", 0))
        await environment.step(tool_call("bash", command=command))
        last = await environment.step(tool_call("submit"))
        await environment.close()
        await family.stop()
        assert last.reward is not None
        return last.reward

    assert asyncio.run(play(f"{FIX} && {COMMIT}")) == 1
    assert asyncio.run(play("git log -p")) == 0
