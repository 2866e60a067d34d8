"""How a page of figures is written from the files of this folder.

A figure is a format string over the content of the file. A ratio is told as its median with its spread, and a list as
its values. A study of `experiments.arms` has `sooner`, `gained`, `goal` and `facts` by the name of its arm. The content
as a whole is `whole`, for names with a point.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from experiments.arms.measures import COLUMNS, gained, sooner
from experiments.arms.records import Record, read
from experiments.arms.study import Study, load

RESULTS = Path(__file__).parent
ROOT = RESULTS.parents[1]
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
_USUAL = re.compile(r"\b2(-core | cores, )")
"""What the page says of all machines but one."""
UNRUN = "unrun"
BEGIN, END = "<!-- measured: python -m experiments.results -->\n", "<!-- /measured -->"


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """One figure."""

    what: str
    figure: str
    command: str
    file: str = ""
    """The file below `experiments/results/`; `STUDY/runs.jsonl` is a study's. Empty: a test asserts the figure."""
    pick: dict[str, dict[str, Any]] = {}
    """Which entry of a list in the file is the content: the one with these values."""
    readme: str = ""
    """What the row is called in the README; empty where it is not there."""
    before: str = ""
    """The earlier figure, over the content of the section's `before`."""


class Section(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    rows: list[Row]
    about: str = ""
    before: str = ""
    """A file of earlier figures. Each has a column, and what has not been measured since is `unrun`."""


class Measured(msgspec.Struct, forbid_unknown_fields=True):
    about: str
    sections: list[Section]


class Spread(dict[str, Any]):
    """A median between low and high."""

    def __format__(self, spec: str) -> str:
        median, low, high = (format(self[name], spec or ".2f") for name in ("median", "low", "high"))
        return f"{median} ({low} to {high})"


class Values(list[Any]):
    """`{…:count}` is how many there are, any other format is that of each; `{…[name]}` are the entries of that name."""

    def __getitem__(self, name: Any) -> Any:
        return Values([each[name] for each in self]) if isinstance(name, str) else super().__getitem__(name)

    def __format__(self, spec: str) -> str:
        if spec == "count":
            return str(len(self))
        return ", ".join(format(value, spec) for value in self)


def wrapped(value: Any) -> Any:
    """The same with spreads and lists that know how they are written."""
    if isinstance(value, dict):
        inner = {name: wrapped(each) for name, each in value.items()}
        return Spread(inner) if {"median", "low", "high"} <= inner.keys() else inner
    return Values(map(wrapped, value)) if isinstance(value, list) else value


@cache
def content(file: str) -> Mapping[str, Any]:
    """What a file of the results says."""
    path = RESULTS / file
    if path.suffix == ".jsonl":
        study = load(ROOT / "experiments" / "studies" / f"{path.parent.name}.yaml")
        return of_study(study, read(path))
    return wrapped(json.loads(path.read_text()))  # type: ignore[no-any-return]


def of_study(study: Study, records: list[Record]) -> Mapping[str, Any]:
    """What, by arm, a table of the study says, and gains in points by seed."""
    trained = [record for record in records if not record.how]
    by_arm = {arm: [record for record in trained if record.arm == arm] for arm in study.every_arm}
    gains = {
        arm: {how: [_points(records, seed, arm, how) for seed in study.seeds] for how in study.evaluate}
        for arm in study.every_arm
    }
    facts = {
        arm: {name: [record.facts.get(name) for record in these] for name in (these[0].facts if these else {})}
        for arm, these in by_arm.items()
    }

    found: dict[str, Any] = {"gained": gains, "facts": facts}
    found |= {"machine": sorted({r.machine for r in records}), "date": max(r.date for r in records)}
    ahead = {arm: sooner(trained, arm, study) for arm in by_arm if study.goal and arm != study.baseline}
    goals = {arm: COLUMNS["seconds to goal"](study, these, trained) for arm, these in by_arm.items() if study.goal}
    trains = {arm: COLUMNS["training to goal"](study, these, trained) for arm, these in by_arm.items() if study.goal}
    return wrapped(found | {"goal": goals, "training": trains, "sooner": ahead})  # type: ignore[no-any-return]


def _points(records: list[Record], seed: int, arm: str, how: str) -> dict[str, float]:
    """The difference in points, as a spread."""
    gain = gained(records, seed, arm, how)
    if gain is None:
        raise KeyError(f"seed {seed} of {arm}, {how}")
    return dict(zip(("median", "low", "high"), (100 * value for value in gain), strict=True))


def told(row: Row) -> tuple[str, str]:
    """The figure, and on which machine and when it was measured.

    Raises ValueError that names the row where its file does not say so.
    """
    if not row.file:
        return row.figure, "any"
    try:
        found = {**content(row.file), "whole": content(row.file)}
        for name, wanted in row.pick.items():
            (entry,) = [each for each in found[name] if wanted.items() <= each.items()]
            found = {**found, **entry}

        return row.figure.format_map(found), f"{_machine(found['machine'])}, {found['date']}"
    except (KeyError, IndexError, TypeError, ValueError, OSError) as error:
        raise ValueError(f"measured.yaml, {row.what!r}: {error!r}; mend its figure or its file") from error


def told_anew(row: Row, before: str) -> tuple[str, str, str]:
    """The earlier figure, and then as `told`: `unrun` where the row's file is not there, has not got that far, or tells
    of a case that failed."""
    earlier = told(Row(row.what, row.before, row.command, before))[0] if row.before else "–"
    found = content(row.file) if (RESULTS / row.file).exists() else {"unrun": ""}
    if "unrun" in found:
        return earlier, UNRUN, ""

    cases = [case for case in found.values() if isinstance(case, dict)]
    lacks = found.keys() & {"failed", "ended_after_s"} or any(case.keys() & {"error", "unrun"} for case in cases)
    try:
        return earlier, *told(row)
    except ValueError:
        if not lacks and "seconds" in found:  # without them whoever measured was ended
            raise
        return earlier, UNRUN, ""


def _machine(said: Any) -> str:
    """The machine in a few words; a study's runs may have been on several."""
    if isinstance(said, dict):
        return f"{said['cores']} cores"
    if isinstance(said, list):
        return " or ".join(dict.fromkeys(map(_machine, said)))
    short = re.sub(r", Linux.*|, x86_64|(Intel|AMD|Processor|\(R\)) ?", "", str(said))
    return short.replace(" cores of ", "-core ").strip()


def page(measured: Measured) -> str:
    """The text of docs/results.md."""
    parts = ["# What was measured", "Written by `python -m experiments.results`; do not edit.", measured.about.strip()]
    for section in measured.sections:
        numbers: dict[tuple[str, str], int] = {}  # by the command, and by the machine and date
        rows: list[tuple[str, int, str]] = []
        for row in section.rows:
            earlier, figure, when = told_anew(row, section.before) if section.before else ("", *told(row))
            told_once = (row.command, f" {_USUAL.sub('', when)}".rstrip() if row.file else "")
            number = numbers.setdefault(told_once, len(numbers) + 1)
            linked = (
                f"[{figure}](../experiments/results/{_shown(row.file)})" if row.file and figure != UNRUN else figure
            )
            rows.append((row.what, number, f"{earlier} | {linked}" if section.before else linked))

        lines = ["| what | measured |", "|---|---|"]
        if section.before:
            lines = [f"| what | {content(section.before)['date']} | now |", "|---|---|---|"]
        lines += [f"| {what}{f' ({n})' if len(numbers) > 1 else ''} | {linked} |" for what, n, linked in rows]
        ran = [f"{command}  #{n}{when}" for (command, when), n in numbers.items()]
        block = "\n".join(["<!-- needs: hours -->", "```bash", *ran, "```"])
        parts += [f"## {section.title}", *([section.about.strip()] if section.about else []), "\n".join(lines), block]
    return "\n\n".join(parts) + "\n"


def _shown(file: str) -> str:
    """A reader of a study looks at its table."""
    return file.replace("runs.jsonl", "README.md")


def readme(measured: Measured, text: str) -> str:
    """The README with its table made anew. Raises ValueError where its marks are missing."""
    lines = ["| what | measured | machine, date |", "|---|---|---|"]
    for row in (row for section in measured.sections for row in section.rows if row.readme):
        lines.append(f"| {row.readme} | {' | '.join(told(row))} |")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN.strip()} and {END} around its table: put them back")
    return before + BEGIN + "\n".join(lines) + "\n" + end + after


def pages() -> dict[Path, str]:
    """What the files should be."""
    measured = msgspec.convert(yaml.safe_load((RESULTS / "measured.yaml").read_text()), Measured)
    return {PAGE: page(measured), README: readme(measured, README.read_text())}
