"""The small protocol between a generator process and an inference engine.

Adding an engine is one file here that implements `Engine`, plus a line in `rollout.generator.engines.make_engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rl.wire.columns import ONE_TURN, declared, masked_columns
from rl.wire.messages import Generate, Version, WeightStatus

DRAIN_S = 30.0
"""`generator.on_update=drain`: longest wait for running requests, whose context is computed again after it."""


@dataclass(frozen=True)
class EngineInfo:
    kv_tokens: int  # capacity of the KV cache, in tokens
    max_num_seqs: int
    max_model_len: int


@dataclass
class Sampled:
    """All that was sampled for one request, in order; versions are per token."""

    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    policy_version: list[int] = field(default_factory=list)
    finish_reason: str = ""  # stop | length | abort
    tokens_generated: int = 0  # also counts tokens that an `abort` update discarded
    columns: dict[str, Any] = field(default_factory=dict)
    """The entries of further columns that generators make (`rl/wire/columns.py`): a list as long as `token_ids`, or one
    entry."""
    context: dict[str, Any] = field(default_factory=dict)
    """For each context column an entry for every token of the prompt from `Generate.known` on. They come at the end, or
    never for a request that was aborted: whoever goes on with it reads these tokens again."""

    def arrays(self) -> dict[str, np.ndarray]:
        """`Generated.columns`. Raises ValueError for a column that is not registered."""
        if not self.token_ids:
            return masked_columns({"token": 0, **ONE_TURN}, "generator")

        given = {
            "token_ids": self.token_ids,
            "logp_behavior": self.logp,
            "policy_version": self.policy_version,
            **self.columns,
        }

        arrays = {}
        for name, values in given.items():
            column = declared(name)
            arrays[name] = np.array(values if column.scope == "token" else [values], column.dtype)
        return arrays

    def context_arrays(self) -> dict[str, np.ndarray]:
        """`Generated.context`. Raises ValueError for a column that is not registered."""
        given = {declared(name): values for name, values in self.context.items()}
        return {
            column.name: np.array(values if len(values) else column.full(0), column.dtype)
            for column, values in given.items()
        }


class Engine(Protocol):
    async def start(self) -> EngineInfo:
        """Load the model; the first version arrives through `load` before any request runs."""

    async def watch(self) -> None:
        """Runs beside everything else, once started: raises EngineDied as soon as the engine has, and says of what.

        Calls that are pending then may never return; whoever made them cancels them.
        """

    async def generate(self, request: Generate, progress: Callable[[Sampled], None]) -> Sampled:
        """Run one request to its end. `progress` is called with the growing result, first at the first token.

        Not at the end: another engine may have to go on from what was told, and behind an end nothing goes on.

        Returns early with finish_reason "abort" after `abort(request_id)`; raises on engine failure.
        """

    async def abort(self, request_id: int) -> None: ...

    def loaded(self) -> int:
        """How far loads have come, in bytes read, checked and loaded: grows as long as one advances."""

    async def load(self, version: Version, probe_ids: list[int]) -> WeightStatus:
        """Load the published weights of `version` under the configured `on_update`, and probe them.

        Takes as long as it takes: whoever calls it watches `loaded`, and cancels a load that stands still.

        Answers what the learner is told: the version loaded, its checksum and probe, and the seconds it took.
        """

    async def rest(self) -> None:
        """Leave the device to the learner: no step, and no memory that can be let go of, until the next load has ended.

        It begins as a load does, as `on_update` says. Requests stay, and new ones wait.
        """

    async def stop(self) -> None: ...
