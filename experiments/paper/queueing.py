"""Queue scheduling with dynamic filtering: 8 prompts x 8 responses, 16 redundant prompts; reported 125 s -> 37 s, 3.4x.

    python -m experiments.paper queueing

Baseline: rounds of 8 prompts with a barrier, until 8 groups with signal are there. The paper does not publish how many
groups are constant, lengths, GPUs. The sweep moves them. Taking the first 8 of 24 prompts prefers short ones: see kept
and drawn.
"""

from __future__ import annotations

from typing import Any

from experiments.paper.report import panels, save, save_plot, table
from experiments.paper.rows import compare, generators_8b, simulate, steady_rules, verdict
from rollout.simulate.distributions import LogNormal
from rollout.simulate.result import SimulationResult
from rollout.simulate.scenario import Scenario, Work

PROMPTS = 8
RESPONSES = 8
REDUNDANT = 16
MEAN = 800  # tokens
SIGMA = 0.6  # of the logarithm
LIMIT = 4_096  # tokens
SUCCESS = 0.5  # mean chance
SPREAD = 5.0  # of the prompts' log-odds: about 6 of 10 groups are constant
GPUS = 8
SWEEP: list[tuple[str, dict[str, Any]]] = [
    ("few constant groups", {"spread": 2.5}),
    ("most groups constant", {"spread": 10.0}),
    ("sigma 0.3", {"sigma": 0.3}),
    ("sigma 1.0", {"sigma": 1.0}),
    ("4 redundant prompts", {"redundant": 4}),
]


def scenario(
    *, spread: float = SPREAD, sigma: float = SIGMA, redundant: int = REDUNDANT, measured: int = 60
) -> Scenario:
    """`spread`: of the prompts' log-odds; `sigma`: of the logarithm of a response's length."""
    work = Work(length=LogNormal(MEAN, sigma), task_share=0.5, max_tokens=LIMIT, success=SUCCESS, success_spread=spread)
    return Scenario(
        broker=steady_rules(
            PROMPTS,
            RESPONSES,
            alpha=0.0,
            redundant_groups=redundant,
            filter_constant_groups=True,
            max_filtered_per_step=10_000,
        ),
        generators=generators_8b(GPUS, 1_000, copy_s=0.0, load_s=0.0),
        work=work,
        measured=measured,
    )


def constant_share(result: SimulationResult) -> float:
    """The share of constant groups among those that were completed."""
    samples: dict[str, int] = result.report["ledger"]["samples"]
    return samples["filtered"] / max(1, samples["filtered"] + samples["trained"])


def line(name: str, **changes: Any) -> dict[str, Any]:
    """A queue with redundant prompts, against rounds without."""
    free = scenario(**changes)
    baseline = simulate(free.with_broker(redundant_groups=0, hooks=["batch_barrier"]))
    result = simulate(free)
    columns = {"constant": constant_share(baseline), "rounds_s": baseline.step_s}
    return compare(name, result, baseline, "" if changes else "125 -> 37 s, 3.4", **columns)


def main() -> None:
    rows = [line("queue, 16 redundant prompts")]
    free = scenario(redundant=0)
    rounds = simulate(free.with_broker(hooks=["batch_barrier"]))
    rows.append(compare("queue, none redundant", simulate(free), rounds, "", constant=None, rounds_s=rounds.step_s))
    table(rows, "queue scheduling with dynamic filtering against rounds")
    verdict(rows)
    sweep = [line(name, **changes) for name, changes in SWEEP]
    table(sweep, "what is not published")
    save("queueing", {"reported": "125 s -> 37 s, 3.4", "lines": rows, "sweep": sweep})

    figure, (axis,) = panels(1, width=7)
    names = [row["setting"] for row in rows + sweep]
    axis.barh(names, [row["speed-up"] for row in rows + sweep], label="step")
    axis.barh(names, [row["tokens x"] for row in rows + sweep], height=0.4, label="useful tokens/s")
    axis.axvline(3.4, color="red", linewidth=0.8, label="reported")
    axis.set(xlabel="gain over rounds")
    axis.invert_yaxis()
    axis.legend()
    save_plot("queueing", figure)
