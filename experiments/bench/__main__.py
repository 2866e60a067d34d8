"""`python -m experiments.bench NAME [options]` runs `experiments.bench.NAME.main(options)`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from experiments.bench._processes import end_on_sigterm

if __name__ == "__main__":
    end_on_sigterm()

    names = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        raise SystemExit(f"usage: python -m experiments.bench {{{','.join(names)}}} [options]")
    importlib.import_module(f"experiments.bench.{sys.argv[1]}").main(sys.argv[2:])
