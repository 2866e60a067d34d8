"""The propositions' bounds in their own setting: slots of constant rate, single responses, nothing cancelled.

    python -m experiments.paper bounds

* queue scheduling of Q samples on K slots: max(Q mu / K, L) <= makespan <= Q mu / K + L;
* one synchronous step <= (N / K)(mu_gen + E mu_train) + L;
* one asynchronous step <= max(N mu_gen / ((1 - beta) K) + L / (1 + alpha), E N mu_train / (beta K)).

mu and L are those of the samples that ran, in seconds; E = 1.
"""

from __future__ import annotations

from typing import Any

from experiments.paper.report import panels, save, save_plot, table
from experiments.paper.rows import ENDLESS, PATIENT_S
from rl.config.seeds import sample_seed
from rollout.broker.rules import Rules
from rollout.simulate.distributions import LogNormal
from rollout.simulate.scenario import Generators, Scenario, TrainingCost, Work
from rollout.simulate.simulation import Simulation

TOKEN_S = 0.02
SEATS = 16  # of one generator
WORK = Work(length=LogNormal(400, 1.0), max_tokens=4096, prompt_tokens=1)
GENERATORS = 8  # K = 128 slots
QUEUES = (128, 512, 2048, 8192, 24_576)
ALPHAS = (0.5, 1.0, 2.0, 4.0)
SHARES = (0.25, 0.5, 0.75)  # beta
TRAIN_S = 4.0  # mu_train
BATCH = 512  # N
ROUNDING_S = 1e-6  # also what prefills take


def scenario(
    samples: int,
    generators: int,
    *,
    alpha: float = 0.0,
    training: TrainingCost = TrainingCost(),
    measured: int = 0,
    work: Work = WORK,
    seed: int = 0,
) -> Scenario:
    """Single responses without a group; `measured` 0: one batch only."""
    return Scenario(
        broker=Rules(
            steps=ENDLESS if measured else 1,
            groups_per_batch=samples,
            group_size=1,
            train_tasks=10**6,
            alpha=alpha,
            hold_patience=0,
            hold_deadline_s=PATIENT_S,
            episode_deadline_s=PATIENT_S,
            seed=seed,
        ),
        generators=Generators(
            count=generators, max_num_seqs=SEATS, decode_base_s=TOKEN_S, prefill_tokens_per_s=1e12, on_update="keep"
        ),
        work=work,
        training=training,
        measured=measured,
    )


def seconds_of(samples: list[int], work: Work = WORK, seed: int = 0) -> list[float]:
    """Decoding time of each sample (the first token comes with the prefill)."""
    return [(sum(work.lengths(0, sample_seed(seed, each))) - 1) * TOKEN_S for each in samples]


def queue_line(samples: int, generators: int = GENERATORS, work: Work = WORK, seed: int = 0) -> dict[str, Any]:
    """Makespan of `samples` on generators * SEATS slots, and its bounds, seconds."""
    simulation = Simulation(scenario(samples, generators, work=work, seed=seed))
    makespan = simulation.run().step_s
    times = seconds_of([sample.sample_id for sample in simulation.record.batches[0].samples], work, seed)
    each = sum(times) / (generators * SEATS)
    longest = max(times)
    lower = max(each, longest)
    upper = each + longest

    return {
        "Q": samples,
        "makespan": makespan,
        "lower": lower,
        "upper": upper,
        "over lower": makespan / lower if lower else 1.0,
        "holds": lower - ROUNDING_S <= makespan <= upper + ROUNDING_S,
    }


def queue_lines(queues: tuple[int, ...] = QUEUES) -> list[dict[str, Any]]:
    """One line for each number of samples."""
    return [queue_line(count) for count in queues]


def step_lines(alphas: tuple[float, ...] = ALPHAS, measured: int = 10) -> list[dict[str, Any]]:
    """Mean step of a steady run against its bound; alpha = 0 trains on all K slots' worth of workers."""
    lines = []
    workers = GENERATORS * SEATS
    for alpha, share in [(0.0, 0.0), *((alpha, share) for alpha in alphas for share in SHARES)]:
        train_s = BATCH * TRAIN_S / (workers * (share or 1))
        generators = round(GENERATORS * (1 - share))
        simulation = Simulation(
            scenario(BATCH, generators, alpha=alpha, training=TrainingCost(step_s=train_s), measured=measured)
        )
        step_s = simulation.run().step_s
        times = seconds_of([sample.sample_id for batch in simulation.record.batches for sample in batch.samples])
        mean = sum(times) / len(times)
        longest = max(times)

        if alpha:
            bound = max(BATCH * mean / (generators * SEATS) + longest / (1 + alpha), train_s)
        else:
            bound = BATCH / workers * (mean + TRAIN_S) + longest

        work = max(BATCH * mean / (generators * SEATS), train_s)
        lines.append(
            {
                "alpha": alpha,
                "beta": share,
                "step": step_s,
                "bound": bound,
                "of bound": step_s / bound,
                "over work": step_s / work,
                "holds": step_s <= bound,
            }
        )

    return lines


def main() -> None:
    queues = queue_lines()
    steps = step_lines()
    table(queues, f"queue scheduling on {GENERATORS * SEATS} slots: makespan against its bounds, seconds")
    table(steps, f"steps of {BATCH} samples: mean step against its bound, seconds")
    held = all(line["holds"] for line in queues + steps)
    print(f"bounds hold: {held}; at Q = {QUEUES[-1]} the makespan is {queues[-1]['over lower']:.3f} of the lower bound")
    save("bounds", {"queue": queues, "steps": steps})

    figure, (left, right) = panels(2)
    for name in ("makespan", "lower", "upper"):
        left.plot([line["Q"] for line in queues], [line[name] for line in queues], "o-", label=name)
    left.set(xlabel="samples", ylabel="seconds", xscale="log", yscale="log", title="queue scheduling")
    left.legend()

    for share in SHARES:
        chosen = [line for line in steps if line["beta"] == share]
        right.plot(
            [line["alpha"] for line in chosen], [line["of bound"] for line in chosen], "o-", label=f"beta {share}"
        )

    right.axhline(1, color="black", linewidth=0.8)
    right.set(xlabel="alpha", ylabel="mean step / bound", title="asynchronous steps")
    right.legend()
    save_plot("bounds", figure)
