"""What a run's folder holds for a replay: batches, checkpoints, and what came out of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rl.config.damage import read_lines
from rl.config.schema import Config, ConfigError, LearnerConfig, overridden
from rl.config.tree import differing
from rl.learner.changes import read_changes, set_at
from rl.store.batch_files import FOLDER, read_batch_part, steps_kept
from rl.store.checkpoint_folder import read_meta, steps_of
from rl.store.version_digests import read_version_digests
from rl.wire.messages import OF_SEQUENCES, BatchPart
from rl.wire.run import RunFile

_HOW = "ranks context_parallel copies reduce_dtype threads max_tokens_per_pack logprob_chunk attention"
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

        self._changes = read_changes(folder)
        self.digests = read_version_digests(folder)
        rows = read_lines(folder / "metrics.jsonl", dict[str, Any])
        steps = (row for row in rows if "train/loss" in row and isinstance(row.get("step"), int))
        self.metrics = {row["step"]: row for row in steps}

    def __reduce__(self) -> tuple[type[Recorded], tuple[Path]]:
        """Another process reads the folder itself, and so registers what the run has registered."""
        return Recorded, (self.folder,)

    @property
    def ranks(self) -> range:
        """Those that had different samples: of ranks that computed together the first."""
        return range(0, self.config.learner.ranks, self.config.learner.context_parallel)

    def sets(self, step: int, config: LearnerConfig) -> dict[str, Any]:
        """What `fresco set` had set when batch `step` was trained, but for what this configuration changes itself."""
        own = differing(dict(config), dict(self.config.learner))
        return {name: value for name, value in set_at(self._changes, step).items() if name.partition(".")[2] not in own}

    def span(self, first: int | None, last: int | None) -> tuple[int, int]:
        """The steps to train again, the second one excluded. Raises ConfigError for batches that are not there."""
        begin = self._earliest() if first is None else first
        end = self.steps[-1] + 1 if last is None else last
        missing = set(range(self.state_before(begin)[1], end)) - {*self.steps}
        if begin >= end or missing:
            there = f"it has the batches of steps {self.steps[0]} to {self.steps[-1]}"
            wanted = f"--from {begin} --to {end} needs that of step {min(missing)}" if missing else "there is no step"
            raise ConfigError(f"{str(self.folder)!r}: {wanted}; {there} (tracking.replay=full keeps all)")
        return begin, end

    def _earliest(self) -> int:
        """The first step of which batch and state are there."""
        states = [self.run.start_step, *steps_of(self.folder / "checkpoints")]
        return min((step for step in states if step in self.steps), default=self.steps[0])

    def state_before(self, step: int) -> tuple[Path | None, int]:
        """The newest checkpoint that is not behind this step, and its own; None: the start model. Raises
        ConfigError."""
        own = steps_of(self.folder / "checkpoints")
        newest = max((n for n in own if n <= step), default=-1)
        if newest >= self.run.start_step:
            return own[newest], newest
        if step < self.run.start_step:
            raise ConfigError(f"--from {step}: the run begins at step {self.run.start_step}")
        began = self.config.resume
        if began is not None and not began.exists():
            later = f"take --from {min(own)}" if own else "put it back there"
            raise ConfigError(f"{began}, which the run began with, is not there any more; {later}")
        return began, self.run.start_step if began is None else read_meta(began).step

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

    def differing(self, n: int, values: Mapping[str, float]) -> dict[str, tuple[float, float | None]]:
        """The metrics of the step that made version n which came out otherwise: what was computed, and what stands in
        the run's row."""
        row = self.metrics.get(n, {})
        both = {name: (value, row[name]) for name, value in values.items() if name in row}
        return {name: pair for name, pair in both.items() if (pair[0] if math.isfinite(pair[0]) else None) != pair[1]}


def dealt(parts: Sequence[BatchPart], rank: int, ranks: int) -> BatchPart:
    """The batch of one number of ranks for another one: whole samples, dealt in turn."""
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    lists = {name: [value for part in parts for value in getattr(part, name)] for name in OF_SEQUENCES}
    whole = msgspec.structs.replace(parts[0], rank=rank, columns=columns, **lists)
    return whole.of_rows(range(rank, len(whole.rows), ranks))
