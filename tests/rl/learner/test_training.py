"""The real learner, as processes of 1 and 2 ranks, against a plain loop that shares none of its code.

The plain loop runs each sample alone through transformers, takes the loss and the advantages from their
formulas and steps torch's AdamW: whatever packing, sharding, minibatches, checkpoints and the wire do, the
losses and weights must come out the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl.learner.publish import probe_prompt
from rl.store.checkpoint_folder import read_journal, read_meta
from rl.weights import make_receiver
from rl.wire.messages import BatchPart, BatchRequest, EvalRequest, Metrics, Version
from rl.wire.run import RunFile
from tests.conftest import save_run
from tests.rl.learner.learner_harness import Harness, make_batch
from tests.rl.learner.tiny_policies import VOCAB, save_tiny

STEPS = 3
MINIBATCHES = 2
TEMPERATURE = 0.7
LR = 1e-2
EPS = 1e-3
MAX_NORM = 0.5
SETTINGS = (
    "learner.kind=fsdp",
    "model.dtype=float32",
    "generator.dtype=float32",
    f"sampling.temperature={TEMPERATURE}",
    f"learner.lr={LR}",
    f"learner.max_grad_norm={MAX_NORM}",
    f"learner.minibatches={MINIBATCHES}",
    f"learner.eps={EPS}",  # a small eps would turn rounding in tiny gradients into whole steps of size lr
    "learner.max_tokens_per_pack=48",
    "rollout.groups_per_batch=4",
    "rollout.group_size=2",
    "rollout.alpha=1",
)


def batches(ranks: int, first: int = 0, last: int = STEPS, timeline: int = 0) -> list[list[BatchPart]]:
    """The same samples for any number of ranks; trained one version late."""
    return [
        make_batch(s, ranks=ranks, vocab=VOCAB, version=max(0, s - 1), timeline=timeline) for s in range(first, last)
    ]


# ---------------------------------------------------------------- the plain loop


@dataclass
class Plain:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)  # of version 0, 1, ...
    probe: list[float] = field(default_factory=list)


def plain_logp(model: torch.nn.Module, ids: Tensor, temperature: float) -> Tensor:
    """(T - 1,) log pi(id t | ids before t) for t = 1 ..."""
    logits: Tensor = model(ids[None]).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def plain_advantages(batch_part: BatchPart) -> list[float]:
    found = []
    for row in batch_part.rows:
        rewards = np.array([other.reward for other in batch_part.rows if other.group_id == row.group_id])
        found.append(float((row.reward - rewards.mean()) / (rewards.std() + 1e-6)))
    return found


def plain_sum(model: torch.nn.Module, batch_part: BatchPart, groups: list[int]) -> Tensor:
    """Sum of the clipped objective over the generated tokens of these groups."""
    advantages = plain_advantages(batch_part)
    offsets = np.cumsum([0, *batch_part.lengths])
    total = torch.zeros(())
    for i, row in enumerate(batch_part.members):
        if batch_part.rows[row].group_id not in groups:
            continue

        span = slice(offsets[i], offsets[i + 1])
        ids = torch.tensor(batch_part.token_ids[span], dtype=torch.int64)
        mask = torch.tensor(batch_part.loss_mask[span].astype(bool))[1:]
        behavior = torch.tensor(batch_part.logp_behavior[span])[1:]
        ratio = (plain_logp(model, ids, TEMPERATURE) - behavior)[mask].exp()
        total = total - torch.minimum(ratio * advantages[row], ratio.clamp(0.8, 1.2) * advantages[row]).sum()
    return total


@pytest.fixture(scope="module")
def plain(model_folder: Path) -> Plain:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.eval()
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    result = Plain()

    def remember() -> None:
        result.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})

    remember()
    for (batch_part,) in batches(ranks=1):
        groups = list(dict.fromkeys(row.group_id for row in batch_part.rows))
        loss_sum = 0.0
        norms = []

        for half in (groups[:2], groups[2:]):
            tokens = sum(row.loss_tokens for row in batch_part.rows if row.group_id in half)
            adamw.zero_grad()
            total = plain_sum(model, batch_part, half)
            (total / tokens).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
            adamw.step()
            loss_sum += total.item()

        result.losses.append(loss_sum / batch_part.loss_tokens)
        result.norms.append(sum(norms) / len(norms))
        remember()
    with torch.no_grad():
        result.probe = plain_logp(model, torch.tensor(probe_prompt(None, VOCAB, 64)), 1.0).tolist()
    return result


# ---------------------------------------------------------------- the learner


@dataclass
class Trained:
    run: RunFile
    rows: list[Metrics]
    wire: dict[str, Tensor]  # the last version, as a generator reads it
    report: dict[str, object]


def run_learner(run: RunFile, work: list[list[BatchPart]], evaluations: list[int] | None = None) -> Trained:
    with Harness(run) as harness:
        harness.published(run.start_step)
        rows = harness.train(work)
        last = run.start_step + len(work)
        receiver = make_receiver(run, "generator-0-0", 0)
        version, taken = receiver.take(Version(run.timeline, last), 10)

        assert version == Version(run.timeline, last)
        assert receiver.receipt()
        wire = {name: tensor.clone() for name, tensor in taken}
        assert receiver.release()
        receiver.close()
        report = msgspec.json.decode(harness.finish().report)
        if evaluations is not None:
            assert [harness.take(EvalRequest).version.n for _ in evaluations] == evaluations
            assert not [each for each in harness.inbox if isinstance(each, EvalRequest)]
    return Trained(run, rows, wire, report)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def one_rank(model_folder: Path) -> Iterator[Trained]:
    run = save_run(*SETTINGS, f"steps={STEPS}", "eval.tasks=4", model_folder=model_folder)
    yield run_learner(run, batches(ranks=1), evaluations=[0, STEPS])
    shutil.rmtree(run.folder)


@pytest.fixture(scope="module")
def two_ranks(model_folder: Path) -> Iterator[Trained]:
    overrides = (*SETTINGS, f"steps={STEPS}", "learner.ranks=2", "learner.checkpoint_every=2")
    run = save_run(*overrides, model_folder=model_folder)
    yield run_learner(run, batches(ranks=2))
    shutil.rmtree(run.folder)


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left.keys() | right.keys())


def test_losses_and_gradient_norms_equal_the_plain_loop(one_rank: Trained, plain: Plain) -> None:
    assert [row.step for row in one_rank.rows] == [1, 2, 3]
    assert [row.values["train/loss"] for row in one_rank.rows] == pytest.approx(plain.losses, rel=1e-5, abs=1e-6)
    assert [row.values["train/grad_norm"] for row in one_rank.rows] == pytest.approx(plain.norms, rel=1e-4)
    assert max(plain.norms) > MAX_NORM  # the clip is part of what was compared


def test_published_weights_equal_the_plain_loop(one_rank: Trained, plain: Plain) -> None:
    wire = dict(one_rank.wire)
    assert torch.equal(wire.pop("lm_head.weight"), wire["model.embed_tokens.weight"])  # tied: sent twice
    assert largest_difference(wire, plain.weights[-1]) < 2e-5
    assert largest_difference(wire, plain.weights[0]) > LR  # they did move


def test_two_ranks_equal_one(one_rank: Trained, two_ranks: Trained) -> None:
    for mine, theirs in zip(two_ranks.rows, one_rank.rows, strict=True):
        for name in ("train/loss", "train/grad_norm", "loss/entropy", "loss/kl_behavior", "tokens/trained"):
            assert mine.values[name] == pytest.approx(theirs.values[name], rel=1e-4, abs=1e-6), name
    assert largest_difference(two_ranks.wire, one_rank.wire) < 2e-5


def test_export_loads_in_transformers_with_the_same_logits(two_ranks: Trained, model_folder: Path) -> None:
    folder = two_ranks.run.folder / "model"
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    exported = AutoModelForCausalLM.from_pretrained(folder)
    fresh = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    fresh.load_state_dict(two_ranks.wire)
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, fresh(ids).logits)
    assert not load_file(folder / "model.safetensors").keys() - exported.state_dict().keys()


def test_an_evaluation_alone_writes_no_model(model_folder: Path) -> None:
    """Else each would leave another copy of what it evaluates, of gigabytes."""
    run = save_run(*SETTINGS, "steps=0", "eval.tasks=4", model_folder=model_folder)
    run_learner(run, [], evaluations=[0])
    assert not (run.folder / "model").exists()
    shutil.rmtree(run.folder)


def test_one_rank_continues_what_two_ranks_saved(two_ranks: Trained, model_folder: Path) -> None:
    """Step 3 from the checkpoint of step 2 equals step 3 of the run that was not interrupted."""
    saved = two_ranks.run.folder / "checkpoints" / "step-2"
    assert read_meta(saved).ranks == 2 and read_journal(saved) == b"journal 2"
    overrides = (*SETTINGS, "steps=3", f"resume={saved}")
    run = save_run(*overrides, model_folder=model_folder, timeline=1, start_step=2)
    resumed = run_learner(run, batches(1, first=2, timeline=1))
    shutil.rmtree(run.folder)
    assert [row.step for row in resumed.rows] == [3]
    assert resumed.rows[0].values["train/loss"] == pytest.approx(two_ranks.rows[2].values["train/loss"], abs=1e-6)
    assert largest_difference(resumed.wire, two_ranks.wire) < 1e-6


def test_metrics_and_report_say_where_the_time_went(one_rank: Trained) -> None:
    values = one_rank.rows[0].values
    assert {"time/step", "time/wait_batch", "time/train", "time/publish", "tokens_per_second"} <= values.keys()
    assert values["time/train"] + values["time/publish"] <= values["time/step"]
    assert values["train/lr"] == LR
    assert values["tokens/trained"] == sum(batches(ranks=1)[0][0].lengths)
    assert one_rank.rows[1].histograms["staleness"] == [1.0] * 8
    assert one_rank.report["steps"] == STEPS
    assert 0 <= float(str(one_rank.report["wait_fraction"])) <= 1
    assert one_rank.report["last"] == {key: one_rank.rows[2].values[f"train/{key}"] for key in ("reward", "loss")}


def test_probe_of_the_last_version_equals_the_plain_loop(one_rank: Trained, plain: Plain, model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(one_rank.run.folder / "model")
    with torch.no_grad():
        logp = plain_logp(model, torch.tensor(probe_prompt(None, VOCAB, 64)), 1.0).tolist()
    assert logp == pytest.approx(plain.probe, abs=1e-4)


def test_two_ranks_stop_during_a_step(model_folder: Path) -> None:
    run = save_run(*SETTINGS, "steps=3", "learner.ranks=2", model_folder=model_folder)
    with Harness(run) as harness:
        harness.take(BatchRequest)
        harness.send_batch(make_batch(0, ranks=2, groups=2000, vocab=VOCAB))
        harness.take(BatchRequest)  # of the next step: the first one has arrived
        harness.stop()
        harness.pump()
        assert not [message for message in harness.inbox if isinstance(message, Metrics)]  # it was in the middle
    shutil.rmtree(run.folder)
