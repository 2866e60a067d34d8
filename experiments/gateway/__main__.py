"""python -m experiments.gateway [--sessions 10000]: fuzzed agents over all templates; status 1 if a token is wrong.

With --real [--out FILE] they play against vLLM on the CPU while its weights change, and every trained token's
log-probability is compared with the learner's."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.gateway.fuzz import Report, play
from experiments.gateway.tokenizers import make_folder, template_names
from rollout.episodes.tokenizer import ChatTokenizer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.gateway", description=__doc__)
    parser.add_argument("--sessions", type=int, help="over all templates together; 10000, or 500 with --real")
    parser.add_argument("--thinking", choices=["keep", "template"], default="keep")
    parser.add_argument("--seed", type=int, default=0, help="of the first session")
    parser.add_argument("--real", action="store_true", help="on vLLM, with weight updates")
    parser.add_argument("--out", type=Path, help="JSON of what --real found")
    options = parser.parse_args()
    options.sessions = options.sessions or (500 if options.real else 10_000)
    return _real(options) if options.real else _simulated(options)


def _simulated(options: argparse.Namespace) -> int:
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


def _real(options: argparse.Namespace) -> int:
    from experiments.gateway.real import LARGEST_DIFFERENCE, play_real  # torch and vLLM take seconds to import

    begin, load = time.monotonic(), os.getloadavg()[0]
    reports: dict[str, Report] = {}
    with tempfile.TemporaryDirectory(prefix="fresco-real-") as folder:
        work = play_real(Path(folder), options.sessions, options.thinking, options.seed, reports)
        found, updates = asyncio.run(work)

    wrong = [f"{name}: {each}" for name, report in sorted(reports.items()) for each in report.wrong] + found.wrong
    result = {
        "command": f"python -m experiments.gateway --real --sessions {options.sessions} --thinking {options.thinking}",
        "seed": options.seed,
        "templates": len(reports),
        **_counts(reports.values()),
        "updates_while_sessions_ran": updates,
        "versions_trained": sorted(found.versions),
        "sequences_of_several_versions": found.of_two_versions,
        "compared_tokens": found.tokens,
        "largest_difference_nats": found.largest,
        "allowed_difference_nats": LARGEST_DIFFERENCE,
        "wrong": wrong,
        "machine": {"cores": os.cpu_count(), "load_average_before": load, "seconds": time.monotonic() - begin},
    }

    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
    return 1 if wrong or result["compared_tokens"] != result["trained_tokens"] else 0


def _counts(reports: Iterable[Report]) -> dict[str, Any]:
    total = Report()
    for report in reports:
        total.add(report)
    counts = {name: value for name, value in vars(total).items() if name != "wrong"}
    return {name: dict(sorted(value.items())) if isinstance(value, dict) else value for name, value in counts.items()}


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
