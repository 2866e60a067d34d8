"""Command line; see the package's docstring."""

from __future__ import annotations

import argparse
import sys

from experiments.results import __doc__ as description
from experiments.results.pages import ROOT, pages


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is another")
    arguments = parser.parse_args(argv)

    other = {path: text for path, text in pages().items() if path.read_text() != text}
    for path, text in other.items():
        name = path.relative_to(ROOT)
        print(f"{name} is not what its files say" if arguments.check else f"wrote {name}")
        if not arguments.check:
            path.write_text(text)
    return int(bool(other) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
