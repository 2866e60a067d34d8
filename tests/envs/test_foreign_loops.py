"""Agents that own their loop, in a real environment server; the test plays broker, proxy and supervisor."""

from __future__ import annotations

import socket

import psutil
import pytest

from rl.wire.messages import (
    NO_OPINION,
    CancelTickets,
    Generate,
    Generated,
    Grown,
    TicketCancelled,
    TicketFailed,
    Trajectory,
    Version,
)
from rollout.broker.validation import fault
from tests.conftest import MakeRun
from tests.envs.harness import ServerPeers, generated, ticket
from tests.rollout.trajectories import reply_columns

LOOP = ("env.name=tests.envs.openai_loop:LoopFamily", "chat.parser=plain", "env.episodes_per_server=8")


def counting(request: Generate) -> Generated:
    return generated(request, [50 + len(request.prompt_ids), 8])


def silent(request: Generate) -> None:
    return None


def test_a_loop_of_the_sdk_is_one_sequence_and_its_responses_are_rewarded(make_run: MakeRun) -> None:
    with ServerPeers(make_run(*LOOP), counting) as peers:
        for ticket_id in (1, 2):
            peers.send(ticket(ticket_id))
        peers.until(lambda: len(peers.ended()) == 2, "two trajectories")

        for ticket_id, result in peers.ended().items():
            assert isinstance(result, Trajectory)
            assert not fault(result, ticket(ticket_id), Version(0, 3), 1000)
            (sequence,) = result.sequences
            assert sequence.token_ids.tolist() == [ticket_id + 2, 3, 4, 53, 8, 9, 56, 8, 9, 59, 8]
            assert [turn.reward for turn in sequence.turns] == [0.25, 0.25, 1.25]
            assert result.reward == 1.75 and result.success and result.stop_reason == "done"
            assert result.info["asked"] == 3 and result.info["drift_none"] == 1

        listening = [c for c in psutil.Process(peers.process.pid).net_connections("inet") if c.status == "LISTEN"]
        assert [connection.laddr.ip for connection in listening] == ["127.0.0.1"]
        port = listening[0].laddr.port
        assert peers.stop() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)


def test_a_held_out_set_of_an_agent_has_its_own_options_and_metrics(make_run: MakeRun) -> None:
    """Held-out tasks alternate: the second is the set's first, which is played with one turn."""
    with ServerPeers(make_run(*LOOP, "eval.sets={short: {turns: 1}}"), counting) as peers:
        for each in (ticket(1), ticket(2, kind="eval", task_index=0), ticket(3, kind="eval", task_index=1)):
            peers.send(each)
        peers.until(lambda: len(peers.ended()) == 3, "three trajectories")
        trained, own, short = (peers.ended()[ticket_id] for ticket_id in (1, 2, 3))
        assert isinstance(trained, Trajectory) and isinstance(own, Trajectory) and isinstance(short, Trajectory)
        assert [each.label for each in (trained, own, short)] == ["", "own", "short"]
        assert [len(each.turns) for each in (trained, own, short)] == [3, 3, 1]
        assert (trained.info["asked"], own.info["own/asked"], short.info["short/asked"]) == (3, 3, 1)


def test_a_history_that_branches_is_several_sequences(make_run: MakeRun) -> None:
    with ServerPeers(make_run(*LOOP, "env.options.does=branch"), counting) as peers:
        peers.send(ticket(1))
        peers.until(lambda: len(peers.ended()) == 1, "the trajectory")
        result = peers.ended()[1]
        assert isinstance(result, Trajectory) and not fault(result, ticket(1), Version(0, 3), 1000)
        assert [sequence.shared for sequence in result.sequences] == [0, 5]
        assert [len(sequence.turns) for sequence in result.sequences] == [2, 1]
        assert result.reward == 1.75


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("unsure", NO_OPINION),
        ("broken", "environment: run answered the reward nan"),
        ("ungraded", "grade raised ValueError: no rubric"),
        ("crash", "environment: run raised KeyError: 'it cannot parse the answer'"),  # a retry would spare the answer
    ],
)
def test_an_agent_whose_reward_is_not_known_ends_its_ticket_without_one(make_run: MakeRun, does: str, why: str) -> None:
    with ServerPeers(make_run(*LOOP, f"env.options.does={does}"), counting) as peers:
        peers.send(ticket(1))
        peers.until(lambda: len(peers.ended()) == 1, "the trajectory")
        result = peers.ended()[1]
        assert isinstance(result, Trajectory) and not fault(result, ticket(1), Version(0, 3), 1000)
        assert (result.unrewarded, result.reward) == (why, 0.0) and len(result.turns) == 3


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("raise", "run raised RuntimeError: the agent broke"),
        ("nothing", "run asked the model for nothing"),
        ("shout", "run rewarded 'resp-77', which is no response of this episode"),
    ],
)
def test_an_agent_that_fails_fails_its_ticket_alone(make_run: MakeRun, does: str, why: str) -> None:
    with ServerPeers(make_run(*LOOP, f"env.options.does={does}"), counting) as peers:
        peers.send(ticket(1))
        peers.until(lambda: len(peers.ended()) == 1, "the failure")
        result = peers.ended()[1]
        assert isinstance(result, TicketFailed) and why in result.reason
        assert peers.process.poll() is None


def test_an_agent_that_breaks_over_a_generation_that_failed_is_tried_again(make_run: MakeRun) -> None:
    """The second turn fails on the generator: the client's exception is no failure of the reward."""

    def fails_later(request: Generate) -> Generated:
        if len(request.prompt_ids) == 3:
            return counting(request)
        return generated(request, [], "error", error="the generator broke")

    with ServerPeers(make_run(*LOOP), fails_later) as peers:
        peers.send(ticket(1))
        peers.until(lambda: len(peers.ended()) == 1, "the failure")
        result = peers.ended()[1]
        assert isinstance(result, TicketFailed) and "the generator broke" in result.reason


def test_an_agent_reads_along_before_its_answer_is_there(make_run: MakeRun) -> None:
    with ServerPeers(make_run(*LOOP, "env.options.does=read"), silent) as peers:
        peers.send(ticket(1))
        peers.until(lambda: bool(peers.requests), "the request")
        (request,) = peers.requests
        assert request.stream
        peers.reply(Grown({request.request_id: (0, reply_columns([50, 51], -0.5, 3))}))

        peers.until(lambda: bool(peers.aborts), "the end of an agent that has read enough")
        peers.reply(generated(request, [50, 51, 52], "abort"))
        peers.until(lambda: len(peers.ended()) == 1, "the failure")
        result = peers.ended()[1]
        assert isinstance(result, TicketFailed) and "it has read 50 51" in result.reason


def test_deadlines_and_cancels_end_what_runs(make_run: MakeRun) -> None:
    with ServerPeers(make_run(*LOOP), silent) as peers:
        peers.send(ticket(1, deadline_s=10.0))
        peers.send(ticket(2))
        peers.until(lambda: len(peers.requests) == 2, "both requests")
        asked = {request.session: request.request_id for request in peers.requests}
        peers.send(CancelTickets([2]))
        peers.until(lambda: len(peers.aborts) == 2, "both aborts")
        assert not peers.results  # a ticket ends after its generation has

        for request in peers.requests:
            peers.reply(generated(request, [5], "abort"))
        peers.until(lambda: len(peers.ended()) == 2, "both ends")
        ended = peers.ended()
        assert isinstance(ended[1], TicketFailed) and isinstance(ended[2], TicketCancelled)
        assert set(peers.aborts) == set(asked.values())
