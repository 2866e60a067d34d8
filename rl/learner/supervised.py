"""Supervised training on the learner's own path: rows of a data set take the broker's place, and nothing is sampled.

`fresco sft` writes the rows as token ids (`rl/store/token_rows.py`). From them each rank makes its own part of every
batch; everything else - packs, FSDP, optimizer, guards, checkpoints, export - is as in reinforcement learning. The loss
is that of REINFORCE with the advantage 1 on each token to be learned: the mean negative log-likelihood.

Which rows batch n has depends on the seed and n alone, so a run that goes on needs no more than its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl.learner.credit import all_reduce
from rl.learner.rows import FOLDER, journal_of, rows_of_batch
from rl.learner.run_client import EMPTY, Client, Stopped
from rl.models.packing import make_packs, pad_packs
from rl.models.protocol import PolicyModel
from rl.store.token_rows import Marked, TokenRows
from rl.weights.channel import Piece
from rl.wire.columns import carried
from rl.wire.messages import BatchPart, Metrics, SampleRow, Stop
from rl.wire.process import Process

_TOLD = ("train/loss", "train/grad_norm", "train/lr", "loss/entropy", "time/train", "time/publish")


def imitated(rewards: Tensor, group: Tensor) -> Tensor:
    """The advantage of each row: 1, its reward. With it the loss `reinforce` is the negative log-likelihood."""
    return rewards.float()


class RowsClient(Client):
    """What `rl.learner.process.train` takes for a run's broker."""

    def __init__(
        self, process: Process, policy: PolicyModel, first_step: int, among: dist.ProcessGroup | None = None
    ) -> None:
        """among: ranks that have each row once between them; None: all."""
        super().__init__(process, first_step)
        self._policy = policy
        self._among = among
        self._rows = TokenRows(self.run.folder / FOLDER / "train")
        self._held_out = TokenRows(self.run.folder / FOLDER / "eval")
        self._save_first = False
        if self.rank == 0:
            process.closing_report = self.closing_report

    @property
    def timeline(self) -> int:
        return self.run.timeline

    def batches(self) -> Iterator[BatchPart]:
        for step in range(self.first_step, self.last_step):
            self._step = step
            self.listen()
            if all_reduce(torch.tensor([self._save_first]).int(), "max"):  # rank 0 is told, and all end together
                self._ended_at = step
                return
            self.process.busy = True
            yield self._batch_part(step)

    def publish(
        self, n: int, pieces: Iterable[Piece], probe_ids: Sequence[int] = (), probe_logp: Sequence[float] = ()
    ) -> bool:
        """Nobody waits for the weights; the held-out loss is due with them."""
        if self._evaluation_due(n) and len(self._held_out):
            with self.span("evaluate"):
                loss = self._held_out_loss(n)
            self._summary["held_out_loss"] = {"first": loss} | self._summary.get("held_out_loss", {}) | {"last": loss}
            if self.rank == 0:
                self.process.send(Metrics(n, {"eval/loss": loss}))
        self.process.busy = False  # what comes before the next batch is files, and a slow disk is no hang
        return True

    def take_devices(self) -> None:
        """They are the learner's alone."""

    def give_devices(self) -> None:
        """Nobody waits for them."""

    def journal(self, n: int) -> bytes:
        """The data that were trained: a run that goes on with other ones would not know its rows."""
        return journal_of(self.run.data, self.config) if self.rank == 0 else b""

    def report(
        self, batch_part: BatchPart, values: dict[str, float], histograms: Mapping[str, list[float]] = EMPTY
    ) -> None:
        """Nothing of what only samples have."""
        row = {name: values[name] for name in _TOLD if name in values}
        row["train/epoch"] = (batch_part.step + 1) * len(batch_part.rows) / len(self._rows)
        row["tokens/learned"] = float(batch_part.loss_tokens)
        super().report(batch_part, row)

    def listen(self) -> None:
        for message in self.process.received():
            if isinstance(message, Stop):
                self._save_first = message.save_first
        if self.process.stopping:
            raise Stopped("stopping")

    def close(self) -> None:
        """There is nothing to close: the rows are mapped files."""

    # ------------------------------------------------------------ batches from rows

    def _batch_part(self, step: int) -> BatchPart:
        chosen = rows_of_batch(len(self._rows), self.config.rollout.groups_per_batch, self.config.seed, step)
        return self._part([self._rows[row] for row in chosen], step)

    def _part(self, rows: list[list[Marked]], step: int) -> BatchPart:
        """This rank's part: the rows are dealt by their length, so that each rank has about as many tokens."""
        lengths = [sum(len(ids) for ids, _ in row) for row in rows]
        order = sorted(range(len(rows)), key=lambda i: (-lengths[i], i))
        learner = self.config.learner
        together = learner.context_parallel
        members = sorted(order[self.rank // together :: learner.ranks // together])
        sequences = [(member, ids, mask) for member in members for ids, mask in rows[member]]
        learned = [sum(int(np.count_nonzero(mask)) for _, mask in row) for row in rows]

        sizes = {"token": sum(len(ids) for _, ids, _ in sequences), "turn": 0}
        columns = {each.name: each.full(sizes.get(each.scope, len(sequences))) for each in carried()}
        if sequences:
            columns["token_ids"] = np.concatenate([ids for _, ids, _ in sequences])
            columns["loss_mask"] = np.concatenate([mask for _, _, mask in sequences])
        columns["policy_version"][columns["loss_mask"] != 0] = step

        return BatchPart(
            step=step,
            rank=self.rank,
            timeline=self.timeline,
            rows=[SampleRow(i, i, 1.0, lengths[i], learned[i], step) for i in range(len(rows))],
            members=[member for member, _, _ in sequences],
            lengths=[len(ids) for _, ids, _ in sequences],
            turn_starts=[[] for _ in sequences],
            columns=columns,
            loss_tokens=sum(learned),
        )

    @torch.no_grad()
    def _held_out_loss(self, step: int) -> float:
        """Mean negative log-likelihood of the held-out tokens, in nats. All ranks call it together."""
        part = self._part(
            [self._held_out[row] for row in range(min(len(self._held_out), self.config.eval.tasks))], step
        )
        packs = make_packs(part, self.config.learner.pack_tokens(self._policy.device.type), step)
        count = int(all_reduce(torch.tensor(max(1, len(packs))), "max"))
        total = torch.zeros((), dtype=torch.float64)
        for pack in pad_packs(packs, count):
            logp = self._policy(pack.to(self._policy.device)).logp.to(pack.mask.device)
            total -= torch.where(pack.mask, logp, torch.zeros_like(logp)).sum().double()
            self.process.progress += 1
        return float(all_reduce(total, "sum", self._among)) / max(1, part.loss_tokens)
