"""`fresco sft`: real processes against a plain loop that shares none of their code, also after a death or Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model
from rl.config.damage import read_lines
from rl.learner.rows import rows_of_batch

ROOT = Path(__file__).parents[1]
ROWS, HELD_OUT, BATCH, LR, LIMIT = 40, 8, 4, 1e-2, 96
QUESTIONS = [(f"what is {i} + {i % 7}?", f"{i + i % 7}") for i in range(ROWS + HELD_OUT)]
LONG = 3  # this row is longer than the limit
SETTINGS = (
    "model.dtype=float32",
    "device=cpu",
    f"generator.max_model_len={LIMIT}",
    f"learner.lr={LR}",
    "learner.schedule=constant",
    "learner.warmup_steps=0",
    "learner.eps=1e-3",  # a small one would turn rounding in tiny gradients into whole steps of size lr
    "learner.max_tokens_per_pack=64",
    "learner.max_grad_norm=0.5",
    "tracking.wandb=disabled",
    "timeouts.stop_s=60",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn_size": 96}
    return ensure_tiny_model(TinyRecipe(sft_steps=0, **sizes), tmp_path_factory.mktemp("cache"), log=lambda _: None)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [{"prompt": question, "completion": answer} for question, answer in QUESTIONS]
    lines[LONG] = {"prompt": "1 " * LIMIT, "completion": "1"}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def command(rows: Path, model: Path, runs: Path, *overrides: str) -> list[str]:
    asked = [str(rows), f"model.path={model}", f"runs={runs}", "--held-out", str(HELD_OUT), "--batch", str(BATCH)]
    return [sys.executable, "-m", "launch.cli", "sft", *asked, *SETTINGS, *overrides]


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == code, output[-4000:]
    return output


def start(*arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def metrics(runs: Path) -> list[dict[str, Any]]:
    return list(read_lines(runs / "sft" / "metrics.jsonl", dict[str, Any]))


def losses(runs: Path) -> list[float]:
    found = [row for row in metrics(runs) if "train/loss" in row]
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    return [row["train/loss"] for row in found]


def wait_for_step(process: subprocess.Popen[str], runs: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if any(row["step"] >= step and "train/loss" in row for row in metrics(runs)):
            return
        time.sleep(0.01)
    process.kill()
    raise AssertionError(process.communicate()[0][-3000:])


class Plain:
    """transformers and AdamW, one row at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.rows = []
        for i, (question, answer) in enumerate(QUESTIONS):
            asked = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
            whole = [
                *prompt,
                *tokenizer.encode(answer, add_special_tokens=False),
                self.model.generation_config.eos_token_id[0],
            ]
            if i != LONG:
                self.rows.append((torch.tensor(whole), len(prompt)))
        self.losses: list[float] = []

    def nll(self, row: int) -> tuple[torch.Tensor, int]:
        ids, prompt = self.rows[row]
        logp = self.model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[prompt - 1 :]
        return -logp.sum(), len(logp)

    def train(self, steps: int) -> None:
        adamw = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)
        for step in range(steps):
            found = [self.nll(row) for row in rows_of_batch(ROWS - 1, BATCH, 0, step)]
            loss = sum((nll for nll, _ in found), torch.zeros(())) / sum(count for _, count in found)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            adamw.step()
            adamw.zero_grad()
            self.losses.append(loss.item())

    @torch.no_grad()
    def held_out(self) -> float:
        found = [self.nll(row) for row in range(ROWS - 1, ROWS - 1 + HELD_OUT)]
        return float(sum(nll for nll, _ in found)) / sum(count for _, count in found)


@lru_cache
def plain(folder: Path, steps: int) -> Plain:
    made = Plain(folder)
    made.train(steps)
    return made


def distance(folder: Path, trained: Plain) -> float:
    """The largest difference of a weight, of what transformers loads from the run's folder."""
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return max(float((tensor - theirs[name]).abs().max()) for name, tensor in trained.model.state_dict().items())


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.docs), 2])
def test_losses_and_weights_equal_the_plain_loop(ranks: int, model: Path, rows: Path, tmp_path: Path) -> None:
    output = finish(start(rows, model, tmp_path, f"learner.ranks={ranks}", "--epochs", "2"))
    steps = 2 * ROWS // BATCH
    assert "1 of 40 training rows are longer than generator.max_model_len=96 and left out" in output
    assert "steps are" in output and "passes over the others" in output

    expected = plain(model, steps)
    assert losses(tmp_path) == pytest.approx(expected.losses, rel=1e-3, abs=1e-4)
    assert expected.losses[-1] < 0.7 * expected.losses[0]
    assert distance(tmp_path / "sft" / "model", expected) < 1e-3

    told = {row["step"]: row["eval/loss"] for row in metrics(tmp_path) if "eval/loss" in row}
    assert told == pytest.approx({0: Plain(model).held_out(), steps: expected.held_out()}, rel=1e-3)
    summary = json.loads((tmp_path / "sft" / "summary.json").read_text())
    assert summary["held_out_loss"] == {"first": told[0], "last": told[steps]}
    assert "Fine-tuned on conversations" in (tmp_path / "sft" / "model" / "README.md").read_text()


@pytest.mark.docs
def test_a_killed_rank_costs_nothing_but_time(model: Path, rows: Path, tmp_path: Path) -> None:
    steps = 40
    overrides = (f"steps={steps}", "learner.ranks=2", "learner.checkpoint_every=10")
    process = start(rows, model, tmp_path, *overrides)
    wait_for_step(process, tmp_path, 12)
    ranks = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "learner" in " ".join(child.cmdline())
    ]
    os.kill(next(each.pid for each in ranks if "--index 1" in " ".join(each.cmdline())), signal.SIGKILL)
    assert "learner.1 killed by SIGKILL; starting it again" in finish(process)
    expected = plain(model, steps)
    assert losses(tmp_path) == pytest.approx(expected.losses, rel=1e-2, abs=1e-2)
    assert distance(tmp_path / "sft" / "model", expected) < 2e-2


@pytest.mark.docs
def test_the_same_command_goes_on_after_ctrl_c(model: Path, rows: Path, tmp_path: Path) -> None:
    process = start(rows, model, tmp_path, "steps=2000", "learner.ranks=2")
    wait_for_step(process, tmp_path, 3)
    process.send_signal(signal.SIGINT)
    finish(process, code=130)
    (saved,) = (tmp_path / "sft" / "checkpoints").iterdir()
    stopped = json.loads((saved / "meta.json").read_text())["step"]
    assert 3 <= stopped < 2000

    other = rows.with_name("other.jsonl")
    other.write_text(rows.read_text().replace("what is", "how much is"))
    output = finish(start(other, model, tmp_path, f"steps={stopped + 4}", "resume=auto"), code=2)
    assert f"resume='{saved}': it is of other rows (40 tasks" in output.replace("\n", " ")

    output = finish(start(rows, model, tmp_path, f"steps={stopped + 4}", "resume=auto", "--batch", "8"), code=2)
    assert f"it was trained with rollout.groups_per_batch={BATCH}, and 8 makes other batches" in output

    output = finish(start(rows, model, tmp_path, f"steps={stopped + 4}", "resume=auto"))
    expected = plain(model, stopped + 4)
    assert losses(tmp_path)[-4:] == pytest.approx(expected.losses[-4:], rel=1e-2, abs=1e-2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("--epochs", "2", "steps=3"), "--epochs=2 beside steps=3; give one of them"),
        *((("--epochs", epochs), f"--epochs={epochs}; it must be above 0") for epochs in ("0", "nan", "inf", "1e+09")),
        (("--held-out", "-1"), "env.options.eval_count=-1: Input should be greater than or equal to 0"),
        (("sampling.temperature=0.5",), "sampling.temperature=0.5: rows are learned at temperature 1; leave it out"),
        (("seconds=9",), "seconds=9.0: fresco sft does not know it; set steps or --epochs"),
        (("--batch", "64"), "--batch=64: there are only 40 rows to train; give --batch 40, or more rows"),
        (
            ("env.name=math", "env.options={source: arithmetic}"),
            "learner.kind='supervised' does not fit env.name='math'",
        ),
        (("learner.kind=fsdp",), "learner.kind='fsdp' does not fit env.name='envs.chat:ChatFamily'"),
    ],
)
def test_what_cannot_run_is_one_line(
    overrides: tuple[str, ...], message: str, model: Path, rows: Path, tmp_path: Path
) -> None:
    output = finish(start(rows, model, tmp_path, "--dry-run", *overrides), code=2)
    assert message in output and "Traceback" not in output
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_would_run(model: Path, rows: Path, tmp_path: Path) -> None:
    output = finish(start(rows, model, tmp_path, "--dry-run", "learner.ranks=2"))
    assert "sft: 10 steps" in output and "2 processes: 2 × learner" in output
    assert not list(tmp_path.iterdir())
