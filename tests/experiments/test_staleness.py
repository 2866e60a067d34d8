"""The staleness study: its sampler, its forced lag, its records and its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import launch.warm_start.sampling
from algos.registry import get_loss, loss_names, make_loss
from algos.types import LossInputs
from experiments.plain_loop import PlayedEpisode, make_shard
from experiments.staleness import grid, records, report, sampler, system
from experiments.staleness.grid import Job
from experiments.staleness.harness import CURVES, LaggedLoop, run_job
from experiments.staleness.records import Record
from experiments.staleness.statistics import Estimate, estimate, paired, separates
from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model
from rl.learner.update import with_logp
from rl.models.packing import make_packs
from rl.models.policy import load_policy

SMALL = TinyRecipe(hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_size=48, sft_steps=5, sft_batch=16)
# The untrained model earns no reward; the entropy bonus moves it all the same.
FEW = (
    "steps=4",
    "rollout.groups_per_batch=2",
    "rollout.group_size=2",
    "sampling.max_tokens=6",
    "eval.tasks=2",
    "learner.lr=1e-2",
    "algo.entropy_coef=0.1",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(SMALL, tmp_path_factory.mktemp("cache"), log=lambda line: None)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_sampler_equals_the_reference_one(folder: Path, temperature: float) -> None:
    policy = load_policy(folder)
    with torch.no_grad():  # sharper than at the start, so that attention and the head matter
        for parameter in policy.parameters():
            parameter.mul_(1.7)

    prompts = [[5, 6, 7], [5, 6, 7], [9, 4, 8, 11, 3, 2, 17], [12], *([20 + i, 30] for i in range(12))]
    settings: dict[str, Any] = {
        "seeds": range(len(prompts)),
        "stop_ids": list(range(40)),  # many stop, at different lengths: rows leave the batch
        "max_tokens": 12,
        "temperature": temperature,
    }

    ours = sampler.sample(policy.model, prompts, **settings)
    reference = launch.warm_start.sampling.sample(policy.model, prompts, **settings)
    assert [one.token_ids for one in ours] == [one.token_ids for one in reference]
    assert len({len(one.token_ids) for one in ours}) > 2
    for one, other in zip(ours, reference, strict=True):
        assert one.logp == pytest.approx(other.logp, abs=2e-5)


def test_sampler_refuses_another_architecture(folder: Path) -> None:
    model = load_policy(folder).model
    model.config.model_type = "llama"
    with pytest.raises(ValueError, match="model_type='llama'"):
        sampler.sample(model, [[1]], seeds=[0], stop_ids=[2], max_tokens=1)


@pytest.mark.parametrize("lag", [0, 2])
def test_batches_are_of_the_policy_lag_updates_ago(folder: Path, lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The behaviour log-probabilities of batch s are, by the learner's own forward, those of version s - lag."""
    weights: list[dict[str, torch.Tensor]] = []
    batches: list[Sequence[PlayedEpisode]] = []
    train = LaggedLoop.train

    def spy(self: LaggedLoop, step: int, batch: Sequence[PlayedEpisode], lag: int = 0) -> dict[str, float]:
        weights.append({name: value.clone() for name, value in self.policy.state_dict().items()})
        batches.append(batch)
        return train(self, step, batch, lag)

    monkeypatch.setattr(LaggedLoop, "train", spy)
    record = run_job(Job("reinforce", lag, 1), folder, FEW)
    assert record.curves["lag"] == [min(step, lag) for step in range(4)]
    assert record.ended == "finished" and set(record.curves) == set(CURVES)
    policy = load_policy(folder)

    def distance(step: int, version: int) -> float:
        """Largest |difference| between the batch's log-probabilities and those of a version, in nats."""
        policy.load_state_dict(weights[version])
        packs = with_logp(
            policy, make_packs(make_shard(step, batches[step], 2, 0), 64, 0), "logp_proximal", temperature=1
        )
        gaps = [(pack.columns["logp_proximal"] - pack.logp_behavior)[pack.mask].abs().max() for pack in packs]
        return float(max(gaps))

    for step in range(4):
        version = max(0, step - lag)
        assert distance(step, version) < 1e-4
        assert all(distance(step, other) > 1e-3 for other in range(4) if other != version)


def test_on_policy_runs_with_the_same_gradient_are_not_computed_twice(folder: Path) -> None:
    steps = (*FEW, "steps=6")
    first = run_job(Job("reinforce", 0, 1), folder, steps)
    same = run_job(Job("grpo", 0, 1), folder, steps, on_policy=first)
    assert same.ended == "equal to reinforce" and same.evals == first.evals and same.curves == first.curves
    other = run_job(Job("grpo", 0, 1), folder, (*steps, "learner.lr=1e-3"), on_policy=first)
    assert other.ended == "finished" and other.curves != first.curves


def test_a_gradient_that_is_not_finite_is_a_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise FloatingPointError("the gradient norm of step 0 is nan")

    monkeypatch.setattr(LaggedLoop, "train", explode)
    record = run_job(Job("reinforce", 0, 1), folder, FEW)
    assert "nan" in record.ended and list(record.evals) == ["0"]


def test_the_study_has_every_loss_and_no_run_twice() -> None:
    jobs = list(grid.study())
    assert len(jobs) == len(set(jobs))
    for name in loss_names():
        known = grid.ALIASES.get(name, name)
        assert {0, 4} <= {job.lag for job in jobs if job.loss == known and job.seed == grid.SEEDS[0]}

    for loss in grid.FINALISTS:
        assert {(job.lag, job.seed) for job in jobs if job.loss == loss} == {
            (lag, seed) for lag in grid.LAGS for seed in grid.SEEDS
        }

    assert {job.seed for job in jobs[: len(jobs) // 3]} == {grid.SEEDS[0]}


def test_aliases_are_the_same_loss() -> None:
    torch.manual_seed(0)
    current, behavior, advantages = torch.randn(3, 12)

    inputs = LossInputs(
        logp_current=current,
        logp_behavior=behavior,
        logp_proximal=None,
        entropy=torch.zeros(12),
        advantages=advantages,
        mask=torch.arange(12) % 4 > 0,
        sample=torch.arange(12) // 4,
        n_samples=3,
        staleness=torch.zeros(12, dtype=torch.int64),
        rewards=torch.tensor([1.0, 0.0, 1.0]),
    )

    for alias, name in grid.ALIASES.items():
        one = get_loss(alias)
        other = get_loss(name)
        assert (one.advantage, one.aggregation) == (other.advantage, other.aggregation)
        assert torch.equal(make_loss(alias, {})(inputs).per_token, make_loss(name, {})(inputs).per_token)


def fake(
    loss: str, lag: float, seed: int, final: float, *, lag_curve: float | None = None, in_system: bool = False
) -> Record:
    curves = {name: [1.0] * 8 for name in CURVES} | {"lag": [float(lag if lag_curve is None else lag_curve)] * 8}
    evals = {"0": 0.3, "4": final - 0.1, "8": final, "12": final + 0.1}
    return Record(loss, lag, seed, in_system, records.setting(), "finished", 1.0, evals, curves)


def test_records_survive_and_those_of_another_setting_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "runs.jsonl"
    assert records.read(path) == []
    record = fake("grpo", 4, 1, 0.8)
    records.append(path, record)
    records.append(path, replace(record, setting="another"))
    records.append(path, replace(record, seed=2))
    assert records.read(path) == [record, replace(record, seed=2)]


def test_final_accuracy_is_the_mean_of_the_last_evaluations() -> None:
    record = fake("grpo", 4, 1, 0.8)
    assert record.final == pytest.approx(0.8)
    ramp = replace(record, curves=record.curves | {"lag": [0, 1, 2, 3, 4, 4, 4, 4]})
    assert ramp.mean("lag") == pytest.approx(21 / 6)  # after the first quarter


def test_intervals_are_students() -> None:
    of_three = estimate([1.0, 2.0, 3.0])
    assert of_three == Estimate(2.0, of_three.half_width, 3)
    assert of_three.half_width == pytest.approx(2.4843, abs=1e-3)
    assert estimate([0.5]).half_width == math.inf
    assert not separates(estimate([0.5])) and not separates(estimate([1.0, -1.0])) and separates(estimate([1.0, 1.1]))
    with pytest.raises(ValueError, match="no runs"):
        estimate([])


def test_losses_are_compared_by_pairs_of_the_same_lag_and_seed() -> None:
    runs = [fake("grpo", lag, seed, 0.8 + seed / 100) for lag in (4, 8) for seed in (1, 2)]
    runs += [fake("tis", lag, seed, 0.7 + seed / 100) for lag in (4, 8) for seed in (1, 2, 3)]
    runs += [fake("tis", 0, 1, 0.1), fake("grpo", 0, 1, 0.9), fake("tis", 4, 1, 0.0, in_system=True)]
    difference = paired(runs, "grpo", "tis", (4, 8))
    assert difference is not None and difference.runs == 4 and difference.mean == pytest.approx(0.1)
    assert separates(difference) and paired(runs, "grpo", "gspo", (4, 8)) is None


def test_the_report_places_the_system_on_the_forced_curve() -> None:
    runs = [fake("grpo", lag, 1, 0.9 - lag / 20) for lag in (0, 2, 4)]
    runs.append(fake("grpo", 2, 1, 0.8, lag_curve=1.5, in_system=True))
    numbers = report.build(runs)
    (row,) = numbers["system"]
    assert row["measured_lag"] == 1.5 and row["forced_final"] == pytest.approx(0.825)
    assert report.forced_at(runs, "grpo", 5.0, "final") is None

    text = report.markdown(numbers)
    assert "| grpo | 0.900 (1) |  | 0.800 (1) | 0.700 (1) |  |" in text
    assert "| grpo | 2 | 1 | 1.500 | 0.800 | 0.825 |" in text


def test_runs_from_different_models_are_not_compared() -> None:
    one = fake("grpo", 0, 1, 0.8)
    other = fake("dapo", 0, 1, 0.8)
    with pytest.raises(ValueError, match="different models"):
        report.build([one, replace(other, evals=other.evals | {"0": 0.2})])


def test_the_report_draws_its_figure(tmp_path: Path) -> None:
    from experiments.staleness.figure import draw

    runs = [fake(loss, lag, seed, 0.7) for loss in grid.FINALISTS for lag in (0, 4) for seed in (1, 2)]
    draw(runs, tmp_path / "figure.png")
    report.write(runs, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"figure.png", "table.json", "table.md"}


def test_metrics_of_a_system_run_become_a_record() -> None:
    metrics = {metric: 0.25 for metric in system.SYSTEM_CURVES.values()}
    rows = [{"step": 0, "eval/accuracy": 0.3}, {"step": 1, **metrics}, {"step": 2, **metrics, "eval/accuracy": 0.5}]
    evals, curves = system.read_metrics(rows)
    assert evals == {"0": 0.3, "2": 0.5}
    assert curves == {name: [0.25, 0.25] for name in CURVES}
