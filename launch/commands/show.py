"""`fresco show RUN`: what the model said, episode by episode, and what it got for it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from rich.text import Text

from launch.terminal import CleanConsole
from rl.config.schema import ConfigError
from rl.store.samples import Sample, read_samples
from rl.wire.run import RunFile
from rollout.episodes.tokenizer import ConversationTokenizer, TokenizerError, load_tokenizer

# Colours of a generated token by its probability: what the model was unsure of stands out.
_COLOURS = ((0.05, "bold red"), (0.3, "red"), (0.7, "yellow"), (1.1, "green"))


def show(arguments: argparse.Namespace) -> int:
    """Print the conversations that fit the filters, newest last. Raises ConfigError where there is no run."""
    if not (arguments.run / "run.json").exists():
        raise ConfigError(f"{str(arguments.run)!r} is no folder of a run (no run.json)")
    chosen = list(islice(matching(read_samples(arguments.run), arguments), arguments.limit))

    console = CleanConsole(highlight=False, soft_wrap=True)
    tokenizer = _tokenizer(arguments.run)
    for sample in chosen:
        for line in conversation(sample, tokenizer):
            console.print(line)
        console.print()
    console.print(f"{len(chosen)} episodes shown" if chosen else _nothing(arguments.run))
    return 0


def matching(samples: Iterable[Sample], wanted: argparse.Namespace) -> Iterator[Sample]:
    """The samples that fit every filter that is set."""
    for sample in samples:
        newest = max(sample.versions, default=-1)
        fits = (
            (wanted.kind is None or sample.kind == wanted.kind)
            and (wanted.step is None or newest == wanted.step)
            and (wanted.reward is None or math.isclose(sample.reward, wanted.reward, abs_tol=1e-6))
            and (wanted.task is None or sample.task_index == wanted.task)
            and (wanted.group is None or sample.group_id == wanted.group)
        )
        if fits:
            yield sample


def conversation(sample: Sample, tokenizer: ConversationTokenizer) -> Iterator[Text]:
    """A head line, then the text turn by turn; generated tokens are coloured by their probability."""
    versions = sorted({version for version in sample.versions if version >= 0})
    outcome = f"reward {sample.reward:g} ({'success' if sample.success else 'no success'})"
    outcome = f"not rewarded: {sample.unrewarded}" if sample.unrewarded else outcome
    group = "" if sample.kind == "eval" else f"group {sample.group_id}  "  # held-out tasks are played once

    yield Text(
        f"{sample.kind} task {sample.task_index}  {group}ticket {sample.ticket_id}  "
        f"{outcome}  ended by {sample.stop_reason}  {len(sample.token_ids)} tokens  "
        f"{sample.seconds:.1f} s  sampled by version {', '.join(map(str, versions)) or 'none'}",
        style="bold",
    )

    read = 0
    for number, turn in enumerate(sample.turns, 1):
        if forks := [start for start in sample.starts if read < start <= turn.start]:
            yield Text("the history forked", style="bold")
            read = forks[-1]
        yield Text(tokenizer.decode(sample.token_ids[read : turn.start]).strip(), style="dim")
        said = Text(f"[{number}] ", style="bold cyan")
        for place in range(turn.start, turn.end):
            probability = math.exp(min(0.0, sample.logp[place]))
            style = next(colour for limit, colour in _COLOURS if probability < limit)
            said.append(tokenizer.decode([sample.token_ids[place]]), style=style)

        yield said
        yield Text(f"    reward {turn.reward:g}  {turn.finish_reason}  generator {turn.generator}", style="dim italic")
        read = turn.end

    if rest := tokenizer.decode(sample.token_ids[read:]).strip():
        yield Text(rest, style="dim")


def _tokenizer(run: Path) -> ConversationTokenizer:
    try:
        return load_tokenizer(RunFile.load(run).model_folder)
    except (OSError, TokenizerError) as error:
        raise ConfigError(f"{str(run)!r}: the model's tokenizer cannot be read: {error}") from None


def _nothing(run: Path) -> str:
    kept = sum(1 for _ in read_samples(run))
    return f"none of {kept} kept episodes fits the filters" if kept else "no episode was kept (tracking.samples)"
