"""A judge of a repository with none of the defences: pytest in the working tree, its report and status believed."""

from __future__ import annotations

import json
import os
import sys


class Report:
    """As the harness has one, but without a key and canaries."""

    def __init__(self) -> None:
        self.job = json.loads(sys.stdin.read())
        # Where pytest captures what is printed, this is still the way out.
        self._out = os.dup(1)

    def send(self, canaries: list[str], outcomes: dict[str, str]) -> None:
        line = json.dumps({"canaries": canaries, "outcomes": outcomes})
        os.write(self._out, f"\n{line}\n".encode())


def main() -> None:
    report = Report()
    sys.path[:0] = [report.job["site"], os.getcwd()]
    import pytest

    outcomes: dict[str, str] = {}

    class Reporter:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                outcomes[report.nodeid] = report.outcome

    options = ["-p", "no:cacheprovider", "-q", "--tb=short"]
    status = pytest.main([*report.job["files"], *options], plugins=[Reporter()])
    report.send([], outcomes)
    sys.exit(status)


if __name__ == "__main__":
    main()
