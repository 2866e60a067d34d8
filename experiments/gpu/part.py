"""The parts by name, what each is given, and what it leaves."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

PARTS = {
    "tests": ("experiments.gpu.runs:tests", 300),
    "paths": ("experiments.gpu.runs:paths", 300),
    "learner": ("experiments.gpu.learner:learner", 480),
    "memory": ("experiments.gpu.learner:memory", 120),
    "states": ("experiments.gpu.learner:states", 240),
    "kinds": ("experiments.gpu.learner:kinds", 240),
    "weights": ("experiments.gpu.engine:weights", 240),
    "frames": ("experiments.gpu.engine:frames", 120),
    "adapters": ("experiments.gpu.engine:adapters", 120),
    "rollout": ("experiments.gpu.engine:rollout", 480),
    "end_to_end": ("experiments.gpu.runs:end_to_end", 240),
    "one_gpu": ("experiments.gpu.runs:one_gpu", 360),
    "start": ("experiments.gpu.runs:start", 330),
    "curve": ("experiments.gpu.compare:curve", 360),
    "compare_short": ("experiments.gpu.compare:compare_short", 480),
    "compare_long": ("experiments.gpu.compare:compare_long", 480),
}
"""What carries out a part, and its limit in seconds."""
COMMIT = Path(__file__).parents[2] / "COMMIT"
"""In a checkout that was bundled: which it is."""


class Unrun(Exception):
    """A part cannot run on this machine; the reason."""


class Result:
    """The JSON of a part, behind what it says already. Whatever is noted is written at once: a part that is ended
    leaves what it has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._noted: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.failed = False

    def note(self, name: str, value: Any) -> None:
        self._noted[name] = value
        write(self._path, self._noted)
        print(f"{name}: {json.dumps(value)}", flush=True)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """What goes wrong within is noted as the error of `name`. What comes next is tried, and the part fails at its
        end."""
        try:
            yield
        except SystemExit as why:
            if isinstance(why.code, int):
                raise  # this part is told to end
            self._fail(name, why)
        except Exception as error:
            self._fail(name, error)

    def _fail(self, name: str, error: BaseException) -> None:
        traceback.print_exception(error)
        self.failed = True
        self.note(name, {"error": f"{type(error).__name__}: {error}"[-2000:]})


def write(path: Path, told: Mapping[str, Any]) -> None:
    """As a whole or not at all, whenever this process is killed."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(told, indent=2) + "\n")
    draft.replace(path)


def commit() -> str:
    """Of this checkout, `-dirty` if it has been changed since; empty where neither git nor a bundle says."""
    if COMMIT.exists():
        return COMMIT.read_text()
    if shutil.which("git") is None:
        return ""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(describe, cwd=COMMIT.parent, capture_output=True, text=True).stdout.strip()


def need_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise Unrun("vLLM is not installed; --bundle FOLDER makes what an offline machine lacks")


def main(argv: list[str]) -> None:
    """Carry out one part in this process: its name, the file of its result, the device."""
    name, path, device = argv
    result = Result(Path(path))
    work: Callable[[Result, str], None] = resolve_name(PARTS[name][0])
    try:
        work(result, device)
    except Unrun as reason:
        result.note("unrun", str(reason))
    if result.failed:
        sys.exit(1)
