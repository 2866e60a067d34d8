"""Prompt replication: one request per response against whole prompts on one generator; reported 1.84x / 1.95x.

    python -m experiments.simulate replication

64 prompts x 16 responses and 16 x 64. The number of GPUs is not published: with more GPUs than prompts some have
nothing to do without replication. Synchronous; no training time, so the step is generation.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from experiments.simulate.laws import LogNormal
from experiments.simulate.report import panels, save, save_plot, table
from experiments.simulate.rows import ENDLESS, PATIENT_S, compare, engine_8b, simulate, verdict
from experiments.simulate.setting import Setting, Work
from rollout.broker import Settings

SHAPES = {(64, 16): "1.84", (16, 64): "1.95"}
GPUS = (8, 16, 32, 64)
MEAN, SIGMA, LIMIT = 8_000, 0.5, 16_384  # tokens
TASK_SHARE = 0.5  # of the variance of log-length


def setting(shape: tuple[int, int], gpus: int, measured: int = 4) -> Setting:
    prompts, responses = shape
    return Setting(
        broker=Settings(
            steps=ENDLESS, groups_per_batch=prompts, group_size=responses, train_tasks=20_000, alpha=0.0,
            episode_deadline_s=PATIENT_S,
        ),
        engine=engine_8b(gpus, 512 + MEAN / 2, copy_s=0.0, load_s=0.0),
        work=Work(length=LogNormal(MEAN, SIGMA), task_share=TASK_SHARE, max_tokens=LIMIT),
        measured=measured,
    )  # fmt: skip


def main() -> None:
    rows: list[dict[str, Any]] = []
    for shape, reported in SHAPES.items():
        for gpus in GPUS:
            free = setting(shape, gpus)
            pinned = simulate(replace(free, pinned_prompts=True))
            columns = {"GPUs": gpus, "pinned_s": pinned.step_s}
            rows.append(compare(f"{shape[0]} x {shape[1]}", simulate(free), pinned, reported, **columns))
    table(rows, "prompt replication against whole prompts on one generator")
    verdict(rows)
    save("replication", {"reported": {f"{a} x {b}": said for (a, b), said in SHAPES.items()}, "lines": rows})
    figure, (axis,) = panels(1)
    for (prompts, responses), reported in SHAPES.items():
        name = f"{prompts} x {responses}"
        chosen = [row for row in rows if row["setting"] == name]
        axis.plot([row["GPUs"] for row in chosen], [row["speed-up"] for row in chosen], "o-", label=name)
        axis.axhline(float(reported), linewidth=0.8, linestyle="--", label=f"{name} reported")
    axis.set(xlabel="GPUs", ylabel="speed-up of a step", xscale="log")
    axis.legend()
    save_plot("replication", figure)
