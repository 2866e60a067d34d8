"""What changes between two steps of a real training run, and what it takes to send that and no more.

    python -m experiments.bench deltas [--steps 12] [--gigabytes 0.25] [--out FILE.json]

The tiny model of `math_cpu` is trained on its own samples, as a run at alpha = 0 trains it, with each learning rate.
After each step the weights are cast to bfloat16, as they are on the wire. Bytes: of the patch, over the dense ones.
Speed: dense bytes a CPU second, on the last pair of versions, repeated up to `--gigabytes`. To apply a patch includes
the copy of what it is applied to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.bench._measuring import parser_of, write
from experiments.bench._ratios import Idle, provenance
from experiments.plain_loop import PlainLoop, model_folder
from rl.config.schema import load_config
from rl.weights.host import delta

RATES = (1e-6, 1e-5, 1e-4)
RECIPE = Path(__file__).parents[1] / "math_cpu.yaml"
_ROUNDS = 5


def versions(lr: float, steps: int) -> Iterator[np.ndarray]:
    """The bytes on the wire, before the first step and after each."""
    config = load_config(RECIPE, [f"learner.lr={lr}", f"steps={steps}", "learner.ranks=1", "generator.dtype=bfloat16"])
    torch.set_num_threads(config.learner.threads)
    loop = PlainLoop(config, model_folder(config))
    for step in range(steps + 1):
        pieces = [local.detach().to(torch.bfloat16).reshape(-1) for _, local, _ in loop.policy.export()]
        yield torch.cat(pieces).view(torch.uint8).numpy()
        if step < steps:
            loop.train(step, loop.rollout(step))


def measured(lr: float, steps: int, total_bytes: int) -> dict[str, Any]:
    """Of one learning rate: per step, and the speed at the last one."""
    shares: list[float] = []
    lengths: list[float] = []
    old, new = np.zeros(0, np.uint8), np.zeros(0, np.uint8)
    for data in versions(lr, steps):
        old, new = new, data
        if len(old):
            patch, changed = patch_of(old, new)
            shares.append(2 * changed / len(new))
            lengths.append(len(patch) / len(new))

    copies = -(-total_bytes // len(old))
    old, new = np.tile(old, copies), np.tile(new, copies)
    encode_s = seconds(lambda: patch_of(old, new))
    patch, _ = patch_of(old, new)
    data = np.empty_like(old)

    def patched() -> None:
        data[:] = old
        delta.apply(patch, data, [delta.Range(0, len(data), 2)])

    apply_s = seconds(patched)
    assert np.array_equal(data, new)
    later = slice(steps // 2, None)
    return {
        "changed": shares,
        "over_dense": lengths,
        "changed_later": statistics.fmean(shares[later]),
        "over_dense_later": statistics.fmean(lengths[later]),
        "encode_gb_s": len(new) / encode_s / 1e9,
        "apply_gb_s": len(new) / apply_s / 1e9,
    }


def patch_of(old: np.ndarray, new: np.ndarray) -> tuple[bytes, int]:
    found = delta.encode(old, new, [delta.Range(0, len(new), 2)])
    assert found is not None
    return found


def seconds(work: Any) -> float:
    """CPU seconds, the least of several."""
    found = []
    for _ in range(_ROUNDS):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return min(found)


def main(argv: list[str]) -> None:
    parser = parser_of("deltas", __doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--gigabytes", type=float, default=0.25)
    options = parser.parse_args(argv)

    result = {}
    print("    lr  changed at step 1, later   patch / dense at step 1, later   encode, apply GB/s a core")
    with Idle() as idle:
        for lr in RATES:
            found = result[f"{lr:g}"] = measured(lr, options.steps, int(1e9 * options.gigabytes))
            print(
                f"{lr:6g}   {found['changed'][0]:14.2%} {found['changed_later']:8.2%}"
                f"   {found['over_dense'][0]:20.2%} {found['over_dense_later']:8.2%}"
                f"   {found['encode_gb_s']:15.2f} {found['apply_gb_s']:6.2f}"
            )
    settings = {"steps": options.steps, "gigabytes": options.gigabytes}
    write(options.out, settings | {"by_lr": result} | provenance(idle))
