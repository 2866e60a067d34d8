"""Command line; see the package's docstring."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable

from experiments.command_line import names, numbers
from experiments.time_to_score import __doc__ as description
from experiments.time_to_score.report import page
from experiments.time_to_score.runs import ARMS, RESULTS, SEEDS, append, play, read
from experiments.time_to_score.sooner import final
from experiments.time_to_score.tasks import STUDY


def run(tasks: Iterable[str], arms: Iterable[str], seeds: Iterable[int], minutes: float) -> None:
    """Every run that is not there yet, a seed of all arms after the other, until the time is up."""
    deadline = time.monotonic() + 60 * minutes
    finished = {each.key for each in read()}
    wanted = [(task, arm, seed) for task in tasks for seed in seeds for arm in arms]

    for task, arm, seed in wanted:
        if (task, arm, seed) in finished:
            continue
        if time.monotonic() > deadline:
            print("time is up")
            return
        found = play(STUDY[task], arm, seed)
        append(found)
        print(f"{task} {arm} seed {seed}: {len(found.scores)} steps, {found.cpu_s:.0f} CPU s, score {final(found):.3f}")


def report() -> None:
    """`README.md` and `curves.png` beside the runs."""
    from experiments.time_to_score.figure import draw  # matplotlib: not needed on a machine that only runs the study

    runs = read()
    head = "# Asynchronous against synchronous training in time to score"
    text = page(runs)
    (RESULTS / "README.md").write_text(f"{head}\n\n{description}\n![curves](curves.png)\n\n{text}\n")
    draw(runs, RESULTS / "curves.png")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="the runs that are not there yet")
    runner.add_argument("--minutes", type=float, default=1e6, help="begin no further run after this long")
    runner.add_argument("--tasks", type=names, default=list(STUDY))
    runner.add_argument("--arms", type=names, default=list(ARMS))
    runner.add_argument("--seeds", type=numbers, default=list(SEEDS))
    commands.add_parser("report", help="table and curves of the finished runs")
    arguments = parser.parse_args()

    if arguments.command == "run":
        if unknown := ({*arguments.tasks} - {*STUDY}) | ({*arguments.arms} - {*ARMS}):
            parser.error(f"{', '.join(sorted(unknown))}: tasks are {', '.join(STUDY)}, arms {', '.join(ARMS)}")
        run(arguments.tasks, arguments.arms, arguments.seeds, arguments.minutes)
    else:
        report()


if __name__ == "__main__":
    main()
