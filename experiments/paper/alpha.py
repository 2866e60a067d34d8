"""The asynchronous ratio: reported nearly all of the speed by alpha = 2, larger only for small batches, long tails.

    python -m experiments.paper alpha

Two machines, 4 generating and 3 training GPUs, 24 and 16. Three lengths' tails and two batch sizes; lengths and costs
are not published. Speed is useful tokens a second over those of alpha = 0 on the same machine. The larger alpha, the
longer it takes until the buffer is steady, so the more steps are measured.
"""

from __future__ import annotations

import math
from typing import Any

from experiments.paper.report import panels, save, save_plot, table
from experiments.paper.rows import compare, generators_8b, simulate, steady_rules, training_8b, verdict
from rollout.simulate.distributions import LogNormal
from rollout.simulate.scenario import Scenario, Work

ALPHAS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 8.0)
MACHINES = {"alpha": (4, 3), "alpha_40gpu": (24, 16)}  # result -> GPUs that generate, that train
MEAN = 4_000  # tokens
RESPONSES = 16
CASES = {  # prompts, sigma of log-length
    "32 x 16, sigma 0.8": (32, 0.8),
    "32 x 16, sigma 0.4": (32, 0.4),
    "32 x 16, sigma 1.2": (32, 1.2),
    "16 x 16, sigma 0.8": (16, 0.8),
}
PLATEAU = 2.0
STEADY = 1.03  # kept / drawn length above which the measurement is not of a steady state


def measured_steps(alpha: float) -> int:
    """The larger alpha, the more steps: old work is in the buffer for longer."""
    return 8 + 6 * math.ceil(alpha)


def scenario(machine: tuple[int, int], prompts: int, sigma: float, alpha: float) -> Scenario:
    """`machine`: GPUs that generate, that train; `sigma`: of the logarithm of a response's length."""
    generating, training = machine
    work = Work(length=LogNormal(MEAN, sigma), task_share=0.5, max_tokens=32_768)

    return Scenario(
        broker=steady_rules(prompts, RESPONSES, alpha=alpha),
        generators=generators_8b(generating, work.prompt_tokens + MEAN / 2),
        work=work,
        training=training_8b(training),
        measured=measured_steps(alpha),
    )


def lines(machine: tuple[int, int]) -> list[dict[str, Any]]:
    """Every case at every alpha, against the same case at alpha = 0."""
    rows = []
    for name, (prompts, sigma) in CASES.items():
        baseline = simulate(scenario(machine, prompts, sigma, 0.0))
        for alpha in ALPHAS:
            result = simulate(scenario(machine, prompts, sigma, alpha)) if alpha else baseline
            rows.append(compare(name, result, baseline, "", alpha=alpha))
    return rows


def plateau(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Share of the best speed over all alphas that alpha = 2 reaches, per case."""
    shares = {}
    for name in dict.fromkeys(row["setting"] for row in rows):
        speeds = {row["alpha"]: row["tokens x"] for row in rows if row["setting"] == name}
        shares[name] = speeds[PLATEAU] / max(speeds.values())
    return shares


def unsteady(rows: list[dict[str, Any]]) -> list[str]:
    """Settings that kept longer samples than were drawn: old work ended within the measurement, or it was short."""
    return [
        f"{row['setting']}, alpha {row['alpha']:g}: kept {row['kept'] / row['drawn']:.3f} of the drawn length"
        for row in rows
        if row["kept"] / row["drawn"] > STEADY
    ]


def main() -> None:
    for name, machine in MACHINES.items():
        report(name, machine)


def report(name: str, machine: tuple[int, int]) -> None:
    """Table, notes, JSON and plot of one machine."""
    rows = lines(machine)
    table(rows, f"alpha sweep on {machine[0]} + {machine[1]} GPUs: useful tokens a second over those of alpha = 0")
    verdict(rows)
    for case, share in plateau(rows).items():
        print(f"{case}: alpha = 2 reaches {share:.0%} of the best speed (reported: nearly all)")
    for note in unsteady(rows):
        print(f"note: not steady, or measured for too short: {note}")
    figures = {"reported": "plateau at 2", "lines": rows, "share_at_2": plateau(rows), "not steady": unsteady(rows)}
    save(name, figures)

    figure, (left, right) = panels(2)

    for case in CASES:
        chosen = [row for row in rows if row["setting"] == case]
        left.plot([row["alpha"] for row in chosen], [row["tokens x"] for row in chosen], "o-", label=case)
        right.plot([row["alpha"] for row in chosen], [row["staleness"] for row in chosen], "o-", label=case)

    left.set(xlabel="alpha", ylabel="useful tokens/s over alpha = 0")
    right.set(xlabel="alpha", ylabel="mean staleness")
    left.legend()
    save_plot(name, figure)
