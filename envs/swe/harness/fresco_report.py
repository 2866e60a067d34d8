"""How a test run is reported: a job from stdin, one line at the end that has its key.

SWE-bench's images bring Pythons as old as 3.5 (of Django before 3.0) and 3.6 (of the others): this module,
apply_diff.py and run_django.py use nothing newer than the first, the other runners nothing newer than the second.
"""

import json
import os
import sys

_WORST_FIRST = ("failed", "skipped", "xfailed", "passed")


class Report:
    """Takes the job and the way out before anything of the repository is imported."""

    def __init__(self) -> None:
        self.job = json.loads(sys.stdin.read())
        self._out = os.dup(1)
        os.set_inheritable(self._out, False)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def send(self, canaries: "list[str]", outcomes: "dict[str, str]") -> None:
        """`canaries`: the outcomes of tests that must fail; `outcomes`: those of the repository's, by name."""
        line = {"key": self.job["key"], "canaries": canaries, "outcomes": outcomes}
        sys.stdout.flush()
        data = ("\n" + json.dumps(line) + "\n").encode()
        while data:
            data = data[os.write(self._out, data) :]


def worst(*outcomes: str) -> str:
    """Of one test, or of all tests of one name: passed only if each of them passed."""
    return min(outcomes, key=_WORST_FIRST.index)
