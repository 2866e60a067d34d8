"""python -m experiments.gateway [--sessions 10000]: fuzzed agents over all templates; status 1 if a token is wrong."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from experiments.gateway.fuzz import Report, play
from experiments.gateway.tokenizers import make_folder, template_names
from rollout.episodes.tokenizer import ChatTokenizer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.gateway", description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000, help="over all templates together")
    parser.add_argument("--thinking", choices=["keep", "template"], default="keep")
    parser.add_argument("--seed", type=int, default=0, help="of the first session")
    options = parser.parse_args()

    begin = time.monotonic()
    names = template_names()
    wrong: list[str] = []
    print(f"{'template':22} sessions sequences  turns  trained  drift (none, ids, text)  forks")
    with tempfile.TemporaryDirectory(prefix="fresco-templates-") as folder:
        for place, name in enumerate(names):
            report = Report()
            tokenizer = ChatTokenizer(make_folder(name, Path(folder) / name))
            asyncio.run(_all(tokenizer, range(options.seed + place, options.sessions, len(names)), report, options))
            wrong += [f"{name}: {each}" for each in report.wrong]
            print(_row(name, report))

    print(f"{options.sessions} sessions in {time.monotonic() - begin:.0f} s, {len(wrong)} wrong")
    for each in wrong[:20]:
        print(each, file=sys.stderr)
    return 1 if wrong else 0


async def _all(tokenizer: ChatTokenizer, seeds: range, report: Report, options: argparse.Namespace) -> None:
    for seed in seeds:
        await play(tokenizer, seed, report, options.thinking)


def _row(name: str, report: Report) -> str:
    drift = ", ".join(str(report.drift[kind]) for kind in ("none", "ids", "text"))
    forks = " ".join(f"{reason} {count}" for reason, count in sorted(report.forks.items()))
    counts = f"{report.sessions:8} {report.sequences:9} {report.turns:6} {report.trained_tokens:8}"
    return f"{name:22} {counts}  {drift:23}  {forks}"


if __name__ == "__main__":
    sys.exit(main())
