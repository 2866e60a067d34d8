"""The paper's rows by what limits an engine: what asynchrony gains where the KV cache binds, and where it never does.

    python -m experiments.paper admission

* `seats`: as many sequences as fit by their mean context; KV memory never binds. An engine cannot know that number.
* `whole`: the KV memory of an 80 GB GPU is the limit, and a request reserves its prompt and max_tokens of it.
* `expected`: likewise, prompt and mean response, with pre-emption by recomputation. All other rows run with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from experiments.paper import (
    agentic,
    alfworld,
    alpha,
    environments,
    queueing,
    redundancy,
    replication,
    rlvr,
    split,
    swe,
)
from experiments.paper.report import save, table
from experiments.paper.rows import KV_TOKENS, simulate, without_kv_limit
from rollout.simulate.result import SimulationResult
from rollout.simulate.scenario import Generators, Scenario

LIMITS: dict[str, Callable[[Generators], Generators]] = {
    "seats": without_kv_limit,
    "whole": lambda generators: replace(generators, kv_admission="whole"),
    "expected": lambda generators: generators,
}
REPLICATING = 16
"""GPUs of the replication row."""


class Setting(Struct, frozen=True):
    """What a row compares: of several choices the one with the most useful tokens a second counts."""

    name: str
    reported: str
    baseline: Scenario
    choices: list[Scenario]


def settings() -> list[Setting]:
    """One or more of each row of the paper."""
    return [*_rlvr(), *_stages(alfworld.ROW), *_stages(swe.ROW), *_single()]


def _rlvr() -> list[Setting]:
    return [
        Setting(
            f"RLVR {model}, {gpus} GPUs",
            "1.53-2.24",
            rlvr.scenario(gpus, length, 0.0),
            [rlvr.scenario(gpus, length, share) for share in rlvr.SHARES],
        )
        for model, length in rlvr.LENGTHS.items()
        for gpus in rlvr.GPUS
    ]


def _stages(row: agentic.Agentic) -> list[Setting]:
    baseline, *stages = row.stages().items()
    return [
        Setting(f"{row.name}: {name.strip()}", reported, baseline[1], [scenario])
        for (name, scenario), reported in zip(stages, (*row.reported, row.reported[-1]), strict=True)
    ]


def _single() -> list[Setting]:
    queue = queueing.scenario()
    rounds = queue.with_broker(redundant_groups=0, hooks=["batch_barrier"])
    found = [Setting("queue, 16 redundant prompts", "3.4", rounds, [queue])]

    for shape, reported in replication.SHAPES.items():
        free = replication.scenario(shape, REPLICATING)
        name = f"replication {shape[0]} x {shape[1]}, {REPLICATING} GPUs"
        found.append(Setting(name, reported, free.with_broker(hooks=["pin_prompts"]), [free]))

    free = environments.scenario(environments.REPORTED_SIGMA_S)
    found.append(Setting("environments, sigma 10 s", "2.46", free.with_broker(hooks=["turn_barrier"]), [free]))

    alone, spare = (redundancy.scenario(shape) for shape in ((32, 8), (36, 9)))
    found.append(Setting("redundant environments, 36 x 9", "5.3 (?)", alone, [spare]))

    for machine in alpha.MACHINES.values():
        synchronous, best = (alpha.scenario(machine, 32, 0.8, each) for each in (0.0, alpha.PLATEAU))
        found.append(Setting("alpha = 2, {} + {} GPUs, sigma 0.8".format(*machine), "", synchronous, [best]))

    shares = [split.scenario(count, 1.0) for count in split.TRAINING]
    found.append(Setting("best split of 40 GPUs", "~2", split.scenario(0, 1.0), shares))
    return found


def gain(setting: Setting, limit: str) -> dict[str, Any]:
    """Steps in seconds, without and with what the row is about, and their ratio; both sides have the same limit."""

    def run(scenario: Scenario) -> SimulationResult:
        return simulate(replace(scenario, generators=LIMITS[limit](scenario.generators)))

    baseline = run(setting.baseline)
    result = max(map(run, setting.choices), key=lambda each: each.useful_tokens_per_s)
    return {
        f"{limit} from_s": baseline.step_s,
        f"{limit} to_s": result.step_s,
        f"{limit} x": baseline.step_s / result.step_s,
        f"{limit} tokens x": result.useful_tokens_per_s / baseline.useful_tokens_per_s,
    }


def line(setting: Setting) -> dict[str, Any]:
    """All limits beside each other."""
    found: dict[str, Any] = {"row": setting.name, "reported": setting.reported}
    for limit in LIMITS:
        found |= gain(setting, limit)
    return found


def main() -> None:
    rows = [line(setting) for setting in settings()]
    told = ("row", "reported", *(f"{limit} {unit}" for unit in ("x", "tokens x") for limit in LIMITS))
    table(
        [{name: row[name] for name in told} for row in rows],
        "the paper's rows by what limits an engine: seats, KV memory with room for max_tokens, for what is expected",
    )
    save("admission", {"kv_tokens": KV_TOKENS, "lines": rows})
