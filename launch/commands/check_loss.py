"""`fresco check-loss NAME [option=value ...]`: the conformance checks on one loss, in seconds.

NAME is a registered loss or an importable `package.module:Name`, as in `algo.loss`; options as in `algo.options`.
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from algos.conformance import CHECKS, check_loss
from algos.registry import make_loss, registered
from launch.refusing import Refusing
from rl.config.plugins import load
from rl.config.tree import apply_override


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if all checks hold, else 1. Raises ConfigError where there is no such loss or option."""
    options: dict[str, Any] = {}
    for option in arguments.options:
        apply_override(options, option)
    with Refusing():
        loss = make_loss(load("loss", arguments.name, registered("loss")), options)

    findings = check_loss(loss)
    for finding in findings:
        what = finding.problem or (CHECKS[finding.check].__doc__ or "").strip()
        print(f"{'FAIL' if finding.problem else 'ok  '} {finding.check:18} {what}")

    failed = sum(bool(finding.problem) for finding in findings)
    if failed:
        print(f"{arguments.name}: {failed} of {len(findings)} checks fail")
        return 1
    print(f"{arguments.name}: all {len(findings)} checks hold")
    fields = [f"algo.loss={arguments.name}", *(f"algo.options.{option}" for option in arguments.options)]
    print(f"try it: fresco run math_cpu {shlex.join(fields)}")
    return 0
