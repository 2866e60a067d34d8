"""`--dry-run` makes, trains and fetches nothing, in a complete installation: every recipe of a launch script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model

ROOT = Path(__file__).parents[2]
HUB = "127.0.0.1"  # where nobody answers
RECIPES = sorted({
    found
    for script in (ROOT / "launch").glob("*.sh")
    for found in re.findall(r"fresco run experiments/(\w+)\.yaml", script.read_text())
})  # fmt: skip

# Each Python process of a dry run writes down what it opens to write, makes, moves, removes, and whom it connects to.
WATCH = """
import os, sys

def _note(event, args):
    wrote = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    if (event == "open" and not (args[2] or 0) & wrote) or (event == "os.mkdir" and os.path.isdir(args[0])):
        return
    if event in ("open", "os.mkdir", "os.rename", "os.link", "os.symlink", "socket.connect", "socket.getaddrinfo"):
        line = f"{event} {args[0] if event != 'socket.connect' else args[1]}\\n"
        os.write(_told, line.encode())

_told = os.open(os.environ["WATCHED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sys.addaudithook(_note)
"""


@pytest.fixture
def watched(tmp_path: Path) -> dict[str, str]:
    """An environment with a home, a cache and a temporary folder of its own, in which every process is watched."""
    for name in ("site", "home", "tmp", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WATCH)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "FRESCO_", "XDG_"))}
    return kept | {
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "tmp"),
        "WATCHED": str(tmp_path / "watched"),
        "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_ENDPOINT": f"http://{HUB}:9",  # of a model on the hub a plan asks for its `config.json`
    }


def dry_run(watched: dict[str, str], *arguments: str) -> str:
    """What it prints, once it has left nothing and has asked nobody."""
    folder = Path(watched["HOME"]).parent
    command = [sys.executable, "-m", "launch.cli", "run", *arguments, "--dry-run"]
    ended = subprocess.run(
        command, cwd=folder / "work", env=watched, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]

    lines = (folder / "watched").read_text().splitlines()
    allowed = rf"(open (/dev/null|/dev/shm$|\d+)|\S+ {folder}/(tmp|work))"  # of /dev/shm the room is measured
    hub = rf"socket\.(getaddrinfo {HUB}|connect \('{HUB}', 9\))$"
    elsewhere = [line for line in lines if not re.match(f"{allowed}|{hub}", line)]
    assert lines and not elsewhere
    assert not [path for name in ("home", "tmp", "work") for path in (folder / name).iterdir()]
    return ended.stdout


@pytest.mark.docs
@pytest.mark.parametrize("recipe", RECIPES)
def test_for_a_recipe(recipe: str, watched: dict[str, str]) -> None:
    assert len(RECIPES) > 6
    told = dry_run(watched, recipe)
    assert "dry run: the configuration is valid; nothing was started" in told


@pytest.mark.docs
def test_for_a_model_of_the_users_own(watched: dict[str, str], tmp_path: Path) -> None:
    """With demonstrations that were asked for: they are told, and neither played nor imitated."""
    model = ensure_tiny_model(TinyRecipe(sft_steps=0), tmp_path / "mine")
    before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    told = dry_run(watched, "own_reward_cpu", f"model.path={model}", "model.warm_start.demonstrations=5")

    assert "a run first trains it on 5 demonstrations, 400 steps" in told
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == before
