"""A learner that trains nothing: the whole protocol, real bytes through the real weight transport, no torch.

`python -m rl.learner.simulated --run DIR --index RANK --incarnation K`

It is for timing and fault tests of everything around the learner. It sleeps `learner.options.step_s` per batch; weights
are a function of their version, the loss is a function of the batch.
"""

from __future__ import annotations

import contextlib
import time

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rl.config.plugins import validated
from rl.config.schema import LearnerConfig
from rl.config.section import NoOptions, Section
from rl.learner.changes import take_wish
from rl.learner.run_client import RunClient, Stopped, begin_from
from rl.store.checkpoint_folder import Meta, begin, commit
from rl.weights.channel import Entry, Piece, Placement
from rl.wire.messages import BatchPart, Version
from rl.wire.process import Process, leave
from rl.wire.run import context_from_command_line

NAME = "simulated.weight"


class SimulatedOptions(Section):
    """`learner.options` of the simulated learner."""

    where = "kind=simulated"
    step_s: float = Field(0.05, ge=0)
    """Seconds of one training step."""
    weight_bytes: int = Field(1 << 20, ge=64)
    """Size of the weights, really transported."""


OPTIONS: dict[str, type[Section]] = {
    "fsdp": NoOptions,
    "supervised": NoOptions,
    "simulated": SimulatedOptions,
}
"""The model of `learner.options` by `learner.kind`."""


def simulated_options(config: LearnerConfig) -> SimulatedOptions:
    """The options of this recipe; of another kind of learner, what they are where nothing is said."""
    given = config.options if config.kind == "simulated" else {}
    options: SimulatedOptions = validated(SimulatedOptions, given, "learner.options")
    return options


def simulated_weights(version: Version, count: int) -> npt.NDArray[np.float32]:
    """(count,) float32, whole numbers; versions that follow each other differ in every element."""
    start = (7919 * version.n + 104_729 * version.timeline) % (1 << 24)
    return ((np.arange(count) + start) % (1 << 24)).astype(np.float32)


def simulated_loss(batch_part: BatchPart) -> float:
    """A number that depends on every sample of the batch and is the same on all ranks."""
    earned = [row.reward * row.loss_tokens for row in batch_part.rows if not row.unrewarded]
    return float(np.sum(earned)) / len(batch_part.rows) / max(1, batch_part.loss_tokens)


def simulated_piece(entry: Entry, version: Version, rank: int, ranks: int) -> Piece:
    """This rank's rows of `version`."""
    name, shape, _ = entry
    first = shape[0] * rank // ranks
    end = shape[0] * (rank + 1) // ranks
    return name, simulated_weights(version, shape[0])[first:end], Placement(shape, first)


def save(process: Process, client: RunClient, step: int) -> None:
    """A checkpoint that holds the broker's journal only: there is nothing else to continue from."""
    with client.span("save"):
        journal = client.journal(step)
        if process.index == 0:
            folder = process.run.folder / "checkpoints"
            learner = process.config.learner
            begin(folder, step)
            commit(folder, Meta(step, client.timeline, learner.ranks), journal, learner.keep_checkpoints)


def train(process: Process, client: RunClient, entry: Entry) -> None:
    """Does what `rl.learner.process.train` does, with a sleep in the place of training."""
    config = process.config.learner
    step_s = simulated_options(config).step_s

    def publish(n: int) -> None:
        version = Version(process.run.timeline, n)
        with client.span("publish"):
            client.publish(n, [simulated_piece(entry, version, process.index, config.ranks)])

    client.take_devices()
    publish(client.first_step)
    client.give_devices()

    for batch_part in client.batches():
        client.take_devices()
        begin = time.monotonic()
        with client.span("train"):
            time.sleep(step_s)
        trained = time.monotonic()

        publish(batch_part.step + 1)
        client.give_devices()
        published = time.monotonic()
        times = {"time/train": trained - begin, "time/publish": published - trained}
        client.report(batch_part, {"train/loss": simulated_loss(batch_part)} | times)
        if client.checkpoint_due(batch_part.step + 1):
            save(process, client, batch_part.step + 1)
        if config.ranks == 1 and batch_part.step + 1 < client.last_step:
            change = take_wish(process.run.folder, batch_part.step + 1, client.timeline)
            if change is not None and change.undo is not None:
                client.go_back(change.undo)
                publish(change.undo)

    if (step := client.to_be_saved) is not None:
        save(process, client, step)
    client.finish()


def main() -> None:
    with Process("learner", context_from_command_line()) as process:
        entry = NAME, (simulated_options(process.config.learner).weight_bytes // 4,), "float32"
        _, first_step = begin_from(process)
        with contextlib.suppress(Stopped):  # an orderly end, also before the channel is open
            client = RunClient(process, [entry], first_step)
            with contextlib.suppress(Stopped):
                train(process, client, entry)
            client.close()
    leave()


if __name__ == "__main__":
    main()
