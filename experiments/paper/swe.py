"""SWE: reported 1.81x with redundancy; environment-level asynchrony 1.23x, asynchronous training 1.68x (?).

    python -m experiments.paper swe

The paper does not publish turns, tokens a turn, latencies, batch and GPUs. Longer turns and heavier training than
ALFWorld; sandboxes take half a minute to start and their commands a few seconds, sometimes minutes (tests). The sweep
moves one at a time.
"""

from __future__ import annotations

from msgspec.structs import replace

from experiments.paper import agentic
from rollout.simulate.distributions import Gaussian, LogNormal
from rollout.simulate.scenario import Work

WORK = Work(
    length=LogNormal(400, 0.7),
    task_share=0.3,
    max_tokens=4096,
    turns=Gaussian(20, 8),
    prompt_tokens=2000,
    observation_tokens=400,
    reset_s=LogNormal(30.0, 0.5, 300.0),
    step_s=LogNormal(2.0, 0.6, 300.0),
    hang_probability=2e-5,
    step_deadline_s=300.0,
    success=0.3,
    success_spread=2.0,
)
ROW = agentic.Agentic(
    name="swe",
    work=WORK,
    gpus=16,
    training=6,
    groups=16,
    size=8,
    mean_context=10_000,
    alpha=1.0,
    extra_groups=2,
    extra_episodes=1,
    reuses=1.5,
    reported=("1.23", "1.68 (?)", "1.81"),
)
SWEEP = {
    "latency 6 s, sigma 1": replace(ROW, work=replace(WORK, step_s=LogNormal(6.0, 1.0, 300.0))),
    "hangs x 5": replace(ROW, work=replace(WORK, hang_probability=1e-4)),
}


def main() -> None:
    agentic.main(ROW, SWEEP)
