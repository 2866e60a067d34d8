"""Fresco itself, as `fresco run` starts it: one engine and one learner rank on the cores that are there."""

from __future__ import annotations

import msgspec

from experiments.compare.job import Job, Row
from experiments.compare.tasks import HELD_OUT
from experiments.compare.trl import CACHE

PINS = ""
RECIPE = "math_cpu"
_SHORT = 64
"""Tokens of an answer that is there before the next batch is trained."""
ON_GPU = {
    "device": "cuda",
    "placement": "shared",
    "model.dtype": "bfloat16",
    "generator.dtype": "bfloat16",
    "generator.max_num_seqs": 256,
    "generator.options.enforce_eager": "false",
    "generator.options.gpu_memory_utilization": 0.5,  # so much must be free when vLLM begins; its cache has its bytes
    "learner.max_tokens_per_pack": 16384,
}
"""Engine and rank on one GPU, with CUDA graphs, as the other side has them; all that is open is decoded at once."""


def command(job: Job, python: str) -> list[str]:
    return [python, "-m", "launch.cli", "run", RECIPE, *settings(job)]


def settings(job: Job) -> list[str]:
    """Overrides of the recipe."""
    chosen = {
        "name": job.folder.name,
        "runs": job.folder.parent,
        "seed": job.seed,
        "steps": job.steps,
        "model.path": job.model,
        "env.options.source": job.questions,
        "env.options.instruction": "",
        "env.options.eval_count": HELD_OUT,
        "eval.tasks": HELD_OUT,  # nothing is evaluated but the two ends
        "eval.every": 0,
        "sampling.max_tokens": job.max_tokens,
        "rollout.groups_per_batch": job.groups,
        "rollout.group_size": job.group_size,
        "generator.count": 1,
        "generator.max_model_len": job.longest,
        "generator.options.kv_cache_bytes": CACHE,
        "learner.ranks": 1,
        "learner.lr": job.lr,
        "learner.max_tokens_per_pack": 2048,
        "learner.checkpoint_every": 0,
        "tracking.wandb": "disabled",
        **_schedule(job),
        **(ON_GPU if job.device == "cuda" else {}),
    }

    return [f"{key}={value}" for key, value in chosen.items()]


def _schedule(job: Job) -> dict[str, object]:
    """What made the first 40 steps of seed 0 or 1 shorter.

    Among short answers both sides wait at α = 1 while tasks and answers are passed on. The longest answers of the other
    task take as long as several training steps: they may be that much older. A larger α would not only let them live:
    the engine would get ahead of the learner by so many steps, on the core that the learner could have had. An update
    would compute the context of all that are half done again.
    """
    if job.max_tokens <= _SHORT:
        return {"rollout.alpha": 1.25}
    return {"rollout.alpha": 3, "rollout.max_staleness": 8, "generator.on_update": "keep"}


class _Step(msgspec.Struct):
    """What is needed of a step's line. The rest is not made: whoever looks at a run takes its cores."""

    time: float
    reward: float = msgspec.field(name="rollout/reward")
    length: float = msgspec.field(name="rollout/length")
    wait: float = msgspec.field(name="time/wait_batch")
    train: float = msgspec.field(name="time/train")
    publish: float = msgspec.field(name="time/publish")
    timeline: float = msgspec.field(name="version/timeline")


def rows(job: Job) -> list[Row]:
    """The learner's seconds: what it waited for a batch, trained, and published."""
    path = job.folder / "metrics.jsonl"
    if not path.exists():
        return []

    found: list[Row] = []
    for line in path.read_bytes().splitlines(keepends=True):
        if b'"train/loss"' not in line or not line.endswith(b"\n"):
            continue  # of an evaluation, or still being written

        step = msgspec.json.decode(line, type=_Step)
        # A learner that begins anew does so from the start model, in a new timeline. Its first batch's wait is for the
        # start of the engine, or its own, which belongs to ours.
        repeat = int(step.timeline)
        begins = not found or found[-1].repeat != repeat
        parts = {"wait": 0.0 if begins else step.wait, "train": step.train, "publish": step.publish}
        tokens = round(step.length * job.groups * job.group_size)
        found.append(Row(step.time, step.reward, tokens, parts, repeat))
    return found
