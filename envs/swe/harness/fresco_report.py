"""How a test run is reported: a job from stdin, one line at the end that has its key.

SWE-bench's images bring Pythons as old as 3.5 (of Django before 3.0) and 3.6 (of the others). So this module,
apply_diff.py and run_django.py use nothing newer than the first, and the other runners nothing newer than the second.
"""

import builtins
import json
import os
import sys

_PLAIN = """
    AssertionError abs all any bool bytes dict enumerate float frozenset getattr hasattr int isinstance issubclass len
    list map max min object range repr round set sorted str sum tuple type zip
""".split()  # noqa: SIM905
ASSERTIONS = """
ASSERTIONS = [
    ("assertEqual", 1, 2), ("assertNotEqual", 1, 1), ("assertTrue", 0), ("assertFalse", 1), ("assertIs", 1, None),
    ("assertIsNot", None, None), ("assertIsNone", 1), ("assertIsNotNone", None), ("assertIn", 1, []),
    ("assertNotIn", 1, [1]), ("assertIsInstance", 1, str), ("assertNotIsInstance", 1, int), ("assertGreater", 1, 2),
    ("assertGreaterEqual", 1, 2), ("assertLess", 2, 1), ("assertLessEqual", 2, 1), ("assertAlmostEqual", 1, 2),
    ("assertNotAlmostEqual", 1, 1), ("assertRaises", ValueError, int, "1"), ("assertWarns", UserWarning, int, "1"),
    ("assertRaisesRegex", ValueError, "zzz", int, "b"), ("assertCountEqual", [1], [2]), ("assertRegex", "a", "b"),
    ("assertNotRegex", "a", "a"), ("assertListEqual", [1], [2]), ("assertTupleEqual", (1,), (2,)),
    ("assertSetEqual", {1}, {2}), ("assertDictEqual", {1: 2}, {1: 3}), ("assertSequenceEqual", [1], [2]),
    ("assertMultiLineEqual", "a", "b"), ("fail", "always"),
]


def all_raise(checks, *kinds):
    for check, *arguments in checks:
        try:
            check(*arguments)
        except kinds:
            continue
        return False
    return True


class Canaries:
    def test_fails(self):
        self.assertEqual([1, 2], [1, 3])

    def test_raises(self):
        raise KeyError(1)

    def test_every_assertion(self):
        if all_raise([(getattr(self, name), *given) for name, *given in ASSERTIONS], AssertionError, ValueError):
            raise AssertionError
"""
"""The assertions of unittest: source of a class whose tests must all fail; the last one passes if a single assertion
does not fail."""
_WORST_FIRST = ("failed", "skipped", "xfailed", "passed")


class Report:
    """Takes the job and the way out before anything of the repository is imported, and notes Python's functions."""

    def __init__(self) -> None:
        self._builtins = dict(vars(builtins))
        self.job = json.loads(sys.stdin.read())
        self._out = os.dup(1)
        os.set_inheritable(self._out, False)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def send(self, canaries: "list[str]", outcomes: "dict[str, str]") -> None:
        """`canaries`: the outcomes of tests that must fail; `outcomes`: those of the repository's, by name.

        A function of Python that was replaced counts as a canary that passed.
        """
        replaced = [name for name in _PLAIN if getattr(builtins, name, None) is not self._builtins[name]]
        canaries = canaries + ["passed" for _ in replaced]
        line = {"key": self.job["key"], "canaries": canaries, "outcomes": outcomes}
        sys.stdout.flush()
        data = ("\n" + json.dumps(line) + "\n").encode()
        while data:
            data = data[os.write(self._out, data) :]


def worst(*outcomes: str) -> str:
    """The outcome of one test, or of all tests of one name: passed only if each of them passed."""
    return min(outcomes, key=_WORST_FIRST.index)
