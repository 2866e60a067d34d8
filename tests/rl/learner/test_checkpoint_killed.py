"""A rank that dies at any file operation of a checkpoint leaves one that is whole: the one before, or the new one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rl.learner import checkpoint
from rl.store.checkpoint_folder import Meta, latest, read_journal, verify
from tests.rl.learner.ranks import process_group

OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


@pytest.mark.parametrize("how", [pytest.param("blocking", marks=pytest.mark.docs), "background"])
def test_a_death_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-m", "tests.rl.learner.test_checkpoint_killed", str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    deaths = [json.loads(line) for line in done.stdout.splitlines()]

    *killed, survived = deaths
    assert all(death["code"] == -signal.SIGKILL for death in killed) and survived["code"] == 0
    met = " ".join(death["at"] for death in killed)
    for part in ("state/", "journal.msgpack", "meta.json", "digests.json", "os.rename step-2.tmp", "os.rmdir step-1"):
        assert part in met

    named = next(place for place, death in enumerate(killed) if death["at"] == "os.rename step-2.tmp")
    steps = [death["step"] for death in deaths]
    assert steps == [1] * (named + 1) + [2] * (len(steps) - named - 1)
    assert [death["journal"] for death in deaths] == [f"journal {step}" for step in steps]


# ------------------------------------------------------------ what dies


def main(folder: Path, how: str) -> None:
    """One line for each death: where it was, and the newest checkpoint afterwards. The last rank survives."""
    torch.set_num_threads(1)
    model = nn.Linear(4, 3)
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    adamw.step()
    first = folder / "first"
    assert _save_in_a_copy(first, model, adamw, step=1) == 0
    (first / "step-2.tmp" / "state").mkdir(parents=True)  # of a death before

    number, code = 0, -1
    while code != 0:
        kept = folder / "kept"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(first, kept)

        place = folder / "at"
        code = _save_in_a_copy(kept, model, adamw, step=2, dies_at=number, place=place, how=how)
        newest = latest(kept)
        assert newest is not None
        step = verify(newest).step
        at = place.read_text() if code else ""
        print(json.dumps({"code": code, "at": at, "step": step, "journal": read_journal(newest).decode()}))
        number += 1


def _save_in_a_copy(
    kept: Path,
    model: nn.Module,
    adamw: torch.optim.Optimizer,
    step: int,
    dies_at: int = -1,
    place: Path | None = None,
    how: str = "blocking",
) -> int:
    """The exit code of a process that saves, and dies before its file operation number `dies_at`."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    store = kept.parent / f"ranks-{os.getpid()}"
    store.mkdir()
    with process_group(store):
        if place is not None:
            _die_at(kept, dies_at, os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        saved = {"policy": (model, adamw)}, Meta(step, 0, 1), f"journal {step}".encode()
        if how == "blocking":
            checkpoint.save(kept, *saved, keep=1)
        else:
            background = checkpoint.Background(kept, deadline_s=60)
            background.save(*saved, keep=1)
            background.wait()
    os._exit(0)


def _die_at(kept: Path, number: int, place: int) -> None:
    left = number

    def seen(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in OPERATIONS:
            return
        path = Path(str(arguments[0]))
        if event in ("os.remove", "os.rmdir") and arguments[-1] >= 0:  # a name in an open folder
            path = Path(os.readlink(f"/proc/self/fd/{arguments[-1]}")) / path
        if not path.is_relative_to(kept):
            return

        if left == 0:
            os.write(place, f"{event} {path.relative_to(kept)}".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    sys.addaudithook(seen)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
