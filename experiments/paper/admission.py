"""KV admission: what asynchrony gains where the cache binds, by what a request reserves of it.

Qwen3-8B "Think" with the KV memory of an 80 GB GPU as the limit, not a number of seats. `whole` reserves prompt and
max_tokens, `expected` prompt and mean response, with pre-emption by recomputation. Without the limit the seats bind.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from experiments.paper.report import save, table
from experiments.paper.rlvr import ALPHA, LENGTHS, SHARES, scenario
from experiments.paper.rows import KV_TOKENS, compare, simulate
from rollout.simulate.result import SimulationResult
from rollout.simulate.scenario import Generators

GPUS = (32,)
SEATS = 256
LIMITS: dict[str, dict[str, Any]] = {
    "seats": {},
    "KV memory, whole": {"kv_tokens": KV_TOKENS, "kv_admission": "whole", "max_num_seqs": SEATS},
    "KV memory, expected": {"kv_tokens": KV_TOKENS, "kv_admission": "expected", "max_num_seqs": SEATS},
}


def run(gpus: int, share: float, limit: str) -> SimulationResult:
    """`share` = 0: synchronous."""
    made = scenario(gpus, LENGTHS["Think"], share)
    generators: Generators = replace(made.generators, **LIMITS[limit])
    return simulate(replace(made, generators=generators))


def lines(gpus: tuple[int, ...] = GPUS) -> list[dict[str, Any]]:
    """Each limit: the best split against synchronous training under the same limit."""
    rows = []
    for count in gpus:
        for limit in LIMITS:
            baseline = run(count, 0.0, limit)
            runs = [(share, run(count, share, limit)) for share in SHARES]
            share, result = max(runs, key=lambda each: each[1].useful_tokens_per_s)
            columns = {"GPUs": count, "train share": share, "sync_s": baseline.step_s}
            rows.append(compare(limit, result, baseline, "1.53-2.24", **columns))

    return rows


def main() -> None:
    rows = lines()
    table(rows, f"what binds: asynchronous (alpha = {ALPHA:g}, best split) against synchronous")
    save("admission", {"kv_tokens": KV_TOKENS, "lines": rows})
