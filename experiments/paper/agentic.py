"""The stages of the two agentic rows, on the same GPUs: synchronous with per-turn barriers, without them, asynchronous
training, redundant environments. `alfworld.py` and `swe.py` hold the parameters."""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from experiments.paper.report import panels, save, save_plot, table
from experiments.paper.rows import compare, generators_8b, simulate, steady_rules, training_8b, verdict
from rollout.simulate.scenario import EnvServers, Scenario, Work

ONE_BARRIER = EnvServers(count=1)  # a barrier is a server's: over all environments


class Agentic(Struct, frozen=True):
    """One benchmark; `training` GPUs of `gpus` train when training is asynchronous."""

    name: str
    work: Work
    gpus: int
    training: int
    groups: int
    size: int
    mean_context: float
    alpha: float
    extra_groups: int
    extra_episodes: int
    reuses: float
    reported: tuple[str, str, str]  # of the stages after the baseline
    measured: int = 12

    def stages(self) -> dict[str, Scenario]:
        """The stages by name, the baseline first."""
        colocated = Scenario(
            broker=steady_rules(
                self.groups,
                self.size,
                alpha=0.0,
                max_attempts=100,
            ),
            generators=generators_8b(self.gpus, self.mean_context),
            work=self.work,
            training=training_8b(self.gpus, self.reuses),
            measured=self.measured,
        )

        decoupled = replace(
            colocated,
            generators=generators_8b(self.gpus - self.training, self.mean_context),
            training=training_8b(self.training, self.reuses),
        ).with_broker(alpha=self.alpha)
        redundant = decoupled.with_broker(redundant_groups=self.extra_groups, redundant_episodes=self.extra_episodes)

        return {
            "synchronous, per-turn barrier": replace(
                colocated.with_broker(hooks=["turn_barrier"]), servers=ONE_BARRIER
            ),
            "+ environment-level asynchrony": colocated,
            "+ asynchronous training": decoupled,
            "+ redundant environments": redundant,
            "  likewise, P = inf": redundant.with_broker(hold_patience=math.inf),
        }


def lines(row: Agentic) -> list[dict[str, Any]]:
    """One line for each stage, against the first."""
    results = {name: simulate(scenario) for name, scenario in row.stages().items()}
    baseline = next(iter(results.values()))
    reported = ("1", *row.reported, row.reported[-1])
    return [
        compare(name, result, baseline, said) | {"turns": result.kept_turns, "issued turns": result.issued_turns}
        for (name, result), said in zip(results.items(), reported, strict=True)
    ]


def main(row: Agentic, sweep: dict[str, Agentic]) -> None:
    rows = lines(row)
    table(rows, f"{row.name}: stages, {row.gpus} GPUs")
    verdict(rows)

    swept = [
        {
            "variant": name,
            "async env": stages[1]["speed-up"],
            "async train": stages[2]["speed-up"],
            "redundant": stages[3]["speed-up"],
            "redundant, tokens": stages[3]["tokens x"],
            "P = inf": stages[4]["speed-up"],
            "P = inf, tokens": stages[4]["tokens x"],
        }
        for name, stages in ((name, lines(variant)) for name, variant in sweep.items())
    ]

    table(swept, f"{row.name}: what is not published")
    save(row.name, {"reported": row.reported, "lines": rows, "sweep": swept})

    figure, (axis,) = panels(1, width=7)
    axis.barh([line["setting"] for line in rows], [line["speed-up"] for line in rows], label="simulated step")
    for index, line in enumerate(rows):
        axis.text(0.05, index, f"reported {line['reported']}", va="center", color="white")
    axis.set(xlabel="speed-up", title=row.name)
    axis.invert_yaxis()
    save_plot(row.name, figure)
