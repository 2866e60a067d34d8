"""What a run's folder holds for a replay: batches, checkpoints, and what came out of each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rl.config.damage import read_lines
from rl.config.schema import Config, ConfigError, LearnerConfig, overridden
from rl.config.tree import differing
from rl.learner.changes import read_changes, set_at
from rl.store.batch_files import FOLDER, read_batch_part, steps_kept
from rl.store.checkpoint_folder import steps_of
from rl.store.version_digests import read_version_digests
from rl.wire.messages import OF_SEQUENCES, BatchPart
from rl.wire.run import RunFile

_HOW = "ranks context_parallel copies reduce_dtype threads max_tokens_per_pack logprob_chunk attention compile"
COMPUTES = {f"learner.{name}" for name in (*_HOW.split(), "activation_checkpointing")} | {"model.dtype"}
"""Fields that change how a step is computed, and nothing of what it is."""
_WHAT = "lr warmup_steps schedule min_lr_fraction betas eps weight_decay max_grad_norm minibatches"
COUNTS = {f"learner.{name}" for name in _WHAT.split()} | {"steps"} | COMPUTES
"""Fields outside of `algo` that a replay may change."""
_OF_SAMPLES = ("algo.columns", "algo.teacher", "algo.critic=")


class Recorded:
    """A run that has trained. Raises ConfigError where there is nothing to replay."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = RunFile.load(folder)
        self.config = self.run.config
        self.steps = steps_kept(folder)
        if (kind := self.config.learner.kind) != "fsdp":
            raise ConfigError(f"{str(folder)!r}: learner.kind={kind} records no batches that could be replayed")
        if not self.steps:
            raise ConfigError(f"{str(folder)!r}: no batch in {folder / FOLDER}; run it with tracking.replay=full")

        self.ranks = range(0, self.config.learner.ranks, self.config.learner.context_parallel)
        """Those that had different samples: of ranks that computed together the first."""

        self._changes = read_changes(folder)
        self.digests = read_version_digests(folder)
        rows = read_lines(folder / "metrics.jsonl", dict[str, Any])
        self.metrics = {row["step"]: row for row in rows if "train/loss" in row and isinstance(row.get("step"), int)}

        start = self.run.start_step
        own = {step: path for step, path in steps_of(folder / "checkpoints").items() if step >= start}
        self._states: dict[int, Path | None] = {start: self.config.resume, **own}
        """What a replay can begin with, by step: checkpoints, and at the first step what the run began with."""

    def sets(self, step: int, config: LearnerConfig) -> dict[str, Any]:
        """What `fresco set` had set when batch `step` was trained, but for what this configuration changes itself."""
        own = differing(dict(config), dict(self.config.learner))
        return {name: value for name, value in set_at(self._changes, step).items() if name.partition(".")[2] not in own}

    def span(self, first: int | None, last: int | None) -> tuple[int, int]:
        """The steps to train again, the second one excluded. Raises ConfigError for batches that are not there.

        The first step is the earliest of which batch and state are there, unless it is given.
        """
        earliest = min((step for step in self._states if step in self.steps), default=self.steps[0])
        begin = earliest if first is None else first
        end = self.steps[-1] + 1 if last is None else last
        missing = set(range(self.state_before(begin)[1], end)) - {*self.steps}
        if begin >= end or missing:
            there = f"it has the batches of steps {self.steps[0]} to {self.steps[-1]}"
            wanted = f"--from {begin} --to {end} needs that of step {min(missing)}" if missing else "there is no step"
            raise ConfigError(f"{str(self.folder)!r}: {wanted}; {there} (tracking.replay=full keeps all)")
        return begin, end

    def state_before(self, step: int) -> tuple[Path | None, int]:
        """The newest state that is not behind this step, and its own; None: the start model. Raises ConfigError."""
        at = max((n for n in self._states if n <= step), default=None)
        if at is None:
            raise ConfigError(f"--from {step}: the run begins at step {self.run.start_step}")
        saved = self._states[at]
        if saved is not None and not saved.exists():
            later = [n for n in self._states if n > at]
            remedy = f"take --from {min(later)}" if later else "put it back there"
            raise ConfigError(f"{saved}, which the run began with, is not there any more; {remedy}")
        return saved, at

    def part(self, step: int, rank: int, ranks: int) -> BatchPart:
        """What one of so many ranks trains. Raises FileNotFoundError, Damaged."""
        if ranks == len(self.ranks):
            return read_batch_part(self.folder, step, self.ranks[rank])
        return dealt([read_batch_part(self.folder, step, each) for each in self.ranks], rank, ranks)

    def changed(self, overrides: Sequence[str]) -> Config:
        """The configuration with these changes. Raises ConfigError for a field that changes nothing in a replay."""
        sampled = _OF_SAMPLES if self.config.algo.critic else (*_OF_SAMPLES, "algo.critic")
        for item in overrides:
            name = item.partition("=")[0]
            if item.startswith(sampled) or not (name in COUNTS or name.startswith("algo.")):
                counts = ", ".join(sorted(COUNTS))
                raise ConfigError(f"{item}: a replay trains what was sampled; what counts is algo and {counts}")
        return overridden(self.config.model_dump(mode="json"), overrides)


def dealt(parts: Sequence[BatchPart], rank: int, ranks: int) -> BatchPart:
    """The batch of one number of ranks for another one: whole samples, dealt in turn."""
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    lists = {name: [value for part in parts for value in getattr(part, name)] for name in OF_SEQUENCES}
    whole = msgspec.structs.replace(parts[0], rank=rank, columns=columns, **lists)
    return whole.of_rows(range(rank, len(whole.rows), ranks))
