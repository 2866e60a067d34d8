"""What the rows of the paper's table share: an 8B model on data-centre GPUs, and how two schedules are compared.

None of these costs is published. They follow from the model and the hardware. 8.2e9 parameters in bf16 are read once a
decode step at about 60 % of 3.35 TB/s (8 ms, 16 ms with launch overheads and sampling). A token of context has 147 kB
of KV cache (36 layers, 8 heads of 128, keys and values). A GPU of 80 GB has 52 GB of it, which limits what runs at
once. Training is at 2.5e14 FLOP/s a GPU, 10 FLOP per parameter and token (forward, backward, two more forwards for
log-probabilities). So rollout takes about 70 % of a synchronous step, as the paper says. Rows sweep what moves their
result.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from rollout.broker.rules import Rules
from rollout.simulate.result import SimulationResult
from rollout.simulate.scenario import Generators, Scenario, TrainingCost
from rollout.simulate.simulation import Simulation

ENDLESS = 1_000_000  # steps of a broker that does not wind down while it is measured
PATIENT_S = 1e7  # deadline that never binds

KV_BYTES_PER_TOKEN = 147_456
HBM_BYTES_PER_S = 2e12  # of 3.35e12, as achieved
DECODE_BASE_S = 0.016
TRAIN_GPU_S_PER_TOKEN = 10 * 8.2e9 / 2.5e14
KV_TOKENS = 350_000
SEATS = 256  # sequences, vLLM's own limit


def steady_rules(groups: int, size: int, **changes: object) -> Rules:
    """The rules of a broker that does not wind down while it is measured; its deadlines never bind."""
    rules = Rules(
        steps=ENDLESS,
        groups_per_batch=groups,
        group_size=size,
        train_tasks=20_000,
        episode_deadline_s=PATIENT_S,
        hold_deadline_s=PATIENT_S,
    )

    return rules.changed(**changes)


def generators_8b(gpus: int, mean_context: float, **changes: Any) -> Generators:
    """One generator per GPU; a further sequence costs the reading of its own KV cache, of `mean_context` tokens.

    KV memory binds: a request reserves its prompt and the mean response, and what outgrows the memory is pre-empted.
    """
    per_seq_s = mean_context * KV_BYTES_PER_TOKEN / HBM_BYTES_PER_S
    room = {"max_num_seqs": SEATS, "kv_tokens": KV_TOKENS, "kv_admission": "expected", "max_model_len": 34_000}

    values: dict[str, Any] = room | {
        "count": gpus,
        "decode_base_s": DECODE_BASE_S,
        "decode_per_seq_s": per_seq_s,
        "prefill_tokens_per_s": 2e4,
        "copy_s": 2.0,
        "load_s": 1.0,
    }

    return Generators(**(values | changes))


def fitting_seats(generators: Generators) -> int:
    """Sequences whose mean contexts fill the KV memory of one of `generators_8b`."""
    mean_context = generators.decode_per_seq_s * HBM_BYTES_PER_S / KV_BYTES_PER_TOKEN
    return max(8, min(SEATS, round(KV_TOKENS / mean_context)))


def without_kv_limit(generators: Generators) -> Generators:
    """Generators with as many seats as fit by their mean context; their KV memory never binds."""
    return replace(generators, kv_tokens=0, max_num_seqs=fitting_seats(generators))


def training_8b(gpus: int, reuses: float = 1.0, publish_s: float = 2.0) -> TrainingCost:
    """E = `reuses` passes over each batch."""
    return TrainingCost(per_token_s=reuses * TRAIN_GPU_S_PER_TOKEN / gpus, publish_s=publish_s)


def simulate(scenario: Scenario) -> SimulationResult:
    """Raises SimulationStopped when the scenario cannot come to its end."""
    return Simulation(scenario).run()


def compare(
    name: str, result: SimulationResult, baseline: SimulationResult, reported: str = "", **columns: Any
) -> dict[str, Any]:
    """One line of a row's table. `tokens x` beside `speed-up`: a gain that comes from shorter samples shows there."""
    return {
        "setting": name,
        **columns,
        "step_s": result.step_s,
        "speed-up": baseline.step_s / result.step_s,
        "reported": reported,
        "tokens/s": result.useful_tokens_per_s,
        "tokens x": result.useful_tokens_per_s / baseline.useful_tokens_per_s,
        "kept": result.kept_length,
        "issued": result.issued_length,
        "drawn": result.population_length,
        "staleness": result.staleness,
        "gen idle": result.generator_idle,
        "train idle": result.learner_idle,
        "wasted": result.wasted,
    }


def verdict(lines: list[dict[str, Any]]) -> None:
    """Says which speed-ups come from dropping long samples: kept much shorter than the work as drawn."""
    for line in lines:
        ratio = line["kept"] / line["drawn"]
        if ratio < 0.97:
            print(
                f"note: {line['setting']!r} trains samples of {ratio:.0%} of the drawn length: of its "
                f"{line['speed-up']:.2f}x only {line['tokens x']:.2f}x is useful tokens, the rest comes from dropping "
                "long samples"
            )
