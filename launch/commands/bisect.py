"""`fresco bisect RUN_A RUN_B`: where two runs part first.

With `--replay` that step is computed again, under the code of each run, and the first thing that differs is named.
`fresco bisect RUN --good COMMIT --bad COMMIT` looks for the first commit that computes the run's steps otherwise.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from launch.provenance import Provenance, differences, git, read_provenance, this_commit
from launch.terminal import say
from rl.config.schema import ConfigError
from rl.config.tree import differing
from rl.replay.parting import common_steps, first_parting
from rl.replay.recorded import Recorded

_ROOT = Path(__file__).parents[2]
_NO_MATTER = ("name", "runs", "resume", "tracking.", "timeouts.", "alarms.")  # to what is computed
_SLOWER = 10  # a step of a replay may take so many times timeouts.hang_s: this machine may be a smaller one
Trail = dict[int, dict[str, str]]


def bisect(arguments: argparse.Namespace) -> int:
    """0 where nothing differs, else 1. Raises ConfigError."""
    one = Recorded(arguments.run)
    if arguments.good or arguments.bad:
        if not (arguments.good and arguments.bad) or arguments.other is not None:
            raise ConfigError("--good and --bad are two commits, and one run is replayed under them")
        return _between(one, arguments)
    if arguments.other is None:
        raise ConfigError("name a second run, or --good COMMIT --bad COMMIT")
    if (arguments.first, arguments.last) != (None, None):
        raise ConfigError("--from and --to are of --good and --bad; two runs are compared as far as both recorded")

    other = Recorded(arguments.other)
    origins = [read_provenance(run.folder, run.config) for run in (one, other)]
    begun = list(begun_with(one, other, origins))
    for line in begun:
        say(line)

    common = common_steps(one, other)
    if not common:
        spans = [f"{str(run.folder)!r} has steps {run.steps[0]} to {run.steps[-1]}" for run in (one, other)]
        raise ConfigError(f"{', '.join(spans)}: there is nothing to compare (tracking.replay=full keeps all)")

    parting = first_parting(one, other)
    if parting is None:
        print(f"every version, batch and metric that both recorded is alike, up to version {common[-1]}")
        shorter, longer = sorted((one, other), key=lambda run: run.steps[-1])
        if shorter.steps[-1] < longer.steps[-1]:
            say(f"{longer.folder} goes on to version {longer.steps[-1] + 1}")
        return int(bool(begun))

    step, what = parting
    print(f"first part at {what}")
    if arguments.replay and step < one.run.start_step:
        print("they begin with other weights: there is no step to replay")
    elif arguments.replay:
        _replay_both(one, other, step, [origin.versions.get("commit", "") for origin in origins])
    return 1


def begun_with(one: Recorded, other: Recorded, origins: list[Provenance]) -> Iterator[str]:
    """How the runs differ before their first step: configuration, data and model, code and packages, machine."""
    for field, (left, right) in differences(one.config, other.config).items():
        if not field.startswith(_NO_MATTER):
            yield f"configuration: {field}: {left} | {right}"
    for kind in ("start", "versions", "machine"):
        for name, (left, right) in differing(*(getattr(origin, kind) for origin in origins)).items():
            yield f"{kind}: {name}: {left or 'unknown'} | {right or 'unknown'}"


def _replay_both(one: Recorded, other: Recorded, step: int, commits: list[str]) -> None:
    """Each under its own commit, where this is a checkout that has both."""
    if not all(commits) or any(commit.endswith("+") for commit in commits) or commits[0] == commits[1]:
        print("both are replayed by this code: the commit of one is unknown, was changed, or is the other's as well")
        commits = ["", ""]
    trails = [trail_under(commit, run, step, step + 1) for commit, run in zip(commits, (one, other), strict=True)]
    named = parted(*trails)
    print(f"replayed, the first that differs is the {named}" if named else "replayed, both compute the same step")


def _between(run: Recorded, arguments: argparse.Namespace) -> int:
    """The first commit that computes otherwise than `--good` does: the history is halved again and again."""
    first, last = run.span(arguments.first, arguments.last)
    listed = git("rev-list", "--reverse", "--first-parent", f"{arguments.good}..{arguments.bad}").split()
    if not listed:
        raise ConfigError(f"--good {arguments.good} --bad {arguments.bad}: no commit leads from one to the other")

    good = trail_under(git("rev-parse", arguments.good), run, first, last)

    @cache
    def differs(commit: str) -> str | None:
        return parted(good, trail_under(commit, run, first, last))

    if differs(listed[-1]) is None:
        print(f"{arguments.good} and {arguments.bad} compute the same, steps {first} to {last - 1}")
        return 0
    found = listed[bisect_left(listed, True, hi=len(listed) - 1, key=lambda commit: differs(commit) is not None)]
    say(f"{git('log', '-1', '--format=%h %s', found)}: the first commit that computes another {differs(found)}")
    return 1


def parted(one: Trail, other: Trail) -> str | None:
    """The first thing that was computed otherwise, and its step."""
    named = ((n, name) for n in sorted(one) for name in one[n] if one[n][name] != other.get(n, {}).get(name))
    return next((f"{name} in step {n - 1}" for n, name in named), None)


def trail_under(commit: str, run: Recorded, first: int, last: int) -> Trail:
    """What the code of a commit computes, by `fresco replay --trail`; empty: this code. Raises ConfigError."""
    with tempfile.TemporaryDirectory(prefix="fresco-trail-") as name:
        path = Path(name) / "trail.json"
        code = _ROOT
        if commit and commit != this_commit():
            code = Path(name) / "code"
            git("archive", f"--output={code}.zip", commit)
            shutil.unpack_archive(f"{code}.zip", code)

        span = ["--from", str(first), "--to", str(last), "--trail", str(path)]
        words = [sys.executable, "-m", "launch.cli", "replay", str(run.folder.absolute()), *span]
        modules = os.pathsep.join([str(code), str(Path.cwd())])  # losses of the user's own stand where this was begun
        limits = run.config.timeouts
        limit_s = limits.start_s + _SLOWER * limits.hang_s * (last - run.state_before(first)[1])
        environment = os.environ | {"PYTHONPATH": modules}
        try:
            ended = subprocess.run(words, cwd=code, env=environment, capture_output=True, text=True, timeout=limit_s)
            said = (ended.stderr.strip().splitlines() or ["nothing was said"])[-1]
        except subprocess.TimeoutExpired:
            said = f"it did not end within {limit_s:g} s, by timeouts.start_s and timeouts.hang_s of the run"

        if not path.exists():
            raise ConfigError(f"commit {commit or 'of this code'} replays no step of {run.folder}: {said}")
        return msgspec.json.decode(path.read_bytes(), type=Trail, strict=False)
