"""What an agent and the head of a run say to each other, on a socket with a key of its own.

Both say what is, and not what has changed: a message that was lost with a connection is made good by the next one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path

import zmq
from msgspec import Struct

from rl.store.digests import DIGESTS
from rl.wire.codec import Codec
from rl.wire.run import RunFile
from rl.wire.sockets import HIGH_WATER_MARK

KEY_FILE = "agents.key"
CHUNK_BYTES = 1 << 20
TAIL_BYTES = 1 << 16
"""Of a log, in one beat."""
_PACKAGES = ("algos", "envs", "launch", "rl", "rollout")
_ROOT = Path(__file__).parents[2]
_LIMIT_BYTES = 4 * CHUNK_BYTES


class File(Struct, frozen=True, array_like=True):
    """A file that a run begins with."""

    size: int
    digest: str


class Hello(Struct, frozen=True, tag="hello"):
    """An agent is there. `number` counts how often it has said so."""

    number: int
    gpus: list[str]
    code: str  # `code_hash`
    machine: int = 0  # the number that it wants; 0: any


class Beat(Struct, frozen=True, tag="beat"):
    """What runs on a machine: the exit code of each process that was begun there, None while it lives."""

    number: int
    states: dict[str, int | None]
    logs: dict[str, tuple[int, bytes]] = {}  # where the bytes stand in the log, and what follows there
    sees: bool = True  # the head's folder of the run, and those that it begins with
    leaving: bool = False
    made: dict[str, str] = {}  # whole folders of a run that stands here alone, with the digest of their digests
    answered: bytes = b""  # the wish of Orders, once the ranks here have taken or refused it
    changes: bytes = b""  # what they have made of all wishes (`rl/learner/changes.py`)
    waiting: list[str] = []  # the processes that begin once their files are there
    came: float = 0.0  # another number whenever something of these has come


class Back(Struct, frozen=True, tag="back"):
    """The answer to Who: what a head that has just begun must know of a machine that belonged to the one before."""

    number: int  # of a beat
    run_id: str
    machine: int
    gpus: list[str]
    sees: bool
    names: bytes  # as in Welcome
    holds: dict[str, list[str]]  # the processes that live there, with their GPUs
    held: dict[str, int]  # as in Orders


def digest_in(name: str, files: Mapping[str, File]) -> str:
    """Of the digests of a folder that is sent; empty where it has none."""
    listed = files.get(f"{name}/{DIGESTS}")
    return listed.digest if listed is not None else ""


class Sent(Struct, frozen=True, tag="sent"):
    """The answer to Want: the files of the folder; none where it is gone. From the head: a checkpoint that a machine is
    to hold as well."""

    name: str
    files: dict[str, File]  # by path, as `checkpoints/step-40/meta.json`

    @property
    def digest(self) -> str:
        return digest_in(self.name, self.files)


class Ask(Struct, frozen=True, tag="ask"):
    """A part of a file that the other side has: of the model, or of a folder that it sends."""

    file: str
    offset: int


class Welcome(Struct, frozen=True, tag="welcome"):
    """The answer to a Hello: all that a machine needs to know of the run."""

    number: int  # of the Hello
    machine: int
    lease_s: float
    run: bytes  # run.json
    key: bytes  # of the run's sockets
    names: bytes  # the key of its names, which stands in no file: a head that comes back has it from its agents
    files: dict[str, File]  # by path, below the folders that run.json names: `model/config.json`


class Who(Struct, frozen=True, tag="who"):
    """The answer to a Beat of an agent that is not known to a head that has come back."""


class Refused(Struct, frozen=True, tag="refused"):
    """The answer to a Hello that cannot be."""

    reason: str


class Want(Struct, frozen=True, tag="want"):
    """The head lacks a folder that a machine has made."""

    name: str


class Begin(Struct, frozen=True, tag="begin"):
    """From what the ranks begin where they did not stand before; what they find there otherwise is to go."""

    timeline: int
    name: str  # of the checkpoint that counts; empty: none does
    digest: str  # of its digests
    files: dict[str, File]
    changes: bytes  # of the run so far, as in Beat


class Start(Struct, frozen=True, tag="start"):
    """A process that is to run there."""

    name: str
    module: str
    arguments: list[str]
    environment: dict[str, str]
    begin: Begin | None = None


class Orders(Struct, frozen=True, tag="orders"):
    """What is to be on a machine. `beat`: the newest that was received."""

    beat: int
    start: list[Start] = []
    kill: list[str] = []
    held: dict[str, int] = {}  # bytes of each log that the head has
    wish: bytes = b""  # what `fresco set` or `fresco undo` asks of the ranks there
    end: bool = False  # the run is over, or the machine was taken for lost


class Part(Struct, frozen=True, tag="part"):
    """The answer to Ask."""

    file: str
    offset: int
    data: bytes


FromAgent = Hello | Beat | Back | Sent | Ask | Part
FromHead = Welcome | Who | Refused | Orders | Want | Sent | Ask | Part
codec: Codec[FromAgent | FromHead] = Codec(FromAgent | FromHead)


def agent_socket(kind: int, key: tuple[bytes, bytes], identity: bytes | None = None) -> zmq.SyncSocket:
    """One end of the connection between an agent and the head; who does not have the key is refused."""
    socket: zmq.SyncSocket = zmq.Context.instance().socket(kind)
    socket.linger = 500
    socket.set_hwm(HIGH_WATER_MARK)
    socket.maxmsgsize = _LIMIT_BYTES
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)

    socket.curve_publickey, socket.curve_secretkey = key
    if kind == zmq.ROUTER:
        socket.curve_server = True
        socket.router_mandatory = True
        socket.router_handover = True  # who connects again before the end of its old connection was noticed
    else:
        socket.curve_serverkey = key[0]
        socket.setsockopt(zmq.IDENTITY, identity or b"")
    return socket


def code_hash() -> str:
    """Of the code that a machine runs: agents with other code than the head's are refused."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for package in _PACKAGES for path in (_ROOT / package).rglob("*.py")):
        digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def boot_time() -> float:
    """Seconds that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def start_folders(run: RunFile) -> dict[str, Path]:
    """The folders that a run begins with, and that another machine may not have."""
    folders = {"model": run.model_folder, "teacher": run.teacher_folder, "resume": run.config.resume}
    return {name: folder for name, folder in folders.items() if folder is not None}
