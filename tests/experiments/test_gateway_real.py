"""What `python -m experiments.gateway --real` compares, without an engine: it must not pass what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from msgspec.structs import replace

from experiments.gateway.fuzz import FIRST_VERSION, check
from experiments.gateway.real import LARGEST_DIFFERENCE, EngineClient, Learner, RealRecords, compare, make_model
from experiments.gateway.tokenizers import special_tokens, template_names
from rl.models.policy import load_policy
from rl.wire.messages import Generate, TokenSequence, Version
from rl.wire.sequences import Turn
from rollout.generator.engines.base import Engine, Sampled
from tests.experiments.test_gateway_fuzz import played


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Learner:
    folder = tmp_path_factory.mktemp("real")
    tokenizers = make_model(folder)

    everything = set().union(*(special_tokens(name) for name in template_names()))
    for tokenizer in tokenizers.values():  # one vocabulary: an id means the same in every template
        assert all(tokenizer.encode(each) == tokenizers["qwen3"].encode(each) for each in everything)
        assert all(len(tokenizer.encode(each)) == 1 for each in everything)

    made = Learner(load_policy(folder / "model"))
    made.step(FIRST_VERSION)
    made.step(FIRST_VERSION + 1)
    return made


@pytest.fixture
def exact(learner: Learner, tmp_path: Path) -> list[TokenSequence]:
    """Sessions whose log-probabilities are the learner's, the second half of each sequence by the second version."""
    sequences = []
    for sequence in played(tmp_path)[0]:
        ids = sequence.token_ids.tolist()
        version = np.full(len(ids), FIRST_VERSION, np.int32)
        version[len(ids) // 2 :] += 1
        first, second = (learner.logp(ids, FIRST_VERSION + age).numpy() for age in range(2))
        logp = np.where(version == FIRST_VERSION, first, second).astype(np.float32)
        sequences.append(
            replace(sequence, columns=sequence.columns | {"policy_version": version, "logp_behavior": logp})
        )
    return sequences


def changed(sequence: TokenSequence, name: str, place: int, change: float) -> TokenSequence:
    column = sequence.columns[name].copy()
    column[place] += np.array(change, column.dtype)
    return replace(sequence, columns=sequence.columns | {name: column})


def test_every_trained_token_is_compared_with_its_own_version(learner: Learner, exact: list[TokenSequence]) -> None:
    found = compare(learner, exact)
    assert not found.wrong and found.largest <= LARGEST_DIFFERENCE
    assert found.tokens == sum(int(sequence.loss_mask.sum()) for sequence in exact) > 50
    assert found.versions == {FIRST_VERSION, FIRST_VERSION + 1} and found.of_two_versions > 0


def test_a_wrong_log_probability_or_version_is_reported(learner: Learner, exact: list[TokenSequence]) -> None:
    place = exact[0].turns[0].start
    for change in (1e-3, np.nan):
        found = compare(learner, [changed(exact[0], "logp_behavior", place, change), *exact[1:]])
        assert len(found.wrong) == 1 and found.wrong[0].startswith("sequence 0:")

    age = int(exact[0].policy_version[place]) - FIRST_VERSION
    assert compare(learner, [changed(exact[0], "policy_version", place, 1 - 2 * age), *exact[1:]]).wrong
    masked = int(np.flatnonzero(exact[0].loss_mask == 0)[1])  # nobody trains it
    assert not compare(learner, [changed(exact[0], "logp_behavior", masked, 1.0), *exact[1:]]).wrong


class TwoSteps:
    """An engine that tells of two tokens before it answers three."""

    async def generate(self, request: Generate, progress: Callable[[Sampled], None]) -> Sampled:
        answer = Sampled([5, 6, 7], [-0.5, -0.6, -0.7], [3, 3, 4], "stop", tokens_generated=3)
        progress(Sampled(answer.token_ids[:2], answer.logp[:2], answer.policy_version[:2]))
        await asyncio.sleep(0)
        return answer


def test_a_token_that_the_engine_did_not_answer_is_reported() -> None:
    prompt = np.array([1, 2], np.int32)
    read: list[tuple[int, list[int]]] = []

    async def go() -> RealRecords:
        records = RealRecords(EngineClient(cast(Engine, TwoSteps())).client)
        request = Generate(0, 1, "train", Version(0, 3), prompt, 8, 1.0, 1.0, [7])
        await records.generate(request, read=lambda place, ids: read.append((place, ids)))
        return records

    records = asyncio.run(go())
    assert read == [(0, [5, 6])] and records.tokens == 3

    columns: dict[str, np.ndarray] = {
        "token_ids": np.array([1, 2, 5, 6, 7], np.int32),
        "logp_behavior": np.array([0, 0, -0.5, -0.6, -0.7], np.float32),
        "policy_version": np.array([-1, -1, 3, 3, 4], np.int32),
        "loss_mask": np.array([0, 0, 1, 1, 1], np.uint8),
    }
    right = TokenSequence(columns=columns, turns=[Turn(2, 5, 0.0, 0.0, 0.0, "stop", 0)])
    assert check([right], records) == ""
    for name in ("token_ids", "logp_behavior", "policy_version"):
        assert "were not sampled" in check([changed(right, name, 3, 1)], records), name
    assert "outside the turns" in check([changed(right, "loss_mask", 1, 1)], records)
