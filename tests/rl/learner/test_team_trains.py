"""However ranks share the work - packs together, several copies of the model - they train what one rank does.

Two teams of two ranks compute each pack together; two copies of the model are each divided among two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rl.config.schema import Config, ConfigError, load_config
from rl.learner import checkpoint
from rl.learner.guards import ExactCheck
from rl.learner.tensor_digests import tensor_digests
from rl.learner.trainer import Trainer
from rl.learner.update import UpdateStats
from rl.models.packing import Pack
from rl.models.team import make_mesh, make_team
from rl.observe.alarms import Alarms
from rl.store.checkpoint_folder import Meta
from tests.rl.learner.ranks import process_group, results_of_ranks
from tests.rl.learner.test_trainer_ranks import SETTINGS, VARIANTS, batch_part_of, smooth, weights
from tests.rl.learner.tiny_policies import largest_difference, save_tiny

RANKS = 4
STEPS = 2
EXACT = 1e6  # nats: every token is compared, and none refused


class Sharing(NamedTuple):
    together: int = 1
    copies: int = 1
    reduce_dtype: str = "float32"


TEAMS = Sharing(together=2)
COPIES = Sharing(copies=2)
HALF = Sharing(copies=2, reduce_dtype="bfloat16")
EQUAL = [(TEAMS, "critic"), (TEAMS, "turns"), (Sharing(together=2, copies=2), "lora"), (COPIES, "batch")]


def configured(case: str, sharing: Sharing = Sharing()) -> Config:
    shared = [f"learner.reduce_dtype={sharing.reduce_dtype}", "learner.max_tokens_per_pack=48"]
    shared += [f"learner.ranks={RANKS}", f"learner.copies={sharing.copies}"]
    return load_config(None, [*SETTINGS, *VARIANTS[case], *shared, f"alarms.exact={EXACT}"])


def trained(trainer: Trainer, rank: int = 0, ranks: int = 1) -> list[dict[str, float]]:
    """The metrics of each step; rank: whose batch parts are trained, of so many."""
    exact = ExactCheck(
        trainer.policy, trainer.config, Alarms(trainer.config.alarms, lambda name, detail: None), trainer.counted
    )
    told = []
    for step in range(STEPS):
        part = batch_part_of(step, rank, ranks)
        stats = UpdateStats()
        minibatches = trainer.minibatches(part)
        compared = exact.batch(step, minibatches)
        for minibatch in minibatches:
            stats.add(trainer.update(minibatch, step))
        stats.all_reduce()
        told.append(stats.metrics() | compared)
    return told


def gradient(trainer: Trainer, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
    """Of the first minibatch; nothing is kept."""
    trainer.accumulate(trainer.minibatches(batch_part_of(0, rank, ranks))[0])
    found = {}
    for name, parameter in trainer.policy.trainable():
        grad: Any = parameter.grad
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
        assert grad.dtype == torch.float32
        parameter.grad = None
    return found


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    results: dict[Any, dict[str, Any]] = {}
    with process_group(folder, rank, RANKS):
        for sharing, case in [*EQUAL, (HALF, "batch")]:
            team = make_team("cpu", sharing.together)
            assert team is None or team.index == rank % sharing.together
            seen: list[int] = []

            def note(pack: Pack, *_: object, seen: list[int] = seen) -> None:
                seen.extend(pack.members)

            config = configured(case, sharing)
            mesh = make_mesh(config, "cpu", RANKS)
            trainer = Trainer(config, Path(folder), last_step=STEPS, mesh=mesh, team=team)
            trainer.observed_by(note)
            whose = rank // sharing.together, RANKS // sharing.together
            first = gradient(trainer, *whose)
            seen.clear()
            if sharing == HALF:
                results[tuple(sharing), case] = {"gradient": first}
                continue

            metrics = trained(trainer, *whose)
            found: dict[str, Any] = {"metrics": metrics, "weights": weights(trainer), "seen": seen, "gradient": first}
            if sharing == COPIES:
                checkpoint.save(Path(folder) / case, trainer.trained(), Meta(STEPS, 0, RANKS), b"", keep=1)
                found["digests"] = tensor_digests(trainer.policy.trainable())
                found["rows"] = [(name, rows.clone(), place.row) for name, rows, place in trainer.policy.export()]
            results[tuple(sharing), case] = found  # plain, as a file of tensors may be
        torch.save(results, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("sharing"))


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[Any, Any]]:
    return results_of_ranks(rank_main, folder, RANKS)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("sharing", "case"), EQUAL)
def test_four_ranks_equal_one(folder: Path, ranks: list[dict[Any, Any]], sharing: Sharing, case: str) -> None:
    trainer = Trainer(configured(case), folder, last_step=STEPS)
    expected = trained(trainer)
    found = [rank[sharing, case] for rank in ranks]
    assert all(each["metrics"] == found[0]["metrics"] for each in found)  # every rank knows the same numbers
    for own, one in zip(found[0]["metrics"], expected, strict=True):
        assert smooth(own) == pytest.approx(smooth(one), rel=2e-4, abs=2e-5)
        assert own["exact/tokens"] == one["exact/tokens"] > 0 and own["exact/unknown"] == one["exact/unknown"] == 0
    assert largest_difference(found[0]["weights"], weights(trainer)) < 3e-5

    observed = [each["seen"] for each in found]
    assert sorted(member for each in observed for member in each) == sorted([*range(8)] * STEPS)
    assert all(not each for rank, each in enumerate(observed) if rank % sharing.together)


def test_gradients_added_up_in_bfloat16_are_those_in_float32_to_one_part_in_a_hundred(
    folder: Path, ranks: list[dict[Any, Any]]
) -> None:
    exact, half = ranks[0][COPIES, "batch"]["gradient"], ranks[0][HALF, "batch"]["gradient"]
    expected = gradient(Trainer(configured("batch"), folder, last_step=STEPS))
    assert largest_difference(exact, expected) < 1e-6
    differs = 0.0
    for name, each in expected.items():
        torch.testing.assert_close(half[name], each, rtol=0, atol=0.01 * float(each.abs().max()))
        differs = max(differs, float((half[name] - each).abs().max()))
    assert differs > 1e-5  # they were added up in another dtype


def test_a_copy_tells_nothing_that_another_has_told(folder: Path, ranks: list[dict[Any, Any]]) -> None:
    """Rows of an export are each one rank's, and digests are those of a single copy."""
    trainer = Trainer(configured("batch"), folder, last_step=STEPS)
    found = [rank[COPIES, "batch"] for rank in ranks]
    assert [sum(len(rows) for _, rows, _ in each["rows"]) > 0 for each in found] == [True, True, False, False]
    whole = {name: rows for name, rows, _ in trainer.policy.export()}
    pieces: dict[str, list[Tensor]] = {name: [] for name in whole}
    for each in found:
        for name, rows, _ in each["rows"]:
            pieces[name].append(rows)
    assert {name: torch.cat(rows).shape for name, rows in pieces.items()} == {
        name: each.shape for name, each in whole.items()
    }
    assert all(each["digests"] == found[0]["digests"] for each in found)

    own = {name.removeprefix("policy."): each for name, each in found[0]["weights"].items()}
    assert found[0]["digests"] == tensor_digests(own.items())


def test_one_rank_continues_what_copies_saved(folder: Path, ranks: list[dict[Any, Any]], tmp_path: Path) -> None:
    with process_group(tmp_path) as mesh:
        trainer = Trainer(configured("batch"), folder, last_step=STEPS, mesh=mesh)
        checkpoint.load(folder / "batch" / f"step-{STEPS}", trainer.trained())
        assert largest_difference(weights(trainer), ranks[0][COPIES, "batch"]["weights"]) == 0


@pytest.mark.parametrize("field", ["context_parallel", "copies"])
def test_ranks_that_cannot_be_shared_evenly_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field}=3 does not divide ranks=4; set one of them"):
        load_config(None, ["learner.ranks=4", f"learner.{field}=3"])
