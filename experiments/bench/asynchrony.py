"""Environment-level asynchrony on the wall clock: per-environment progress against a per-turn barrier.

    python -m experiments.bench asynchrony [--mean-s 0.5 --sigma-s 0.5 --turns 10] [--out FILE.json]

The complete system of real processes with simulated engines, injected Gaussian latency of every environment step and
synchronous training (alpha = 0): the same configuration twice, `rollout.turn_barrier` apart, each beside the
simulator's prediction for the same draws. All environments are one server's, so one barrier holds them all.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from experiments.bench._measuring import parser_of, write
from experiments.paper.reality import COMMON, RECIPE, measure, predict
from rl.core.config import load_config

OUT = Path(__file__).parent.parent / "results" / "bench" / "asynchrony.json"
WARM_UP = 1  # steps
SIDES = {"per-turn barrier": "rollout.turn_barrier=true", "per environment": "rollout.turn_barrier=false"}


def main(argv: list[str]) -> None:
    options = _options(argv)
    sides = {name: _side((*_overrides(options), setting)) for name, setting in SIDES.items()}
    barrier, free = sides.values()
    ratio = {key: barrier[key] / free[key] for key in ("measured_s", "predicted_s")}
    print(f"barrier / per environment: measured {ratio['measured_s']:.2f}x, predicted {ratio['predicted_s']:.2f}x")
    parameters = {name: value for name, value in vars(options).items() if name != "out"}
    result = {"parameters": parameters, "seconds_per_step": sides, "ratio": ratio, "load": os.getloadavg()[0]}
    write(options.out, result)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = parser_of("asynchrony", __doc__)
    parser.add_argument("--mean-s", type=float, default=0.5, help="of an environment step")
    parser.add_argument("--sigma-s", type=float, default=0.5)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--groups", type=int, default=16, help="of 4 episodes each, in one batch")
    parser.add_argument("--tokens", type=float, default=10.0, help="mean of a turn; a token takes 10 ms or more")
    parser.add_argument("--steps", type=int, default=6, help=f"training steps, of which {WARM_UP} is not measured")
    parser.set_defaults(out=OUT)

    return parser.parse_args(argv)


def _overrides(options: argparse.Namespace) -> tuple[str, ...]:
    """Engines with a seat for every episode, so that only latencies make one wait for another."""
    return (
        "rollout.alpha=0",
        f"steps={options.steps}",
        f"rollout.groups_per_batch={options.groups}",
        f"env.options.turns={options.turns}",
        f"env.max_turns={options.turns}",
        f"env.options.mean_s={options.mean_s}",
        f"env.options.sigma_s={options.sigma_s}",
        f"generator.simulated.length_mean={options.tokens}",
        "generator.max_model_len=4096",
        "generator.max_num_seqs=256",
        "sampling.max_tokens=100",
    )


def _side(overrides: tuple[str, ...]) -> dict[str, Any]:
    predicted = predict(load_config(RECIPE, [*COMMON, *overrides]), WARM_UP)
    with tempfile.TemporaryDirectory(prefix="fresco-bench-") as folder:
        measured, cpus = measure(overrides, Path(folder), WARM_UP)
    print(f"{overrides[-1]}: {measured:.2f} s a step, predicted {predicted:.2f} s, {cpus:.2f} CPUs", flush=True)
    return {"measured_s": measured, "predicted_s": predicted, "cpus": cpus}
