"""The learner: one process per FSDP rank (`python -m rl.learner.process --run DIR --index RANK --incarnation K`).

`train` is the algorithm. What a rank needs for it stands in `Learner`, its conversation with the rest of the
run in `rl.learner.link`: batches are requested one ahead, so they are assembled and sent during training.

Models and their update are `rl.learner.trainer`'s. Metrics are all-reduced: `train/loss` is the mean over the batch's
generated tokens.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl.core.checkpoint_folder import CheckpointError, Meta
from rl.core.process import Process
from rl.core.run import RunFile, context_from_command_line
from rl.learner import checkpoint
from rl.learner.link import LearnerLink, Stopped
from rl.learner.publish import Publisher, weight_manifest
from rl.learner.trainer import Trainer
from rl.learner.update import UpdateStats


def train(learner: Learner, link: LearnerLink) -> None:
    """From the first weights to the closing report; returns when the supervisor says stop."""
    publisher = Publisher(learner.policy, learner.manifest, link)
    publisher.publish(link.version(link.first_step))
    for shard in link.batches():  # step s: samples of versions s - ceil(alpha) .. s
        begin = time.monotonic()
        stats = UpdateStats()
        for minibatch in learner.trainer.minibatches(shard):
            stats.add(learner.trainer.update(minibatch, shard.step))
        stats.all_reduce()
        values = stats.metrics()
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
    """The trainer of one rank, and what the run gives it. All ranks call the same methods in the same order."""

    def __init__(self, process: Process) -> None:
        run = process.run
        if run.model_folder is None:
            raise ValueError("the learner has no model: run.json names no model_folder")
        self.run = run
        self.config = run.config
        self._process = process

        torch.set_num_threads(self.config.learner.threads)
        torch.manual_seed(self.config.seed)
        self.trainer = Trainer(
            self.config,
            run.model_folder,
            last_step=run.start_step + self.config.steps,
            mesh=_join_ranks(run, process.index),
            device=run.device,
            before_forward=self._advance,
        )

        self.policy = self.trainer.policy
        self.manifest = weight_manifest(self.policy, run)
        if self.config.resume is not None:
            self._resume()

    def _advance(self, *_: object) -> None:
        """Before every forward: one pack is the grain at which a hang is noticed and a stop is obeyed."""
        self._process.progress += 1
        if self._process.stopping:
            raise Stopped("told to stop during training")

    def _resume(self) -> None:
        assert self.config.resume is not None
        meta = checkpoint.load(self.config.resume, self.trainer.trained())
        if meta.step != self.run.start_step:
            raise CheckpointError(
                f"{self.config.resume} is of step {meta.step}, this run starts at step {self.run.start_step}"
            )

    def save(self, link: LearnerLink, step: int) -> None:
        """A checkpoint with the broker's journal at this version."""
        journal = link.journal(link.version(step))
        meta = Meta(step, self.run.epoch, self.config.learner.ranks)
        keep = self.config.learner.keep_checkpoints
        checkpoint.save(self.run.folder / "checkpoints", self.trainer.trained(), meta, journal, keep)

    def export(self) -> None:
        """The trained model as `<run>/model`, for transformers and vLLM."""
        assert self.run.model_folder is not None
        checkpoint.export_hf(self.policy, self.run.folder / "model", self.run.model_folder)


def _join_ranks(run: RunFile, rank: int) -> DeviceMesh:
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
    with Process("learner", context_from_command_line()) as process:
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
