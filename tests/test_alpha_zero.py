"""alpha = 0 is synchronous training: the complete system equals a plain single-process rollout-then-train loop.

Same tasks and seeds; batches are compared by sample id, token by token, and losses to float32 tolerance. Once with
the simulated engine and once with real vLLM, whose weights change at every step (a high learning rate makes sure
that a missed or late update would show). At alpha = 0 every token is sampled by the version it trains, so its
behaviour log-probability must also be the learner's own: ratio 1 within 1e-4, after each of several updates.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from experiments.plain_loop import PlainLoop, PlayedEpisode
from experiments.sampling import Sampled
from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model
from rl.config.schema import load_config
from rl.learner.publish import weight_entries
from rl.store.batch_files import read_batch_parts
from rl.weights import make_sender
from rl.weights.channel import Placement
from rl.wire.messages import BatchPart, Generate, Version
from rl.wire.run import ProcessContext, RunFile
from rollout.generator.engines import make_engine
from rollout.generator.engines.base import Engine
from tests.conftest import MakeRun

Answer = TypeVar("Answer")
ROOT = Path(__file__).parent.parent
STEPS = 4
RECIPE = (
    "rollout.alpha=0",
    f"steps={STEPS}",
    "rollout.groups_per_batch=3",
    "rollout.group_size=4",
    "sampling.seeded=true",
    "sampling.max_tokens=24",
    "sampling.temperature=0.9",
    "generator.dtype=float32",
    "model.dtype=float32",
    "generator.max_model_len=256",
    "generator.max_num_seqs=16",
    "env.name=synthetic",
    "env.max_turns=1",
    "env.options={prompt_tokens: 8, vocab_size: 64}",
    "learner.lr=3e-3",
    "eval.tasks=0",
    "tracking.replay=full",
    "tracking.wandb=disabled",
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = TinyRecipe(hidden_size=32, layers=2, head_dim=32, ffn_size=64, sft_steps=0)
    return ensure_tiny_model(recipe, tmp_path_factory.mktemp("cache"))


def run_system(folder: Path, model: Path, *overrides: str) -> tuple[list[BatchPart], list[dict[str, Any]]]:
    (folder / "recipe.yaml").write_text("name: system\n")
    command = [
        sys.executable,
        "-m",
        "launch.cli",
        "run",
        str(folder / "recipe.yaml"),
        f"runs={folder}",
        f"model.path={model}",
        *RECIPE,
        *overrides,
    ]

    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    rows = [json.loads(line) for line in (folder / "system" / "metrics.jsonl").read_text().splitlines()]

    return list(read_batch_parts(folder / "system")), [row for row in rows if "train/loss" in row]


class EngineOfLoop:
    """One engine in this process, driven without broker, proxy or generator process."""

    def __init__(self, run: RunFile) -> None:
        self.engine: Engine = make_engine(ProcessContext(run, 0, 0))
        self.run = run
        self.stop_ids = [0]
        self.version = -1
        self._loop = asyncio.new_event_loop()

    def wait(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return self._loop.run_until_complete(asyncio.wait_for(work, 600))

    def __call__(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], temperature: float, max_tokens: int
    ) -> list[Sampled]:
        async def everything() -> list[Sampled]:
            requests = [
                Generate(
                    key,
                    key,
                    "train",
                    Version(0, 0),
                    np.array(prompt, np.int32),
                    max_tokens,
                    temperature,
                    1.0,
                    self.stop_ids,
                    seed,
                )
                for key, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            ]

            results = await asyncio.gather(*(self.engine.generate(one, lambda _: None) for one in requests))
            return [Sampled(list(one.token_ids), list(one.logp)) for one in results]

        return self.wait(everything())


def run_plain_loop(run: RunFile, model: Path) -> list[tuple[list[PlayedEpisode], dict[str, float]]]:
    torch.manual_seed(0)
    engine = EngineOfLoop(run)
    loop = PlainLoop(run.config, model, engine)
    engine.stop_ids = list(loop.tokenizer.stop_ids)
    sender = make_sender(run, 0, weight_entries(loop.policy, run))
    sender.open()

    def publish(n: int) -> None:
        parameters = loop.policy.named_parameters()
        sender.offer(n, ((name.removeprefix("model."), p, Placement(tuple(p.shape))) for name, p in parameters))
        sender.announce(Version(0, n))
        engine.wait(engine.engine.load(Version(0, n), []))

    steps = []
    try:
        engine.wait(engine.engine.start())
        for step in range(STEPS):
            publish(step)
            batch = loop.rollout(step)
            steps.append((batch, loop.train(step, batch)))
    finally:
        engine.wait(engine.engine.stop())
        sender.close()

    return steps


def check_equal(
    batch_parts: list[BatchPart],
    rows: list[dict[str, Any]],
    plain: list[tuple[list[PlayedEpisode], dict[str, float]]],
    logp: float,
) -> None:
    assert len(rows) == len(plain) == STEPS
    for step, (batch, metrics) in enumerate(plain):
        seen = 0
        for batch_part in (batch_part for batch_part in batch_parts if batch_part.step == step):
            starts = np.cumsum([0, *batch_part.lengths])
            for index, member in enumerate(batch_part.members):
                row = batch_part.rows[member]
                episode = batch[member]
                part = slice(starts[index], starts[index + 1])

                assert row.sample_id == step * len(batch) + member
                assert batch_part.token_ids[part].tolist() == [*episode.prompt, *episode.completion.token_ids]
                generated = batch_part.loss_mask[part] == 1
                np.testing.assert_allclose(
                    batch_part.logp_behavior[part][generated], episode.completion.logp, atol=logp
                )
                assert row.reward == pytest.approx(episode.reward, abs=1e-9)
                seen += 1

        assert seen == len(batch)
        assert rows[step]["train/loss"] == pytest.approx(metrics["loss/objective"], rel=1e-4, abs=2e-6)
        assert rows[step]["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=1e-3)

    assert len({round(metrics["train/grad_norm"], 6) for _, metrics in plain}) == STEPS  # something was learned from


def test_simulated_engine(tmp_path: Path, model_folder: Path, make_run: MakeRun) -> None:
    engine = ("generator.engine=simulated", "generator.options.vocab_size=64", "learner.ranks=1")
    batch_parts, rows = run_system(tmp_path, model_folder, *engine)
    run = make_run(*RECIPE, *engine, model_folder=model_folder, train_tasks=1000)
    check_equal(batch_parts, rows, run_plain_loop(run, model_folder), logp=0)


@pytest.mark.docs
def test_real_vllm_and_two_ranks(tmp_path: Path, model_folder: Path) -> None:
    """The reference runs in a process of its own: vLLM's environment must be set before Python starts."""
    cache = "generator.options.kv_cache_bytes=16777216"
    overrides = ("generator.engine=vllm", cache, "learner.ranks=2", "generator.count=2")
    batch_parts, rows = run_system(tmp_path, model_folder, *overrides)
    for row in rows:  # behaviour logprobs are the learner's, after every update
        assert abs(row["loss/ratio_max"] - 1) < 1e-4 and abs(row["loss/kl_behavior_k1"]) < 1e-5
    from rollout.generator.engines.environment import engine_environment

    config = load_config(None, [*RECIPE, *overrides])
    program = (
        "import sys, pickle; from pathlib import Path; from tests.test_alpha_zero import reference_in_process;"
        "reference_in_process(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    reference = tmp_path / "reference"
    reference.mkdir()

    with tempfile.TemporaryDirectory(prefix="fresco-test-") as sockets:  # short: a socket's path has 107 characters
        environment = os.environ | engine_environment(config, "cpu") | {"TMPDIR": sockets}
        ended = subprocess.run(
            [sys.executable, "-c", program, str(reference), str(model_folder)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=800,
        )

    assert ended.returncode == 0, ended.stderr[-4000:]
    plain = [
        (
            [PlayedEpisode(one["prompt"], Sampled(one["ids"], one["logp"]), one["reward"]) for one in step["batch"]],
            step["metrics"],
        )
        for step in json.loads((reference / "steps.json").read_text())
    ]

    check_equal(batch_parts, rows, plain, logp=1e-4)


def reference_in_process(folder: Path, model: Path) -> None:
    """The plain loop with one bare vLLM engine; writes steps.json."""
    import time
    import uuid

    config = load_config(None, [*RECIPE, "generator.engine=vllm"])

    run = RunFile(
        config=config,
        run_id=uuid.uuid4().hex[:8],
        folder=folder,
        socket_folder=folder,
        device="cpu",
        model_folder=model,
        train_tasks=1000,
        eval_tasks=0,
        started_at=time.time(),
    )

    run.save()
    steps = [
        {
            "batch": [
                {
                    "prompt": list(map(int, a.prompt)),
                    "ids": list(map(int, a.completion.token_ids)),
                    "logp": list(map(float, a.completion.logp)),
                    "reward": a.reward,
                }
                for a in batch
            ],
            "metrics": metrics,
        }
        for batch, metrics in run_plain_loop(run, model)
    ]

    (folder / "steps.json").write_text(json.dumps(steps))


@pytest.mark.parametrize(
    "setting", ["seconds=60", "env.max_turns=2", "rollout.filter_constant_groups=true"], ids=lambda each: str(each)
)
def test_the_plain_loop_refuses_what_it_would_leave_out(setting: str, tmp_path: Path) -> None:
    config = load_config(None, ["steps=1", setting])
    with pytest.raises(ValueError, match="the plain loop"):
        PlainLoop(config, tmp_path)
