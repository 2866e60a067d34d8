"""`fresco join HEAD --key FILE` keeps an agent on this machine, `fresco leave HEAD` lets it go.

The keeper is small, and what it begins cannot outlive it. Where that is allowed, the agent is the first process of a
pid namespace, which the kernel empties when it ends. It holds the lease as well: an agent that hangs is killed, with
all that it has begun. What a keeper left that was killed where no namespaces are allowed, the next one sweeps.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from launch.agent import KEY_BYTES, LEASE
from launch.launcher.local import descendants, end_descendants
from launch.launcher.node_messages import boot_time
from rl.config.schema import ConfigError
from rl.wire.process import adopt_orphans, die_with_parent
from rl.wire.run import key_pair

_JOINS_S = 90.0  # for the agent to say until when its first lease holds
_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
KEEPER = "FRESCOKEEPER"


def join(arguments: argparse.Namespace) -> int:
    """Returns 0 when the run has ended or this machine has left it, 3 when the head was lost. Raises ConfigError."""
    head, key = _address(arguments.head), _read_key(arguments.key)
    sweep()
    adopt_orphans()
    others = descendants()

    lease, theirs = os.pipe()
    with tempfile.TemporaryDirectory(prefix="fresco-") as folder:
        process = _begin([head, str(theirs), folder, str(arguments.machine)], theirs)
        os.close(theirs)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(key)
            process.stdin.flush()

        def leave(*_: object) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            process.stdin.close()  # type: ignore[union-attr]

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, leave)

        ends = False
        try:
            ends = _keep(lease)
            if not ends:
                print("the agent has not renewed its lease in time, and is killed", file=sys.stderr)
        finally:
            if not ends:
                process.kill()
            code = process.wait()
            end_descendants(spared=others)
    return code if code >= 0 else 3


def _keep(lease: int) -> bool:
    """Wait for the agent's end; False when its lease is over before."""
    until = boot_time() + _JOINS_S
    while (left := until - boot_time()) > 0:
        if not select.select([lease], [], [], left)[0]:
            continue
        told = os.read(lease, 1 << 16)
        if not told:
            return True
        (until,) = LEASE.unpack(told[-LEASE.size :])
    return False


def _begin(arguments: list[str], lease: int) -> subprocess.Popen[bytes]:
    me = os.getpid()
    alone = subprocess.run([*_NAMESPACE, "true"], stderr=subprocess.DEVNULL).returncode == 0
    kept = {"FRESCO_PARENT_PID": "0" if alone else str(me), KEEPER: " ".join(named(me))}
    return subprocess.Popen(
        [*(_NAMESPACE if alone else []), sys.executable, "-m", "launch.agent", *arguments],
        bufsize=0,
        stdin=subprocess.PIPE,
        pass_fds=[lease],
        env=os.environ | kept,
        preexec_fn=lambda: die_with_parent(me),
        start_new_session=True,
    )


def named(pid: int) -> tuple[str, str, str]:
    """What no other process of this box is called: its pid namespace, its pid there, and when it began."""
    namespace = os.readlink("/proc/self/ns/pid")
    began = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19]
    return namespace, str(pid), began


def sweep() -> None:
    """End what dead keepers of this pid namespace left."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            namespace, pid, began = process.environ().get(KEEPER, "- 0 0").split()
            ours = namespace == os.readlink("/proc/self/ns/pid")
            if ours and not (psutil.pid_exists(int(pid)) and named(int(pid))[2] == began):
                print(f"ended {process.pid}, which a dead agent had left", flush=True)
                process.kill()


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{text}: the head's address is wanted, HOST:PORT, as `fresco run` prints it")
    return text


def _read_key(path: str) -> bytes:
    """Raises ConfigError."""
    try:
        key = sys.stdin.buffer.read(KEY_BYTES) if path == "-" else Path(path).read_bytes().strip()
        key_pair(key)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--key {path}: no key of a run's agents ({error}); copy RUN/agents.key from the head"
        ) from None
    return key


def leave(arguments: argparse.Namespace) -> int:
    """Returns 0 once the agents of this machine have left the run. Raises ConfigError."""
    kept = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "join" in words and words[words.index("join") + 1 : words.index("join") + 2] == [arguments.head]:
            kept.append(process)
            process.send_signal(signal.SIGTERM)
    if not kept:
        raise ConfigError(f"{arguments.head}: no agent of this head runs here")
    psutil.wait_procs(kept)
    return 0
