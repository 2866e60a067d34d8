"""Whole runs and tests on a GPU: the marked tests, arithmetic to its orderly end, on one GPU too, and the start."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from experiments.bench._processes import end_on_sigterm, ends_of, logs_below
from experiments.bench.start import one_start
from experiments.gpu.part import Result, Unrun, need_vllm
from launch.gpus import visible_gpus
from launch.machine import this_machine
from launch.memory import ASLEEP, CONTEXT, STARTING, Need, estimate, shape_of
from launch.prepare import prepare
from rl.config.recipes import find_recipe
from rl.config.schema import load_config
from rl.wire.run import RunFile

_ROOT = Path(__file__).parents[2]
_BF16 = ["model.dtype=bfloat16", "generator.dtype=bfloat16", "alarms.exact=50"]
_SHARE = "generator.options.gpu_memory_utilization=0.5"  # so much must be free when vLLM begins beside a learner
_ONE_EACH = ["generator.count=1", "learner.ranks=1", "device=cuda", _SHARE, *_BF16]
_SIZE = {"cuda": "1.5b", "cpu": "tiny"}
_LARGE = [
    "generator.options.kv_cache_bytes=1073741824",
    "learner.max_tokens_per_pack=4096",
]  # beside what the recipe has
_EAGER = "generator.options.enforce_eager=true"
_SMALL = ["steps=1", "eval.tasks=4", "rollout.groups_per_batch=2", "model.warm_start.demonstrations=0"]
_ON_CPU = [*_SMALL, "rollout.group_size=2", "generator.count=1", "learner.ranks=1", "generator.max_num_seqs=8"]
_KEPT = ("eval/accuracy", "time/step", "time/train", "exact/max", "train/loss", "time/take_device", "time/give_device")
_FRESCO = [sys.executable, "-m", "launch.cli", "run"]
_SAVE = """import sys, pathlib, experiments.gpu.models
experiments.gpu.models.save_model(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3])"""
_POLL_S = 0.5
_TIDY_S = 20.0  # for a run that is told to end


_LEARNER = [
    "tests/rl/weights/device/test_ipc.py",
    "tests/rl/learner/test_gpu.py",
    "tests/rollout/generator/test_vllm_gpu.py",
]
_PATHS = [f"tests/rollout/generator/test_{name}.py" for name in ("vllm_paths", "routing_engine", "adapter_engine")]


def tests(result: Result, device: str) -> None:
    """Of channel ipc, learner and engine those that are marked `gpu`; without a GPU each of them skips itself."""
    _marked(result, _LEARNER)


def paths(result: Result, device: str) -> None:
    """Likewise of what an engine does otherwise on a GPU, of mixtures and of adapters."""
    _marked(result, _PATHS)


def _marked(result: Result, files: list[str]) -> None:
    """Each file by itself: an engine takes long to start, and what has run is told if this is ended."""
    codes = []
    for name in files:
        with tempfile.TemporaryDirectory() as folder, result.case(name):
            report = Path(folder) / "report.xml"
            arguments = ["-o", "addopts=", "-m", "gpu", "-v", "-rA", "-p", "no:cacheprovider", f"--junitxml={report}"]
            codes.append(subprocess.run([sys.executable, "-m", "pytest", *arguments, name], cwd=_ROOT).returncode)
            (suite,) = ElementTree.parse(report).iter("testsuite")
            counts = {kind: int(suite.get(kind, 0)) for kind in ("tests", "failures", "errors", "skipped")}
            result.note(name, counts | {"exit_code": codes[-1]})

    if code := max(codes):
        sys.exit(code)


def end_to_end(result: Result, device: str) -> None:
    """Engine and rank on a GPU each."""
    need_vllm()
    if device == "cuda" and (shown := len(visible_gpus())) < 2:
        raise Unrun(f"it needs two GPUs, and this machine shows {shown}; the part one_gpu is for one")
    if code := _run(result, ["math_cpu", *(["steps=20", *_ONE_EACH] if device == "cuda" else _ON_CPU)]):
        sys.exit(code)


def one_gpu(result: Result, device: str) -> None:
    """Engine and rank on one GPU. The recipe's own model learns; one of 1.5B, which does not, shows memory and seconds
    at the same time and then by turns. Turns are also shown by a CPU."""
    need_vllm()
    codes = []
    with tempfile.TemporaryDirectory(prefix="fresco-gpu-") as folder:
        model = f"model.path={_model_of_arithmetic(_SIZE[device], Path(folder), device)}"
        large = ["steps=3", *_ONE_EACH, *_LARGE, _EAGER, model]
        ways = {
            "shared": ["steps=20", *_ONE_EACH, _EAGER, "placement=shared"],
            "shared, 1.5b": [*large, "placement=shared"],
            "alternate, 1.5b": [*large, "placement=alternate"],
        }
        if device == "cpu":
            ways = {"alternate, tiny": [*_ON_CPU, model, "placement=alternate"]}

        for way, settings in ways.items():
            begin = time.monotonic()
            with result.case(f"{way}: failed"), _PeakMemory() as peak:
                codes.append(_run(result, ["math_cpu", *settings], f"{way}: ", peak))
            result.note(f"{way}: seconds", round(time.monotonic() - begin, 1))

    if code := max(codes, key=abs, default=0):
        sys.exit(code)


def start(result: Result, device: str) -> None:
    """The first update at 1.5B, eagerly and with graphs, twice each: the second finds what the first has compiled."""
    need_vllm()
    ways = {"eager": [*_ONE_EACH, *_LARGE, _EAGER], "graphs": [*_ONE_EACH, *_LARGE]}
    if device == "cpu":
        ways = {"cpu": _ON_CPU}

    with tempfile.TemporaryDirectory(prefix="fresco-gpu-") as folder:
        model = _model_of_arithmetic(_SIZE[device], Path(folder), device)
        asked = [f"model.path={model}", "tracking.wandb=disabled", "steps=100"]  # it goes on until it is ended
        for name, settings in ways.items():
            for time_of in ("first", "again") if device == "cuda" else ("first",):
                options = argparse.Namespace(recipe="math_cpu", overrides=[*settings, *asked])
                with result.case(f"{name}, {time_of}"), tempfile.TemporaryDirectory(dir=folder) as own:
                    begun = one_start(options, Path(own), saves=False)  # 18 GB would take longer than the start
                    result.note(f"{name}, {time_of}", {"marks_s": begun.marks, "cpu_s": begun.cpu_s})


def _model_of_arithmetic(size: str, folder: Path, device: str) -> Path:
    """A random one of this size that reads and writes as the recipe's own does."""
    own = prepare(load_config(find_recipe("math_cpu"), ["model.tiny.sft_steps=0"])).folder  # its words alone count
    assert own is not None
    # By a process of its own: what this one holds of the GPU would count as the runs'.
    subprocess.run([sys.executable, "-c", _SAVE, size, str(folder), device], cwd=_ROOT, check=True)
    model = folder / size
    for pattern in ("tokenizer*", "*.jinja", "generation_config.json"):
        for each in own.glob(pattern):
            shutil.copy(each, model)
    return model


def _run(result: Result, words: list[str], before: str = "", peak: _PeakMemory | None = None) -> int:
    """`fresco run` to its end, what its metrics say of it, and its peak beside the estimate of the preflight; its exit
    code. before: each name of what is noted."""
    with tempfile.TemporaryDirectory(prefix="fresco-gpu-") as folder:
        settings = [f"runs={folder}", "name=run", "tracking.wandb=disabled"]
        result.note(f"{before}run", " ".join(["fresco", "run", *words]))

        end_on_sigterm()
        with subprocess.Popen([*_FRESCO, *words, *settings], cwd=_ROOT) as process:
            try:
                code = process.wait()
            finally:
                if process.poll() != 0:  # its folder goes with this block
                    print(ends_of(*logs_below(Path(folder))), flush=True)
                process.terminate()  # it ends in its own order, also where this part is ended at its limit
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TIDY_S)

                _note_run(result, Path(folder) / "run", before)
                process.kill()
                result.note(f"{before}exit_code", process.wait())

        if peak is not None and not code:
            _note_peak(result, RunFile.load(Path(folder) / "run"), peak, before)
    return code


def _note_run(result: Result, run: Path, before: str) -> None:
    """The metrics step by step, and the summary, which only an orderly end leaves."""
    if (metrics := run / "metrics.jsonl").exists():
        lines = metrics.read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written
        result.note(f"{before}metrics", [{key: row[key] for key in ("step", *_KEPT) if key in row} for row in rows])
        largest = max((row.get("exact/max", 0.0) for row in rows), default=0.0)
        result.note(f"{before}largest_difference_nats", largest)
    if (summary := run / "summary.json").exists():
        told: dict[str, Any] = json.loads(summary.read_text())
        result.note(f"{before}summary", told)


def _note_peak(result: Result, run: RunFile, peak: _PeakMemory, before: str) -> None:
    """By the driver, beside the estimate."""
    if not peak.mib:
        result.note(f"{before}peak", {"unrun": "nvidia-smi is not there, or says nothing of this GPU's memory"})
        return
    assert run.model_folder is not None
    told = json.loads((run.model_folder / "config.json").read_text())
    needs = estimate(run.config, run.device, shape_of(run.config, told), this_machine())
    promised = _promised([need for need in needs if need.where == "gpu"], run.config.alternates) / 2**30
    held = peak.mib / 1024
    result.note(f"{before}peak", {"held_gib": held, "promised_gib": promised, "ratio": promised / held})


def _promised(needs: list[Need], turns: bool) -> int:
    """Bytes of an engine and a learner on one GPU: of both, or of the turn that takes more, beside what the other side
    keeps at rest."""
    learner, engine = (sum(need.each for need in needs if who in need.what) for who in ("learner", "engine"))
    return max(learner + ASLEEP, engine + CONTEXT + STARTING) if turns else learner + engine


class _PeakMemory:
    """The most MiB that a GPU had in use, as the driver counts them; 0 without its `nvidia-smi`."""

    mib = 0

    def __enter__(self) -> _PeakMemory:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_parts: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while shutil.which("nvidia-smi") and not self._stop.wait(_POLL_S):
            used = subprocess.run(query, capture_output=True, text=True).stdout.split()
            self.mib = max(self.mib, *(int(each) for each in used if each.isdigit()), 0)
