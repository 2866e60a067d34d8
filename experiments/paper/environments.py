"""Environment-level asynchrony: Gaussian step latency mu = 10 s, sigma = 10 s; reported 892 s -> 362 s, 2.46x.

    python -m experiments.paper environments

Synchronous training in both; with the per-turn barrier every turn waits for the slowest environment. Turns and
number of environments are not published: 20 turns of 256 environments give both reported times; the sweep shows others.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from experiments.paper.report import panels, save, save_plot, table
from experiments.paper.rows import compare, generators_8b, simulate, steady_rules, verdict
from rollout.simulate.distributions import Constant, Gaussian, LogNormal
from rollout.simulate.scenario import EnvServers, Scenario, Work

MU_S = 10.0
SIGMAS_S = (0.0, 1.0, 3.0, 5.0, 10.0)
REPORTED_SIGMA_S = 10.0
TURNS = 20
ENVIRONMENTS = 256
TOKENS = 40  # of one turn
GPUS = 8
SWEEP = [(10, 256), (40, 256), (20, 64)]  # turns, environments


def scenario(sigma_s: float, turns: int = TURNS, environments: int = ENVIRONMENTS, measured: int = 4) -> Scenario:
    """Synchronous; a step of an environment takes 10 s on average, `sigma_s` around it."""
    return Scenario(
        broker=steady_rules(
            environments // 8,
            8,
            alpha=0.0,
        ),
        generators=generators_8b(GPUS, 2_000, copy_s=0.0, load_s=0.0),
        work=Work(
            length=LogNormal(TOKENS, 0.3), turns=Constant(turns), observation_tokens=50, step_s=Gaussian(MU_S, sigma_s)
        ),
        servers=EnvServers(count=1),  # one barrier over all environments
        measured=measured,
    )


def line(sigma_s: float, turns: int = TURNS, environments: int = ENVIRONMENTS) -> dict[str, Any]:
    """One line: without the per-turn barrier, against the same with it."""
    free = scenario(sigma_s, turns, environments)
    baseline = simulate(free.with_broker(hooks=["turn_barrier"]))
    result = simulate(free)
    reported = "892 -> 362 s, 2.46" if sigma_s == REPORTED_SIGMA_S and (turns, environments) == (20, 256) else ""
    columns = {"turns": turns, "envs": environments, "barrier_s": baseline.step_s}
    return compare(f"sigma {sigma_s:g} s", result, baseline, reported, **columns)


def main() -> None:
    rows = [line(sigma_s) for sigma_s in SIGMAS_S]
    table(rows, f"environment-level asynchrony, mu = {MU_S:g} s")
    verdict(rows)
    gains = [row["speed-up"] for row in rows]
    print(f"the gain grows with sigma: {all(a <= b for a, b in pairwise(gains))}")
    sweep = [line(REPORTED_SIGMA_S, turns, environments) for turns, environments in SWEEP]
    table(sweep, "what is not published: turns and environments")
    save("environments", {"reported": "892 s -> 362 s, 2.46", "lines": rows, "sweep": sweep})

    figure, (axis,) = panels(1)
    axis.plot(SIGMAS_S, gains, "o-", label="simulated")
    axis.plot([REPORTED_SIGMA_S], [2.46], "r*", markersize=12, label="reported")
    axis.set(xlabel="sigma of the step latency, seconds", ylabel="speed-up of a step")
    axis.legend()
    save_plot("environments", figure)
