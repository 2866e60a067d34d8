"""Several machines on one box: namespaces with an address, /tmp, /dev/shm, host name and cable of their own.

    with Machines(4, rate="1gbit", shared={1: [folder], 2: [folder]}) as machines:
        process = machines.begin(1, ["fresco", "run", ...])
        machines.cut(3); machines.heal(3); machines.kill(4)

A machine's first process is its power: when it dies, the kernel ends all others there. It dies with who made it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

_ROOT = Path(__file__).parents[1]  # the code, which every machine has
_UP_S = 20.0
_BOOT = """
mount --make-rprivate /
mount -t tmpfs -o size=2g,mode=1777 shm /dev/shm
hostname {host}
{shared}
mount --rbind {tmp} /tmp
{hidden}
touch /tmp/ready
trap : TERM
while :; do sleep 1000 & wait -n; done
"""


def missing() -> str:
    """What this box lacks for it; empty: nothing."""
    tools = [tool for tool in ("ip", "tc", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None]
    if tools:
        return f"no {', '.join(tools)}"
    if os.geteuid():
        return "not root: namespaces and mounts need CAP_SYS_ADMIN and CAP_NET_ADMIN"
    name = f"frt{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"no network namespaces: {made.stderr.strip()}" if made.returncode else ""


def sh(command: str) -> str:
    return subprocess.run(["sh", "-ec", command], check=True, capture_output=True, text=True).stdout


class Machines:
    """shared: folders below /tmp that a machine sees, by its number; elsewhere it sees all but `hidden`."""

    def __init__(
        self,
        count: int,
        rate: str = "1gbit",
        shared: Mapping[int, Sequence[Path]] | None = None,
        hidden: Mapping[int, Sequence[Path]] | None = None,
    ) -> None:
        self.count = count
        self._rate = rate
        self._shared = shared or {}
        self._hidden = hidden or {}
        self._tag = f"f{secrets.token_hex(2)}"
        self._folder = Path(tempfile.mkdtemp(prefix="machines-", dir="/var/tmp"))
        self._power: dict[int, psutil.Process] = {}

    def __enter__(self) -> Machines:
        switch = f"{self._tag}s"
        sh(f"ip netns add {switch}; ip -n {switch} link add br0 type bridge; ip -n {switch} link set br0 up")
        for number in range(1, self.count + 1):
            self._plug(number, switch)
            self._boot(number)
        return self

    def _plug(self, number: int, switch: str) -> None:
        name, cable, port = f"{self._tag}{number}", f"{self._tag}e{number}", f"{self._tag}p{number}"
        limit = f"root tbf rate {self._rate} burst 256kb latency 50ms"
        sh(
            f"ip netns add {name}; ip link add {cable} netns {name} type veth peer name {port} netns {switch};"
            f"ip -n {name} link set lo up; ip -n {name} addr add {self.address(number)}/24 dev {cable};"
            f"ip -n {name} link set {cable} up; ip -n {switch} link set {port} master br0 up;"
            f"tc -n {name} qdisc add dev {cable} {limit}; tc -n {switch} qdisc add dev {port} {limit}"
        )

    def _boot(self, number: int) -> None:
        own = self._folder / str(number)
        own.mkdir()
        mounts = []
        for folder in (*self._shared.get(number, ()), _ROOT):
            if not folder.is_relative_to("/tmp"):
                continue
            (own / folder.relative_to("/tmp")).mkdir(parents=True, exist_ok=True)
            mounts.append(f"mount --bind {folder} {own / folder.relative_to('/tmp')}")

        hidden = [f"mount -t tmpfs hidden {folder}" for folder in self._hidden.get(number, ())]
        boot = _BOOT.format(host=f"node{number}", shared="\n".join(mounts), tmp=own, hidden="\n".join(hidden))
        spaces = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self._folder / f"{number}.log").open("wb") as log:
            dies_with_us = ["setpriv", "--pdeathsig", "KILL"]
            command = [*dies_with_us, "ip", "netns", "exec", f"{self._tag}{number}", *spaces, "bash", "-ec", boot]
            outer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        until = time.monotonic() + _UP_S
        while not (own / "ready").exists():
            assert time.monotonic() < until and outer.poll() is None, (self._folder / f"{number}.log").read_text()
            time.sleep(0.02)
        (self._power[number],) = psutil.Process(outer.pid).children()

    def address(self, number: int) -> str:
        return f"10.77.0.{number}"

    def begin(self, number: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Begin a command there, in this folder."""
        where = options.pop("cwd", os.getcwd())
        enter = ["nsenter", "-t", str(self._power[number].pid), "-n", "-m", "-u", "-i", "-p", "--wd=/", "--"]
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(where)]
        return subprocess.Popen([*enter, *there, *command], text=True, **options)

    def run(self, number: int, command: str) -> str:
        return self.begin(number, ["sh", "-ec", command], stdout=subprocess.PIPE).communicate(timeout=60)[0]

    def processes(self, number: int) -> list[str]:
        """The command lines of what lives there, also in pid namespaces of its own, but for the machine itself."""
        power = self._power[number]
        listed = subprocess.run(
            ["pgrep", "--ns", str(power.pid), "--nslist", "net", "-r", "RSDT"], capture_output=True, text=True
        )
        found = []
        for pid in {*map(int, listed.stdout.split())} - {power.pid, power.ppid()}:
            line = ""
            with contextlib.suppress(OSError):  # it has ended meanwhile
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            if line and not line.startswith(("sleep 1000", "nsenter ")):
                found.append(line)
        return found

    def cut(self, number: int) -> None:
        sh(f"ip -n {self._tag}s link set {self._tag}p{number} down")

    def heal(self, number: int) -> None:
        sh(f"ip -n {self._tag}s link set {self._tag}p{number} up")

    def kill(self, number: int) -> None:
        self._power[number].kill()

    def __exit__(self, *_: object) -> None:
        for number, power in self._power.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                power.kill()
            subprocess.run(["ip", "netns", "del", f"{self._tag}{number}"], capture_output=True)
        psutil.wait_procs([*self._power.values()], timeout=10)
        sh(f"ip netns del {self._tag}s; rm -rf {shlex.quote(str(self._folder))}")
