"""The newest episodes of a run as rows of text, for a dashboard's table."""

from __future__ import annotations

import os
from pathlib import Path

from rl.config.damage import readable
from rl.store.samples import FOLDER, Sample
from rl.wire.run import RunFile
from rollout.episodes.tokenizer import load_tokenizer

COLUMNS = ("kind", "version", "task", "group", "reward", "success", "ended by", "tokens", "conversation")
_OF_EACH_KIND = 8
_TAIL_BYTES = 1 << 18  # read of each file: a long run has kept gigabytes
_LONGEST = 8_000  # characters


def recent_conversations(run: Path) -> list[list[str | float | bool]]:
    """Rows of COLUMNS: the newest training episodes, then the newest evaluated ones."""
    tokenizer = load_tokenizer(RunFile.load(run).model_folder)
    samples = sorted(_newest(run), key=lambda sample: sample.time)
    chosen = [
        sample for kind in ("train", "eval") for sample in [s for s in samples if s.kind == kind][-_OF_EACH_KIND:]
    ]

    return [
        [
            sample.kind,
            max(sample.versions, default=-1),
            sample.task_index,
            sample.group_id,
            sample.reward,
            sample.success,
            sample.stop_reason,
            len(sample.token_ids),
            tokenizer.decode(sample.token_ids)[:_LONGEST],
        ]
        for sample in chosen
    ]


def _newest(run: Path) -> list[Sample]:
    """The samples at the end of every file; the first line there, and one that is being written, may be a part."""
    found = []
    for path in (run / FOLDER).glob("env_server.*.jsonl"):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]

        whole = lines if size <= _TAIL_BYTES else lines[1:]
        found += readable(whole, Sample)
    return found
