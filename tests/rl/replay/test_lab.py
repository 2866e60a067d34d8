"""One batch under several losses: exact at the first step, honest at later ones, and each sample's part in it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from algos.registry import NoOptions
from algos.types import LossInputs, LossResult
from launch.cli import main
from launch.report.gather import gather
from rl.replay.recorded import Recorded
from rl.replay.replay import RECORDED, Request, Row, replayed
from tests.rl.replay.recording import STEPS


def opposite(inputs: LossInputs, options: NoOptions) -> LossResult:
    """Policy gradient with its sign turned round."""
    ratio = (inputs.logp_current - inputs.logp_behavior).exp()
    return LossResult(inputs.masked(ratio * inputs.advantages))


def plain(inputs: LossInputs, options: NoOptions) -> LossResult:
    ratio = (inputs.logp_current - inputs.logp_behavior).exp()
    return LossResult(inputs.masked(-ratio * inputs.advantages))


MINE = f"{__name__}:plain"
TURNED = f"{__name__}:opposite"


def first_rows(folder: Path, *losses: str) -> dict[str, Row]:
    recorded = Recorded(folder)
    variants = {loss: recorded.changed([f"algo.loss={loss}"]) for loss in losses}
    return {row.variant: row for row in replayed(recorded, Request(2, 3, variants)) if row.first is not None}


def test_gradients_are_compared_exactly(run_folder: Path) -> None:
    """A loss of the user's own stands in the same list; with its sign turned round its gradient is the opposite."""
    rows = first_rows(run_folder, MINE, TURNED)
    cosine = rows[TURNED].first.cosine  # type: ignore[union-attr]
    assert cosine[MINE] == pytest.approx(-1, abs=1e-6) and cosine[TURNED] == pytest.approx(1, abs=1e-6)
    assert abs(cosine[RECORDED]) < 1
    assert rows[TURNED].values["train/grad_norm"] == pytest.approx(rows[MINE].values["train/grad_norm"], rel=1e-6)


def test_the_pull_of_a_token_is_its_ratio_times_its_advantage(run_folder: Path) -> None:
    recorded = Recorded(run_folder)
    row = first_rows(run_folder, MINE)[MINE]
    found = row.first
    assert found is not None
    part = recorded.part(2, 0, 1)
    assert sorted(found.tokens) == sorted(part.members)
    assert math.isclose(sum(found.by_age.values()), 1) and math.isclose(sum(found.by_reward.values()), 1)
    assert set(found.by_age) == {"1"}  # trained one version late

    for member, pulls in found.tokens.items():
        rewards = [each.reward for each in part.rows if each.group_id == part.rows[member].group_id]
        over = part.rows[member].reward - sum(rewards) / len(rewards)
        assert len(pulls) == part.rows[member].loss_tokens
        assert all(math.copysign(1, pull) == math.copysign(1, over) for pull in pulls if over)


@pytest.mark.docs
def test_two_ranks_see_the_same_pulls_as_one(deadly_folder: Path) -> None:
    recorded = Recorded(deadly_folder)
    config = recorded.changed(["algo.loss=topr"])
    alone = recorded.changed(["algo.loss=topr", "learner.ranks=1"])
    both = [
        next(row.first for row in replayed(recorded, Request(3, 4, {"it": each})) if row.variant == "it")
        for each in (config, alone)
    ]
    assert both[0] is not None and both[1] is not None
    for member, share in both[0].samples.items():
        assert share == pytest.approx(both[1].samples[member], abs=1e-5)
    assert both[0].cosine[RECORDED] == pytest.approx(both[1].cosine[RECORDED], abs=1e-5)


def test_the_command_writes_the_page(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--from", "2", "--losses", f"topr,{TURNED}", "--with", "algo.advantage=batch learner.lr=0.05"]
    assert main(["lab", str(run_folder), *arguments, "--trust", "0.9,1"]) == 0
    said = capsys.readouterr().out
    assert "batch 2, exact; then 4 steps with their trust" in said and "beyond trust" in said

    lab = gather(run_folder).facts["lab"]
    names = [each["name"] for each in lab["losses"]]
    assert names == [RECORDED, "topr", TURNED, "algo.advantage=batch learner.lr=0.05"]
    assert lab["reproduced"] and all(len(each["steps"]) == STEPS - 2 for each in lab["losses"])
    far = lab["losses"][3]
    assert far["beyond"] == next(
        n for n, ess in zip(far["steps"], far["curves"]["trust/ess"], strict=True) if ess < 0.9
    )

    for sample in lab["samples"]:
        assert len(sample["generated"]) == len(sample["pull"]["topr"])
        assert len(sample["text"]) > max(sample["generated"])
    shares = [max(sample["share"].values()) - min(sample["share"].values()) for sample in lab["samples"]]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0
    assert json.loads((run_folder / "lab.json").read_bytes())["first"] == 2


def test_a_lab_without_losses_says_what_to_give(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", str(run_folder)]) == 2
    assert "give --losses" in capsys.readouterr().err


def test_the_gain_is_the_reward_of_what_became_likelier() -> None:
    """Two samples of a group, one of which earned: doubled in weight, it earns 2/3 where it earned 1/2."""
    import msgspec

    from rl.replay.replay import nearness
    from tests.rl.learner.tiny_policies import make_batch_parts

    (part,) = make_batch_parts(1, groups=1, group_size=2)
    rows = [msgspec.structs.replace(row, reward=float(i == 0)) for i, row in enumerate(part.rows)]
    part = msgspec.structs.replace(part, rows=rows)
    zeros = {0: torch.zeros(3), 1: torch.zeros(2)}
    moved = {0: torch.tensor([math.log(2.0), 0, 0]), 1: torch.zeros(2)}
    found = nearness({member: {"log-probabilities": logp.double()} for member, logp in moved.items()}, zeros, part)
    assert found["gain"] == pytest.approx(2 / 3 - 1 / 2)
    assert found["trust/ess"] == pytest.approx((2 + 1) ** 2 / (4 + 1) / 2)
    assert found["trust/kl"] == pytest.approx((2 - 1 - math.log(2)) / 5)


def test_names_of_losses_may_stand_apart_and_nothing_is_no_variant(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", str(run_folder), "--losses", "topr, cispo,", "--with", " ", "--to", "1"]) == 0
    capsys.readouterr()
    names = [each["name"] for each in gather(run_folder).facts["lab"]["losses"]]
    assert names == [RECORDED, "topr", "cispo"]
    assert main(["lab", str(run_folder), "--with", ""]) == 2
