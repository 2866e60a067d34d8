"""The learner on one GPU: model FLOPs used, with lengths that repeat and with new ones, beside a bare loop; memory.

A step is four packs of 16 384 tokens, made of samples of 512 to 4 096. The bare loop has the same packs, attention and
head, compiled where the learner's are, and nothing of the learner's own loop. `mfu` counts 6 for each parameter and
token, and causal attention; what is computed again in backward is not counted. `mfu_computed` counts the head on
trained tokens only, as it is computed. All are medians of five steps with new lengths in each, or of the same five
again, each behind its own; the optimizer's part is included.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from experiments.bench._bare_loop import BareLoop
from experiments.bench._measuring import batch_part_of, temporary_run
from experiments.gpu.kernels import profiled
from experiments.gpu.models import SIZES, save_model, shape_of
from experiments.gpu.part import Result, Unrun
from launch.machine import this_machine
from launch.memory import Need, check_memory, estimate
from rl.config.schema import Config, ConfigError, load_config
from rl.learner.trainer import Trainer
from rl.learner.update import UpdateStats
from rl.models.compiled import compile_layers
from rl.models.head import token_logprobs
from rl.models.layout import Layout
from rl.models.packing import Pack, make_packs
from rl.models.shape import logprob_chunk
from rl.wire.columns import ROUTED_EXPERTS, register, routed_experts
from rl.wire.messages import BatchPart

_PEAK = 989e12  # of an H100 in bfloat16, dense
_SAMPLES, _GROUP, _PACKS = 28, 4, 4
_CASES = {
    "cuda": [
        ("1.5b", "fresco", False),
        ("1.5b", "bare", False),
        ("1.5b", "fresco", True),
        ("4b", "fresco", False),
        ("0.5b", "fresco", False),
        ("1.5b", "bare", True),
        ("0.5b", "bare", False),
    ],
    "cpu": [("tiny", "fresco", False), ("tiny", "bare", False)],
}
"""Size, side, and whether layers and head are compiled, in the order of what one wants to know where time runs out."""
_STORED = ("0.5b",)
"""Sizes that keep their activations; all others compute them again."""
_MEMORY = {"cuda": [("0.5b", True), ("0.5b", False), ("1.5b", True), ("1.5b", False)]}
_STATES = {"cuda": ["1.5b", "4b"], "cpu": ["tiny"]}  # 8B takes 123 GiB of the host, or 138 of the GPU
_HOST = "learner.optimizer_states=host"
_PLACES = {"device": (), "host": (_HOST,), "host, added up in bfloat16": (_HOST, "learner.reduce_dtype=bfloat16")}
_LORA = "model.lora={rank: 16, alpha: 32}"
_UNREPLAYED = "learner.router_replay=off"
_KINDS: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    "cuda": [
        ("1.5b", "in full", ()),
        ("1.5b", "LoRA", (_LORA,)),
        ("8b", "LoRA", (_LORA,)),
        ("mixture", "without replay", (_UNREPLAYED,)),
        ("mixture", "router replay", ()),
    ],
    "cpu": [
        ("tiny", "in full", ()),
        ("tiny", "LoRA", (_LORA,)),
        ("tiny mixture", "without replay", (_UNREPLAYED,)),
        ("tiny mixture", "router replay", ()),
    ],
}

Step = Callable[[BatchPart], None]


def learner(result: Result, device: str) -> None:
    """Each case by itself: one that fails leaves the others. Ours of the first size is profiled as well."""
    with one_rank(device), tempfile.TemporaryDirectory(prefix="fresco-gpu-") as folder:
        rates: dict[tuple[str, str, bool], float] = {}
        for size, side, compile in _CASES[device]:
            case = case_of(size, side, compile)
            _clear(device)

            with _if_it_fits(result, case):
                model = save_model(size, Path(folder), device)
                config = config_of(size, device, size not in _STORED, [f"learner.compile={str(compile).lower()}"])
                step = _fresco(config, model, device) if side == "fresco" else _bare(config, model, device)
                found = _measured(step, size, device, repeated=side == "fresco")
                result.note(case, found)
                rates[size, side, compile] = found["fresh"]["tokens_per_s"]

                if side == "fresco" and size == _CASES[device][0][0]:
                    with result.case(f"{case}, a pack"):
                        again = partial(_timed, step, _batch_part(size, device, 0), device)
                        result.note(f"{case}, a pack", profiled(again, _PACKS, device))
            step = again = None  # type: ignore[assignment]  # their memory is the next one's

            if side == "bare" and {(size, each, compile) for each in ("fresco", "bare")} <= rates.keys():
                ratio = rates[size, "fresco", compile] / rates[size, "bare", compile]
                result.note(f"{size} fresco over bare{', compiled' if compile else ''}, tokens a second", ratio)


def case_of(size: str, side: str, compile: bool) -> str:
    """The name of a case's result."""
    return f"{size} {side}{'' if size in _STORED else ', activations again'}{', compiled' if compile else ''}"


@contextmanager
def _if_it_fits(result: Result, case: str) -> Iterator[None]:
    """What a GPU's memory does not hold is noted so, and is no fault of the part; what comes next is tried."""
    with result.case(case):
        try:
            yield
        except torch.OutOfMemoryError as error:
            result.note(case, {"error": str(error).partition(". ")[0]})


def memory(result: Result, device: str) -> None:
    """The peak of a step beside the estimate of the preflight."""
    if device == "cpu":
        raise Unrun("torch does not count the bytes of a CPU")
    with one_rank(device), tempfile.TemporaryDirectory(prefix="fresco-gpu-") as folder:
        for size, checkpointing in _MEMORY[device]:
            config = config_of(size, device, checkpointing)
            case = f"{size}{', activations again' if checkpointing else ''}"
            _clear(device)
            with _if_it_fits(result, case):
                model = save_model(size, Path(folder), device)
                step = _fresco(config, model, device)
                for seed in range(2):
                    step(_batch_part(size, device, seed))

                needs = estimate(config, device, shape_of(size))
                (rank,) = [need for need in needs if need.what == "learner's GPU"]
                promised, held = rank.each - rank.parts["CUDA"], torch.cuda.max_memory_allocated()
                figures = {"promised_gib": promised / 2**30, "held_gib": held / 2**30, "ratio": promised / held}
                result.note(case, figures)
            step = None  # type: ignore[assignment]  # its memory is the next one's


def states(result: Result, device: str) -> None:
    """Steps with the optimizer's states on the device and on the host: seconds, peak beside the estimate, and what the
    optimizer itself takes."""
    cases = [(size, name, overrides) for size in _STATES[device] for name, overrides in _PLACES.items()]
    _note_steps(result, device, cases)


def kinds(result: Result, device: str) -> None:
    """Steps with adapters, and of a mixture of experts with and without the routing that its engine told, beside steps
    of a dense model in full."""
    _note_steps(result, device, _KINDS[device])


def _note_steps(result: Result, device: str, cases: Sequence[tuple[str, str, tuple[str, ...]]]) -> None:
    """cases: size, name, fields. What neither GPU nor host holds is noted so, by the estimate."""
    here = this_machine()
    with one_rank(device), tempfile.TemporaryDirectory(prefix="fresco-gpu-") as folder:
        for size, name, overrides in cases:
            config = config_of(size, device, checkpointing=True, overrides=overrides)
            needs = estimate(config, device, shape_of(size))
            own = [need for need in needs if need.what in ("learner's GPU", "learner rank")]

            try:
                check_memory(own, here)
            except ConfigError as error:
                result.note(f"{size}, {name}", {"unrun": str(error)})
                continue

            _clear(device)
            with _if_it_fits(result, f"{size}, {name}"):
                model = save_model(size, Path(folder), device)
                result.note(f"{size}, {name}", _with_states(config, model, size, device) | _promised(own))


def _with_states(config: Config, model: Path, size: str, device: str) -> dict[str, Any]:
    """Of the third of three steps: the first one makes AdamW's moments, and locks pages."""
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)) if device == "cuda" else 1)
    trainer = Trainer(config, model, last_step=1000, device=device)
    found: dict[str, Any] = {}

    for seed in range(3):
        begin = time.perf_counter()
        for minibatch in trainer.minibatches(_batch_part(size, device, seed)):
            trainer.accumulate(minibatch)
        finished(device)

        summed = time.perf_counter()
        trainer.optimizer.step(seed)
        finished(device)
        found = {"gradients_s": summed - begin, "optimizer_s": time.perf_counter() - summed}

    torch.set_num_threads(threads)
    if device == "cuda":
        found["held_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def _promised(needs: list[Need]) -> dict[str, float]:
    """GiB by the estimate: of the GPU without CUDA's own, and of the host."""
    return {f"promised_{need.where}_gib": (need.each - need.parts.get("CUDA", 0)) / 2**30 for need in needs}


def finished(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def config_of(size: str, device: str, checkpointing: bool, overrides: Sequence[str] = ()) -> Config:
    """One rank, in bfloat16 on a GPU."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    pack = _pack_tokens(device)
    return load_config(
        None,
        [
            *(f"{part}.dtype={dtype}" for part in ("model", "generator")),
            f"learner.max_tokens_per_pack={pack}",
            f"generator.max_model_len={max(64, pack // 4)}",
            "sampling.max_tokens=32",
            f"learner.logprob_chunk={'null' if device == 'cuda' else 64}",
            f"learner.activation_checkpointing={str(checkpointing).lower()}",
            f"rollout.groups_per_batch={_SAMPLES // _GROUP}",
            f"rollout.group_size={_GROUP}",
            *overrides,
        ],
    )


def _pack_tokens(device: str) -> int:
    return 16384 if device == "cuda" else 256


def _batch_part(size: str, device: str, seed: int) -> BatchPart:
    """Four packs of samples of an eighth to a fourth of a pack, of which an eighth is prompt."""
    longest = 4096 if device == "cuda" else 64
    prompt = longest // 16
    random = np.random.default_rng(seed)
    packs = 0
    while packs != _PACKS:
        answers = random.integers(longest // 8 - prompt, longest - prompt + 1, _SAMPLES).tolist()
        batch_part = batch_part_of(prompt, answers, _GROUP, shape_of(size).vocabulary, random, shared=False)
        packs = len(make_packs(batch_part, _pack_tokens(device), 0))

    if (column := routed_experts(SIZES[size])) is not None:
        register(column)
        layers, chosen = (int(size) for size in column.shape)
        chances = random.random((sum(batch_part.lengths), layers, SIZES[size]["num_experts"]), np.float32)
        batch_part.columns[ROUTED_EXPERTS] = chances.argpartition(chosen, -1)[..., :chosen].astype(column.dtype)
    return batch_part


def _fresco(config: Config, model: Path, device: str) -> Step:
    trainer = Trainer(config, model, last_step=1000, device=device)

    def step(batch_part: BatchPart) -> None:
        stats = UpdateStats()
        for minibatch in trainer.minibatches(batch_part):
            stats.add(trainer.update(minibatch, 0))
        stats.all_reduce()
        stats.metrics()

    return step


class _Bare(BareLoop):
    """With the learner's head, which is the one that fits, and the learner's dtype between layers."""

    def __init__(self, config: Config, model: Path, device: str) -> None:
        with temporary_run(device=device, config=config, model_folder=model) as run:
            super().__init__(run, "packed")
        self._chunk = logprob_chunk(config.learner.logprob_chunk, self.model.config.vocab_size, device)
        self._dtype = getattr(torch, config.model.dtype)
        self._compile = config.learner.compile

        # Autocast would leave what the embedding and norms give in float32, which is twice as much to move as ours.
        for module in self.model.modules():
            if "Norm" in type(module).__name__:
                module.to(self._dtype)
        self.model.get_input_embeddings().register_forward_hook(lambda _module, _ids, states: states.to(self._dtype))

        if self._compile:
            compile_layers(self.model.get_decoder())
        if config.learner.activation_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def logp(self, pack: Pack, layout: Layout) -> torch.Tensor:
        # As the learner's head has it; autocast would leave both in float32, and their products in backward.
        hidden = self.contexts(pack, layout).to(self._dtype)
        weight = self.model.lm_head.weight.to(self._dtype)
        targets = pack.token_ids[layout.targets]
        return token_logprobs(hidden, weight, targets, chunk=self._chunk, compile=self._compile)[0]


def _bare(config: Config, model: Path, device: str) -> Step:
    loop = _Bare(config, model, device)

    def step(batch_part: BatchPart) -> None:
        made = make_packs(batch_part, config.learner.pack_tokens(device), 0)
        packs = [pack.with_columns(advantages=torch.randn(pack.tokens)) for pack in made]
        loop.step(loop.prepared(packs), batch_part.loss_tokens)

    return step


def _measured(step: Step, size: str, device: str, *, repeated: bool) -> dict[str, Any]:
    """repeated: also each batch once more, as soon as its lengths are known. The first step pays for what is made
    once."""
    shape = shape_of(size)
    found: dict[str, Any] = {"first_s": _timed(step, _batch_part(size, device, 0), device)}
    kinds: dict[str, list[dict[str, float]]] = {kind: [] for kind in ("fresh", "repeated")[: 1 + repeated]}
    for seed in range(1, 6 if device == "cuda" else 2):
        batch_part = _batch_part(size, device, seed)
        lengths, tokens = batch_part.lengths, sum(batch_part.lengths)
        whole, computed = shape.flops(lengths, tokens), shape.flops(lengths, batch_part.loss_tokens)
        for told in kinds.values():
            seconds = _timed(step, batch_part, device)
            rates = {"mfu": whole / seconds / _PEAK, "mfu_computed": computed / seconds / _PEAK}
            told.append({"tokens_per_s": tokens / seconds, **rates, "seconds": seconds})

    for kind, told in kinds.items():
        found[kind] = {name: statistics.median(each[name] for each in told) for name in told[0]}
    if repeated:  # of the same work, which differs between batches by a tenth
        pairs = zip(kinds["fresh"], kinds["repeated"], strict=True)
        found["fresh_over_repeated"] = statistics.median(new["seconds"] / again["seconds"] for new, again in pairs)
    if device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return found


def _timed(step: Step, batch_part: BatchPart, device: str) -> float:
    begin = time.perf_counter()
    step(batch_part)
    finished(device)
    return time.perf_counter() - begin


def _clear(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def one_rank(device: str, number: int = 0) -> Iterator[None]:
    """The process group of a rank that is alone, on the GPU of this number."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if device == "cuda":
        torch.cuda.set_device(number)
    try:
        yield
    finally:
        dist.destroy_process_group()
