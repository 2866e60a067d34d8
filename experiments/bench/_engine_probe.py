"""Seconds of a probe in vLLM: `python -m experiments.bench._engine_probe RUN_FOLDER`, which prints them as JSON.

The engine is that of the run's generator. What follows an update is repeated: the engine stands, a few requests wait in
it with all that they had and a little to sample, and it goes on. Blocks of such rounds with a probe before the requests
and blocks without take turns. Their difference is what the probe costs, from its way into the engine to its answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench._measuring import Timing, family_cpu_s, temporary_run
from rl.learner.publish import probe_length
from rl.store.batch_files import read_batch_parts
from rl.weights.updater import LONG_PROBES
from rl.wire.run import ProcessContext, RunFile
from rollout.generator.engines.environment import engine_environment

_PAIRS = 40  # of blocks
_ROUNDS = 20  # in a block: the kernel counts CPU time in hundredths of a second
_REQUESTS = 8  # that an update meets; of more, the differences between rounds would hide a probe
_TOKENS = 2  # that each has left to sample
_WAITING_S = 0.02  # for all to be in the engine before it goes on


class Updates:
    """Rounds of one engine, each like the end of an update."""

    def __init__(self, run: RunFile, texts: Sequence[list[int]]) -> None:
        from rollout.generator.engines.vllm import make_core
        from rollout.generator.engines.vllm_settings import engine_arguments

        self.core = make_core(run, engine_arguments(ProcessContext(run, 0, 0))[0])
        self._texts = texts
        self._probe_length = probe_length(run.config, LONG_PROBES)
        self._asked = 0

    async def block(self, *, probe: bool) -> Timing:
        """The time of one round; CPU of this process and of those below it."""
        began_s = time.perf_counter()
        began_cpu_s = family_cpu_s()
        for number in range(_ROUNDS):
            await self._round(number, probe)
        return Timing((time.perf_counter() - began_s) / _ROUNDS, (family_cpu_s() - began_cpu_s) / _ROUNDS)

    async def _round(self, number: int, probe: bool) -> None:
        """Play one round, with the same texts in every block."""
        await self.core.pause("keep", clear_cache=True)
        chosen = [self._texts[(number + place) % len(self._texts)] for place in range(_REQUESTS)]
        asked = []
        if probe:
            ids = chosen[0][: self._probe_length]
            asked.append(asyncio.create_task(self._generate(ids, max_tokens=1, prompt_logprobs=0)))
        asked += [asyncio.create_task(self._generate(text, max_tokens=_TOKENS, logprobs=0)) for text in chosen]

        await asyncio.sleep(_WAITING_S)
        await self.core.resume()
        await asyncio.gather(*asked)

    async def _generate(self, ids: list[int], **wanted: Any) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        name = str(self._asked)
        self._asked += 1
        parameters = SamplingParams(
            temperature=1.0,
            ignore_eos=True,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **wanted,
        )

        stream = await self.core.begin(name, tokens_input(ids, cache_salt=name), parameters, 0)
        await stream.next()
        stream.close()


async def measure(run: RunFile, texts: Sequence[list[int]]) -> dict[str, list[Timing]]:
    """A round with the probe and one without, by pair of blocks; the first pair warms up."""
    updates = Updates(run, texts)
    await updates.core.start()
    found: dict[str, list[Timing]] = {"with": [], "without": []}
    for _ in range(1 + _PAIRS):
        found["with"].append(await updates.block(probe=True))
        found["without"].append(await updates.block(probe=False))

    updates.core.shutdown(5)
    return {name: timings[1:] for name, timings in found.items()}


def texts_of(folder: Path, least: int) -> list[list[int]]:
    """The sequences of the run's last batch that have so many ids."""
    *_, batch_part = read_batch_parts(folder)
    parts = np.split(batch_part.columns["token_ids"], np.cumsum(batch_part.lengths)[:-1])
    return [part.tolist() for part in parts if len(part) >= least]


def main(argv: list[str]) -> None:
    (path,) = argv
    folder = Path(path)
    of_run = RunFile.load(folder)
    with temporary_run(config=of_run.config, model_folder=of_run.model_folder) as run:
        os.environ.update(engine_environment(run.config, "cpu"), FRESCO_PARENT_PID=str(os.getpid()))
        print(json.dumps(asyncio.run(measure(run, texts_of(folder, probe_length(run.config, LONG_PROBES))))))


if __name__ == "__main__":
    main(sys.argv[1:])
