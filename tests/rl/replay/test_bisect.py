"""Two runs that differ in one thing: bisect names it. And the commit that made a difference is found in a history."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.cli import main
from launch.provenance import Provenance, read_provenance
from rl.replay.recorded import Recorded
from rl.store.batch_files import read_batch_part, write_batch_part
from rl.wire.messages import BatchPart
from tests.rl.replay.recording import STEPS

ROOT = Path(__file__).parents[3]
Spoil = Callable[[Path], None]
SPOILT: dict[str, tuple[Spoil, str]] = {}
"""Ten differences by name: what makes it in a copy of the run, and what bisect says."""


def spoilt(says: str) -> Callable[[Spoil], Spoil]:
    def keep(spoil: Spoil) -> Spoil:
        SPOILT[spoil.__name__] = spoil, says
        return spoil

    return keep


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def change_line(path: Path, place: int, change: Callable[[Any], None]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines[place])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_batch(folder: Path, step: int, change: Callable[[BatchPart], BatchPart]) -> None:
    write_batch_part(folder, change(read_batch_part(folder, step, 0)))


@spoilt("configuration: learner.eps: 0.001 | 1e-08")
def a_changed_default(folder: Path) -> None:
    change_json(folder / "run.json", lambda run: run["config"]["learner"].update(eps=1e-8))


@spoilt("versions: torch: 2.0 | 2.1")
def another_package(folder: Path) -> None:
    change_json(folder / "provenance.json", lambda told: told["versions"].update(torch="2.1"))


@spoilt("start: data of math: 7 tasks, digest aa | 7 tasks, digest bb")
def other_data(folder: Path) -> None:
    change_json(folder / "provenance.json", lambda told: told["start"].update({"data of math": "7 tasks, digest bb"}))


@spoilt("machine: CPU: one | another")
def another_machine(folder: Path) -> None:
    change_json(folder / "provenance.json", lambda told: told["machine"].update(CPU="another"))


@spoilt("first part at version 0: version model.model.layers.0.self_attn.q_proj.weight")
def another_start_model(folder: Path) -> None:
    name = "model.model.layers.0.self_attn.q_proj.weight"
    change_line(folder / "digests.jsonl", 0, lambda line: line["tensors"].update({name: "0" * 16}))


@spoilt("first part at step 2: column logp_behavior of sample 200, entry 8")
def a_flipped_bit_in_a_batch(folder: Path) -> None:
    def flipped(part: BatchPart) -> BatchPart:
        logp = part.logp_behavior.copy()
        logp.view("i4")[8] ^= 1
        return msgspec.structs.replace(part, columns=part.columns | {"logp_behavior": logp})

    change_batch(folder, 2, flipped)


@spoilt("first part at step 3: sample 307 is missing in the second run")
def a_lost_sample(folder: Path) -> None:
    change_batch(folder, 3, lambda part: msgspec.structs.replace(part, rows=part.rows[:-1]))


@spoilt("first part at step 1: order sample 100 stands in batch 2 of the second run")
def another_order_of_batches(folder: Path) -> None:
    one, other = (read_batch_part(folder, step, 0) for step in (1, 2))
    write_batch_part(folder, msgspec.structs.replace(one, step=2))
    write_batch_part(folder, msgspec.structs.replace(other, step=1))


@spoilt("first part at step 4: row reward of sample 403")
def another_reward(folder: Path) -> None:
    def paid(part: BatchPart) -> BatchPart:
        rows = [msgspec.structs.replace(row, reward=row.reward + (i == 3)) for i, row in enumerate(part.rows)]
        return msgspec.structs.replace(part, rows=rows)

    change_batch(folder, 4, paid)


@spoilt("first part at step 0: metric loss/objective")
def a_loss_with_a_sign_fault(folder: Path) -> None:
    """The same batch and the same weights, and another number."""
    change_line(folder / "metrics.jsonl", 0, lambda row: row.update({"loss/objective": -row["loss/objective"]}))


@pytest.fixture
def runs(run_folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The run twice, with what the supervisor knows of where it ran."""
    told = Provenance(versions={"torch": "2.0"}, machine={"CPU": "one"}, start={"data of math": "7 tasks, digest aa"})
    folders = [shutil.copytree(run_folder, tmp_path / name) for name in ("a", "b")]
    for folder in folders:
        (folder / "provenance.json").write_bytes(msgspec.json.encode(told))
    return folders[0], folders[1]


def test_runs_that_are_alike(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", *map(str, runs)]) == 0
    alike = "every version, batch and metric that both recorded is alike, up to version"
    assert capsys.readouterr().out == f"{alike} {STEPS}\n"

    (runs[1] / "batches" / f"{STEPS - 1:06d}.0.msgpack").unlink()
    lines = (runs[1] / "digests.jsonl").read_text().splitlines()
    (runs[1] / "digests.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert main(["bisect", *map(str, runs)]) == 0
    assert capsys.readouterr().out == f"{alike} {STEPS - 1}\n{runs[0]} goes on to version {STEPS}\n"


def test_runs_without_a_step_in_common_are_not_alike(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(STEPS - 1):
        (runs[0] / "batches" / f"{step:06d}.0.msgpack").unlink()
    (runs[1] / "batches" / f"{STEPS - 1:06d}.0.msgpack").unlink()
    (runs[1] / "digests.jsonl").unlink()
    (runs[0] / "digests.jsonl").unlink()
    assert main(["bisect", *map(str, runs)]) == 2
    said = capsys.readouterr()
    assert "alike" not in said.out and "there is nothing to compare" in said.err


def test_a_damaged_provenance_is_none(runs: tuple[Path, Path]) -> None:
    (runs[1] / "provenance.json").write_text('{"versions": {"torch"')
    assert main(["bisect", *map(str, runs)]) == 1  # nothing is known of where it ran


@pytest.mark.parametrize("name", SPOILT)
def test_a_difference_is_named(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], name: str) -> None:
    spoil, says = SPOILT[name]
    spoil(runs[1])
    assert main(["bisect", *map(str, runs)]) == 1
    (said,) = capsys.readouterr().out.splitlines()[:1]
    assert said.startswith(says)


def test_ten_differences_are_seeded() -> None:
    assert len(SPOILT) == 10


@pytest.mark.docs
def test_a_replay_names_what_was_computed_otherwise(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two learning rates: the batch, the loss and the gradient are alike, and the weights after the step are not."""
    change_json(runs[1] / "run.json", lambda run: run["config"]["learner"].update(lr=0.02))
    change_line(runs[1] / "digests.jsonl", 1, lambda line: line["tensors"].update(dict.fromkeys(line["tensors"], "0")))
    assert main(["bisect", *map(str, runs), "--replay"]) == 1
    said = capsys.readouterr().out
    assert "first part at version 1: version model.model" in said
    assert "the first that differs is the model.model.embed_tokens.weight after the step in step 0" in said


def test_a_provenance_of_an_earlier_version_is_read(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text('{"recipe": "it.yaml", "versions": {"torch": "2.0"}}')
    assert read_provenance(tmp_path, Recorded(run_folder).config).start == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a second run"),
        (["--good", "HEAD"], "two commits"),
        (["--good", "a", "--bad", "b"], "git rev-list"),
        (["other", "--from", "2"], "--from and --to are of --good and --bad"),
    ],
)
def test_what_cannot_be_compared_is_said(
    run_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["bisect", str(run_folder), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.docs
def test_the_commit_that_made_a_sign_fault_is_found(run_folder: Path, tmp_path: Path) -> None:
    """Three commits in a checkout of its own, the second of which turns the loss round."""
    code = tmp_path / "code"

    def git(*words: str) -> None:
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *name, *words], cwd=code if code.exists() else ROOT, check=True, capture_output=True)

    git("clone", "--shared", "--quiet", str(ROOT), str(code))
    ppo = code / "algos" / "ppo.py"
    for text, said in (
        (ppo.read_text(), "harmless"),
        (ppo.read_text().replace("plain = -ratio", "plain = ratio"), "turned"),
    ):
        ppo.write_text(text + "\n")
        git("commit", "--all", "--quiet", "--message", said)
    (code / "README.md").write_text("another")
    git("commit", "--all", "--quiet", "--message", "harmless as well")

    words = ["bisect", str(run_folder), "--good", "HEAD~3", "--bad", "HEAD", "--to", "1"]
    environment = os.environ | {"PYTHONPATH": str(code)}
    ended = subprocess.run(
        [sys.executable, "-m", "launch.cli", *words], cwd=code, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1, ended.stderr
    assert "turned: the first commit that computes another loss of the tokens in step 0" in ended.stdout
