"""How large and how fast: 3 steps of 1 024 generators with 100 000 live environments, events a second of one core.

python -m experiments.paper scale
"""

from __future__ import annotations

import resource
import time

from experiments.paper.report import save
from rollout.broker.rules import Rules
from rollout.simulate.distributions import Gaussian, LogNormal
from rollout.simulate.scenario import EnvServers, Generators, Scenario, TrainingCost, Work
from rollout.simulate.simulation import Simulation


def scenario(generators: int = 1024, environments: int = 100_000, steps: int = 3) -> Scenario:
    """alpha = 1: two batches of environments / 2 samples are open at once, so all environments are live."""
    return Scenario(
        broker=Rules(
            steps=steps,
            groups_per_batch=environments // 16,
            group_size=8,
            train_tasks=100_000,
            alpha=1.0,
            episode_deadline_s=3600,
            hold_deadline_s=600,
        ),
        generators=Generators(
            count=generators,
            max_num_seqs=128,
            decode_base_s=0.02,
            decode_per_seq_s=1e-4,
            prefill_tokens_per_s=2e4,
            copy_s=1.0,
            load_s=0.05,
        ),
        work=Work(
            length=LogNormal(150, 0.5),
            task_share=0.3,
            turns=Gaussian(5, 2),
            max_tokens=2048,
            prompt_tokens=300,
            observation_tokens=50,
            step_s=Gaussian(10, 5),
            hang_probability=1e-5,
        ),
        servers=EnvServers(count=max(1, environments // 500), capacity=500),
        training=TrainingCost(step_s=60.0),
    )


def main() -> None:
    began = time.monotonic()
    simulation = Simulation(scenario())
    result = simulation.run()
    wall_s = time.monotonic() - began
    simulation.broker.ledger.check()

    figures = {
        "generators": 1024,
        "environments": 100_000,
        "peak_open_episodes": simulation.record.peak_open,
        "steps": 3,
        "events": result.events,
        "cpu_s": result.cpu_s,
        "wall_s": wall_s,
        "events_per_cpu_s": result.events / result.cpu_s,
        "resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "virtual_s": simulation.clock.now,
    }

    for name, value in figures.items():
        print(f"{name:>20}  {value:,.0f}")
    save("scale", figures)
