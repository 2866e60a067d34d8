"""What the design adds to the published one, each switched off alone.

    python -m experiments.paper ablations

* passing stragglers (F5, P = 1) against always waiting for the oldest (P = 0), the published head-of-line blocking;
* true replication (every response a request of its own, on any generator) against whole prompts on one generator, with
  more prompts than generators and with fewer;
* active cancellation against letting redundant and over-age episodes run to their end;
* second copies of slow episodes when one or two environment servers of eight are 5 times slower (fail-slow), and what
  they cost when none is;
* rolling weight updates against stopping every generator at once, and keeping the KV cache against recomputing it.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from experiments.paper.report import panels, save, save_plot, table
from experiments.paper.rows import compare, generators_8b, simulate, steady_rules, training_8b, verdict
from rollout.simulate.distributions import Constant, Gaussian, LogNormal
from rollout.simulate.scenario import EnvServers, Scenario, TrainingCost, Work

GENERATING = 8
TRAINING = 8
MEASURED = 48  # with 12 the last figure of a gain, and the sign of a small one, is chance


def reasoning() -> Scenario:
    """RLVR: long tails, so that stragglers matter."""
    work = Work(length=LogNormal(4_000, 1.0), task_share=0.5, max_tokens=32_768)
    return Scenario(
        broker=steady_rules(32, 8, alpha=1.0),
        generators=generators_8b(GENERATING, work.prompt_tokens + 2_000),
        work=work,
        training=training_8b(TRAINING),
        measured=MEASURED,
    )


def few_prompts() -> Scenario:
    """Fewer prompts in flight than generators, each with many responses."""
    base = reasoning()
    return replace(base, generators=generators_8b(16, base.work.prompt_tokens + 2_000)).with_broker(
        groups_per_batch=8, group_size=32, alpha=0.5
    )


def agentic() -> Scenario:
    """Environments that differ and hang, with redundancy, on a machine that is full."""
    base = reasoning()
    return replace(
        base,
        work=Work(
            length=LogNormal(300, 0.6),
            task_share=0.3,
            turns=Gaussian(10, 4),
            observation_tokens=200,
            max_tokens=2048,
            step_s=LogNormal(5, 1.0, 300),
            hang_probability=0.001,
            step_deadline_s=300,
        ),
        broker=base.broker.changed(redundant_groups=6, redundant_episodes=2, max_attempts=100),
        servers=EnvServers(count=8, capacity=80),
        generators=generators_8b(4, 3_000),
    )


def fail_slow(alpha: float, slow_servers: int) -> Scenario:
    """Environments of 10 turns of 5 s on 8 servers, some of them 5 times slower, beside short responses."""
    base = reasoning()
    return replace(
        base,
        work=Work(
            length=LogNormal(100, 0.5),
            turns=Constant(10),
            observation_tokens=100,
            max_tokens=1024,
            step_s=LogNormal(5, 0.5),
        ),
        servers=EnvServers(count=8, capacity=200, slow_fraction=slow_servers / 8, slow_factor=5.0),
        generators=generators_8b(8, 2_000, copy_s=0.5, load_s=0.5),
        training=TrainingCost(step_s=10.0),
    ).with_broker(alpha=alpha, hooks=[{"hedging": {"quantile": 0.8}}])


def heavy_updates() -> Scenario:
    """A model whose weights take long to load, relative to a step."""
    base = reasoning()
    return replace(base, generators=replace(base.generators, load_s=20.0, copy_s=5.0)).with_broker(groups_per_batch=16)


def lines() -> list[dict[str, Any]]:
    """Each mechanism on, against each variant without it."""
    rows = []

    def ablate(name: str, on: Scenario, variants: dict[str, Scenario]) -> None:
        baseline = {label: simulate(off) for label, off in variants.items()}
        result = simulate(on)
        for label, off in baseline.items():
            rows.append(compare(f"{name}: {label} -> on", result, off, "", off_s=off.step_s, **_kept(off)))

    on = reasoning()
    ablate(
        "passing stragglers",
        on,
        {"P = 0": on.with_broker(hold_patience=0), "P = inf": on.with_broker(hold_patience=math.inf)},
    )

    for name, on in (("true replication, 32 x 8 on 8", reasoning()), ("true replication, 8 x 32 on 16", few_prompts())):
        ablate(name, on, {"whole prompts": on.with_broker(hooks=["pin_prompts"])})

    on = agentic()
    ablate("active cancellation", on, {"off": replace(on, cancellation=False)})

    for alpha, slow in ((0.0, 1), (1.0, 1), (1.0, 2), (1.0, 0)):
        on = fail_slow(alpha, slow)
        name = f"second copies, {slow} of 8 servers slow, alpha {alpha:g}"
        ablate(name, on, {"off": on.with_broker(hooks=[])})

    on = heavy_updates().with_generators(on_update="keep")
    ablate(
        "rolling updates",
        on,
        {
            "20 s, all at once": on.with_generators(rolling=False),
            "rolling, recompute": on.with_generators(on_update="recompute"),
        },
    )

    on = on.with_generators(load_s=2.0, copy_s=2.0)
    ablate("rolling updates of 2 s", on, {"all at once": on.with_generators(rolling=False)})

    return rows


def _kept(off: Any) -> dict[str, float]:
    return {"off kept": off.kept_length, "off wasted": off.wasted}


def main() -> None:
    rows = lines()
    table(rows, "ablations: speed-up of the mechanism over its absence")
    verdict(rows)
    save("ablations", {"lines": rows})

    figure, (axis,) = panels(1, width=7)
    axis.barh([row["setting"] for row in rows], [row["tokens x"] for row in rows])
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set(xlabel="useful tokens/s over the variant")
    axis.invert_yaxis()
    save_plot("ablations", figure)
