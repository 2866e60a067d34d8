"""The learner: one process per FSDP rank (`python -m rl.learner.process --run DIR --index RANK --incarnation K`).

`train` is the algorithm. What a rank needs for it stands in `Learner`, its conversation with the rest of the run in
`rl.learner.run_client`, or in `rl.learner.supervised` where rows are imitated. Batches are requested one ahead, so they
are assembled and sent during training.

Models and their update are `rl.learner.trainer`'s. Metrics are all-reduced: `train/loss` is the mean over the batch's
generated tokens.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rl.config.schema import Config
from rl.learner import checkpoint
from rl.learner.apart import bring_out, ranks_apart
from rl.learner.changes import CHANGES, WISH, reachable, read_changes, set_at, settle, take_wish
from rl.learner.credit import all_reduce, gathered
from rl.learner.guards import ExactCheck, StepGuards
from rl.learner.model_card import texts_beside
from rl.learner.publish import Publisher, weight_entries
from rl.learner.run_client import Client, RunClient, Stopped, begin_from
from rl.learner.supervised import RowsClient
from rl.learner.tensor_digests import tensor_digests
from rl.learner.token_log import TokenLog
from rl.learner.trainer import Trainer, export_adapter
from rl.learner.update import UpdateStats
from rl.models.compiled import while_compiling
from rl.models.loading import weight_files
from rl.models.team import make_mesh, make_team
from rl.store.checkpoint_folder import CheckpointError, Meta
from rl.store.digests import digest_of
from rl.store.samples import LineFile
from rl.store.version_digests import FILE, VersionDigests
from rl.wire.effort import watched_work
from rl.wire.messages import BatchPart
from rl.wire.process import Process, WaitExpired, leave
from rl.wire.run import context_from_command_line, numeric


def train(learner: Learner, client: Client) -> None:
    """Train from the first weights to the closing report; returns when the supervisor says stop."""
    publisher = Publisher(learner.policy, client)
    learner.publish(publisher, client, client.first_step)
    done = client.first_step
    for batch_part in client.batches():  # step s: samples of versions s - S .. s (rollout.staleness_bound)
        learner.take_device(client)
        begin = time.monotonic()
        with client.span("prepare"):
            minibatches = learner.trainer.minibatches(batch_part)
            learner.guards.batch(batch_part, minibatches)
            compared = learner.exact.batch(batch_part.step, minibatches)
            compared |= learner.trainer.replay_gap(minibatches)
            learner.token_log.batch(batch_part)

        stats = UpdateStats()
        with client.span("train"):
            for minibatch in minibatches:
                update = learner.trainer.update(minibatch, batch_part.step, batch_part.over)
                learner.guards.updated(minibatch, update)
                stats.add(update)

            stats.all_reduce()
        learner.token_log.write_batch()
        values = stats.metrics() | compared
        learner.guards.trained(values, stats.routing)
        values["train/loss"] = values.get("loss/objective", 0.0)
        trained = time.monotonic()

        learner.publish(publisher, client, batch_part.step + 1, batch_part)
        values |= learner.turns | {"time/train": trained - begin, "time/publish": time.monotonic() - trained}
        client.report(batch_part, values, stats.histograms())
        if client.checkpoint_due(batch_part.step + 1):
            with client.span("save"):
                learner.save(client, batch_part.step + 1)
        done = batch_part.step + 1
        if done < client.last_step:
            learner.take_changes(client, publisher, done)

    if (step := client.to_be_saved) is not None:
        with client.span("save"):
            learner.save(client, step)
    if learner.config.steps:  # an evaluation alone has its model already
        with client.span("export"):
            learner.export(done)
    client.finish()


class Learner:
    """The trainer of one rank, and what the run gives it. All ranks call the same methods in the same order."""

    def __init__(self, process: Process) -> None:
        run = process.run
        if run.model_folder is None:
            raise ValueError("the learner has no model: run.json names no model_folder")
        self.run = run
        self._start = run.model_folder
        self.config = run.config
        self._process = process

        torch.set_num_threads(_threads(self.config, run.learner_device))
        torch.manual_seed(self.config.seed)
        me = f"learner.{process.index}.{process.incarnation}"
        self.token_log = TokenLog(run.folder, me, run.config.tracking.samples)
        if self.config.learner.compile:
            while_compiling(lambda: watched_work(process))

        self.trainer = Trainer(
            self.config,
            self._start,
            last_step=run.last_step,
            mesh=join_ranks(process),
            team=make_team(run.learner_device, self.config.learner.context_parallel),
            device=run.learner_device,
            before_forward=self._advance,
            before_layer=self._count,
            at_rest=self.config.alternates,
        )
        self.trainer.observed_by(self.token_log)

        self._has_device = False
        self.turns: dict[str, float] = {}
        """What the last turn on a shared device has cost, for the metrics."""

        self.policy = self.trainer.policy
        self._lora = self._adapters()
        self.entries = weight_entries(self.policy, run)
        begin, self.first_step = begin_from(process)
        if begin is not None:
            self._load(begin, self.first_step)
        self._began = self.config.learner.model_copy()
        self._settle(self.first_step)
        self._watch()
        self.digests = LineFile(run.folder / FILE) if process.index == 0 else None

        self.apart = ranks_apart(run.folder)
        self.background: checkpoint.Background | None = None
        if self.config.learner.checkpoints == "background":
            self.background = checkpoint.Background(run.folder / "checkpoints", run.save_s, self.apart)

    def _watch(self) -> None:
        """Guards that know of no step yet."""
        alarms = self._process.alarms
        self.guards = StepGuards(self.trainer, self.config, alarms, first_step=self.run.start_step)
        self.exact = ExactCheck(self.policy, self.config, alarms, self.trainer.counted)

    def take_changes(self, client: Client, publisher: Publisher, n: int) -> None:
        """Do what was asked of the run, now that version `n` is there. All ranks call it together."""
        if self.background is not None:
            self.background.look()
            if (self.run.folder / WISH).exists():
                self.background.wait()  # an undo begins from checkpoints that are there
        wish = take_wish(self.run.folder, n, client.timeline, may_undo=not self.apart) if dist.get_rank() == 0 else None
        made = bool(all_reduce(torch.tensor([wish is not None]).int(), "max"))
        if made:
            bring_out(self.run.folder / CHANGES, self.apart)  # it stands in the file for every rank

        if made and (undo := read_changes(self.run.folder)[-1].undo) is not None:
            n = undo
            with client.span("undo"):
                self._load(reachable(self.run.folder)[n], n)
                self._watch()
                client.go_back(n)
                self.publish(publisher, client, n)
        self._settle(n)

    def publish(self, publisher: Publisher, client: Client, n: int, batch: BatchPart | None = None) -> None:
        """The present weights as version `n`. With it the device is the engines' again, where they share it."""
        self.take_device(client)
        publisher.publish(n, batch)
        self.note_version(client, n)
        self._give_device(client)

    def take_device(self, client: Client) -> None:
        """Until no engine uses the device, and what is trained is there. Rank 0 waits for all, so ranks meet."""
        if not self.config.alternates or self._has_device:
            return
        begin = time.monotonic()
        self._process.busy = False  # every rank waits as long as an engine starts, loads or drains
        client.take_devices()
        all_reduce(torch.zeros(1), "max")
        self._process.busy = True
        self.trainer.moves.to_device()
        self._has_device = True
        self.turns = {"time/take_device": time.monotonic() - begin}

    def _give_device(self, client: Client) -> None:
        if self._has_device:
            begin = time.monotonic()
            self.trainer.moves.to_host()
            all_reduce(torch.zeros(1), "max")
            self._has_device = False
            client.give_devices()
            self.turns["time/give_device"] = time.monotonic() - begin

    def _settle(self, step: int) -> None:
        settle(self.config.learner, self._began, set_at(read_changes(self.run.folder), step))

    def _count(self, *_: object) -> None:
        """A layer is the grain at which a hang is noticed: a sample of 32k tokens may take minutes."""
        self._process.progress += 1

    def _advance(self, *_: object) -> None:
        """Obey a stop before every forward: one pack is the grain."""
        self._count()
        if self._process.stopping:
            raise Stopped("told to stop during training")

    def _load(self, saved: Path, step: int) -> None:
        meta = checkpoint.load(saved, self.trainer.trained())
        if meta.step != step:
            raise CheckpointError(f"{saved} is of step {meta.step}, this run starts at step {step}")
        if meta.lora != self._lora:
            raise CheckpointError(
                f"{saved} has adapters {meta.lora}, this run {self._lora}: resume with the model.lora and model.path "
                f"they were trained with, not {str(self._start)!r}"
            )

    def _adapters(self) -> dict[str, Any] | None:
        """What a checkpoint says of its adapters. Rank 0 alone reads the weights that they stand on."""
        options = self.trainer.lora
        if options is None:
            return None
        own = digest_of({*weight_files(self._start).values()}) if dist.get_rank() == 0 else ""
        return options.identity() | {"base": gathered(own.encode())[0].decode()}

    def note_version(self, client: Client, n: int) -> None:
        """For a replay: what the weights of version `n` are."""
        if self.config.tracking.replay != "off":
            tensors = tensor_digests(self.trainer.weights.trainable())
            if self.digests is not None:
                self.digests.write(VersionDigests(client.timeline, n, tensors))

    def save(self, client: Client, step: int) -> None:
        """A checkpoint with the broker's journal at this version."""
        journal = client.journal(step)
        meta = Meta(step, client.timeline, self.config.learner.ranks, self._lora)
        keep = self.config.learner.keep_checkpoints
        if self.background is not None:
            self.background.save(self.trainer.trained(), meta, journal, keep)
        else:
            folder = self.run.folder / "checkpoints"
            checkpoint.save(folder, self.trainer.trained(), meta, journal, keep, self.apart)

    def client(self) -> Client:
        """Where the batches come from: the broker, or the rows of supervised training."""
        if self.config.supervised:
            return RowsClient(self._process, self.policy, self.first_step, self.trainer.counted)
        return RunClient(self._process, self.entries, self.first_step)

    def export(self, step: int) -> None:
        """The trained model as `<run>/model`, for transformers and vLLM, with a card that says how it was made; its
        adapters, if that is what was trained, as `<run>/adapter` besides."""
        checkpoint.export_hf(self.policy, self.run.folder / "model", self._start, texts_beside(self.run, step))
        if (options := self.trainer.lora) is not None:
            export_adapter(self.policy, options, self.config, self._start, self.run.folder / "adapter")
        if self.background is not None:
            self.background.wait()


def _threads(config: Config, device: str) -> int:
    """An optimizer on the host has all cores of its rank while the GPU waits for it."""
    waits = device == "cuda" and config.learner.optimizer_states == "host"
    return max(config.learner.threads, len(os.sched_getaffinity(0)) if waits else 1)


def join_ranks(process: Process) -> DeviceMesh | None:
    """Join the process group of this incarnation of the ranks, and what `make_mesh` gives for it.

    A rank may wait as long as another one waits for its batch, or saves, and then some: that wait is the one to report.
    So may a rank that another machine begins only once it has fetched what it needs, which the supervisor watches.
    """
    run = process.run
    ranks = run.config.learner.ranks
    has_address = run.device == "cpu" or run.config.network.transport == "tcp"
    if has_address and (interface := _interface(run.host)):  # the machine's name may not resolve on it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    backend = "gloo" if run.learner_device == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=run.config.learner.batch_deadline_s + run.save_s)
    store = _meeting_place(process, timeout)

    if run.learner_device == "cuda":
        torch.cuda.set_device(0)  # the only one that it is shown; a mesh would guess
    dist.init_process_group(backend, store=store, rank=process.index, world_size=ranks, timeout=timeout)
    return make_mesh(run.config, run.learner_device, ranks)


def _meeting_place(process: Process, timeout: timedelta) -> dist.Store:
    """Where the ranks meet: on one machine a file that only its owner can open; between machines rank 0 serves it, and
    says where."""
    run = process.run
    ranks = run.config.learner.ranks
    if ranks == 1:
        return dist.HashStore()
    if run.config.network.transport == "ipc":
        return dist.FileStore(str(run.folder / f"ranks-{run.run_id}-{process.incarnation}"), ranks)

    name = f"ranks.{process.incarnation}"
    if process.index == 0:
        listener = socket.create_server((numeric(run.host), 0))  # of its own accord it listens on all interfaces
        port, listens = listener.getsockname()[1], listener.detach()
        served = dist.TCPStore(run.host, port, ranks, True, timeout, wait_for_workers=False, master_listen_fd=listens)
        run.addresses.bound(name, f"{run.host}:{served.port}")
        return served

    deadline_s = timeout.total_seconds()
    found = run.addresses.wait_for(name, deadline_s)
    if found is None:
        raise WaitExpired(f"learner.{process.index} waited {deadline_s:g} s for learner.0 (learner.batch_deadline_s)")
    host, _, port = found.rpartition(":")
    return dist.TCPStore(host, int(port), ranks, False, timeout)


def _interface(host: str) -> str | None:
    """The network interface that has this address."""
    address = numeric(host)
    if address.startswith("127."):
        return "lo"
    found = psutil.net_if_addrs().items()
    return next((name for name, own in found if any(each.address == address for each in own)), None)


def main() -> None:
    with Process("learner", context_from_command_line()) as process:
        learner = Learner(process)
        with contextlib.suppress(Stopped):  # an orderly end, also before the channel is open
            client = learner.client()
            with contextlib.suppress(Stopped):  # after a failure the weights stay for the next incarnation
                train(learner, client)
            client.close()
    leave()


if __name__ == "__main__":
    main()
