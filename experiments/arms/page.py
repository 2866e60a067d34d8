"""The page of a study: what is there and under which conditions, the table of arms, and what was gained by task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from experiments.arms.measures import ALL, MARK, column, is_busy, pairs, share
from experiments.arms.records import Record, missing
from experiments.arms.study import START, Study
from experiments.bench._ratios import BUSY
from rl.observe.intervals import paired_bootstrap

_TITLES = {"cpu_s": "CPU s", "wall_s": "wall s", "others": "used by others", "score": "score at the end"}


def page(study: Study, records: Sequence[Record], command: str) -> str:
    """The text of the page, as Markdown."""
    parts = [f"# {study.title}", f"`{command}`", study.about.strip(), *_conditions(study, records)]
    trained = [record for record in records if not record.how]
    if trained:
        parts.append(_arms(study, trained))

    if study.evaluate:
        arms = list(study.every_arm)
        parts += ["## Before and after", _table(_rows(study, records, arms, START, [ALL]), "before", "after")]
        if study.baseline:
            others = [arm for arm in arms if arm != study.baseline]
            rows = _rows(study, records, others, study.baseline, [ALL])
            parts += [f"## Against {study.baseline}", _table(rows, study.baseline, "this arm")]
        parts += ["## By kind of task", _table(_rows(study, records, arms, START, None), "before", "after")]
    return "\n\n".join(part for part in parts if part) + "\n"


def _conditions(study: Study, records: Sequence[Record]) -> list[str]:
    machines = sorted({record.machine for record in records if record.machine})
    busy = [record for record in records if is_busy(record)]
    absent = missing(study, list(records))
    counted = [f"Runs: {len(records)}. Machine: {'; '.join(machines) or 'unknown'}."]

    if busy:
        listed = "; ".join(f"{record.cell}: {record.others:.0%}" for record in busy)
        counted.append(f"In {len(busy)} of them others used more than {BUSY:.0%} of its cores ({MARK}): {listed}.")
    if absent:
        counted.append(f"Missing are {len(absent)} runs: {'; '.join(map(str, absent))}.")
    return counted


def _arms(study: Study, trained: Sequence[Record]) -> str:
    """One line for each arm that has runs. What is no mean is told seed by seed."""
    titles = [_TITLES.get(name, name) for name in study.read]
    titles = [name.replace("to goal", f"to {study.goal:.0%}") for name in titles]
    titles = [f"sooner than {study.baseline}" if name == "sooner" else name for name in titles]
    lines = [_line(["arm", "seeds", *titles]), _line(["---"] * (len(titles) + 2))]

    for arm in study.every_arm:
        these = [record for record in trained if record.arm == arm]
        if these:
            seeds = ", ".join(str(record.seed) for record in these)
            ended = "".join(f" (seed {record.seed}: {record.ended})" for record in these if record.ended)
            cells = [column(study, name, these, trained) for name in study.read]
            lines.append(_line([arm + ended, seeds, *cells]))
    return "\n".join(lines)


Row = tuple[str, str, int, str, list[float], list[float]]


def _rows(
    study: Study, records: Sequence[Record], arms: Sequence[str], first: str, kinds: Sequence[str] | None
) -> Iterable[Row]:
    won = {(record.arm, record.how, record.seed): record.won for record in records if record.how}
    for how in study.evaluate:
        for arm in arms:
            for seed in study.seeds:
                before, after = won.get((first, how, seed)), won.get((arm, how, seed))
                if before is None or after is None:
                    continue
                for kind in kinds or sorted(before):
                    yield how, arm, seed, kind, *pairs(before, after, kind)


def _table(rows: Iterable[Row], first: str, second: str) -> str:
    titles = ["play", "arm", "seed", "kind", "tasks", first, second, "difference (95 % interval)"]
    lines = [_line(titles), _line(["---"] * len(titles))]
    for how, arm, seed, kind, before, after in rows:
        mean, low, high = (100 * value for value in paired_bootstrap(before, after))
        difference = f"{mean:+z.1f} ({low:+z.1f} to {high:+z.1f})"
        lines.append(_line([how, arm, str(seed), kind, str(len(before)), share(before), share(after), difference]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
