"""`fresco report RUN …`: write the page of these runs, or serve it."""

from __future__ import annotations

import argparse

from launch.report.page import write_report
from launch.report.serve import serve


def report(arguments: argparse.Namespace) -> int:
    """Raises ConfigError where there is no run, nowhere to write, or a port that is taken."""
    if arguments.serve:
        serve(arguments.runs, arguments.port)
    else:
        print(f"report: {write_report(arguments.runs, arguments.out)}")
    return 0
