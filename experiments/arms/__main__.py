"""Command line; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from experiments.arms import __doc__ as description
from experiments.arms.page import page
from experiments.arms.play import play
from experiments.arms.records import append, check_made_by, missing, read
from experiments.arms.study import StudyError, load
from rl.config.schema import ConfigError

RESULTS = Path(__file__).parents[1] / "results"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.arms", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path, help="such as experiments/studies/addition.yaml")
    parser.add_argument("--out", type=Path, help="folder of the results; experiments/results/STUDY")
    parser.add_argument("--runs", type=Path, help="folder of the runs, which stay")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no further run after this long")
    parser.add_argument("--table", action="store_true", help="of the runs that are there; none is started")
    arguments = parser.parse_args(argv)

    try:
        run(arguments)
    except (StudyError, ConfigError) as error:
        sys.exit(f"arms: {error}")
    return 0


def run(arguments: argparse.Namespace) -> None:
    """Make every run that is not there yet, until the time is up, and the page after each."""
    study = load(arguments.study)
    out = arguments.out or RESULTS / arguments.study.stem
    path = out / "runs.jsonl"
    records = read(path)
    deadline = time.monotonic() + 60 * arguments.minutes
    out.mkdir(parents=True, exist_ok=True)

    def write() -> str:
        text = page(study, read(path), f"python -m experiments.arms experiments/studies/{arguments.study.name}")
        (out / "README.md").write_text(text)
        return text

    if not arguments.table:
        check_made_by(study, records, path)
        for cell in missing(study, records):
            if time.monotonic() > deadline:
                print("time is up")
                break
            print(f"run {cell}", flush=True)
            append(path, play(study, cell, arguments.runs or Path("runs") / arguments.study.stem))
            write()
    print(write())


if __name__ == "__main__":
    sys.exit(main())
