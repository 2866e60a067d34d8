"""A teacher's log-probabilities are the model's own, whoever computes them, and only of tokens that mean the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from launch.prepare import other_tokens
from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model
from rl.config.schema import load_config
from rl.learner.algorithm import make_algorithm
from rl.wire.messages import ScoreTokens
from rollout.teacher.scoring import TeacherRefused, make_score
from tests.conftest import MakeRun

pytestmark = pytest.mark.usefixtures("own_table")
SIZES = {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn_size": 96, "sft_steps": 0}
TAUGHT = ("algo.loss=reverse_kl", "model.dtype=float32", "learner.max_tokens_per_pack=64")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(TinyRecipe(**SIZES), tmp_path_factory.mktemp("cache"), log=lambda _: None)


def sequences() -> list[ScoreTokens]:
    random = np.random.default_rng(0)
    found = []
    for number, length in enumerate((5, 17, 1, 9)):
        mask = (random.random(length) < 0.5).astype(np.uint8)
        mask[0] = 0
        found.append(ScoreTokens(number, random.integers(0, 60, length).astype(np.int32), mask))
    return found


@torch.no_grad()
def by_hand(folder: Path, asked: ScoreTokens, temperature: float) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(asked.token_ids, dtype=torch.int64)
    logp = (model(ids[None]).logits[0] / temperature).log_softmax(-1)
    return [float(logp[place - 1, ids[place]]) for place in np.flatnonzero(asked.loss_mask)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_model_of_our_own(temperature: float, teacher: Path, make_run: MakeRun) -> None:
    run = make_run(*TAUGHT, f"algo.teacher={teacher}", f"sampling.temperature={temperature}", teacher_folder=teacher)
    asked = sequences()
    found = make_score(run)(asked)
    assert [each.dtype for each in found] == [np.float32] * 4
    for one, logp in zip(asked, found, strict=True):
        assert logp.tolist() == pytest.approx(by_hand(teacher, one, temperature), abs=1e-5)


class Completions(BaseHTTPRequestHandler):
    """vLLM's answer to a prompt of ids with `prompt_logprobs=0`; the logarithm is minus the id."""

    says: Any = True
    logprob: Any = None  # of every token, in the place of minus its id
    limit = 4096

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "big" and asked["prompt_logprobs"] == 0 and asked["max_tokens"] == 1
        logs = {id: -float(id) if self.logprob is None else self.logprob for id in asked["prompt"]}
        told = [None, *({str(id): {"logprob": logs[id], "rank": 1}} for id in asked["prompt"][1:])]
        choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
        choice |= {"prompt_logprobs": told} if self.says else {}
        answer = json.dumps({"id": "1", "object": "text_completion", "created": 0, "model": "big", "choices": [choice]})
        self.send_response(200 if len(asked["prompt"]) < self.limit else 400)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1#big"
    server.shutdown()
    server.server_close()


def test_an_endpoint(endpoint: str, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    score = make_score(make_run(*TAUGHT, f"algo.teacher={endpoint}"))
    asked = sequences()
    for one, logp in zip(asked, score(asked), strict=True):
        assert logp.tolist() == (-one.token_ids[one.loss_mask != 0]).tolist()

    monkeypatch.setattr(Completions, "says", False)
    with pytest.raises(TeacherRefused, match="does not tell the log-probability of each token of the prompt"):
        score(asked)


def test_an_endpoint_that_is_not_there_is_named(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.teacher.scoring._TRIES", 0)
    with pytest.raises(TeacherRefused, match=r"algo.teacher='http://127.0.0.1:9/v1#big' does not answer: "):
        make_score(make_run(*TAUGHT, "algo.teacher=http://127.0.0.1:9/v1#big"))


def test_an_endpoint_for_shorter_contexts_is_found_before_an_episode(
    endpoint: str, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Completions, "limit", 64)  # of the prompt and the one token that it must generate
    make_score(make_run(*TAUGHT, f"algo.teacher={endpoint}", "generator.max_model_len=63", "sampling.max_tokens=8"))
    with pytest.raises(TeacherRefused, match="does not answer: Error code: 400"):
        make_score(make_run(*TAUGHT, f"algo.teacher={endpoint}", "generator.max_model_len=64", "sampling.max_tokens=8"))


@pytest.mark.parametrize("logprob", [float("nan"), float("inf"), 3.5, "much", [1.0]])
def test_an_endpoint_that_tells_no_log_probabilities(
    logprob: Any, endpoint: str, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Completions, "logprob", logprob)
    with pytest.raises(TeacherRefused, match=r"algo.teacher='http://.*' (does not tell|tells .* no log-probability)"):
        make_score(make_run(*TAUGHT, f"algo.teacher={endpoint}"))


def test_a_token_that_is_impossible_to_an_endpoint_can_be_learned(
    endpoint: str, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Completions, "logprob", -float("inf"))
    (logp,) = make_score(make_run(*TAUGHT, f"algo.teacher={endpoint}"))(sequences()[:1])
    assert set(logp.tolist()) <= {-100.0}


def test_tokens_must_mean_the_same(teacher: Path, tmp_path: Path) -> None:
    def copy(name: str, **config: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        told = json.loads((teacher / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(told))
        (folder / "tokenizer.json").write_text((teacher / "tokenizer.json").read_text())
        return folder

    size = json.loads((teacher / "config.json").read_text())["vocab_size"]
    assert other_tokens(teacher, copy("same")) == other_tokens(teacher, copy("padded", vocab_size=size + 64)) == ""
    assert (
        other_tokens(teacher, copy("short", vocab_size=size - 1)) == f"it has {size - 1} logits, and model.path {size}"
    )

    other = copy("other")
    told = json.loads((other / "tokenizer.json").read_text())
    first, second = list(told["model"]["vocab"])[10:12]
    vocabulary = told["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(told))
    (copy("none") / "tokenizer.json").unlink()
    assert "tokenizer.json cannot be read" in other_tokens(teacher, tmp_path / "none")
    assert f"has id {vocabulary[second]} in model.path and is id {vocabulary[first]} there" in other_tokens(
        teacher, other
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("algo.loss=reverse_kl",),
            "uses teacher_logp, which nothing here computes: .*, or name the model of a teacher in algo.teacher",
        ),
        (("algo.teacher=x",), "algo.teacher='x' is never asked with algo.loss='grpo': set algo.loss=reverse_kl"),
        (
            ("algo.loss=reverse_kl", "algo.teacher=http://x/v1#y", "sampling.temperature=0.7"),
            "an endpoint tells log-probabilities at temperature 1 only; set sampling.temperature=1",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_algorithm(load_config(None, [*overrides]))
