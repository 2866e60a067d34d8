"""python -m experiments.paper NAME...: reproduce rows of the paper's tables; without a name, list them."""

from __future__ import annotations

import argparse
import importlib

NAMES = (
    "rlvr",
    "admission",
    "alfworld",
    "swe",
    "queueing",
    "replication",
    "environments",
    "redundancy",
    "alpha",
    "split",
    "ablations",
    "bounds",
    "cost",
    "scale",
    "reality",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.paper", description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*NAMES, "all"], metavar="NAME", help=", ".join((*NAMES, "all")))
    arguments = parser.parse_args()

    for name in NAMES if "all" in arguments.names else arguments.names:
        importlib.import_module(f"experiments.paper.{name}").main()


if __name__ == "__main__":
    main()
