"""Train / inference split of 40 GPUs: reported best near 24 inference + 16 training, about 2x; and against beta*.

    python -m experiments.paper split

beta* = E N mu_train / (N mu_gen + K L / (1 + alpha) + E N mu_train), with mu_gen in GPU seconds at a full
batch. The cost of training is not published: the sweep shows how the best split moves with it.
"""

from __future__ import annotations

from typing import Any

from experiments.paper.report import panels, save, save_plot, table
from experiments.paper.rows import (
    TRAIN_GPU_S_PER_TOKEN,
    compare,
    fitting_seats,
    generators_8b,
    simulate,
    steady_rules,
    training_8b,
    verdict,
)
from rollout.simulate.distributions import LogNormal
from rollout.simulate.result import SimulationResult
from rollout.simulate.scenario import Scenario, Work

GPUS = 40
TRAINING = (4, 8, 12, 16, 20, 24, 28)
PROMPTS = 64
RESPONSES = 16
MEAN = 11_000  # tokens
SIGMA = 0.6  # of the logarithm
ALPHA = 2.0
REUSES = (0.5, 1.0, 2.0)  # E mu_train, in units of one pass
REPORTED_TRAINING = 16


def scenario(training: int, reuses: float, measured: int = 16) -> Scenario:
    """`training` = 0: synchronous, all GPUs for both."""
    work = Work(length=LogNormal(MEAN, SIGMA), task_share=0.5, max_tokens=32_768)
    return Scenario(
        broker=steady_rules(PROMPTS, RESPONSES, alpha=ALPHA if training else 0.0),
        generators=generators_8b(GPUS - training, work.prompt_tokens + MEAN / 2),
        work=work,
        training=training_8b(training or GPUS, reuses),
        measured=measured,
    )


def best_by_theory(reuses: float, longest_tokens: float = 32_768) -> tuple[float, float]:
    """beta* * K, in training GPUs: with the tail L, and without it."""
    chosen = scenario(0, reuses)
    machines = chosen.generators
    samples = PROMPTS * RESPONSES
    seats = fitting_seats(machines)
    step_s = machines.decode_base_s + machines.decode_per_seq_s * (seats - 1)
    mean = chosen.work.population_length()
    generate = samples * mean * step_s / seats
    train = reuses * samples * mean * TRAIN_GPU_S_PER_TOKEN
    tail = GPUS * longest_tokens * step_s / (1 + ALPHA)

    return GPUS * train / (generate + tail + train), GPUS * train / (generate + train)


def lines(reuses: float, baseline: SimulationResult, training: tuple[int, ...] = TRAINING) -> list[dict[str, Any]]:
    """Every split of the GPUs, against `baseline`."""
    return [
        compare(
            f"{GPUS - count} + {count}",
            simulate(scenario(count, reuses)),
            baseline,
            "~2 (best)" if count == REPORTED_TRAINING else "",
            training=count,
            reuses=reuses,
        )
        for count in training
    ]


def main() -> None:
    everything: list[dict[str, Any]] = []
    optima = []
    for reuses in REUSES:
        baseline = simulate(scenario(0, reuses))
        rows = lines(reuses, baseline)
        best = max(rows, key=lambda row: row["tokens x"])
        with_tail, without = best_by_theory(reuses)

        optima.append(
            {
                "E mu_train": reuses,
                "sync_s": baseline.step_s,
                "sync train share": 1 - baseline.learner_idle,
                "best training": best["training"],
                "tokens x": best["tokens x"],
                "beta* K": with_tail,
                "beta* K, L = 0": without,
            }
        )

        everything += rows

    table([row for row in everything if row["reuses"] == 1.0], f"split of {GPUS} GPUs, inference + training, E = 1")
    verdict(everything)
    table(optima, "best split by cost of training (reported: 16 training GPUs, ~2x)")
    save("split", {"reported": "24 + 16, ~2x", "lines": everything, "optima": optima})

    figure, (axis,) = panels(1)

    for reuses in REUSES:
        chosen = [row for row in everything if row["reuses"] == reuses]
        axis.plot([row["training"] for row in chosen], [row["tokens x"] for row in chosen], "o-", label=f"E = {reuses}")

    axis.axvline(REPORTED_TRAINING, color="grey", linewidth=0.8, label="reported best")
    axis.set(xlabel="training GPUs of 40", ylabel="useful tokens/s over synchronous")
    axis.legend()
    save_plot("split", figure)
