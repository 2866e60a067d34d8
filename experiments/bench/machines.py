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
        self._beginnings = 1  # of the run, with all agents
        self._join_all(range(1, NODES + 1))

    def _join_all(self, machines: Sequence[int]) -> None:
        """The machines of the plan, once the head has an address."""
        self.wait(lambda: "fresco join " in self.said(), "the head's address")
        (self._address,) = re.findall(r"fresco join (\S+)", self.said())
        for number, machine in enumerate(machines, 1):
            self.join(machine, number)

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
        before, beginnings = self.rows(), self._beginnings
        begun = time.time()
        event()
        self.wait_for_steps(_CALM)
        return cost_of(before, self.rows(), begun, anew=self._beginnings > beginnings)

    # ------------------------------------------------------------ events, which have happened on return

    def glitch(self, number: int, seconds: float) -> None:
        self.machines.cut(number)
        time.sleep(seconds)
        self.machines.heal(number)

    def cut_off(self, number: int) -> None:
        self._lose(number, self.machines.cut)
        self.machines.heal(number)

    def power_off(self, number: int) -> None:
        self._lose(number, self.machines.kill)

    def _lose(self, number: int, event: Callable[[int], None]) -> None:
        """Until the head has taken it for lost."""
        told = f"its machine {number} is lost"
        known = self.said().count(told)
        event(number)
        self.wait(lambda: self.said().count(told) > known, told)

    def join_for_good(self, machine: int, number: int) -> None:
        told = f"it goes back to machine {number}"
        self.join(machine, number)
        self.wait(lambda: told in self.said(), told)

    def replace_head(self) -> None:
        """While the agents wait."""
        self._kill_head()
        self._begin_head()
        self.wait(lambda: "not back" in self.said() or self.said().count("is back, with") == NODES, "all agents")
        if "not back" in self.said():
            raise SystemExit(f"bench machines: the head took longer than a lease to be back: --lease\n{self.said()}")

    def begin_anew(self, machines: Sequence[int]) -> None:
        """Once no agent is left, with new ones on these machines."""
        self._kill_head()
        for agent in self._agents:
            agent.wait(_WAIT_S)
        self._beginnings += 1
        self._begin_head()
        self._join_all(machines)

    def _kill_head(self) -> None:
        """The process alone; its children die with it."""
        (head,) = psutil.Process(self._head.pid).children()
        head.kill()
        self._head.wait()

    def _begin_head(self) -> None:
        self._log = self._log.with_name(f"{self._log.name}.next")
        self._head = self._begin(1, _fresco("head", "--resume", str(self._folder / "simulated")), self._log)


def _fresco(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "launch.cli", *arguments]


def cost_of(before: list[Row], after: list[Row], begun: float, *, anew: bool = False) -> Cost:
    """Of an event at `begun`: the time of the steps since, less the same number at the pace of the last ones before.

    anew: the run has begun from a checkpoint, and what was sampled since is gone.
    """
    calm = before[-_CALM - 1 :]
    pace_s = statistics.median(later.at - row.at for row, later in pairwise(calm))
    last = after[-1]
    seconds = last.at - begun - pace_s * (last.step - before[-1].step)

    ended = before[-1]
    kept = max(set(before) & set(after)) if anew else ended
    tokens = last.unused - kept.unused
    if anew:
        taken_back = [row for row in before if row.step > kept.step]
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

            events: dict[str, Callable[[], None]] = {
                "a cable out for a third of a lease": lambda: run.glitch(3, lease_s / 3),
                "a machine with a generator cut off": lambda: run.cut_off(3),
                "it joins again": lambda: run.join_for_good(3, 3),
                "a machine with environments powered off": lambda: run.power_off(4),
                "another joins late": lambda: run.join_for_good(SPARE, 4),
                "the head killed, back at once": run.replace_head,
                "the head killed, back when no agent is left": lambda: run.begin_anew([1, 2, 3, SPARE]),
                "a machine with a rank powered off": lambda: run.power_off(2),
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
