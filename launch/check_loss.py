"""`fresco check-loss NAME [option=value ...]`: the conformance checks on one loss, in seconds.

NAME is a registered loss or an importable `package.module:Name`, as in `algo.loss`; options as in `algo.options`.
"""

from __future__ import annotations

import sys

import yaml

from algos.conformance import CHECKS, check_loss
from algos.registry import make_loss, registered
from rl.core.plugins import load


def run(name: str, options: list[str]) -> int:
    """Returns the exit code: 0 all hold, 1 something does not, 2 no such loss or option."""
    try:
        options_by_name = dict(_parse(option) for option in options)
        loss = make_loss(load("loss", name, registered("loss")), options_by_name)
    except ValueError as error:
        print(f"fresco: {error}", file=sys.stderr)
        return 2
    findings = check_loss(loss)
    for finding in findings:
        what = finding.problem or (CHECKS[finding.check].__doc__ or "").strip()
        print(f"{'FAIL' if finding.problem else 'ok  '} {finding.check:18} {what}")
    failed = sum(bool(finding.problem) for finding in findings)
    print(f"{name}: {f'{failed} of {len(findings)} checks fail' if failed else f'all {len(findings)} checks hold'}")
    if not failed:
        print(f"try it: fresco run experiments/math_cpu.yaml algo.loss={name}")
    return 1 if failed else 0


def _parse(option: str) -> tuple[str, object]:
    key, equals, value = option.partition("=")
    if not equals:
        raise ValueError(f"{option!r} is not an option: write name=value")
    return key, yaml.safe_load(value)
