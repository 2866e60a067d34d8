"""`fresco set RUN learner.lr=1e-5` and `fresco undo RUN --to N`: change a run that goes on, at the end of a step.

Engines and environments stay up. What an undo takes back expires by the rules of freshness, and its first version is
published in a new timeline.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from launch.report.gather import is_running
from launch.terminal import say
from rl.config.schema import ConfigError, overridden
from rl.learner.changes import SETTABLE, WISH, Change, reachable, read_changes
from rl.wire.run import RunFile

_TURN_S = 0.02


def set_fields(arguments: argparse.Namespace) -> int:
    """Returns 0 once it is so. Raises ConfigError."""
    run = _live(arguments.run)
    fields = [item.partition("=")[0] for item in arguments.overrides]
    if fixed := [field for field in fields if field not in SETTABLE]:
        raise ConfigError(f"{fixed[0]}: it cannot change while a run goes on; what can is {', '.join(SETTABLE)}")

    learner = overridden(run.config.model_dump(mode="json"), arguments.overrides).learner
    made = _ask(run, Change(sets={field: getattr(learner, field.partition(".")[2]) for field in fields}))
    say(f"from step {made.step} on: {', '.join(f'{name}={value}' for name, value in made.sets.items())}")
    return 0


def undo(arguments: argparse.Namespace) -> int:
    """Returns 0 once the old version is published again, or, by a learner that does not see the folder, is to be.
    Raises ConfigError."""
    run = _live(arguments.run)
    if run.config.supervised:
        raise ConfigError(f"{str(arguments.run)!r}: fine-tuning goes back by resume=CHECKPOINT only, after its end")

    made = _ask(run, Change(undo=arguments.to))
    begin = time.monotonic()
    versions = run.folder / "versions.jsonl"
    if run.config.cluster.count and not versions.exists():  # it stands on the learner's machine
        print(f"version {made.undo} becomes the newest again, in timeline {made.timeline}")
        return 0

    wanted = f'{{"timeline":{made.timeline},"n":{made.undo},'
    _wait(run, f"learner.0 to publish version {made.undo} again", lambda: wanted in versions.read_text())
    after = f"{time.monotonic() - begin:.1f} s after the step's end"
    print(f"version {made.undo} is the newest again, in timeline {made.timeline}, {after}")
    return 0


def _live(folder: Path) -> RunFile:
    run = RunFile.load(folder)
    if not is_running(folder):
        raise ConfigError(f"{str(folder)!r}: it does not go on; resume=CHECKPOINT of fresco run changes anything")
    if run.config.learner.kind == "simulated" and run.config.learner.ranks > 1:
        raise ConfigError("learner.kind=simulated changes nothing with more than one rank")
    return run


def _ask(run: RunFile, wish: Change) -> Change:
    """What was made of it. Raises ConfigError where another wish waits, or this one is out of reach."""
    if wish.undo is not None and wish.undo not in reachable(run.folder):
        raise _beyond(run, wish)

    known = len(read_changes(run.folder))
    path = run.folder / WISH
    partial = run.folder / f"{WISH}.{os.getpid()}"
    asked = msgspec.structs.asdict(wish) | {"at": time.time_ns()}  # on another machine, no two wishes are alike
    partial.write_bytes(msgspec.json.encode(asked))
    try:
        os.link(partial, path)
    except FileExistsError:
        raise ConfigError(f"{path} waits for the end of a step: another change was asked for") from None
    finally:
        partial.unlink()

    try:
        _wait(run, "learner.0 to end its step", lambda: not path.exists())
    finally:
        path.unlink(missing_ok=True)
    changes = read_changes(run.folder)
    if len(changes) == known:
        raise _beyond(run, wish)
    return changes[-1]


def _beyond(run: RunFile, wish: Change) -> ConfigError:
    there = ", ".join(map(str, reachable(run.folder))) or "none; set learner.checkpoint_every"
    apart = "; not with ranks on machines that share no folder" if run.config.cluster.count else ""
    return ConfigError(f"--to {wish.undo}: a run goes back to one of its two newest checkpoints: {there}{apart}")


def _wait(run: RunFile, whom: str, done: Callable[[], bool]) -> None:
    """Raises ConfigError where it takes too long."""
    deadline_s = run.config.learner.batch_deadline_s
    begin = time.monotonic()
    while not done():
        if time.monotonic() - begin > deadline_s or not is_running(run.folder):
            raise ConfigError(f"waited for {whom}, at most learner.batch_deadline_s={deadline_s:g} s; it may be over")
        time.sleep(_TURN_S)
