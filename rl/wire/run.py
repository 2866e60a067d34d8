"""The run file: what every process of a run is told, as one JSON file in the run's folder.

The supervisor resolves the configuration, writes the file and starts each process with
`--run <folder> --control <endpoint> --host <address> --index <i> --incarnation <k>`. Where a socket is bound, and where
it is reached, is said here and nowhere else.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import zmq
from pydantic import BaseModel, ConfigDict, PrivateAttr

from rl.config.damage import RESUME, Damaged, reading
from rl.config.failures import ENDS_RUN
from rl.config.lora import served_adapter
from rl.config.schema import Config, ConfigError, validate
from rl.wire.addresses import Addresses
from rl.wire.columns import register_configured, shape_by_model
from rl.wire.names import Names

KEY_FILE = "curve.key"
_SLOWEST_DISK = 50e6  # bytes a second: slower ones are taken for one that hangs


class RunFile(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")
    config: Config
    run_id: str
    """8 hex digits, unique per start; names shared-memory files."""
    folder: Path
    """Absolute path of `<runs>/<name>`."""
    socket_folder: Path
    """Short folder for ipc sockets (paths are limited to 107 bytes)."""
    device: str
    """`cpu` or `cuda`, resolved."""
    timeline: int = 0
    start_step: int = 0
    model_folder: Path | None = None
    """Local folder of the model (config, weights, tokenizer.json, chat template); None when simulated."""
    teacher_folder: Path | None = None
    """Local folder of the teacher of a distillation; None where there is none, or it is asked elsewhere."""
    train_tasks: int
    eval_tasks: int
    data: dict[str, str] = {}
    """What the training tasks are, by environment (`envs/data.py`)."""
    beside_learner: tuple[float, int] | None = None
    """Of a GPU that an engine shares with a learner rank: the engine's share of the memory, and the bytes of its cache.
    None: engines have GPUs of their own."""
    saved_bytes: int = 0
    """Of a checkpoint and of the trained model, about: a save is waited for as long as they need (`save_s`)."""
    started_at: float
    """time.time() of the command."""
    _addresses: Addresses = PrivateAttr(default_factory=Addresses)
    _names: Names = PrivateAttr(default_factory=Names)

    @classmethod
    def load(cls, folder: str | Path) -> RunFile:
        """Raises ConfigError where it is none, is damaged, or a version with other fields wrote it. The model may be
        gone: who needs it says so."""
        path = Path(folder) / "run.json"
        if not path.exists():
            raise ConfigError(f"{str(folder)!r} is no folder of a run (no run.json)")
        with reading(path, RESUME):
            tree = json.loads(path.read_text())
            if "config" not in tree:
                raise Damaged(f"{path} has no configuration: it is damaged, or of another version; {RESUME}")

            try:
                config = validate(tree["config"])
            except ConfigError as error:
                raise Damaged(f"{path} is damaged, or of another version of Fresco: {error}; {RESUME}") from None
            run = cls.model_validate(tree | {"config": config})
        run._names = Names.given()
        register_configured(run.config.algo.all_columns)
        if run.model_folder is None or (run.model_folder / "config.json").exists():
            shape_by_model(run.model_folder, replay=run.config.replays_routers)
        return run

    def save(self) -> None:
        """Write the file. Whoever looks meanwhile reads the one before, or none: never a part."""
        partial = self.folder / "run.json.part"
        partial.write_text(self.model_dump_json(indent=2))
        partial.replace(self.folder / "run.json")

    def curve_key(self) -> tuple[bytes, bytes]:
        """The run's public and secret key. Raises Damaged."""
        with reading(self.folder / KEY_FILE, RESUME):
            return key_pair((self.folder / KEY_FILE).read_bytes())

    @property
    def last_step(self) -> int:
        """The step with which it ends, if its time is not over before; where it trains nothing, that of its start."""
        return max(self.start_step, self.config.steps)

    @property
    def learner_device(self) -> str:
        """Where the learner computes. Without a step to train it only hands out weights, and leaves the GPUs to the
        engines."""
        return self.device if self.config.steps else "cpu"

    @property
    def save_s(self) -> float:
        """The longest time of a checkpoint and of the trained model: written, and read once more for their digests."""
        return self.config.timeouts.hang_s + 2 * self.saved_bytes / _SLOWEST_DISK

    @property
    def untied(self) -> bool:
        """Whether an engine gives the head of a tied model weights of its own, which are sent beside the embedding.

        Where vLLM's linear layers on a CPU are packed they keep a copy of the head, which an update of the embedding
        does not reach (7 nats wrong). On GPUs nothing is packed, and beside an adapter the embedding stands still.
        """
        return self.device == "cpu" and served_adapter(self.config.model) is None

    @property
    def addresses(self) -> Addresses:
        """The addresses of the run's sockets, as far as this process knows them. They are not part of the file."""
        return self._addresses

    @property
    def names(self) -> Names:
        """What its processes are called on the wire. They are not part of the file."""
        return self._names

    def make_names(self, key: bytes = b"") -> None:
        """To be called by the supervisor, before it starts a process. key: that of a supervisor before, if known; names
        that are made stay."""
        if key:
            self._names = Names(key=key)
        elif not self._names.key:
            self._names = Names.made()

    @property
    def host(self) -> str:
        """Address of the machine on which this process stands. Sockets over ipc have none."""
        if self.config.network.transport == "ipc":
            return "127.0.0.1"
        return self.addresses.host or self.config.network.host

    def place_of(self, name: str) -> str:
        """Where the socket of this name is bound: over ipc its own name, over tcp a free port of this node."""
        if self.config.network.transport == "ipc":
            return f"ipc://{self.socket_folder}/{name}"
        return f"tcp://{numeric(self.host)}:{self.addresses.ports.get(name, '*')}"

    def address_of(self, name: str) -> str | None:
        """Where the socket of this name is reached; None as long as nobody has said so."""
        if self.config.network.transport == "ipc":
            return self.place_of(name)
        return self.addresses.find(name)


def socket_name(name: str, index: int | None = None) -> str:
    """The name of a socket; of several that are called alike, of the `index`-th."""
    return name if index is None else f"{name}.{index}"


def key_pair(text: bytes) -> tuple[bytes, bytes]:
    """Public and secret key, as a file of them has them. Raises ValueError."""
    public, secret = text.split(b"\n")
    if zmq.curve_public(secret) != public:
        raise ValueError("no pair of keys")
    return public, secret


def numeric(host: str) -> str:
    """The address that a name stands for: only that can be bound. Raises OSError."""
    found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    return str(found[0][4][0])


@dataclass(frozen=True)
class ProcessContext:
    """Which process this is."""

    run: RunFile
    index: int
    incarnation: int


def context_from_command_line(argv: list[str] | None = None) -> ProcessContext:
    """Command line of every process that the supervisor starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True, help="folder with run.json")
    parser.add_argument("--control", default="", help="the supervisor's endpoint; empty: as the run file has it")
    parser.add_argument("--host", help="where this process binds its sockets")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--incarnation", type=int, default=0)
    arguments = parser.parse_args(argv)

    try:
        run = RunFile.load(arguments.run)
        run.curve_key()
    except Damaged as error:
        print(error, file=sys.stderr)
        sys.exit(ENDS_RUN)

    run.addresses.host = arguments.host
    if arguments.control:
        run.addresses.give({"control": arguments.control})
    return ProcessContext(run, arguments.index, arguments.incarnation)
