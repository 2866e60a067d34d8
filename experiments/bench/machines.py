"""Seconds and tokens that each event of a cluster costs, in one run over five machines of this box.

    python -m experiments.bench machines [--rounds 3] [--lease 6] [--out FILE.json]

The machines are network namespaces (it takes root, `ip` and `tc`). The engines are simulated and the processes real: a
rank of the learner on machines 1 and 2, generators on 2 and 3, environments on 4. The cable of machine 3 is out for a
third of a lease, and then until the lease is over. 3 joins again, 4 is powered off, and 5 joins in its place. The head
is killed and begun again at once, then killed and begun again when no agent is left. At last 2 is powered off.

Seconds: from the event until training has been calm again for some steps, less what as many steps took before it.
Tokens: those that were sampled by then, and are lost or of samples that ended without being trained. Where steps are
taken back with all that was sampled since, they are those of these steps, and of samples that were on their way.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

from experiments.bench._measuring import parser_of, write
from experiments.bench._ratios import Idle, provenance
from experiments.machines import Machines, missing
from launch.sittings import read_rows

ROOT = Path(__file__).parents[2]
NODES, SPARE = 4, 5
PLACE = "cluster.place={learner: [1, 2], generator: [2, 3], env_server: [4]}"
SETTINGS = ("steps=100000", "learner.options.step_s=0.1", "learner.checkpoint_every=5", "eval.tasks=0", PLACE)
_CALM = 20  # steps by which the pace is judged, and which must follow an event
_WAIT_S = 240.0


class Row(NamedTuple):
    """A step that was trained."""

    step: int
    at: float
    """By the clock on the wall."""
    unused: float
    """Tokens so far that are lost, or of samples that ended without being trained."""
    tokens: float = 0.0
    """Of its batch."""
    open: float = 0.0
    """Of samples that were not trained yet and had not ended; each counts as many as those of the batch."""


class Cost(NamedTuple):
    seconds: float
    tokens: float


class Run:
    """`fresco run` on machine 1, and an agent on each."""

    def __init__(self, machines: Machines, folder: Path, lease_s: float) -> None:
        self.machines = machines
        self._folder = folder
        self._environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        network = ("network.transport=tcp", f"network.host={machines.address(1)}", f"cluster.lease_s={lease_s}")
        command = [*_fresco("run", "simulated"), f"runs={folder}", *network, f"cluster.nodes={NODES}", *SETTINGS]
        self._log = folder / "head.log"
        self._head = self._begin(1, command, self._log)
        self._agents: list[subprocess.Popen[str]] = []
        self._join_all(range(1, NODES + 1))

    def _join_all(self, machines: Sequence[int]) -> None:
        """The machines of the plan, once the head has an address."""
        self.wait(lambda: "fresco join " in self.said(), "the head's address")
        (self._address,) = re.findall(r"fresco join (\S+)", self.said())
        for number, machine in enumerate(machines, 1):
            self.join(machine, number)

    def kill_head(self) -> None:
        """The process alone; its children die with it."""
        (head,) = psutil.Process(self._head.pid).children()
        head.kill()
        self._head.wait()

    def begin_head(self) -> None:
        """In the place of the one before."""
        self._log = self._folder / f"head{len(self._agents)}.log"
        self._head = self._begin(1, _fresco("head", "--resume", str(self._folder / "simulated")), self._log)

    def await_return(self) -> None:
        """Of all agents to the head that has just begun."""
        self.wait(lambda: len(re.findall(r"machine \d+ is back", self.said())) == NODES, "all agents")

    def begin_anew(self, machines: Sequence[int]) -> None:
        """A head, once no agent is left, and agents on these machines."""
        for agent in self._agents:
            agent.wait(_WAIT_S)
        self.begin_head()
        self._join_all(machines)

    def join(self, machine: int, number: int) -> None:
        """number: whose place it takes in the run."""
        command = _fresco("join", self._address, "--key", "-", "--machine", str(number))
        log = self._folder / f"agent{len(self._agents)}.log"
        agent = self._begin(machine, command, log, stdin=subprocess.PIPE, cwd="/tmp")
        pipe: IO[str] | None = agent.stdin
        assert pipe is not None
        pipe.write((self._folder / "simulated" / "agents.key").read_text())
        pipe.close()
        self._agents.append(agent)

    def _begin(self, machine: int, command: list[str], log: Path, **options: Any) -> subprocess.Popen[str]:
        where = {"cwd": str(ROOT), "env": self._environment} | options
        with log.open("w") as file:
            return self.machines.begin(machine, command, stdout=file, stderr=file, **where)

    def said(self) -> str:
        return self._log.read_text()

    def rows(self) -> list[Row]:
        """Each step when it was first trained."""
        found: dict[int, Row] = {}
        for row in read_rows(self._folder / "simulated"):
            if "train/loss" in row:
                lengths = row.get("histogram/length", [0.0])
                on_their_way = sum(count for name, count in row.items() if name.startswith("queue/"))
                open_tokens = on_their_way * statistics.mean(lengths)
                known = row["step"], row["time"], row["broker/unused_tokens"], sum(lengths), open_tokens
                found.setdefault(row["step"], Row(*known))
        return list(found.values())

    def wait_for_steps(self, more: int) -> None:
        """So many more than there are now."""
        wanted = len(self.rows()) + more
        self.wait(lambda: len(self.rows()) >= wanted, f"step {wanted}")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _WAIT_S
        while not condition():
            if self._head.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"bench machines: {what} did not come within {_WAIT_S:g} s\n{self.said()[-3000:]}")
            time.sleep(0.05)

    def cost(self, event: Callable[[], None]) -> Cost:
        """What an event costs, which has happened once the call has returned."""
        self.wait_for_steps(_CALM)
        before = self.rows()
        begun = time.time()
        event()
        self.wait_for_steps(_CALM)
        return cost_of(before, self.rows(), begun)

    def lost(self, number: int) -> Callable[[], bool]:
        """Whether the head has taken it for lost since now."""
        told = f"its machine {number} is lost"
        known = self.said().count(told)
        return lambda: self.said().count(told) > known


def _fresco(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "launch.cli", *arguments]


def cost_of(before: list[Row], after: list[Row], begun: float) -> Cost:
    """Of an event at `begun`: the time of the steps since, less the same number at the pace of the last ones before."""
    calm = before[-_CALM - 1 :]
    pace_s = statistics.median(later.at - row.at for row, later in pairwise(calm))
    last = after[-1]
    seconds = last.at - begun - pace_s * (last.step - before[-1].step)

    kept = max(set(before) & set(after))
    taken_back = [row for row in before if row.step > kept.step]
    tokens = last.unused - kept.unused
    if taken_back:
        ended = taken_back[-1]
        tokens += sum(row.tokens for row in taken_back) + ended.open + ended.unused - kept.unused
    return Cost(seconds, tokens)


def costs(lease_s: float) -> dict[str, Cost]:
    """Of each event in one run."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="machines-", dir="/tmp") as folder:
        runs = Path(folder)
        with Machines(SPARE, shared={1: [runs], 2: [runs]}) as machines:
            run = Run(machines, runs, lease_s)
            run.wait_for_steps(_CALM)

            def glitch() -> None:
                machines.cut(3)
                time.sleep(lease_s / 3)
                machines.heal(3)

            def cut() -> None:
                lost = run.lost(3)
                machines.cut(3)
                run.wait(lost, "the loss of machine 3")
                machines.heal(3)

            def power_off(number: int) -> None:
                lost = run.lost(number)
                machines.kill(number)
                run.wait(lost, f"the loss of machine {number}")

            def join(machine: int, number: int) -> None:
                told = f"it goes back to machine {number}"
                run.join(machine, number)
                run.wait(lambda: told in run.said(), told)

            def head_at_once() -> None:
                run.kill_head()
                run.begin_head()
                run.await_return()

            def head_later() -> None:
                run.kill_head()
                run.begin_anew([1, 2, 3, SPARE])

            events: dict[str, Callable[[], None]] = {
                "a cable out for a third of a lease": glitch,
                "a machine with a generator cut off": cut,
                "it joins again": lambda: join(3, 3),
                "a machine with environments powered off": lambda: power_off(4),
                "another joins late": lambda: join(SPARE, 4),
                "the head killed, back at once": head_at_once,
                "the head killed, back when no agent is left": head_later,
                "a machine with a rank powered off": lambda: power_off(2),
            }
            for name, event in events.items():
                found[name] = run.cost(event)
                print(f"  {name}: {found[name].seconds:.1f} s, {found[name].tokens:.0f} tokens", flush=True)
    return found


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def main(argv: list[str]) -> None:
    parser = parser_of("machines", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lease", type=float, default=6.0, help="seconds (6)")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.lease < 1:
        raise SystemExit(f"bench machines: --rounds={options.rounds} and --lease={options.lease:g} are 1 or more")
    if lacks := missing():
        raise SystemExit(f"bench machines: several machines on one box: {lacks}")

    rounds = []
    with Idle() as idle:
        for number in range(options.rounds):
            print(f"run {number + 1}, a lease of {options.lease:g} s")
            rounds.append(costs(options.lease))

    events = [
        {
            "event": name,
            "seconds": spread([each[name].seconds for each in rounds]),
            "tokens": spread([each[name].tokens for each in rounds]),
        }
        for name in rounds[0]
    ]
    write(options.out, {"lease_s": options.lease, "rounds": options.rounds, "events": events} | provenance(idle))
