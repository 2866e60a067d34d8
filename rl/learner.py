"""The learner: one process per FSDP rank (`python -m rl.learner --run DIR --index RANK --incarnation K`).

`train` is the algorithm. What a rank needs for it stands in `Learner`, its conversation with the rest of the
run in `rl.learner_link`: batches are requested one ahead, so they are assembled and sent during training.

Advantages and token counts are of the whole batch and identical on every rank; ranks, packs and minibatches
only spread one sum. Metrics are all-reduced: `train/loss` is the mean over the batch's generated tokens.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from algos.registry import get_advantage, make_loss
from rl import checkpoint
from rl.checkpoint_folder import CheckpointError, Meta
from rl.learner_link import LearnerLink, Stopped
from rl.messages import Shard
from rl.optimizer import Optimizer
from rl.packing import Pack, batch_advantages, make_packs, pad_packs, split_minibatches
from rl.policy import load_policy, shard_policy
from rl.process import Process
from rl.publish import Publisher, weight_manifest
from rl.run import RunFile, parse_place
from rl.update import UpdateStats, accumulate_gradients, with_proximal

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def train(learner: Learner, link: LearnerLink) -> None:
    """From the first weights to the closing report; returns when the supervisor says stop."""
    publisher = Publisher(learner.policy, learner.manifest, link)
    publisher.publish(link.version(link.first_step))
    for shard in link.batches():  # step s: samples of versions s - ceil(alpha) .. s
        begin = time.monotonic()
        stats, norms = UpdateStats(), []
        for packs, tokens in learner.minibatches(shard):
            stats.add(learner.accumulate(packs, tokens))
            grad_norm, rate = learner.optimizer.step(shard.step)
            norms.append(grad_norm)
        stats.all_reduce()
        values = stats.metrics() | {"train/lr": rate, "train/grad_norm": sum(norms) / len(norms)}
        values["train/loss"] = values.get("loss/objective", 0.0)
        trained = time.monotonic()

        publisher.publish(link.version(shard.step + 1))
        values |= {"time/train": trained - begin, "time/publish": time.monotonic() - trained}
        link.report(shard, values)
        if link.checkpoint_due(shard.step + 1):
            learner.save(link, shard.step + 1)
    learner.export()
    link.finish()


class Learner:
    """Policy, loss and optimizer of one rank. All ranks call the same methods in the same order."""

    def __init__(self, process: Process) -> None:
        run = process.run
        self.run, self.config, self._process = run, run.config, process
        self.ranks, self.device = run.config.learner.ranks, run.device
        if run.model_folder is None:
            raise ValueError("the learner has no model: run.json names no model_folder")
        torch.set_num_threads(self.config.learner.threads)
        torch.manual_seed(self.config.seed)
        mesh = _join_ranks(run, process.index)
        policy = load_policy(run.model_folder, logprob_chunk=self.config.learner.logprob_chunk, device=self.device)
        self.manifest = weight_manifest(policy, run)
        self.policy = shard_policy(
            policy,
            compute_dtype=_DTYPES[self.config.model.dtype],
            activation_checkpointing=self.config.learner.activation_checkpointing,
            mesh=mesh,
            device=self.device,
        )
        self.policy.register_forward_pre_hook(self._advance)
        self.loss = make_loss(self.config.algo.loss, self.config.algo.options)
        self.advantage = get_advantage(self.config.algo.advantage)
        self.optimizer = Optimizer(self.policy, self.config.learner, run.start_step + self.config.steps)
        if self.config.resume is not None:
            self._resume()

    def _advance(self, *_: object) -> None:
        """Before every forward: one pack is the grain at which a hang is noticed and a stop is obeyed."""
        self._process.progress += 1
        if self._process.stopping:
            raise Stopped("told to stop during training")

    def _resume(self) -> None:
        assert self.config.resume is not None
        meta = checkpoint.load(self.config.resume, self.policy, self.optimizer.adamw)
        if meta.step != self.run.start_step:
            raise CheckpointError(
                f"{self.config.resume} is of step {meta.step}, this run starts at step {self.run.start_step}"
            )

    def minibatches(self, shard: Shard) -> list[tuple[list[Pack], int]]:
        """(this rank's packs, loss tokens of all ranks) per optimizer step; every rank gets equally many packs."""
        settings = self.config.learner
        advantages = batch_advantages(shard, self.advantage)  # (N,)
        parts = split_minibatches(shard, settings.minibatches)
        packed = [make_packs(part, advantages, settings.max_tokens_per_pack, shard.step) for part in parts]
        counts = torch.tensor([max(1, len(packs)) for packs in packed], device=self.device)  # (minibatches,)
        dist.all_reduce(counts, dist.ReduceOp.MAX)
        padded = [pad_packs(packs, int(count)) for packs, count in zip(packed, counts, strict=True)]
        if self.loss.needs_proximal:  # of the weights before the first of these optimizer steps
            temperature = self.config.sampling.temperature
            padded = [with_proximal(self.policy, packs, temperature=temperature) for packs in padded]
        return [(packs, part.loss_tokens) for packs, part in zip(padded, parts, strict=True)]

    def accumulate(self, packs: list[Pack], global_tokens: int) -> UpdateStats:
        return accumulate_gradients(
            self.policy, packs, self.loss,
            temperature=self.config.sampling.temperature, global_tokens=global_tokens, world_size=self.ranks,
        )  # fmt: skip

    def save(self, link: LearnerLink, step: int) -> None:
        """A checkpoint with the broker's journal at this version."""
        journal = link.journal(link.version(step))
        meta = Meta(step, self.run.epoch, self.ranks)
        keep = self.config.learner.keep_checkpoints
        checkpoint.save(self.run.folder / "checkpoints", self.policy, self.optimizer.adamw, meta, journal, keep)

    def export(self) -> None:
        """The trained model as `<run>/model`, for transformers and vLLM."""
        assert self.run.model_folder is not None
        checkpoint.export_hf(self.policy, self.run.folder / "model", self.run.model_folder)


def _join_ranks(run: RunFile, rank: int) -> dist.DeviceMesh:
    """Join the process group of this start of the run, through a file in its folder.

    A rank may wait as long as another one waits for its batch, and then some: that wait is the one to report.
    """
    ranks = run.config.learner.ranks
    if run.device == "cpu":  # ranks share a machine; the host's name may not resolve on it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo" if run.device == "cpu" else "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(run.folder / f"ranks-{run.run_id}-{run.epoch}"), ranks)
    timeout = timedelta(seconds=run.config.learner.batch_deadline_s + run.config.timeouts.hang_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    return init_device_mesh(run.device, (ranks,))


def main() -> None:
    with Process("learner", parse_place()) as process:
        learner = Learner(process)
        link = LearnerLink(process, learner.manifest)
        try:
            train(learner, link)
        except Stopped:
            pass  # an orderly end
        finally:
            link.close()


if __name__ == "__main__":
    main()
