"""CPU seconds that bare vLLM needs for the samples of some steps: `python -m experiments.bench._bare_engine WORK`.

vLLM's offline engine in this process, nothing between it and its requests. Same model, dtype, cache and most sequences
as the run's. Each answer has exactly the length that it had, and comes with its log-probabilities, without which
nothing could be trained on it later. As many requests are in it as the run's engine had at most, always. A new one for
each that ends, and at both ends of the measurement it is as full as in between. Weights and prompts are random, which
costs the same; the prompts of a group are equal.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import deque
from typing import Any

import numpy as np

from experiments.bench._bound import Work
from experiments.bench._measuring import family_cpu_s
from rl.wire.process import die_with_parent
from rl.wire.run import ProcessContext, RunFile

Request = tuple[list[int], int]
"""A request: its prompt, and the tokens of its answer."""


def measure(work: Work) -> float:
    """CPU seconds of all processes for the answers of all steps."""
    engine = _engine(RunFile.load(work.run))
    vocabulary = engine.model_config.get_vocab_size()
    warming = list(itertools.islice(itertools.cycle(requests_of(work, vocabulary, seed=1)), 2 * work.at_once))
    measured = requests_of(work, vocabulary, seed=0)
    repeats = -(-4 * work.at_once // len(measured))  # of a short work, so that the measurement has several fillings
    one_more = measured[:1]

    waiting = deque([*warming, *(measured * repeats), *one_more])
    names = itertools.count()
    lengths: dict[str, int] = {}
    begins, ends = len(measured) * repeats + len(one_more), len(one_more)
    began_s, answered = 0.0, 0

    while True:
        while len(lengths) < work.at_once:
            if len(waiting) == begins:
                began_s, answered = family_cpu_s(), 0
            elif len(waiting) == ends:
                return (family_cpu_s() - began_s) * sum(length for _, length in measured) / answered
            prompt, length = waiting.popleft()
            lengths[_add(engine, str(next(names)), prompt, length)] = length

        answered += sum(map(lengths.pop, _step(engine)))


def requests_of(work: Work, vocabulary: int, seed: int) -> list[Request]:
    """The requests of all steps, in order."""
    random = np.random.default_rng(seed)
    found = []
    for step in work.steps:
        for first in range(0, len(step.answers), work.group_size):
            prompt = random.integers(0, vocabulary, step.prompt).tolist()
            found += [(prompt, length) for length in step.answers[first : first + work.group_size]]
    return found


def _engine(run: RunFile) -> Any:
    """The engine as the run's generator has it, but for what only a trainer needs: loads of new weights, priorities, a
    process."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from rollout.generator.engines.cpu.unpacked import heed_environment
    from rollout.generator.engines.vllm_settings import engine_arguments

    heed_environment()
    arguments, _untied = engine_arguments(ProcessContext(run, 0, 0))
    arguments.worker_extension_cls = ""
    arguments.scheduling_policy = "fcfs"
    return LLMEngine.from_engine_args(arguments)


def _add(engine: Any, name: str, prompt: list[int], length: int) -> str:
    """The name by which its answer comes."""
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    wanted = SamplingParams(
        max_tokens=length,
        temperature=1.0,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine.add_request(name, tokens_input(prompt), wanted)
    return name


def _step(engine: Any) -> list[str]:
    """What has ended in it."""
    return [output.request_id for output in engine.step() if output.finished]


def main(argv: list[str]) -> None:
    die_with_parent()
    (path,) = argv
    print(json.dumps({"engine": measure(Work.load(path))}))


if __name__ == "__main__":
    main(sys.argv[1:])
