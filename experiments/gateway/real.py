"""The fuzzed sessions on a real vLLM engine on the CPU, over the real weight transport, in float32.

One engine with one vocabulary, which holds the special tokens of every template, serves the sessions of all of them;
its model is small and random. Its weights change while sessions run. The learner's policy keeps every version, and each
trained token's log-probability is computed anew by the policy under the version that the token is tagged with.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from experiments.gateway.fuzz import FIRST_VERSION, LIMIT, Records, Report, play
from experiments.gateway.tokenizers import make_folder, special_tokens, stop_tokens, template_names
from rl.config.schema import load_config
from rl.learner.publish import probe_length, probe_prompt, weight_entries, weight_pieces
from rl.models.policy import Policy, load_policy, local_rows
from rl.weights import make_sender
from rl.weights.proof import TOLERANCE, Expected, LoadProof
from rl.wire.messages import Abort, Generate, Generated, Grown, TokenSequence, Version
from rl.wire.run import ProcessContext, RunFile
from rl.wire.sockets import make_curve_key
from rollout.episodes.forest import Thinking
from rollout.episodes.generation import GenerationClient, Read
from rollout.episodes.tokenizer import ChatTokenizer
from rollout.generator.engines.base import Engine, Sampled
from rollout.generator.engines.environment import engine_environment
from rollout.generator.jobs import Job

LARGEST_DIFFERENCE = 1e-4  # nats
UPDATES = 8
_AT_ONCE = 16  # sessions
_STEP = 0.03  # of one update, in every weight: neighbouring versions differ by tenths of nats
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": LIMIT,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
_SETTINGS = [
    "generator.dtype=float32",
    f"generator.max_model_len={LIMIT}",
    f"generator.max_num_seqs={2 * _AT_ONCE}",
    f"generator.kv_cache_bytes={256 << 20}",
    "sampling.max_tokens=48",
    "weights.deadline_s=120",
]


class Learner:
    """The policy, and the weights of every version that it has published."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.kept: dict[int, list[torch.Tensor]] = {}

    def step(self, version: int) -> None:
        """Keep the present weights as `version`, after a step in a random direction unless they are the first."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(version)
            for rows in self._rows() if self.kept else []:
                rows.add_(_STEP * torch.randn_like(rows))
        self.kept[version] = [rows.clone() for rows in self._rows()]

    def logp(self, ids: Iterable[int], version: int | None = None) -> torch.Tensor:
        """Log-probabilities (T,) of all ids after those before them, under a version or the present weights."""
        if version is not None:
            for rows, values in zip(self._rows(), self.kept[version], strict=True):
                rows.copy_(values)
        tokens = torch.tensor(list(ids))
        with torch.no_grad():
            logp: torch.Tensor = self.policy(tokens, torch.arange(len(tokens))).logp
        return logp

    def _rows(self) -> list[torch.Tensor]:
        return [rows for _, rows, _ in local_rows(self.policy, untie=False)]


@dataclass
class Comparison:
    """Trained tokens beside the learner's own forward, under each token's own version."""

    tokens: int = 0
    largest: float = 0.0  # nats
    versions: set[int] = field(default_factory=set)
    of_two_versions: int = 0  # sequences with an update in them
    wrong: list[str] = field(default_factory=list)


def compare(learner: Learner, sequences: list[TokenSequence]) -> Comparison:
    found = Comparison()
    masks = [sequence.loss_mask.astype(bool) for sequence in sequences]
    of_each = [set(s.policy_version[mask].tolist()) for s, mask in zip(sequences, masks, strict=True)]
    found.versions = set().union(*of_each)
    found.of_two_versions = sum(len(versions) > 1 for versions in of_each)

    for version in sorted(found.versions):
        for place, (sequence, mask) in enumerate(zip(sequences, masks, strict=True)):
            if version not in of_each[place]:
                continue
            mine = torch.from_numpy(mask & (sequence.policy_version == version))
            logp = learner.logp(sequence.token_ids.tolist(), version)
            gaps = (logp - torch.from_numpy(sequence.logp_behavior.copy())).abs()[mine]

            found.tokens += len(gaps)
            found.largest = max(found.largest, float(gaps.max()))
            if not bool((gaps <= LARGEST_DIFFERENCE).all()):  # nan is wrong as well
                found.wrong.append(f"sequence {place}: {float(gaps.max()):.2g} nats from version {version}")
    return found


class EngineClient:
    """Requests to an engine in this process, as clients make them: ids, aborts that are awaited, reading along."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.client = GenerationClient(self._send, abort_deadline_s=120)
        self._tasks: set[asyncio.Task[None]] = set()

    def _send(self, message: Generate | Abort) -> None:
        if isinstance(message, Generate):
            task = asyncio.create_task(self._answer(message))
        else:
            task = asyncio.create_task(self._engine.abort(message.request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Generate) -> None:
        job = Job(request)

        def progress(sampled: Sampled) -> None:
            job.sampled = sampled
            if request.stream and (new := job.grown(1)):
                self.client.grew(Grown({request.request_id: new}))

        error, sampled = "", Sampled(finish_reason="error")
        try:
            sampled = await self._engine.generate(request, progress)
        except Exception as failure:
            error = str(failure)

        self.client.answered(
            Generated(
                request_id=request.request_id,
                session=request.session,
                columns=sampled.arrays(),
                timeline=request.version.timeline,
                finish_reason=sampled.finish_reason,
                tokens_generated=sampled.tokens_generated,
                generator=0,
                error=error,
            )
        )


class RealRecords(Records):
    """One session's requests to the real engine."""

    def __init__(self, client: GenerationClient) -> None:
        super().__init__()
        self._client = client

    async def generate(
        self, request: Generate, ending: asyncio.Future[None] | None = None, read: Read | None = None
    ) -> Generated:
        request = replace(request, stream=read is not None)
        generated = await self._client.generate(request, ending, read)
        self.record(request, generated)
        return generated


class Weights:
    """From the learner to the engine, by the real channel; every load is proven as in a run."""

    def __init__(self, run: RunFile, learner: Learner, engine: Engine) -> None:
        self._learner = learner
        self._engine = engine
        self.sender = make_sender(run, 0, weight_entries(learner.policy, run))
        self._proof = LoadProof(TOLERANCE[run.config.generator.dtype], probe=True)
        self._probe = probe_prompt(
            run.model_folder, learner.policy.model.config.vocab_size, probe_length(run.config, 0)
        )
        self._updating = asyncio.Lock()

    async def update(self) -> None:
        """The next version. Raises RuntimeError if it does not arrive as it was written."""
        async with self._updating:
            version = Version(0, FIRST_VERSION + len(self._learner.kept))
            self._learner.step(version.n)
            self.sender.offer(version.n, weight_pieces(self._learner.policy))
            receipt = self.sender.receipt(version.n)
            self.sender.announce(version)

            logp = self._learner.logp(self._probe)[1:].double().numpy()
            self._proof.add(Expected(version, receipt, tuple(self._probe), logp))
            if fault := self._proof.fault(await self._engine.load(version, self._probe)):
                raise RuntimeError(fault)


def make_model(folder: Path) -> dict[str, ChatTokenizer]:
    """A model in `folder`/model for all templates; each template's tokenizer, of the same vocabulary."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    names = template_names()
    special: set[str] = set().union(*(special_tokens(name) for name in names))
    tokenizers = {name: ChatTokenizer(make_folder(name, folder / name, special)) for name in names}
    make_folder(names[0], folder / "model", special)

    first = tokenizers[names[0]]
    vocabulary = 1 + max(first.encode(token)[0] for token in special)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**_SHAPE, vocab_size=vocabulary))
        likely = {"<think>", "</think>", "<tool_call>", "</tool_call>"}.union(*(stop_tokens(name) for name in names))
        for token in sorted(likely & special):  # else hardly a turn would end before its limit
            model.lm_head.weight[first.encode(token)[0]] *= 2
    model.save_pretrained(folder / "model")
    return tokenizers


def make_run(folder: Path) -> RunFile:
    config = load_config(None, _SETTINGS)
    os.environ.update(engine_environment(config, "cpu"))

    run = RunFile(
        config=config,
        run_id=os.urandom(4).hex(),
        folder=folder,
        socket_folder=folder,
        device="cpu",
        model_folder=folder / "model",
        train_tasks=1,
        eval_tasks=1,
        started_at=time.time(),
    )

    make_curve_key(folder)
    run.save()
    return run


async def play_real(
    folder: Path, sessions: int, thinking: Thinking, seed: int, reports: dict[str, Report]
) -> tuple[Comparison, int]:
    """Plays all, with a report for each template; then compares. The number of updates while sessions ran comes too.

    Raises RuntimeError when the engine or a load fails."""
    tokenizers = make_model(folder)
    run = make_run(folder)
    from rollout.generator.engines.vllm import VllmEngine  # after the environment that it reads

    engine = VllmEngine(ProcessContext(run, 0, 0))
    learner = Learner(load_policy(folder / "model"))
    weights = Weights(run, learner, engine)
    weights.sender.open()

    try:
        await engine.start()
        await weights.update()

        client = EngineClient(engine).client
        trained: list[TokenSequence] = []
        left = iter(range(seed, seed + sessions))
        every = max(1, sessions // (UPDATES + 1))

        async def one_after_another() -> None:
            for each in left:
                name = list(tokenizers)[each % len(tokenizers)]
                report = reports.setdefault(name, Report())
                trained.extend(
                    await play(tokenizers[name], each, report, thinking, run.config, engine=RealRecords(client))
                )
                if (each - seed + 1) % every == 0 and len(learner.kept) <= UPDATES:
                    await weights.update()

        await asyncio.gather(*(one_after_another() for _ in range(_AT_ONCE)))
    finally:
        await engine.stop()
        weights.sender.close()

    return compare(learner, trained), len(learner.kept) - 1
