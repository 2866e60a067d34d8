"""Command line; see the package's docstring."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from experiments.command_line import names, numbers
from experiments.plain_loop import model_folder
from experiments.staleness import __doc__ as description
from experiments.staleness.grid import ON_POLICY, Job, study
from experiments.staleness.harness import job_config, run_job
from experiments.staleness.records import RESULTS, append, read
from experiments.staleness.report import write
from experiments.staleness.system import run_system

RUNS = RESULTS / "runs.jsonl"
SYSTEM_RUNS = RESULTS / "system.jsonl"


def run(jobs: Iterable[Job], minutes: float, model: Path | None) -> None:
    """Every job that has no record yet, until the time is up; a run that was begun is finished."""
    torch.set_num_threads(1)
    deadline = time.monotonic() + 60 * minutes
    for job in jobs:
        records = {record.key: record for record in read(RUNS)}
        if (job.loss, job.lag, job.seed, False) in records:
            continue
        if time.monotonic() > deadline:
            print("time is up")
            return

        on_policy = records.get((ON_POLICY, 0, job.seed, False)) if job.lag == 0 else None
        record = run_job(job, model or model_folder(job_config(job)), on_policy=on_policy)
        append(RUNS, record)
        print(
            f"{job.loss:14s} lag {job.lag} seed {job.seed}  final {record.final:.3f}  ess {record.mean('ess'):.3f}  "
            f"cpu {record.cpu_s:.0f} s  {record.ended}",
            flush=True,
        )


def run_systems(losses: Iterable[str], alphas: Iterable[float], seeds: Iterable[int], model: Path | None) -> None:
    """The complete system at each alpha that has no record yet."""
    for seed in seeds:
        for alpha in alphas:
            for loss in losses:
                if (loss, alpha, seed, True) in {record.key for record in read(SYSTEM_RUNS)}:
                    continue
                record = run_system(loss, alpha, seed, model)
                append(SYSTEM_RUNS, record)
                print(
                    f"{loss:14s} alpha {alpha:g} seed {seed}  final {record.final:.3f}  lag {record.mean('lag'):.2f}  "
                    f"ess {record.mean('ess'):.3f}  cpu {record.cpu_s:.0f} s",
                    flush=True,
                )


def report() -> None:
    """`table.md`, `table.json` and `figure.png` beside the runs."""
    from experiments.staleness.figure import draw  # matplotlib: not needed on a machine that only runs the study

    records = read(RUNS) + read(SYSTEM_RUNS)
    write(records, RESULTS)
    draw(records, RESULTS / "figure.png")
    print((RESULTS / "table.md").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="the study with a forced lag")
    runner.add_argument("--minutes", type=float, default=1e6, help="begin no further run after this long")
    runner.add_argument("--losses", type=names, help="comma-separated; default: all of the study")
    runner.add_argument("--lags", type=numbers)
    runner.add_argument("--seeds", type=numbers)

    system = commands.add_parser("system", help="the same setting in the complete asynchronous system")
    system.add_argument("--losses", type=names, default=[ON_POLICY])
    system.add_argument("--alphas", type=numbers, default=[2, 4])
    system.add_argument("--seeds", type=numbers, default=[1])

    for command in (runner, system):
        command.add_argument("--model", type=Path, help="start from this folder, not from the recipe's tiny model")
    commands.add_parser("report", help="table and figure from the finished runs")
    arguments = parser.parse_args()

    if arguments.command == "run":
        run([job for job in study() if _wanted(job, arguments)], arguments.minutes, arguments.model)
    elif arguments.command == "system":
        run_systems(arguments.losses, arguments.alphas, arguments.seeds, arguments.model)
    else:
        report()


def _wanted(job: Job, arguments: argparse.Namespace) -> bool:
    chosen = ((job.loss, arguments.losses), (job.lag, arguments.lags), (job.seed, arguments.seeds))
    return all(allowed is None or value in allowed for value, allowed in chosen)


if __name__ == "__main__":
    main()
