"""Rollout, then train, in one process: what the asynchronous system must equal at alpha = 0.

    python -m experiments.plain_loop experiments/math_cpu.yaml [--lag 1] [--rows FILE] [key=value ...]

It reads the same configuration and uses the same tasks, seeds, advantages, loss and optimizer as a run of the
system, but no process, socket, broker or transport. Left out: multi-turn environments, filtering, redundancy,
sharding and checkpoints. `lag` trains each batch that many versions after it was sampled: what the
learner sees at alpha = lag when it is the bottleneck.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from envs.registry import make_family
from experiments.columns import token_columns
from experiments.sampling import Sampled, sample
from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model
from rl.config.schema import Config, load_config
from rl.config.seeds import sample_seed, task_order, turn_seed
from rl.learner.trainer import Trainer
from rl.learner.update import UpdateStats
from rl.models.policy import Policy
from rl.wire.messages import BatchPart, SampleRow
from rollout.episodes.environment import EnvironmentFamily
from rollout.episodes.tokenizer import ChatTokenizer


class Generate(Protocol):
    """Completes all prompts under the present weights; completion i depends on prompts[i] and seeds[i] only."""

    def __call__(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], temperature: float, max_tokens: int
    ) -> list[Sampled]: ...


@dataclass(frozen=True)
class PlayedEpisode:
    """One episode: a prompt, its completion and what the verifier said."""

    prompt: list[int]
    completion: Sampled
    reward: float
    truncated: bool = False  # cut at sampling.max_tokens


class PlainLoop:
    """Policy, tasks and optimizer of one process. `generate` None: the policy itself samples."""

    def __init__(self, config: Config, folder: Path, generate: Generate | None = None) -> None:
        if config.rollout.filter_constant_groups:
            raise ValueError("the plain loop knows no filtering")
        if config.env.max_turns != 1:
            raise ValueError(f"env.max_turns={config.env.max_turns}: the plain loop runs one turn only")
        if config.seconds is not None:
            raise ValueError(f"seconds={config.seconds:g}: the plain loop counts steps; set seconds=null and steps")

        self.config = config
        self.family: EnvironmentFamily = make_family(config)
        self.tokenizer: ChatTokenizer = ChatTokenizer(folder)
        self.trainer: Trainer = Trainer(config, folder, last_step=config.steps)
        self.policy: Policy = self.trainer.policy
        self.generate: Generate = generate or self._sample_here

    def rollout(self, step: int) -> list[PlayedEpisode]:
        """The batch of `step`: the tasks and seeds that a run of the system gives the same sample ids."""
        settings = self.config.rollout
        count = self.family.task_count("train")
        first = step * settings.groups_per_batch
        tasks = []

        for group in range(first, first + settings.groups_per_batch):
            data_pass, index = divmod(group, count)
            tasks += [int(task_order(self.config.seed, data_pass, count)[index])] * settings.group_size

        ids = range(first * settings.group_size, first * settings.group_size + len(tasks))
        return self._play("train", tasks, ids, self.config.sampling.temperature)

    def evaluate(self, temperature: float) -> float:
        """Share of held-out tasks answered right."""
        tasks = range(min(self.config.eval.tasks, self.family.task_count("eval")))
        episodes = self._play("eval", tasks, [-1 - task for task in tasks], temperature)
        return sum(episode.reward for episode in episodes) / max(1, len(episodes))

    def train(self, step: int, batch: Sequence[PlayedEpisode], lag: int = 0) -> dict[str, float]:
        """The optimizer steps of a batch sampled `lag` versions ago; the update's metrics."""
        group_size = self.config.rollout.group_size
        batch_part = make_batch_part(step, batch, group_size, step - lag)
        stats = UpdateStats()
        for minibatch in self.trainer.minibatches(batch_part):
            stats.add(self.trainer.update(minibatch, step))
        rewards = [episode.reward for episode in batch]
        lengths = [len(episode.completion.token_ids) for episode in batch]

        return stats.metrics() | {
            "reward/mean": sum(rewards) / len(rewards),
            "length/mean": sum(lengths) / len(lengths),
            "batch/tokens": float(sum(batch_part.lengths)),
        }

    def _play(self, split: str, tasks: Sequence[int], ids: Sequence[int], temperature: float) -> list[PlayedEpisode]:
        problems = [self.family.task(split, task) for task in tasks]
        prompts = asyncio.run(self._prompts(problems))
        seeds = [turn_seed(sample_seed(self.config.seed, sample_id), 0) for sample_id in ids]
        completions = self.generate(prompts, seeds, temperature, self.config.sampling.max_tokens)
        texts = [self.tokenizer.decode(completion.token_ids) for completion in completions]
        rewards = asyncio.run(self._rewards(problems, texts))
        stop_ids = self.tokenizer.stop_ids
        truncated = [completion.token_ids[-1] not in stop_ids for completion in completions]

        return [PlayedEpisode(*fields) for fields in zip(prompts, completions, rewards, truncated, strict=True)]

    async def _prompts(self, problems: Sequence[Any]) -> list[list[int]]:
        return [self.tokenizer.prompt(await self.family.make().reset(problem)) for problem in problems]

    async def _rewards(self, problems: Sequence[Any], texts: Sequence[str]) -> list[float]:
        rewards = []
        for problem, text in zip(problems, texts, strict=True):
            environment = self.family.make()
            await environment.reset(problem)
            reward = (await environment.step(text)).reward
            assert reward is not None, "the plain loop masks nothing: it needs a reward of every answer"
            rewards.append(reward)
        await self.family.stop()
        return rewards

    def _sample_here(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], temperature: float, max_tokens: int
    ) -> list[Sampled]:
        return sample(
            self.policy.model,
            prompts,
            seeds=seeds,
            stop_ids=self.tokenizer.stop_ids,
            max_tokens=max_tokens,
            temperature=temperature,
        )


def make_batch_part(step: int, batch: Sequence[PlayedEpisode], group_size: int, version: int) -> BatchPart:
    """The batch as the broker would send it to a single rank; whole groups stand together."""
    lengths = [len(episode.prompt) + len(episode.completion.token_ids) for episode in batch]
    starts = [len(episode.prompt) for episode in batch]
    first = step * len(batch)

    rows = [
        SampleRow(
            sample_id=first + index,
            group_id=(first + index) // group_size,
            reward=episode.reward,
            tokens=lengths[index],
            loss_tokens=len(episode.completion.token_ids),
            version=version,
            truncated=episode.truncated,
        )
        for index, episode in enumerate(batch)
    ]

    return BatchPart(
        step=step,
        rank=0,
        timeline=0,
        rows=rows,
        members=list(range(len(batch))),
        lengths=lengths,
        turn_starts=[[start] for start in starts],
        columns=token_columns(
            token_ids=np.concatenate([[*one.prompt, *one.completion.token_ids] for one in batch]),
            loss_mask=np.concatenate(
                [np.arange(length) >= start for length, start in zip(lengths, starts, strict=True)]
            ),
            logp_behavior=np.concatenate([[0.0] * len(one.prompt) + one.completion.logp for one in batch]),
            policy_version=version,
        ),
        loss_tokens=sum(row.loss_tokens for row in rows),
    )


def run(loop: PlainLoop, lag: int = 0) -> Iterator[dict[str, float]]:
    """Train `config.steps` batches; yields one row of metrics per step, with held-out accuracy when it is due."""
    config = loop.config
    waiting: deque[list[PlayedEpisode]] = deque()
    sampled = 0

    for step in range(config.steps + 1):
        begin = time.process_time()
        row = {"step": float(step)}
        due = step in (0, config.steps) or (config.eval.every and step % config.eval.every == 0)
        if due and config.eval.tasks:
            row |= {"eval/greedy": loop.evaluate(0.0), "eval/sampled": loop.evaluate(1.0)}

        if step == config.steps:
            yield row
            return

        while sampled <= min(step + lag, config.steps - 1):
            waiting.append(loop.rollout(sampled))
            sampled += 1

        rolled_out = time.process_time()
        row |= loop.train(step, waiting.popleft(), min(step, lag))
        yield row | {"cpu_s/rollout": rolled_out - begin, "cpu_s/train": time.process_time() - rolled_out}


def model_folder(config: Config) -> Path:
    """The folder of the model that training starts from; the tiny one is made first."""
    if config.model.path != "tiny":
        return Path(config.model.path)
    return ensure_tiny_model(TinyRecipe.model_validate(config.model.tiny))


def main(print_line: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--lag", type=int, default=0, help="versions between sampling and training")
    parser.add_argument("--rows", type=Path, help="write one JSON line per step to this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.recipe, arguments.overrides)
    torch.set_num_threads(config.learner.threads)
    rows = []
    shown = ("eval/greedy", "eval/sampled", "reward/mean", "length/mean", "train/grad_norm", "batch/tokens")

    for row in run(PlainLoop(config, model_folder(config)), arguments.lag):
        rows.append(json.dumps(row))
        if "eval/greedy" in row or int(row["step"]) % 10 == 0:
            print_line(f"{int(row['step']):4d}  " + "  ".join(f"{k} {row[k]:.3f}" for k in shown if k in row))

    if arguments.rows:
        arguments.rows.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
