"""RLVR, asynchronous against synchronous on the same GPUs: reported 1.53-2.24x (Qwen3-8B Base / Think, up to 128 GPUs).

    python -m experiments.paper rlvr

Synchronous: all GPUs generate, then all train. Asynchronous: a part generates, the rest trains, alpha = 2; the split
is chosen by its useful tokens per second. The paper does not publish the lengths' distribution, batch and costs; the
sweep shows how much they matter.
"""

from __future__ import annotations

from typing import Any

from experiments.paper.report import panels, save, save_plot, table
from experiments.paper.rows import compare, generators_8b, simulate, steady_rules, training_8b, verdict
from rollout.simulate.distributions import LogNormal
from rollout.simulate.result import SimulationResult
from rollout.simulate.scenario import Scenario, Work

PROMPTS = 64
RESPONSES = 16
GPUS = (16, 32, 64, 128)
ALPHA = 2.0
SHARES = (0.375, 0.5)  # of the GPUs that train
LENGTHS = {"Base": (2_000, 0.8), "Think": (11_000, 0.6)}  # mean tokens, sigma of the logarithm: not published
TASK_SHARE = 0.5  # of the variance of log-length that lies between prompts: not published
REUSES = 1.0  # E
MEASURED = 16
SWEEP = {  # mean tokens, sigma, prompts
    "Think": [(11_000, 0.4, 64), (11_000, 0.8, 64), (11_000, 0.6, 128)],
    "Base": [(2_000, 0.5, 64), (2_000, 1.1, 64)],
}


def scenario(gpus: int, length: tuple[float, float], share: float, prompts: int = PROMPTS) -> Scenario:
    """`share` = 0: synchronous, all GPUs for both."""
    mean, sigma = length
    work = Work(length=LogNormal(mean, sigma), task_share=TASK_SHARE, max_tokens=32_768)

    return Scenario(
        broker=steady_rules(prompts, RESPONSES, alpha=ALPHA if share else 0.0),
        generators=generators_8b(round(gpus * (1 - share)), work.prompt_tokens + mean / 2),
        work=work,
        training=training_8b(round(gpus * (share or 1)), REUSES),
        measured=MEASURED,
    )


def best(gpus: int, length: tuple[float, float], prompts: int = PROMPTS) -> tuple[float, SimulationResult]:
    """The share of the GPUs that trains with which most useful tokens a second come out."""
    runs = [(share, simulate(scenario(gpus, length, share, prompts))) for share in SHARES]
    return max(runs, key=lambda run: run[1].useful_tokens_per_s)


def lines(gpus: tuple[int, ...] = GPUS) -> list[dict[str, Any]]:
    """Each model on each number of GPUs: the best split against synchronous training."""
    rows = []
    for model, length in LENGTHS.items():
        for count in gpus:
            baseline = simulate(scenario(count, length, 0.0))
            share, result = best(count, length)
            columns = {"GPUs": count, "train share": share, "sync_s": baseline.step_s}
            rows.append(compare(f"Qwen3-8B {model}", result, baseline, "1.53-2.24", **columns))

    return rows


def main() -> None:
    rows = lines()
    table(rows, "RLVR: asynchronous (alpha = 2, best split) against synchronous")
    verdict(rows)
    sweep = []

    for model, lengths in SWEEP.items():
        for mean, sigma, prompts in lengths:
            baseline = simulate(scenario(64, (mean, sigma), 0.0, prompts))
            share, result = best(64, (mean, sigma), prompts)
            columns = {"mean": mean, "sigma": sigma, "prompts": prompts, "train share": share}
            sweep.append(compare(f"{model}, 64 GPUs", result, baseline, "", **columns))

    table(sweep, "what is not published: lengths and batch")
    speedups = [line["speed-up"] for line in rows]
    print(f"reported 1.53-2.24x, simulated {min(speedups):.2f}-{max(speedups):.2f}x")
    save("rlvr", {"reported": "1.53-2.24", "lines": rows, "sweep": sweep})

    figure, (axis,) = panels(1)

    for model in LENGTHS:
        chosen = [line for line in rows if line["setting"].endswith(model)]
        axis.plot([line["GPUs"] for line in chosen], [line["speed-up"] for line in chosen], "o-", label=model)

    axis.axhspan(1.53, 2.24, alpha=0.15, label="reported range")
    axis.set(xlabel="GPUs", ylabel="speed-up of a step", xscale="log", title="asynchronous against synchronous")
    axis.legend()
    save_plot("rlvr", figure)
