"""CPU of the scheduling itself, per sample and turn: broker and proxy cores at 10, 1 000 and 100 000 live environments.

    python -m experiments.paper cost

Every call of a core is timed with the thread's CPU clock; what the timer itself costs is measured and taken off. The
garbage collector is set as in the broker's process (`tune_memory`): its walks fall into whatever call is running.

`steps` are function calls, Python's and C's, inside the cores, counted in a second run of the same scenario: the work
that was done, whatever the machine's caches hold.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from experiments.paper.report import panels, save, save_plot, table
from experiments.paper.rows import PATIENT_S
from rollout.broker.core import BrokerCore
from rollout.broker.process import tune_memory
from rollout.broker.rules import Rules
from rollout.proxy.core import ProxyCore
from rollout.simulate.distributions import Constant, Gaussian, LogNormal
from rollout.simulate.scenario import EnvServers, Generators, Scenario, TrainingCost, Work
from rollout.simulate.simulation import Simulation

LIVE = (10, 100, 1_000, 10_000, 100_000)
TURNS = 2
ENVIRONMENTS_PER_GENERATOR = 100
MIN_SAMPLES = 6_000


def scenario(live: int, samples: int = MIN_SAMPLES) -> Scenario:
    """So many live environments, and steps enough for `samples` trained samples."""
    groups = max(1, live // 4)  # of two samples; with alpha = 1 as many are open as there are environments

    return Scenario(
        broker=Rules(
            steps=max(2, math.ceil(samples / (2 * groups))),
            groups_per_batch=groups,
            group_size=2,
            train_tasks=100_000,
            alpha=1.0,
            episode_deadline_s=PATIENT_S,
            hold_deadline_s=PATIENT_S,
        ),
        generators=Generators(
            count=max(1, live // ENVIRONMENTS_PER_GENERATOR),
            max_num_seqs=128,
            decode_base_s=0.01,
            prefill_tokens_per_s=1e5,
        ),
        work=Work(length=LogNormal(100, 0.5), turns=Constant(TURNS), observation_tokens=50, step_s=Gaussian(5, 2)),
        servers=EnvServers(count=max(1, live // 500), capacity=min(500, live)),
        training=TrainingCost(step_s=1.0),
    )


class Around:
    """A core whose every call goes through `around`."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.calls = 0

    def around(self, method: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._core, name)
        if not callable(value):
            return value

        def through(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            return self.around(value, arguments, named)

        self.__dict__[name] = through
        return through


class Timed(Around):
    """CPU time of the calls, by the thread's clock."""

    nanoseconds = 0

    def around(self, method: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        begin = time.thread_time_ns()
        result = method(*arguments, **named)
        self.nanoseconds += time.thread_time_ns() - begin
        return result

    def microseconds(self, timer_ns: float) -> float:
        return (self.nanoseconds - self.calls * timer_ns) / 1000


class Counted(Around):
    """Function calls inside the calls."""

    steps = 0

    def around(self, method: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        sys.setprofile(self._event)
        try:
            return method(*arguments, **named)
        finally:
            sys.setprofile(None)

    def _event(self, frame: object, event: str, argument: object) -> None:
        self.steps += event in ("call", "c_call")


A = TypeVar("A", bound=Around)


class _Nothing:
    def call(self) -> None: ...


def timer_ns(calls: int = 100_000) -> float:
    """What is measured for a call that does nothing."""
    empty = Timed(_Nothing())
    for _ in range(calls):
        empty.call()
    return empty.nanoseconds / calls


def measure(live: int, samples: int = MIN_SAMPLES) -> dict[str, Any]:
    """One line of the table: microseconds, calls and steps for each trained sample."""
    (broker, proxy), simulation = run(Timed, live, samples)
    overhead = timer_ns()
    trained = sum(len(batch.samples) for batch in simulation.record.batches)
    line: dict[str, Any] = {"live": live, "samples": trained, "peak_open": simulation.record.peak_open}

    for name, core in (("broker", broker), ("proxy", proxy)):
        line[f"{name}_us"] = core.microseconds(overhead) / trained
        line[f"{name}_calls"] = core.calls / trained

    line["total_us"] = line["broker_us"] + line["proxy_us"]
    counted, _ = run(Counted, live, samples)

    return line | {"steps": sum(core.steps for core in counted) / trained}


def run(around: type[A], live: int, samples: int) -> tuple[tuple[A, A], Simulation]:
    """Broker and proxy, each behind `around`, after a whole simulation."""
    simulation = Simulation(scenario(live, samples))
    broker = around(simulation.broker)
    proxy = around(simulation.proxy)
    simulation.broker = cast(BrokerCore, broker)
    simulation.proxy = cast(ProxyCore, proxy)
    simulation.run()
    return (broker, proxy), simulation


def main() -> None:
    tune_memory()
    lines = [measure(live) for live in LIVE]
    table(lines, f"CPU microseconds per trained sample of {TURNS} turns")
    ratio, work = (lines[-1][name] / min(line[name] for line in lines[:3]) for name in ("total_us", "steps"))
    print(
        f"100 000 live environments cost {ratio:.2f} times what the cheapest of 10 to 1 000 costs, per sample, "
        f"in {work:.2f} times as many function calls"
    )
    save("cost", {"lines": lines, "ratio": ratio, "steps_ratio": work})

    figure, (axis,) = panels(1)

    for name in ("broker_us", "proxy_us", "total_us"):
        axis.plot(
            [line["live"] for line in lines], [line[name] for line in lines], "o-", label=name.removesuffix("_us")
        )

    axis.set(xlabel="live environments", ylabel="CPU us per sample", xscale="log", title=f"scheduling, {TURNS} turns")
    axis.set_ylim(bottom=0)
    axis.legend()
    save_plot("cost", figure)
