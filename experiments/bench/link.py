"""Seconds of an update between two machines, whole and as a patch, beside what the link allows.

    python -m experiments.bench link [--gigabytes 1] [--rate 1gbit] [--changed 0.02] [--updates 3] [--out FILE.json]

The machines are two network namespaces of this one, joined by a cable of that rate (it takes root and `ip`, `tc`). On
one a learner's rank offers bf16 weights over channel `tcp`, on the other an engine's rank takes them. Each update adds
one unit in the last place to `--changed` of the weights, at random. The time is from the announcement until all
is there and verified. The bound is the dense bytes over the rate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from experiments.bench._measuring import parser_of, temporary_run, write
from experiments.bench._ratios import Idle, provenance
from rl.weights import make_receiver, make_sender
from rl.weights.channel import Entry, Placement
from rl.weights.host import clean_up
from rl.wire.messages import Version
from rl.wire.run import RunFile

ROWS = 1024
_UNITS = {"gbit": 1e9, "mbit": 1e6}
_WAIT_S = 300.0


def address(machine: int) -> str:
    return f"10.78.{os.getpid() % 250}.{machine + 1}"


@contextlib.contextmanager
def machines(rate: str) -> Iterator[list[str]]:
    """Names of two namespaces, joined by a cable."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        raise SystemExit("bench link makes network namespaces: it takes root, and the commands ip and tc (iproute2)")

    names = [f"fresco-link-{os.getpid()}-{machine}" for machine in range(2)]
    cables = [f"frl{os.getpid() % 100_000}{side}" for side in "ab"]
    try:
        for name in names:
            call("ip", "netns", "add", name)

        call("ip", "link", "add", cables[0], "netns", names[0], "type", "veth", "peer", cables[1], "netns", names[1])
        for machine, (name, cable) in enumerate(zip(names, cables, strict=True)):
            call("ip", "-n", name, "addr", "add", f"{address(machine)}/24", "dev", cable)
            for device in ("lo", cable):
                call("ip", "-n", name, "link", "set", device, "up")
            limit = ("rate", rate, "burst", "256kb", "latency", "50ms")
            call("tc", "-n", name, "qdisc", "add", "dev", cable, "root", "tbf", *limit)

        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def call(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"bench link: {' '.join(command)}: {ended.stderr.strip()}")


# ------------------------------------------------------------ on the machines


def learner(run: RunFile, entry: Entry, changed: float, updates: int) -> None:
    """Offers a version whenever the engine has taken the one before."""
    whole = torch.randn(entry[1], generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    bits = whole.view(torch.int16)

    sender = make_sender(run, 0, [entry])
    sender.open()
    say(run, "endpoints", run.addresses.questions()[0])
    for n in range(updates + 1):
        if n:
            hear(run, f"taken.{n - 1}")
            for rows in bits.split(4096):
                rows += (torch.rand(rows.shape) < changed).to(torch.int16)

        sender.offer(n, [(entry[0], whole, Placement(entry[1]))])
        sender.receipt(n)
        begin = time.monotonic()
        sender.announce(Version(0, n))
        say(run, f"announced.{n}", [begin, sender.stats(), cpu_s()])

    hear(run, f"taken.{updates}")
    say(run, "stats", sender.stats())
    sender.close()


def engine(run: RunFile, updates: int) -> None:
    run.addresses.give(hear(run, "endpoints"))
    receiver = make_receiver(run, "generator-0-0", 0)
    for n in range(updates + 1):
        begin, _, _ = hear(run, f"announced.{n}")
        receiver.take(Version(0, n), _WAIT_S)
        assert receiver.receipt() and receiver.release()
        say(run, f"taken.{n}", [time.monotonic() - begin, cpu_s()])
    receiver.close()
    clean_up(run.run_id)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def say(run: RunFile, name: str, value: Any) -> None:
    (run.folder / f"{name}.new").write_text(json.dumps(value))
    (run.folder / f"{name}.new").replace(run.folder / name)


def hear(run: RunFile, name: str) -> Any:
    until = time.monotonic() + _WAIT_S
    while not (run.folder / name).exists():
        if time.monotonic() > until:
            raise SystemExit(f"bench link: nobody said {name} within {_WAIT_S:g} s")
        time.sleep(0.002)
    return json.loads((run.folder / name).read_text())


# ------------------------------------------------------------ both of them


def update_seconds(names: list[str], delta: str, options: argparse.Namespace) -> dict[str, Any]:
    settings = ["network.transport=tcp", f"weights.delta={delta}", "weights.slots=2", f"weights.deadline_s={_WAIT_S}"]
    with temporary_run(settings) as run:
        command = [sys.executable, "-m", "experiments.bench", "link", *sys.argv[2:], "--run", str(run.folder)]
        children = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command, "--machine", str(machine), "--host", address(machine)]
            )
            for machine, name in enumerate(names)
        ]

        try:
            ends = [child.wait(_WAIT_S) for child in children]
        finally:
            for child in children:
                child.kill()
            clean_up(run.run_id)

        if any(ends):
            raise SystemExit(f"bench link: the machines ended with {ends}")

        taken = [hear(run, f"taken.{n}") for n in range(options.updates + 1)]
        stats = hear(run, "stats")

    first, *later = [seconds for seconds, _ in taken]
    engine_cpu_s = (taken[-1][1] - taken[0][1]) / options.updates
    return {"first_s": first, "update_s": later, "stats": stats, "engine_cpu_s": engine_cpu_s}


def main(argv: list[str]) -> None:
    parser = parser_of("link", __doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rate", default="1gbit", help="as `tc` writes it: 1gbit, 500mbit")
    parser.add_argument("--changed", type=float, default=0.02)
    parser.add_argument("--updates", type=int, default=3)
    for name in ("--run", "--machine", "--host"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)

    torch.set_num_threads(1)
    entry: Entry = ("embed", (int(options.gigabytes * 1e9 / 2 / ROWS), ROWS), "bfloat16")
    if options.run:
        run = RunFile.load(options.run)
        run.addresses.host = options.host
        learner(run, entry, options.changed, options.updates) if options.machine == "0" else engine(
            run, options.updates
        )
        return

    unit = next((unit for unit in _UNITS if options.rate.endswith(unit)), "")
    if not unit:
        raise SystemExit(f"--rate={options.rate}: write a number and one of {', '.join(_UNITS)}")
    nbytes = 2 * entry[1][0] * ROWS
    bound_s = 8 * nbytes / (float(options.rate.removesuffix(unit)) * _UNITS[unit])
    with machines(options.rate) as names, Idle() as idle:
        found = {kind: update_seconds(names, delta, options) for kind, delta in (("dense", "off"), ("delta", "auto"))}

    print(
        f"{nbytes / 1e9:.2f} GB at {options.rate}: the link's bound is {bound_s:.2f} s; {options.changed:.1%} changed"
    )
    for kind, one in found.items():
        seconds = statistics.median(one["update_s"])
        print(f"  {kind}: first {one['first_s']:.2f} s, updates {seconds:.2f} s ({seconds / bound_s:.2f} of the bound)")
    settings = {"gigabytes": nbytes / 1e9, "rate": options.rate, "changed": options.changed, "bound_s": bound_s}
    write(options.out, settings | found | provenance(idle))
