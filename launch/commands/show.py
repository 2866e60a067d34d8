"""`fresco show RUN`: what the model said, episode by episode, the newest first, and what it got for it."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from launch.refusing import Refusing
from launch.terminal import CleanConsole
from rl.store.samples import Sample, read_samples
from rl.wire.run import RunFile
from rollout.episodes.pieces import Pieces
from rollout.episodes.tokenizer import TokenizerError, load_tokenizer

# Colours of a generated token by its probability: what the model was unsure of stands out.
_COLOURS = ((0.05, "bold red"), (0.3, "red"), (0.7, "yellow"), (1.1, "green"))
_BY_TOKEN = ("token_ids", "logp", "versions", "turns", "starts")
_ROUNDING = 1e-6


def show(arguments: argparse.Namespace) -> int:
    """Print the conversations that fit the filters, newest first. Raises ConfigError where there is no run."""
    pieces = _pieces(arguments.run)
    newest_first = read_samples(arguments.run, newest_first=True)
    chosen = islice(matching(newest_first, arguments), arguments.limit)

    if arguments.json:
        for sample in chosen:
            sys.stdout.write(msgspec.json.encode(as_json(sample, pieces)).decode() + "\n")
        return 0

    console = CleanConsole(highlight=False, soft_wrap=True)
    count = 0
    for sample in chosen:
        count += 1
        for line in conversation(sample, pieces):
            console.print(line)
        console.print()
    console.print(f"{count} episodes shown" if count else _nothing(arguments.run))
    return 0


def matching(samples: Iterable[Sample], wanted: argparse.Namespace) -> Iterator[Sample]:
    """The samples that fit every filter that is set."""
    for sample in samples:
        newest = max(sample.versions, default=-1)
        fits = (
            (wanted.kind is None or sample.kind == wanted.kind)
            and (wanted.step is None or newest == wanted.step)
            and (wanted.reward is None or _is_within(sample, *wanted.reward))
            and (not wanted.failed or not sample.success)
            and (wanted.task is None or sample.task_index == wanted.task)
            and (wanted.group is None or sample.group_id == wanted.group)
        )
        if fits:
            yield sample


def _is_within(sample: Sample, low: float, high: float) -> bool:
    return not sample.unrewarded and low - _ROUNDING <= sample.reward <= high + _ROUNDING


def as_json(sample: Sample, pieces: Pieces) -> dict[str, Any]:
    """All that is known of an episode, with texts in the place of tokens."""
    texts = pieces.of(sample.token_ids)
    facts = {name: value for name, value in msgspec.structs.asdict(sample).items() if name not in _BY_TOKEN}
    versions = sorted({version for version in sample.versions if version >= 0})
    turns = [
        {"read": "".join(texts[read : turn.start]), "said": "".join(texts[turn.start : turn.end])}
        | {"reward": turn.reward, "finish_reason": turn.finish_reason, "generator": turn.generator}
        for turn, read in zip(sample.turns, [0, *(turn.end for turn in sample.turns)], strict=False)
    ]
    last = sample.turns[-1].end if sample.turns else 0
    return facts | {"tokens": len(texts), "versions": versions, "turns": turns, "after": "".join(texts[last:])}


def conversation(sample: Sample, pieces: Pieces) -> Iterator[Text]:
    """A head line, then the text turn by turn; generated tokens are coloured by their probability."""
    yield Text(_head(sample), style="bold")

    texts = pieces.of(sample.token_ids)
    read = 0
    for number, turn in enumerate(sample.turns, 1):
        if forks := [start for start in sample.starts if read < start <= turn.start]:
            yield Text("the history forked", style="bold")
            read = forks[-1]
        yield Text("".join(texts[read : turn.start]).strip(), style="dim")
        said = Text(f"[{number}] ", style="bold cyan")
        for place in range(turn.start, turn.end):
            probability = math.exp(min(0.0, sample.logp[place]))
            style = next(colour for limit, colour in _COLOURS if probability < limit)
            said.append(texts[place], style=style)

        yield said
        yield Text(f"    reward {turn.reward:g}  {turn.finish_reason}  generator {turn.generator}", style="dim italic")
        read = turn.end

    if rest := "".join(texts[read:]).strip():
        yield Text(rest, style="dim")
    for name, text in sample.notes.items():
        yield Text(f"    {name}: {text}", style="italic" if sample.success else "bold italic")


def _head(sample: Sample) -> str:
    versions = sorted({version for version in sample.versions if version >= 0})
    outcome = f"reward {sample.reward:g} ({'success' if sample.success else 'no success'})"
    outcome = f"not rewarded: {sample.unrewarded}" if sample.unrewarded else outcome
    group = "" if sample.kind == "eval" else f"group {sample.group_id}  "  # held-out tasks are in no group
    return (
        f"{sample.kind} task {sample.task_index}  {group}ticket {sample.ticket_id}  "
        f"{outcome}  ended by {sample.stop_reason}  {len(sample.token_ids)} tokens  "
        f"{sample.seconds:.1f} s  sampled by version {', '.join(map(str, versions)) or 'none'}"
    )


def _pieces(run: Path) -> Pieces:
    with Refusing(f"{str(run)!r}: the model's tokenizer cannot be read", OSError, TokenizerError):
        return Pieces(load_tokenizer(RunFile.load(run).model_folder))


def _nothing(run: Path) -> str:
    kept = sum(1 for _ in read_samples(run))
    return f"none of {kept} kept episodes fits the filters" if kept else "no episode was kept (tracking.samples)"
