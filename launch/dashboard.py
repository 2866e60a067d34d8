"""The dashboards of a run, each in a thread of its own: nothing of it can slow or fail a run.

What is logged goes into a queue with an end. What does not fit, or what a dashboard refuses, is dropped and counted
(`summary.json`, key `dashboard`). A resumed run goes on in the wandb run of the one that it continues.

Few numbers of a row are drawn, grouped by what stands before the slash. `metrics.jsonl` has all of them: the counters
of every process, and each diagnostic by the age of its tokens.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from launch.boards import COLUMNS as COLUMNS
from launch.boards import Board, TensorboardBoard, TrackioBoard, WandbBoard
from launch.sittings import read_rows
from rl.config.damage import readable
from rl.observe.tracking import Dashboard
from rl.store.samples import FOLDER, Sample
from rl.wire.run import RunFile
from rollout.episodes.tokenizer import load_tokenizer

_PROCESS = re.compile(r"^(broker|proxy|learner|generator|env_server|parsers|teacher)\.\d+/|^wait/")
_BY_AGE = re.compile(r"^stale_\w+/")
_DRAWN_BY_AGE = ("/kl_behavior", "/ess", "/tokens")
_LEFT_OUT = {
    "train/reward",  # rollout/reward
    "version/timeline",
    "time/over",
    "tokens/trained",
    "loss/kl_behavior_k1",
    "loss/token_staleness",
    "loss/token_staleness_max",
    "loss/ratio_p05",
    "loss/ratio_p50",
    "loss/ratio_p95",
    "broker/hold_s",
    "broker/wait_s",
    "weight_sync/bytes",
    "weight_sync/count",
    "weight_sync/copy_mean_s",
    "weight_sync/drain_mean_s",
    "weight_sync/wait_mean_s",
    "eval/version_min",
    "eval/version_max",
}
_RENAMED = {
    "tokens_per_second": "speed/tokens_per_second",
    "generator_idle_fraction": "speed/generator_idle",
    "time/step": "speed/step_s",
    "time/wait_batch": "speed/learner_waits_s",
    "time/train": "speed/train_s",
    "time/publish": "speed/publish_s",
    "time/elapsed": "speed/elapsed_s",
}
_NOT_IN_KEYS = re.compile(r"[,\s]+")
_MOST_WAITING = 10_000
_ID = "wandb-id"
_OF_EACH_KIND = 8
_TAIL_BYTES = 1 << 18  # read of each file: a long run has kept gigabytes
_LONGEST = 8_000  # characters

Job = Callable[[Board], None]


def open_dashboard(run: RunFile) -> Dashboard:
    """Those that the configuration asks for. Each is opened in its thread, so the run does not wait for it."""
    tracking = run.config.tracking
    mode = wandb_mode(tracking.wandb)
    threads: list[Dashboard] = []
    if mode != "disabled":
        own = run.folder / _ID  # which is there when another head began the run
        run_id = own.read_text().strip() if own.exists() else continued_id(run.config.resume)
        own.write_text(run_id)
        threads.append(BoardThread(lambda: WandbBoard(tracking, mode, run, run_id), run.folder))

    if "tensorboard" in tracking.boards:
        before = [  # of the sittings before
            (row["step"], charts({key: each for key, each in row.items() if isinstance(each, float) and key != "time"}))
            for row in read_rows(run.folder)
        ]
        threads.append(BoardThread(lambda: TensorboardBoard(run, before), run.folder))
    if "trackio" in tracking.boards:
        threads.append(BoardThread(lambda: TrackioBoard(tracking, run), run.folder))
    return _Together(threads)


class _Together(Dashboard):
    """Several dashboards, or none."""

    def __init__(self, dashboards: list[Dashboard]) -> None:
        self._dashboards = dashboards

    def log(self, step: int, values: dict[str, Any], histograms: dict[str, list[float]]) -> None:
        for each in self._dashboards:
            each.log(step, values, histograms)

    def alert(self, title: str, text: str) -> None:
        for each in self._dashboards:
            each.alert(title, text)

    def close(self, report: Callable[[], Path] | None) -> None:
        """The report is written once, for all of them."""
        if report is not None and self._dashboards:
            report = partial(Path, report())
        for each in self._dashboards:
            each.close(report)

    def describe(self) -> dict[str, Any]:
        told = [each.describe() for each in self._dashboards]
        if not told:
            return {}
        errors = "; ".join(each["error"] for each in told if each["error"])
        return {name: sum(each[name] for each in told) for name in ("dropped", "failed")} | {"error": errors}


def continued_id(resume: Path | None) -> str:
    """The id of the wandb run that the checkpoint's run had, else a new one."""
    known = resume.absolute().parents[1] / _ID if resume is not None else None
    return known.read_text().strip() if known is not None and known.exists() else uuid.uuid4().hex[:8]


def wandb_mode(asked: str) -> str:
    """`auto` is online when an account is configured (WANDB_API_KEY or a netrc entry), else offline."""
    if asked != "auto":
        return asked
    import netrc

    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    try:
        return "online" if netrc.netrc().authenticators("api.wandb.ai") else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"


class BoardThread(Dashboard):
    """`open_board` gives the dashboard; jobs are carried out in order, each by itself."""

    def __init__(self, open_board: Callable[[], Board], folder: Path, most_waiting: int = _MOST_WAITING) -> None:
        self._open_board = open_board
        self._folder = folder
        self._jobs: queue.Queue[Job | None] = queue.Queue(most_waiting)
        self._dropped = 0
        self._failed = 0
        self._error = ""

        self._thread = threading.Thread(target=self._work, name="dashboard", daemon=True)
        self._thread.start()

    def log(self, step: int, values: dict[str, Any], histograms: dict[str, list[float]]) -> None:
        drawn = charts(values)
        named = {f"histogram/{key.removeprefix('histogram/')}": each for key, each in histograms.items() if each}
        samples = {_drawn_as(name): each for name, each in named.items()}
        self._put(lambda board: board.log(step, drawn, samples))
        if "eval/accuracy" in values:
            self._put(lambda board: board.conversations(step, recent_conversations(self._folder)))

    def alert(self, title: str, text: str) -> None:
        self._put(lambda board: board.alert(title, text))

    def close(self, report: Callable[[], Path] | None) -> None:
        """Wait until everything is sent; the caller has a deadline."""
        if report is not None:
            self._put(lambda board: board.report(report()))
        self._jobs.put(None)
        self._thread.join()

    def describe(self) -> dict[str, Any]:
        return {"dropped": self._dropped, "failed": self._failed, "error": self._error}

    def _put(self, job: Job) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._dropped += 1

    def _work(self) -> None:
        board: Board | None = None
        try:
            board = self._open_board()
        except Exception as error:
            self._note(error)

        while (job := self._jobs.get()) is not None:
            if board is None:
                self._dropped += 1
                continue
            try:
                job(board)
            except Exception as error:
                self._failed += 1
                self._note(error)

        if board is not None:
            board.finish()

    def _note(self, error: Exception) -> None:
        """The first one is the cause."""
        self._error = self._error or f"{type(error).__name__}: {error}"


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
    found: list[Sample] = []
    for path in (run / FOLDER).glob("env_server.*.jsonl"):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]

        whole = lines if size <= _TAIL_BYTES else lines[1:]
        found += [sample for sample in readable(whole, Sample) if sample.is_whole]
    return found


def charts(values: dict[str, float]) -> dict[str, float]:
    """The numbers that people look at while a run goes on; every name has a group."""
    return {_drawn_as(_RENAMED.get(name, name)): value for name, value in values.items() if _is_drawn(name)}


def _drawn_as(name: str) -> str:
    """Without what a dashboard's lists and formulas take for their own; users give names to rewards and members."""
    return _NOT_IN_KEYS.sub("_", name)


def _is_drawn(name: str) -> bool:
    if name in _LEFT_OUT or _PROCESS.match(name) or name.startswith("queue/"):
        return False
    if name.startswith("staleness/"):
        return name in ("staleness/mean", "staleness/max")
    return not _BY_AGE.match(name) or name.endswith(_DRAWN_BY_AGE)
