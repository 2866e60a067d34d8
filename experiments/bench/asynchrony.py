"""Environment-level asynchrony on the wall clock: per-environment progress against a per-turn barrier.

    python -m experiments.bench asynchrony [--mean-s 0.5 --sigma-s 0.5 --turns 10] [--rounds 5] [--out FILE.json]

The complete system of real processes with simulated engines, injected Gaussian latency of every environment step and
synchronous training (alpha = 0). It is the same configuration twice, the hook `turn_barrier` apart, in turns, each
beside the simulator's prediction for the same draws. All environments are one server's, so one barrier holds them all.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from experiments.bench._measuring import Timing, in_turns, parser_of, write
from experiments.bench._ratios import Idle, provenance, ratio_of
from experiments.paper.reality import COMMON, RECIPE, measure, predict
from rl.config.schema import load_config

OUT = Path(__file__).parent.parent / "results" / "bench" / "asynchrony.json"
WARM_UP = 1  # steps
SIDES = {"per-turn barrier": "rollout.hooks=[turn_barrier]", "per environment": "rollout.hooks=[]"}


def main(argv: list[str]) -> None:
    options = _options(argv)
    settings = {name: (*_overrides(options), setting) for name, setting in SIDES.items()}
    predicted = {name: predict(load_config(RECIPE, [*COMMON, *each]), WARM_UP) for name, each in settings.items()}
    measured: dict[str, list[Timing]] = {name: [] for name in SIDES}
    with Idle() as idle:
        for _, name in in_turns(SIDES, options.rounds):
            measured[name].append(_step(name, settings[name]))

    barrier, free = SIDES
    ratio = ratio_of(measured[barrier], measured[free])
    expected = predicted[barrier] / predicted[free]
    print(f"seconds of a step, {barrier} over {free}: {ratio}; predicted {expected:.2f}")
    print(idle.told(options.rounds))

    parameters = {name: value for name, value in vars(options).items() if name != "out"}
    steps = {"measured": measured, "predicted_s": predicted, "predicted_ratio": expected}
    found = provenance(idle, {"barrier_over_free": ratio})
    write(options.out, {"parameters": parameters, "steps": steps, "refusal": idle.refusal(options.rounds)} | found)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = parser_of("asynchrony", __doc__)
    parser.add_argument("--mean-s", type=float, default=0.5, help="of an environment step")
    parser.add_argument("--sigma-s", type=float, default=0.5)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--groups", type=int, default=16, help="of 4 episodes each, in one batch")
    parser.add_argument("--tokens", type=float, default=10.0, help="mean of a turn; a token takes 10 ms or more")
    parser.add_argument("--rounds", type=int, default=5)
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
        f"generator.options.length_mean={options.tokens}",
        "generator.max_model_len=4096",
        "generator.max_num_seqs=256",
        "sampling.max_tokens=100",
    )


def _step(name: str, overrides: tuple[str, ...]) -> Timing:
    """The mean time of a step of one run."""
    with tempfile.TemporaryDirectory(prefix="fresco-bench-") as folder:
        measured, cpus = measure(overrides, Path(folder), WARM_UP)
    print(f"{name}: {measured:.2f} s a step, {cpus:.2f} CPUs", flush=True)
    return Timing(measured, cpus * measured)
