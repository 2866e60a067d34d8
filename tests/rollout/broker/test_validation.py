"""Nothing that cannot be true is accepted from an environment server."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rl.wire.messages import (
    BatchRequest,
    EvalRequest,
    FirstToken,
    Message,
    ProtocolError,
    Published,
    SaveRequest,
    StillSampling,
    Ticket,
    Trajectory,
    Turn,
    Usage,
    Version,
)
from rollout.broker.validation import HIGHEST_LOGP, NOT_LIVE, check_report, check_wish, fault, vocabulary_of
from tests.conftest import MakeRun
from tests.rollout.broker.corruptions import CORRUPTIONS
from tests.rollout.trajectories import make_trajectory, with_sequence

VOCABULARY = 100
NEWEST = 6
TICKET = Ticket(7, 21, 10, 3, Version(0, 3))


def good() -> Trajectory:
    """Two turns with an observation between them, sampled by versions 3 to 5."""
    turns = [Turn(2, 4, 0.25, 0.1, 0.2, "stop", 0), Turn(6, 9, 0.5, 0.1, 0.2, "stop", 1)]
    return replace(
        with_sequence(
            make_trajectory(TICKET, 1, 1.0, tokens=7),
            turns,
            loss_mask=np.array([0, 0, 1, 1, 0, 0, 1, 1, 1], np.uint8),
            policy_version=np.array([-1, -1, 3, 4, -1, -1, 4, 5, 5], np.int32),
            logp_behavior=np.array([0, 0, -1, 0, 0, 0, -2, -30, HIGHEST_LOGP / 2], np.float32),
        ),
        reward=0.75,
        info={"legal": -2.5},
    )


def refused(trajectory: Trajectory) -> str:
    return fault(trajectory, TICKET, Version(1, NEWEST), VOCABULARY)


def test_a_good_trajectory_has_no_fault() -> None:
    assert refused(good()) == ""
    newest = good().sequence.policy_version.copy()
    newest[-1] = NEWEST
    assert refused(with_sequence(good(), policy_version=newest)) == ""


@pytest.mark.parametrize("field", CORRUPTIONS)
@given(pick=st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_a_trajectory_wrong_in_one_field_is_refused(field: str, pick: random.Random) -> None:
    assert refused(CORRUPTIONS[field](good(), pick, VOCABULARY))


def test_an_episode_that_never_asked_the_model_is_refused() -> None:
    read = {name: values[:2] for name, values in good().sequence.columns.items()}
    never = replace(
        good(), sequences=[replace(good().sequence, columns=read, turns=[])], tokens_generated=0, reward=0.0
    )
    assert refused(never) == "loss_mask: no token was generated"
    empty = {name: values[:0] for name, values in read.items()}
    assert refused(replace(never, sequences=[replace(never.sequence, columns=empty)]))


@pytest.mark.parametrize(
    ("versions", "what"),
    [
        ([3, 4, 4, 5, 4], "policy_version goes back from 5"),
        ([2, 4, 4, 5, 5], "policy_version 2 is older than its ticket's, 3"),
        ([3, 4, 4, 5, 7], "policy_version 7 does not exist yet: the newest is 6"),
    ],
)
def test_versions_lie_between_the_tickets_and_the_newest_and_never_go_back(versions: list[int], what: str) -> None:
    column = good().sequence.policy_version.copy()
    column[column >= 0] = versions
    wrong = with_sequence(good(), policy_version=column)
    assert refused(wrong).startswith(what)

    # Numbers of another timeline say nothing here: the core ends such a group as stale.
    other_timeline = refused(replace(wrong, timeline=1))
    assert bool(other_timeline) == (versions != sorted(versions))


def test_the_reason_names_the_field() -> None:
    sequence = good().sequence
    without = {name: values for name, values in sequence.columns.items() if name != "logp_behavior"}
    assert "'logp_behavior' is missing" in refused(replace(good(), sequences=[replace(sequence, columns=without)]))
    unknown = with_sequence(good(), teacher_logp=np.zeros(9, np.float32))
    assert refused(unknown).startswith("column 'teacher_logp' is not registered") and "algo.columns" in refused(unknown)
    learners = with_sequence(good(), logp_reference=np.zeros(9, np.float32))  # never crosses a socket
    assert "'logp_reference' is not registered for this place" in refused(learners)
    assert refused(replace(good(), group_id=11)) == "group_id 11: its ticket is for 10"
    assert refused(replace(good(), reward=1e300)).startswith("reward 1e+300")


@pytest.mark.parametrize("config", [{"vocab_size": 151_936}, {"text_config": {"vocab_size": 151_936}}])
def test_the_vocabulary_is_the_models(make_run: MakeRun, tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = make_run()
    assert vocabulary_of(run.model_copy(update={"model_folder": tmp_path})) == 151_936
    assert vocabulary_of(run.model_copy(update={"model_folder": None})) == 2**31


def test_a_trajectory_without_a_live_ticket_is_of_no_use() -> None:
    assert fault(good(), None, Version(1, NEWEST), VOCABULARY) == NOT_LIVE


def test_a_column_of_the_sample_takes_no_other_ones_place() -> None:
    logp = np.full(9, 50, np.float32)
    assert "'logp_behavior' is not registered for this place" in refused(
        replace(good(), columns={"logp_behavior": logp})
    )
    short = with_sequence(good(), loss_mask=np.ones(3, np.uint8))
    assert refused(replace(short, columns={"loss_mask": good().sequence.loss_mask})).startswith(
        "loss_mask is uint8(3,)"
    )


@pytest.mark.parametrize("timeline", [-1, 2, 99])
def test_the_timeline_lies_between_the_tickets_and_the_newest(timeline: int) -> None:
    assert refused(replace(good(), timeline=timeline)).startswith(f"timeline {timeline}")


def test_more_tokens_than_an_episode_can_sample_are_refused() -> None:
    assert refused(replace(good(), tokens_generated=2**62)).startswith("tokens_generated")


@pytest.mark.parametrize(
    "message",
    [
        Usage(1, 45_000_000_000),
        Usage(1, -1),
        FirstToken(1, 2, Version(0, 6)),
        FirstToken(1, 2, Version(1, 0)),
        FirstToken(1, 2, Version(0, -3)),
    ],
    ids=repr,
)
def test_what_no_proxy_reports_is_refused(message: Message) -> None:
    with pytest.raises(ProtocolError, match=type(message).__name__):
        check_report(message, Version(0, 5), 4096)


def test_what_a_proxy_reports_is_taken() -> None:
    for message in (Usage(1, 0), Usage(1, 5 * 4096, lost=True), FirstToken(1, 2, Version(0, 5)), StillSampling()):
        check_report(message, Version(0, 5), 4096)


@pytest.mark.parametrize(
    "message",
    [
        BatchRequest(2**62),
        BatchRequest(-1),
        Published(Version(0, 8)),
        Published(Version(-1, 5)),
        EvalRequest(Version(0, 5), 2**62),
        EvalRequest(Version(0, 5), 0),
        EvalRequest(Version(0, 9), 4),
        SaveRequest(Version(0, 4)),
        SaveRequest(Version(0, 5), newest=6),
        Usage(1, 5),
    ],
    ids=repr,
)
def test_what_no_learner_asks_for_is_refused(message: Message) -> None:
    """At version 5, with the batches before 7 assembled."""
    with pytest.raises(ProtocolError, match=f"{type(message).__name__}.* of the learner, at version 5"):
        check_wish(message, 5, 7, 16)


def test_what_a_learner_asks_for_is_taken() -> None:
    """One that was killed begins behind, and publishes again what it had published."""
    wishes: list[Message] = [BatchRequest(3), BatchRequest(7), Published(Version(1, 3)), Published(Version(0, 6))]
    for message in (*wishes, EvalRequest(Version(0, 5), 16), SaveRequest(Version(0, 6), newest=4)):
        check_wish(message, 5, 7, 16)
