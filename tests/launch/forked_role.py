"""What the tests of the fork server let it begin: `python -m tests.launch.forked_role WHAT`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

BEGUN_IN = os.getpid()
"""Where this module was imported."""
tempfile.gettempdir()  # as libraries do when they are imported; Python remembers the answer


def main() -> None:
    match sys.argv[1]:
        case "say":
            told = {
                "pid": os.getpid(),
                "parent": os.getppid(),
                "imported_in": BEGUN_IN,
                "leader": os.getsid(0),
                "setting": os.environ.get("SETTING"),
                "temporary": tempfile.gettempdir(),
                "standard input": sys.stdin.read(),
                "files": sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir()),
            }
            print(json.dumps(told))
        case "fail":
            raise RuntimeError("on purpose")
        case "sleep":
            time.sleep(600)


if __name__ == "__main__":
    main()
