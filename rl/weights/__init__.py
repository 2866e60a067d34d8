"""How the learner's weights reach the engines: `channel` is the seam, `updater` says when and whether."""

from __future__ import annotations

from collections.abc import Iterable

from rl.config.plugins import load
from rl.config.schema import ConfigError
from rl.weights.channel import Channel, Entry, Receiver, Sender, Wait
from rl.wire.run import RunFile

HOST_CHANNELS = {
    "shm": "rl.weights.host.shm:SHM",
    "zmq": "rl.weights.host.frames:FRAMES",
    "tcp": "rl.weights.host.tcp:TCP",
}
DEVICE_CHANNELS = {"nccl": "rl.weights.device.nccl:NCCL", "ipc": "rl.weights.device.ipc:IPC"}
CHANNELS = HOST_CHANNELS | DEVICE_CHANNELS


def channel_of(transport: str) -> Channel:
    """What `weights.transport` names. Raises ConfigError."""
    channel = load("weights.transport", transport, CHANNELS)
    if not isinstance(channel, Channel):
        raise ConfigError(f"weights.transport={transport!r}: it names no rl.weights.channel.Channel(sender, receiver)")

    for end, base in ((channel.sender, Sender), (channel.receiver, Receiver)):
        if not (isinstance(end, type) and issubclass(end, base)):
            raise ConfigError(f"weights.transport={transport!r}: {end!r} is no rl.weights.channel.{base.__name__}")
        if missing := sorted(end.__abstractmethods__):
            raise ConfigError(f"weights.transport={transport!r}: its {end.__name__} has no method {missing[0]!r}")
    return channel


def make_sender(run: RunFile, rank: int, entries: Iterable[Entry], wait: Wait | None = None) -> Sender:
    """The end of one rank of the learner; not open."""
    return channel_of(run.config.channel).sender(run, rank, entries, wait)


def make_receiver(run: RunFile, name: str, incarnation: int, device: str = "cpu") -> Receiver:
    """The end of one rank of an engine; `name` is unique among receivers (`Receiver.__init__`)."""
    return channel_of(run.config.channel).receiver(run, name, incarnation, device)
