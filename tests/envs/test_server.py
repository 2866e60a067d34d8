"""The environment server as a real process; the test plays broker, proxy and supervisor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from envs.math import arithmetic
from rl.wire.messages import (
    AckTickets,
    CancelTickets,
    Generate,
    Generated,
    TicketCancelled,
    TicketFailed,
    Trajectory,
    Version,
)
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.envs.harness import ServerPeers, generated, ticket
from tests.envs.model_folder import make_model_folder

SYNTHETIC = ("env.name=synthetic", "sampling.seeded=true", "env.max_turns=8")


def even(request: Generate) -> Generated:
    return generated(request, [2, 4, 7, 8])


def silent(request: Generate) -> None:
    return None


def test_multi_turn_synthetic(make_run: MakeRun) -> None:
    run = make_run(*SYNTHETIC, "env.options.turns=3", "env.options.prompt_tokens=5", "env.episodes_per_server=7")
    with ServerPeers(run, even) as peers:
        assert peers.hello is not None and peers.hello.capacity == 7 and peers.hello.seq == 0
        for ticket_id in (1, 2):
            peers.send(ticket(ticket_id, task_index=4, seed=11, temperature=0.7, group_id=9))

        peers.until(lambda: len(peers.ended()) == 2, "two trajectories")
        first = peers.ended()[1]
        second = peers.ended()[2]
        assert isinstance(first, Trajectory) and isinstance(second, Trajectory)
        assert [first.seq, second.seq] in ([1, 2], [2, 1])
        assert first.stop_reason == "done" and first.tokens_generated == 12 and len(first.sequence.turns) == 3
        # prompt 5 · turn 4 · observation 4 · turn 4 · observation 4 · turn 4
        assert [(turn.start, turn.end) for turn in first.sequence.turns] == [(5, 9), (13, 17), (21, 25)]
        np.testing.assert_array_equal(first.sequence.loss_mask, [0] * 5 + ([1] * 4 + [0] * 4) * 2 + [1] * 4)
        np.testing.assert_array_equal(first.sequence.token_ids[first.sequence.loss_mask == 1], [2, 4, 7, 8] * 3)

        np.testing.assert_array_equal(first.sequence.policy_version, np.where(first.sequence.loss_mask == 1, 3, -1))
        np.testing.assert_allclose(first.sequence.logp_behavior, np.where(first.sequence.loss_mask == 1, -0.5, 0))
        assert first.reward == pytest.approx(0.75)
        np.testing.assert_array_equal(
            first.sequence.token_ids, second.sequence.token_ids
        )  # same task, same generations
        own = [request for request in peers.requests if request.session == 1]
        assert [len(request.prompt_ids) for request in own] == [5, 13, 21]

        np.testing.assert_array_equal(own[2].prompt_ids, first.sequence.token_ids[:21])
        assert len({request.seed for request in own}) == 3
        assert [request.seed for request in own] == [r.seed for r in peers.requests if r.session == 2]
        assert {(r.temperature, r.priority, r.version) for r in own} == {(0.7, 9, Version(0, 3))}
        stats = {"episodes_done": 2.0, "episodes_running": 0.0, "unacknowledged": 0.0}
        peers.until(lambda: peers.heartbeat is not None and stats.items() <= peers.heartbeat.stats.items(), "all ended")
        assert peers.stop() == 0


@pytest.fixture
def math_run(make_run: MakeRun, tmp_path: Path) -> RunFile:
    folder = make_model_folder(tmp_path / "model")
    return make_run("env.name=math", "sampling.max_tokens=64", model_folder=folder)


def test_math_end_to_end_without_torch(math_run: RunFile) -> None:
    assert math_run.model_folder is not None
    tokenizer = Tokenizer.from_file(str(math_run.model_folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    answers = {1: "\\boxed{%s}", 2: "%s", 3: "\\boxed{%s} no, \\boxed{0}", 4: "\\boxed{%s}"}

    def answer(request: Generate) -> Generated:
        assert end in request.stop_token_ids
        problem = arithmetic.problem("train" if request.kind == "train" else "eval", request.session, 0)
        ids = tokenizer.encode(answers[request.session] % problem.answer, add_special_tokens=False).ids
        return generated(request, [*ids, end])

    with ServerPeers(math_run, answer) as peers:
        for ticket_id in answers:
            peers.send(ticket(ticket_id, kind="eval" if ticket_id == 4 else "train"))
        peers.until(lambda: len(peers.ended()) == 4, "four trajectories")
        ended = peers.ended()
        rewards = {key: result.reward for key, result in ended.items() if isinstance(result, Trajectory)}
        assert rewards == {1: 1.0, 2: 0.0, 3: 0.0, 4: 1.0}
        first = ended[1]
        assert isinstance(first, Trajectory) and first.stop_reason == "done" and first.info["boxed"] == 1

        text = tokenizer.decode(first.sequence.token_ids.tolist(), skip_special_tokens=False)
        question = arithmetic.problem("train", 1, 0).question
        assert text.startswith(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n\\boxed")
        assert (
            text.endswith("}<|im_end|>") and first.sequence.token_ids[-1] == end and first.sequence.loss_mask[-1] == 1
        )
        mapped = Path(f"/proc/{peers.process.pid}/maps").read_text()
        assert "libtorch" not in mapped and "/torch/" not in mapped
        assert psutil.Process(peers.process.pid).children() == []  # plain numbers need no verifier worker


def test_cancel_waits_for_the_abort(make_run: MakeRun) -> None:
    with ServerPeers(make_run(*SYNTHETIC, "env.options.turns=2"), silent) as peers:
        peers.send(ticket(1))
        peers.until(lambda: len(peers.requests) == 1, "the request")
        peers.send(CancelTickets([1, 99]))
        peers.until(lambda: peers.aborts == [peers.requests[0].request_id], "the abort")
        peers.run_for(0.3)
        assert peers.results == []

        peers.reply(generated(peers.requests[0], [5, 6], "abort"))
        peers.until(lambda: bool(peers.results), "the cancel's answer")
        assert peers.results == [TicketCancelled(0, 0, 1, 1, turns=1)]
        # A cancel together with its ticket, and one of a finished episode: one end each.
        peers.answer = even
        peers.send(ticket(2))
        peers.send(CancelTickets([2]))
        peers.send(ticket(3))

        peers.until(lambda: {2, 3} <= peers.ended().keys(), "both ends")
        peers.send(CancelTickets([2, 3]))
        peers.run_for(0.3)
        assert sorted(result.ticket_id for result in peers.results) == [1, 2, 3]
        assert sorted(result.seq for result in peers.results) == [1, 2, 3]
        assert isinstance(peers.ended()[2], TicketCancelled) and isinstance(peers.ended()[3], Trajectory)
        # Cancelled in its second turn: the broker learns how far it had come.
        peers.answer = lambda request: None if len(request.prompt_ids) > 16 else even(request)

        peers.send(ticket(4))
        peers.until(lambda: sum(request.session == 4 for request in peers.requests) == 2, "the second turn")
        peers.send(CancelTickets([4]))
        peers.until(lambda: bool(peers.aborts[1:]), "the abort")
        peers.reply(generated(peers.requests[-1], [], "abort"))
        peers.until(lambda: 4 in peers.ended(), "the cancel's answer")
        cancelled = peers.ended()[4]
        assert isinstance(cancelled, TicketCancelled) and cancelled.turns == 2


def test_failures_stay_with_their_ticket(make_run: MakeRun) -> None:
    """A hung environment, a raising one, a generator's error and a prompt too long; the neighbour goes on."""
    short = ("sampling.max_tokens=8", "generator.max_model_len=64", "env.step_deadline_s=2")
    run = make_run(*SYNTHETIC, *short, "env.name=tests.envs.faulty:FaultyFamily")

    def answer(request: Generate) -> Generated:
        if request.session == 5:
            return generated(request, [], "error", error="engine is out of luck")
        return even(request)

    kinds = {1: "hang", 2: "raise", 3: "exit", 4: "nan", 5: "fine", 6: "long", 7: "stubborn", 8: "fine"}
    with ServerPeers(run, answer) as peers:
        for ticket_id, index in zip(kinds, range(len(kinds)), strict=True):
            peers.send(ticket(ticket_id, task_index=index))
        peers.until(lambda: len(peers.ended()) == len(kinds), "every end")
        reasons = {key: end.reason for key, end in peers.ended().items() if isinstance(end, TicketFailed)}
        assert reasons.keys() == {1, 2, 3, 5, 6, 7}
        overrun = "environment: step of turn 1 ran past env.step_deadline_s=2"
        assert reasons[1] == reasons[7] == overrun
        assert reasons[2] == "environment: step of turn 1 raised ValueError: on purpose \ufffd"

        assert "SystemExit" in reasons[3]
        unjudged = peers.ended()[4]  # another try would spare the model its answer
        assert isinstance(unjudged, Trajectory) and (unjudged.reward, unjudged.stop_reason) == (0, "done")
        assert unjudged.unrewarded == "environment: step of turn 1 answered the reward nan"
        assert reasons[5] == "generation failed: engine is out of luck"
        assert "prompt of 100 tokens" in reasons[6]
        neighbour = peers.ended()[8]
        assert isinstance(neighbour, Trajectory) and neighbour.reward == 1
        peers.send(ticket(9, task_index=len(kinds) - 1))  # asks how often environments were closed
        peers.until(lambda: 9 in peers.ended(), "the last episode")
        last = peers.ended()[9]
        assert isinstance(last, Trajectory) and last.info == {"closed": float(len(kinds))}
        assert sorted(result.seq for result in peers.results) == list(range(1, 10))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["env.options.start_fails=true"], "RuntimeError: start fails"),
        (
            ["env.options.tools=true", "chat.parser=vllm:hermes", "timeouts.start_s=1"],
            "waited 1 s for parsers.0 to be ready",
        ),
        (["env.options.late=true", "eval.tasks=8"], "eval-on-train"),
    ],
)
def test_a_server_that_cannot_begin_leaves_nothing_behind(
    make_run: MakeRun, tmp_path: Path, changes: list[str], said: str
) -> None:
    folder = tmp_path / "family"
    folder.mkdir()
    faulty = ("env.name=tests.envs.faulty:FaultyFamily", f"env.options.folder={folder}")
    peers = ServerPeers(make_run(*SYNTHETIC, *faulty, *changes), even)
    try:
        peers.until(lambda: peers.fatal is not None, "what failed")
        assert peers.process.wait(timeout=240) == 1
    finally:
        peers.__exit__()
    assert peers.fatal is not None and said in peers.fatal.message and peers.hello is None
    assert not list(folder.iterdir())


def test_cancels_and_deadlines_at_the_turn_barrier(make_run: MakeRun) -> None:
    """Two of three have generated and wait; the third hangs in its generation until its deadline ends it."""
    run = make_run(*SYNTHETIC, "rollout.hooks=[turn_barrier]", "env.options.turns=2")
    with ServerPeers(run, lambda request: None if request.session == 3 else even(request)) as peers:
        for ticket_id in (1, 2):
            peers.send(ticket(ticket_id))

        peers.send(ticket(3, deadline_s=5.0))
        peers.until(lambda: len(peers.requests) >= 3, "the requests")
        peers.send(CancelTickets([2]))
        peers.until(lambda: 2 in peers.ended(), "the cancel's answer, from inside the barrier")
        assert isinstance(peers.ended()[2], TicketCancelled) and 1 not in peers.ended()
        assert len(peers.requests) == 3, "nobody takes a second turn while 3 is generating"

        peers.until(lambda: bool(peers.aborts), "the deadline of the third")
        (third,) = (request for request in peers.requests if request.session == 3)
        peers.reply(generated(third, [], "abort"))
        peers.until(lambda: {1, 3} <= peers.ended().keys(), "both ends")
        assert isinstance(peers.ended()[3], TicketFailed)
        first = peers.ended()[1]
        assert isinstance(first, Trajectory) and len(first.sequence.turns) == 2


def test_deadline_of_an_episode(make_run: MakeRun) -> None:
    with ServerPeers(make_run(*SYNTHETIC), silent) as peers:
        peers.send(ticket(1, deadline_s=3.0))
        peers.until(lambda: bool(peers.aborts), "the abort")
        peers.reply(generated(peers.requests[0], [], "abort"))
        peers.until(lambda: bool(peers.results), "the failure")
        (failure,) = peers.results
        assert isinstance(failure, TicketFailed) and failure.reason == "the episode ran past its deadline of 3 s"


def test_sent_again_until_acknowledged(make_run: MakeRun) -> None:
    with ServerPeers(make_run(*SYNTHETIC), even, acknowledge=False) as peers:
        peers.send(ticket(1))
        peers.until(lambda: len(peers.arrived) >= 2, "the repeat")
        first, repeat = peers.arrived[:2]
        assert isinstance(first, Trajectory) and isinstance(repeat, Trajectory)
        assert first.seq == repeat.seq == 1
        np.testing.assert_array_equal(first.sequence.token_ids, repeat.sequence.token_ids)
        peers.send(AckTickets([1]))
        peers.run_for(1.0)  # one more may have been on its way
        arrived = len(peers.arrived)
        peers.run_for(3.5)
        assert len(peers.arrived) == arrived


def test_a_turn_aborted_at_an_update_goes_on(make_run: MakeRun) -> None:
    def answer(request: Generate) -> Generated:
        if request.request_id == 1:
            return generated(request, [2, 3], "abort")
        return generated(request, [4], "length")

    run = make_run(*SYNTHETIC, "env.options.turns=1", "env.options.prompt_tokens=5", "sampling.max_tokens=3")
    with ServerPeers(run, answer) as peers:
        peers.send(ticket(1))
        peers.until(lambda: bool(peers.results), "the trajectory")
        (result,) = peers.results
        assert isinstance(result, Trajectory) and result.stop_reason == "length" and result.tokens_generated == 3
        assert result.sequence.token_ids[5:].tolist() == [2, 3, 4] and len(result.sequence.turns) == 1
        assert [request.max_tokens for request in peers.requests] == [3, 1]
        assert peers.requests[0].seed != peers.requests[1].seed


def test_killed_verifier_worker_is_replaced_and_none_is_orphaned(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    data = tmp_path / "roots.jsonl"
    data.write_text('{"question": "Simplify $\\\\sqrt{12}$.", "answer": "2\\\\sqrt{3}"}\n' * 20)
    run = make_run(
        f"env.options.source={data}", "env.options.eval_count=2", "sampling.max_tokens=64", model_folder=folder
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    forms = ["\\sqrt{3}\\cdot 2", "\\sqrt{3}+\\sqrt{3}", "\\frac{6}{\\sqrt{3}}"]

    def answer(request: Generate) -> Generated:
        return generated(request, tokenizer.encode(f"\\boxed{{{forms[request.session]}}}").ids)

    with ServerPeers(run, answer) as peers:
        server = psutil.Process(peers.process.pid)
        peers.send(ticket(0))
        peers.until(lambda: 0 in peers.ended(), "the first verdict")
        (worker,) = server.children()
        worker.kill()
        peers.send(ticket(1))
        peers.until(lambda: 1 in peers.ended(), "the second verdict")
        results = [peers.ended()[number] for number in range(2)]

        assert [result.reward for result in results if isinstance(result, Trajectory)] == [1.0, 1.0]
        (successor,) = server.children()
        assert successor.pid != worker.pid
        successor.suspend()  # not even a hung one outlives the server
        peers.send(ticket(2))
        peers.run_for(0.2)
        peers.process.kill()
        _, alive = psutil.wait_procs([successor], timeout=60)
        assert not alive


def test_stop_ends_running_episodes_at_once(make_run: MakeRun) -> None:
    run = make_run(*SYNTHETIC, "env.options.hang_probability=1", "env.options.turns=2")
    with ServerPeers(run, even) as peers:
        for ticket_id in range(20):
            peers.send(ticket(ticket_id))
        peers.until(lambda: len(peers.requests) == 20, "the requests")
        assert peers.stop() == 0


def test_a_malformed_message_costs_nobody_an_episode(make_run: MakeRun) -> None:
    with ServerPeers(make_run(*SYNTHETIC), even) as peers:
        peers.send(Version(0, 0))  # type: ignore[arg-type]
        peers.send(ticket(1, task_index=3))
        peers.until(lambda: bool(peers.results), "the trajectory")
        assert peers.fatal is None and isinstance(peers.results[0], Trajectory)
