"""The simulator against reality: real processes with `simulated` engines and injected latency, on the wall clock.

    python -m experiments.paper reality

Each scenario runs as a user would run it (`fresco run experiments/simulated.yaml ...`), a few seconds a step, so
that what the box itself needs is small. The prediction knows the configuration only; lengths and latencies are the same
draws (seeded requests; the synthetic environment's own generator). CPU of all processes is reported beside it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from envs.synthetic import SyntheticFamily, SyntheticOptions
from experiments.paper.report import panels, save, save_plot, table
from rl.config.plugins import validated
from rl.config.schema import Config, load_config
from rl.config.seeds import turn_seed
from rl.wire.messages import Ticket
from rollout.generator.engines.timing import SimulatedOptions
from rollout.simulate.recipe import Given, assumed, scenario_of
from rollout.simulate.scenario import Scenario
from rollout.simulate.server import SimulatedEpisode
from rollout.simulate.simulation import Simulation

RECIPE = Path(__file__).parent.parent / "simulated.yaml"
STEPS = 14
WARM_UP = 3
TOLERANCE = 0.10
COMMON = (
    f"steps={STEPS}",
    "sampling.seeded=true",
    "eval.tasks=0",
    "sampling.max_tokens=400",
    "generator.options.decode_base_s=0.01",
    "generator.options.decode_per_seq_s=0.0005",
    "generator.options.length_mean=80",
    "generator.options.length_sigma=0.8",
    "env.servers=1",
    "env.episodes_per_server=200",
    "learner.ranks=1",
    "learner.options.step_s=0.5",
    "rollout.group_size=4",
)
SETTINGS: dict[str, tuple[str, ...]] = {
    "synchronous, single turn": ("rollout.alpha=0", "env.options.turns=1", "env.max_turns=1"),
    "alpha 1, single turn": ("rollout.alpha=1", "env.options.turns=1", "env.max_turns=1"),
    "alpha 2, long tail, training-bound": (
        "rollout.alpha=2",
        "env.options.turns=1",
        "env.max_turns=1",
        "generator.options.length_sigma=1.2",
        "learner.options.step_s=1.5",
    ),
    "synchronous, 3 turns, env 1 s +- 1 s": (
        "rollout.alpha=0",
        "env.options.turns=3",
        "env.max_turns=3",
        "env.options.mean_s=1",
        "env.options.sigma_s=1",
        "generator.options.length_mean=30",
    ),
    "likewise, per-turn barrier": (
        "rollout.alpha=0",
        "env.options.turns=3",
        "env.max_turns=3",
        "env.options.mean_s=1",
        "env.options.sigma_s=1",
        "generator.options.length_mean=30",
        "rollout.hooks=[turn_barrier]",
    ),
    "alpha 1, 3 turns, redundant": (
        "rollout.alpha=1",
        "env.options.turns=3",
        "env.max_turns=3",
        "env.options.mean_s=1",
        "env.options.sigma_s=1",
        "generator.options.length_mean=30",
        "rollout.redundant_groups=1",
        "rollout.redundant_episodes=1",
    ),
}


class SameDraws(Simulation):
    """The lengths of the simulated engine and the latencies of the synthetic environment, draw for draw."""

    def __init__(self, scenario: Scenario, config: Config) -> None:
        super().__init__(scenario)
        engine: SimulatedOptions = validated(SimulatedOptions, config.generator.options, "generator.options")
        self._response_length = engine.response_length
        self._turns = config.env.options["turns"]
        options = SyntheticOptions.model_validate(config.env.options)
        self._families = [SyntheticFamily(options, config.seed) for _ in range(config.env.servers)]
        self._visits: dict[int, int] = {}

    def lengths(self, server: int, ticket: Ticket) -> list[int]:
        family = self._families[server]
        self._visits[ticket.ticket_id] = family.visit(family.task("train", ticket.task_index))
        limit = self.scenario.work.max_tokens
        return [min(limit, self._response_length(turn_seed(ticket.seed, turn))) for turn in range(self._turns)]

    def step_seconds(self, episode: SimulatedEpisode) -> float:
        family = self._families[episode.server.index]
        ticket = episode.ticket
        task = family.task("train", ticket.task_index)
        return family.latency_s(task, episode.turn, self._visits[ticket.ticket_id])


def predict(config: Config, warm_up: int = WARM_UP) -> float:
    """Mean seconds of the steps after the warm-up."""
    simulation = SameDraws(scenario_of(config, assumed(config, Given())), config)
    times = simulation.run().step_times[warm_up:]
    return sum(times) / len(times)


def measure(overrides: tuple[str, ...], runs: Path, warm_up: int = WARM_UP) -> tuple[float, float]:
    """Mean seconds of the steps after the warm-up, and the CPUs that all processes of the run used."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    command = [sys.executable, "-m", "launch.cli", "run", str(RECIPE), *COMMON, *overrides, f"runs={runs}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600)
    wall_s = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rows = [json.loads(line) for path in runs.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    times = {row["step"]: row["time"] for row in rows if "time/step" in row}

    return (times[max(times)] - times[warm_up]) / (max(times) - warm_up), cpu_s / wall_s


def main() -> None:
    lines: list[dict[str, Any]] = []
    for name, overrides in SETTINGS.items():
        config = load_config(RECIPE, [*COMMON, *overrides])
        predicted = predict(config)
        with tempfile.TemporaryDirectory(prefix="fresco-") as folder:
            measured, cpus = measure(overrides, Path(folder))

        lines.append(
            {
                "setting": name,
                "predicted_s": predicted,
                "measured_s": measured,
                "error": predicted / measured - 1,
                "CPU": cpus / (os.cpu_count() or 1),
                "load": os.getloadavg()[0],
                "within 10 %": abs(predicted / measured - 1) <= TOLERANCE,
            }
        )

        table(lines[-1:])

    table(lines, "predicted against measured step times")
    save("reality", {"tolerance": TOLERANCE, "lines": lines})

    figure, (axis,) = panels(1)
    axis.plot([line["measured_s"] for line in lines], [line["predicted_s"] for line in lines], "o")
    top = 1.1 * max(line["measured_s"] for line in lines)
    axis.plot([0, top], [0, top], color="grey", linewidth=0.8)
    axis.set(xlabel="measured step, seconds", ylabel="predicted step, seconds")
    save_plot("reality", figure)
