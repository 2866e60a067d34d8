"""Steps of a function stand apart, and the formatter wins; `experiments.structure` counts both."""

from __future__ import annotations

from pathlib import Path

from experiments.structure.checkout import FLOORS, modules_of
from experiments.structure.figures import airless_functions, format_skips, long_runs, tuple_assignments

ROOT = Path(__file__).parent.parent
MODULES = modules_of(ROOT, *FLOORS)
MAX_FORMAT_SKIPS = 5
MAX_TUPLE_ASSIGNMENTS = 1.0
"""In a thousand lines: a pair of values may be one thing, as the two ends of a range."""


def test_long_functions_have_blank_lines_between_their_steps() -> None:
    airless = [where for module in MODULES for where in airless_functions(module)]
    assert not airless, "\n".join(airless)


def test_no_function_goes_on_for_too_long_without_a_blank_line() -> None:
    runs = [where for module in MODULES for where in long_runs(module)]
    assert not runs, "\n".join(runs)


def test_unrelated_things_are_not_assigned_in_one_tuple() -> None:
    counts = {str(module.path): count for module in MODULES if (count := tuple_assignments(module))}
    lines = sum(len(module.lines) for module in MODULES)
    assert 1000 * sum(counts.values()) / lines <= MAX_TUPLE_ASSIGNMENTS, counts


def test_the_formatter_wins() -> None:
    skips = {str(module.path): count for module in MODULES if (count := format_skips(module))}
    assert sum(skips.values()) <= MAX_FORMAT_SKIPS, skips
