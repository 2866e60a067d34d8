"""Prompt replication: one request per response against whole prompts on one generator; reported 1.84x / 1.95x.

    python -m experiments.paper replication

64 prompts x 16 responses and 16 x 64. The number of GPUs is not published: with more GPUs than prompts some have
nothing to do without replication. Nor are the spread of lengths, how alike the responses of a prompt are, and what a
further sequence costs a decode step. The sweep shows the range (at 0 a step takes as long for 64 sequences as for one,
and nothing is gained by spreading them). Synchronous; no training time, so the step is generation.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from experiments.paper.report import panels, save, save_plot, table
from experiments.paper.rows import compare, generators_8b, simulate, steady_rules, verdict
from rollout.simulate.distributions import LogNormal
from rollout.simulate.scenario import Scenario, Work

SHAPES = {(64, 16): "1.84", (16, 64): "1.95"}
GPUS = (8, 16, 32, 64)
MEAN = 8_000  # tokens
SIGMA = 0.5  # of the logarithm
LIMIT = 16_384  # tokens
TASK_SHARE = 0.5  # of the variance of log-length
SWEPT_GPUS = (16, 64)
SWEPT_SIGMAS = (0.3, 1.0)
SWEPT_SHARES = (0.0, 0.95)
SWEPT_COSTS = (0.0, 1.0, 4.0)  # of a further sequence, in multiples of reading its KV cache (`rows.generators_8b`)


def scenario(shape: tuple[int, int], gpus: int, measured: int = 4) -> Scenario:
    """`shape`: prompts and responses of each."""
    prompts, responses = shape
    return Scenario(
        broker=steady_rules(prompts, responses, alpha=0.0),
        generators=generators_8b(gpus, 512 + MEAN / 2, copy_s=0.0, load_s=0.0),
        work=Work(length=LogNormal(MEAN, SIGMA), task_share=TASK_SHARE, max_tokens=LIMIT),
        measured=measured,
    )


def sweep_line(shape: tuple[int, int], gpus: int, sigma: float, share: float, cost: float) -> dict[str, Any]:
    """One choice of what is not published, with and without replication."""
    base = scenario(shape, gpus, measured=2)
    free = base.with_work(length=LogNormal(MEAN, sigma), task_share=share).with_generators(
        decode_per_seq_s=cost * base.generators.decode_per_seq_s
    )
    step_s = simulate(free).step_s
    pinned_s = simulate(free.with_broker(hooks=["pin_prompts"])).step_s

    return {
        "setting": f"{shape[0]} x {shape[1]}",
        "GPUs": gpus,
        "sigma": sigma,
        "share of the task": share,
        "cost of a sequence": cost,
        "pinned_s": pinned_s,
        "step_s": step_s,
        "speed-up": pinned_s / step_s,
    }


def ranges(sweep: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each shape on so many GPUs: the range over what is not published, and how many lines reach the report."""
    found = []
    for (shape, reported), gpus in product(SHAPES.items(), SWEPT_GPUS):
        name = f"{shape[0]} x {shape[1]}"
        gains = [row["speed-up"] for row in sweep if (row["setting"], row["GPUs"]) == (name, gpus)]
        reach = sum(gain >= float(reported) for gain in gains)

        found.append(
            {
                "setting": name,
                "GPUs": gpus,
                "reported": reported,
                "least": min(gains),
                "most": max(gains),
                "reach it": f"{reach} of {len(gains)}",
            }
        )

    return found


def main() -> None:
    rows: list[dict[str, Any]] = []
    for shape, reported in SHAPES.items():
        for gpus in GPUS:
            free = scenario(shape, gpus)
            pinned = simulate(free.with_broker(hooks=["pin_prompts"]))
            columns = {"GPUs": gpus, "pinned_s": pinned.step_s}
            rows.append(compare(f"{shape[0]} x {shape[1]}", simulate(free), pinned, reported, **columns))

    table(rows, "prompt replication against whole prompts on one generator")
    verdict(rows)
    swept = product(SHAPES, SWEPT_GPUS, SWEPT_SIGMAS, SWEPT_SHARES, SWEPT_COSTS)
    sweep = [sweep_line(*values) for values in swept]
    table(sweep, "what is not published: spread of lengths, likeness within a prompt, cost of a further sequence")
    spans = ranges(sweep)
    table(spans, "its range")
    reported_as = {f"{a} x {b}": said for (a, b), said in SHAPES.items()}
    save("replication", {"reported": reported_as, "lines": rows, "range": spans, "sweep": sweep})
    _plot(rows, spans)


def _plot(rows: list[dict[str, Any]], spans: list[dict[str, Any]]) -> None:

    figure, (axis,) = panels(1)
    for (prompts, responses), reported in SHAPES.items():
        name = f"{prompts} x {responses}"
        chosen = [row for row in rows if row["setting"] == name]
        (line,) = axis.plot([row["GPUs"] for row in chosen], [row["speed-up"] for row in chosen], "o-", label=name)
        axis.axhline(float(reported), color=line.get_color(), linewidth=0.8, linestyle="--", label=f"{name} reported")
        for span in (span for span in spans if span["setting"] == name):
            x = span["GPUs"] * (1.05 if prompts > responses else 0.95)  # beside each other
            axis.vlines(x, span["least"], span["most"], color=line.get_color(), linewidth=4, alpha=0.4)

    axis.set(xlabel="GPUs (bars: range of the sweep)", ylabel="speed-up of a step", xscale="log")
    axis.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
    axis.minorticks_off()
    axis.legend(loc="upper left")
    save_plot("replication", figure)
