"""The episode loop alone, on an event loop, with a scripted generator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from msgspec import structs

from experiments.gateway.agents import TOOLS
from experiments.gateway.tokenizers import make_folder
from rl.config.schema import load_config
from rl.config.section import NoOptions
from rl.config.seeds import turn_seed
from rl.store.samples import Sample, sample_of
from rl.wire.messages import NO_OPINION, Abort, Generate, Generated, Trajectory, Version
from rl.wire.process import WaitExpired
from rollout.episodes.environment import ChatMessage, Opening, RewardFailed, Step, TurnText
from rollout.episodes.episode import EpisodeContext, Progress, run_episode
from rollout.episodes.generation import GenerationClient
from rollout.episodes.hooks import EpisodeHooks
from rollout.episodes.parsing import DistantParser, HermesParser, ParsedTurn, SampledText, TurnReader, make_reader
from rollout.episodes.tokenizer import ChatTokenizer, IdTokenizer
from rollout.episodes.turn_barrier import TurnBarrier
from rollout.episodes.turns import EpisodeFailed
from tests.envs.harness import generated, ticket


class Scripted:
    """Two ids of observation a turn; done after `turns`. Counts its closes."""

    def __init__(self, turns: int = 99, observation: str = "7 7") -> None:
        self.turns = turns
        self.observation = observation
        self.actions: list[str] = []
        self.cut: list[bool] = []
        self.closes = 0

    async def reset(self, task: Any) -> list[ChatMessage]:
        return [ChatMessage("user", "1 2 3")]

    async def step(self, action: str, truncated: bool = False) -> Step:
        self.actions.append(action)
        self.cut.append(truncated)
        done = len(self.actions) >= self.turns
        return Step([ChatMessage("user", self.observation)], 0.5, done, done, {"n": len(self.actions)})

    async def close(self) -> None:
        self.closes += 1


class Judged(Scripted):
    """Knows what the work is worth only when asked."""

    async def finish(self) -> Step:
        assert not self.closes
        return Step([], 4.0, True, True, {"asked": 1.0})


def episode_context(generate: Callable[[Generate], Coroutine[Any, Any, Generated]], *overrides: str) -> EpisodeContext:
    small = ("sampling.max_tokens=4", "generator.max_model_len=20", "env.max_turns=9")
    return EpisodeContext(load_config(None, [*small, *overrides]), IdTokenizer(), generate)


def run(environment: Scripted, context: EpisodeContext, **fields: Any) -> Trajectory:
    return asyncio.run(asyncio.wait_for(run_episode(ticket(5, **fields), lambda: environment, None, context), 10))


async def two_ids(request: Generate) -> Generated:
    return generated(request, [8, 9][: request.max_tokens])


async def as_many_as_allowed(request: Generate) -> Generated:
    return generated(request, [8] * request.max_tokens, "length")


def test_done() -> None:
    environment = Scripted(turns=2)
    result = run(environment, episode_context(two_ids))
    assert result.stop_reason == "done" and result.reward == 1.0 and result.info == {"n": 2.0}
    assert result.sequence.token_ids.tolist() == [1, 2, 3, 8, 9, 7, 7, 8, 9]  # no observation after the end
    assert [turn.reward for turn in result.sequence.turns] == [0.5, 0.5]
    assert environment.actions == ["8 9", "8 9"] and environment.closes == 1
    assert (result.ticket_id, result.sample_id, result.kind, result.timeline) == (5, 5, "train", 0)
    assert result.sequence.oldest_version == 3


@pytest.mark.parametrize(
    ("turns", "generate", "overrides", "stop_reason", "tokens"),
    [
        (1, as_many_as_allowed, (), "length", 7),  # the environment judged a response that was cut
        (9, two_ids, ("env.max_turns=2",), "max_turns", 9),
        (9, two_ids, (), "context", 20),  # 3 + 4·4 = 19 leaves room for one id, and then for nothing
        (9, as_many_as_allowed, (), "context", 19),  # 3 + 4 + 2 + 4 + 2 + 4 = 19: an observation would pass 19
        (9, as_many_as_allowed, ("generator.max_model_len=16",), "context", 16),  # the third turn is cut at 1 id
    ],
)
def test_stop_reasons(turns: int, generate: Any, overrides: tuple[str, ...], stop_reason: str, tokens: int) -> None:
    environment = Scripted(turns)
    result = run(environment, episode_context(generate, *overrides))
    assert (result.stop_reason, len(result.sequence.token_ids)) == (stop_reason, tokens)
    assert result.sequence.loss_mask[-1] == 1  # never ends on environment text
    assert len(environment.actions) == len(result.sequence.turns) and environment.closes == 1


@pytest.mark.parametrize(
    ("generate", "overrides", "stop_reason"),
    [
        (two_ids, ("env.max_turns=2",), "max_turns"),
        (as_many_as_allowed, (), "context"),  # an observation has no room
        (as_many_as_allowed, ("generator.max_model_len=16",), "context"),  # a turn is cut
    ],
)
def test_an_episode_that_is_cut_is_judged_as_it_stands(
    generate: Any, overrides: tuple[str, ...], stop_reason: str
) -> None:
    judged, unjudged = Judged(), Scripted()
    result = run(judged, episode_context(generate, *overrides))
    *before, last = [turn.reward for turn in result.sequence.turns]
    assert result.stop_reason == stop_reason and result.success and result.info["asked"] == 1
    assert set(before) <= {0.5} and last == 4.5 and result.reward == sum(before) + last

    without = run(unjudged, episode_context(generate, *overrides))
    assert without.stop_reason == stop_reason and not without.success and without.reward > 0
    assert result.sequence.token_ids.tolist() == without.sequence.token_ids.tolist()


def test_an_environment_that_ends_its_episode_itself_is_not_asked_again() -> None:
    result = run(Judged(turns=2), episode_context(two_ids, "env.max_turns=2"))
    assert result.stop_reason == "done" and result.reward == 1.0 and result.success and "asked" not in result.info


def test_what_an_environment_notes_for_people_stays_at_home() -> None:
    class Noting(Judged):
        async def step(self, action: str, truncated: bool = False) -> Step:
            step = await super().step(action, truncated)
            return replace(step, notes={"expected": "42", "read": f"half \ud83d and {'9' * 5000}"})

        async def finish(self) -> Step:
            return replace(await super().finish(), notes={"tests": "1 of 2"})

    progress = Progress()
    context = episode_context(two_ids, "env.max_turns=2")
    played = asyncio.run(run_episode(ticket(5), Noting, None, context, progress))
    assert progress.notes["expected"] == "42" and progress.notes["tests"] == "1 of 2"
    assert progress.notes["read"].startswith("half \ufffd and 999") and len(progress.notes["read"]) == 1000
    assert "notes" not in played.__struct_fields__, "no message carries them"

    kept = sample_of(played, progress.notes)
    assert msgspec.json.decode(msgspec.json.encode(kept), type=Sample).notes == progress.notes


def test_notes_that_are_no_texts_by_name_fail_the_episode() -> None:
    class Noting(Scripted):
        async def step(self, action: str, truncated: bool = False) -> Step:
            return replace(await super().step(action, truncated), notes=cast(Any, ["42"]))

    with pytest.raises(EpisodeFailed, match=r"notes=\['42'\]: they are texts by name"):
        run(Noting(), episode_context(two_ids))


def test_an_environment_is_told_which_turns_were_cut() -> None:
    environment = Scripted(turns=3)
    run(environment, episode_context(as_many_as_allowed, "generator.max_model_len=100"))
    assert environment.cut == [True, True, True]
    environment = Scripted(turns=3)
    run(environment, episode_context(two_ids))
    assert environment.cut == [False, False, False]


def test_seeds_are_a_function_of_ticket_and_turn() -> None:
    seen: list[int | None] = []

    async def generate(request: Generate) -> Generated:
        seen.append(request.seed)
        return generated(request, [8, 9])

    run(Scripted(turns=3), episode_context(generate, "sampling.seeded=true"), seed=21)
    assert seen == [turn_seed(21, turn) for turn in range(3)] and len(set(seen)) == 3
    seen.clear()
    run(Scripted(turns=1), episode_context(generate), seed=21)
    assert seen == [None]


def test_tokens_generated_are_the_generators_count() -> None:
    async def generate(request: Generate) -> Generated:
        answer = generated(request, [8, 9])
        return structs.replace(answer, tokens_generated=5)

    assert run(Scripted(turns=2), episode_context(generate)).tokens_generated == 10


def test_every_request_is_gated_at_the_newest_version_of_its_history() -> None:
    """Of a turn before, of the part of a turn that an abort left, and of the ticket."""
    newest = iter([3, 5, 5, 6])  # generators stand at different versions
    gates: list[Version] = []

    async def generate(request: Generate) -> Generated:
        gates.append(request.version)
        ids, reason = ([8], "abort") if len(gates) == 2 else ([8, 9], "stop")
        answer = generated(request, ids, reason)
        version = np.full(len(ids), next(newest), np.int32)
        return structs.replace(answer, columns=answer.columns | {"policy_version": version})

    result = run(Scripted(turns=3), episode_context(generate))
    assert gates == [Version(0, gate) for gate in (3, 3, 5, 5)]
    versions = result.sequence.policy_version[result.sequence.loss_mask != 0].tolist()
    assert versions == sorted(versions) and result.sequence.oldest_version == 3


async def _no_ids(request: Generate) -> Generated:
    return generated(request, [])


async def _mismatched(request: Generate) -> Generated:
    answer = generated(request, [8, 9])
    return structs.replace(answer, columns=answer.columns | {"logp_behavior": answer.logp_behavior[:1]})


@pytest.mark.parametrize(
    ("generate", "message"), [(_no_ids, "without a token"), (_mismatched, r"logp_behavior is float32\(1,\)")]
)
def test_bad_generations_fail_the_ticket(generate: Any, message: str) -> None:
    environment = Scripted()
    with pytest.raises(EpisodeFailed, match=message):
        run(environment, episode_context(generate))
    assert environment.closes == 1


class Nonsense(Scripted):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    async def step(self, action: str, truncated: bool = False) -> Any:
        return self.answer() if callable(self.answer) else self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "NoneType, not a Step"),
        (Step(["text"], 0.0, False, False), "not a list of ChatMessage"),  # type: ignore[list-item]
        (Step([], 0.0, True, False, {"x": "y"}), "no number"),  # type: ignore[dict-item]
        (Step([], 0.0, True, False, {"speed": float("nan")}), "answered the speed nan"),
        (Step([], 0.5, True, 0.5), "success=0.5: Step.success is True or False"),  # type: ignore[arg-type]
        (lambda: Step([], 0.5, True), "missing 1 required positional argument: 'success'"),  # type: ignore[call-arg]
    ],
)
def test_nonsense_from_an_environment_fails_the_ticket(answer: Any, message: str) -> None:
    environment = Nonsense(answer)
    with pytest.raises(EpisodeFailed, match=message):
        run(environment, episode_context(two_ids))
    assert environment.closes == 1


class Unsure(Scripted):
    """Earns these rewards, turn by turn; a text is why one has failed."""

    def __init__(self, *rewards: Any) -> None:
        super().__init__(turns=len(rewards))
        self.rewards = rewards

    async def step(self, action: str, truncated: bool = False) -> Step:
        step = await super().step(action, truncated)
        earned = self.rewards[len(self.actions) - 1]
        if isinstance(earned, RewardFailed):
            raise earned
        return replace(step, reward=earned)


@pytest.mark.parametrize(
    ("rewards", "earned", "unrewarded"),
    [
        ((None, 0.5), [0.0, 0.5], ""),
        ((0.5, None), [0.5, 0.0], ""),
        ((0.0,), [0.0], ""),
        ((None, None), [0.0, 0.0], NO_OPINION),
        ((0.5, float("nan"), 1.0), [0.5, 0.0], "environment: step of turn 2 answered the reward nan"),
        ((float("inf"),), [0.0], "environment: step of turn 1 answered the reward inf"),
        ((1e7,), [0.0], "environment: step of turn 1 answered the reward 1e+07"),
        ((10**400,), [0.0], "environment: step of turn 1 answered a reward that is no number"),
        (("much",), [0.0], "environment: step of turn 1 answered a reward that is no number"),
        ((0.5, RewardFailed("grade raised KeyError: 3"), 1.0), [0.5, 0.0], "grade raised KeyError: 3"),
        ((6e5, 5e5), [0.0, 0.0], "environment: the rewards of an episode add up to 1.1e+06: at most 1e+06 in size"),
        ((-1e6, -1e6, 1e6), [-1e6, -1e6, 1e6], ""),
        ((-1e6, -1.0), [0.0, 0.0], "environment: the rewards of an episode add up to -1e+06"),
        ((1e6, 1.0, RewardFailed("grade raised KeyError: 3")), [0.0, 0.0, 0.0], "grade raised KeyError: 3"),
    ],
)
def test_a_reward_that_is_not_known_masks_the_episode_and_fails_no_ticket(
    rewards: tuple[Any, ...], earned: list[float], unrewarded: str
) -> None:
    environment = Unsure(*rewards)
    result = run(environment, episode_context(two_ids))
    assert [turn.reward for turn in result.turns] == earned and result.reward == sum(earned)
    assert result.unrewarded.startswith(unrewarded) and bool(result.unrewarded) == bool(unrewarded)
    assert result.stop_reason == "done" and environment.closes == 1


def test_a_verdict_on_demand_may_fail_as_well() -> None:
    class Broken(Judged):
        async def finish(self) -> Step:
            raise RewardFailed("the tests could not be run")

    result = run(Broken(), episode_context(two_ids, "env.max_turns=2"))
    assert (result.unrewarded, result.stop_reason) == ("the tests could not be run", "done")


async def settle() -> None:
    """All that can happen without anything from outside has happened; turns of the loop, not time."""
    for _ in range(200):
        await asyncio.sleep(0)


def test_cancel_aborts_waits_and_closes_once() -> None:
    async def scenario() -> None:
        sent: list[Generate | Abort] = []
        client = GenerationClient(sent.append, abort_deadline_s=60)
        environment = Scripted()
        episode = asyncio.create_task(
            run_episode(ticket(5), lambda: environment, None, episode_context(client.generate))
        )
        while not sent:
            await asyncio.sleep(0.001)

        episode.cancel()
        await settle()
        request, abort = sent
        assert isinstance(request, Generate) and abort == Abort(request.request_id)
        assert not episode.done() and environment.closes == 0 and len(client) == 1

        client.ask_again()  # the proxy has died
        assert sent[2:] == [request, abort]

        client.answered(generated(request, [8], "abort"))
        await asyncio.wait({episode}, timeout=60)
        assert episode.cancelled() and environment.closes == 1 and len(client) == 0

    asyncio.run(scenario())


def test_an_abort_without_an_answer_has_a_name() -> None:
    async def scenario() -> None:
        sent: list[Generate | Abort] = []
        client = GenerationClient(sent.append, abort_deadline_s=0.05)
        episode = asyncio.create_task(run_episode(ticket(5), Scripted, None, episode_context(client.generate)))
        while not sent:
            await asyncio.sleep(0.001)
        episode.cancel()
        with pytest.raises(WaitExpired, match=r"the abort of request 1 \(ticket 5\)"):
            await asyncio.wait_for(episode, 60)

    asyncio.run(scenario())


def test_cancel_during_a_step_closes_once() -> None:
    class Slow(Scripted):
        async def step(self, action: str, truncated: bool = False) -> Step:
            await asyncio.sleep(60)
            raise AssertionError

    async def scenario() -> None:
        environment = Slow()
        context = episode_context(two_ids)
        episode = asyncio.create_task(run_episode(ticket(5), lambda: environment, None, context))
        while not context.activity.running["environment"] or not context.activity.seconds["generate"]:
            await asyncio.sleep(0.001)
        episode.cancel()
        await asyncio.wait({episode}, timeout=60)
        assert episode.cancelled() and environment.closes == 1 and context.activity.running["environment"] == 0

    asyncio.run(scenario())


def test_the_per_turn_barrier_lets_go_of_whoever_ends() -> None:
    """Three episodes: one is cancelled at the barrier, one in its generation; the third goes on alone."""

    async def scenario() -> None:
        sent: list[Generate] = []
        answers: dict[int, asyncio.Future[Generated]] = {}

        async def generate(request: Generate) -> Generated:
            sent.append(request)
            answers[request.session] = asyncio.get_running_loop().create_future()
            return await answers[request.session]

        soon = asyncio.get_running_loop().call_soon
        barrier = TurnBarrier(NoOptions(), soon, soon)
        context = replace(episode_context(generate), hooks=EpisodeHooks([barrier]))
        environments = {1: Scripted(turns=2), 2: Scripted(), 3: Scripted()}
        episodes = {
            number: asyncio.create_task(run_episode(ticket(number), lambda made=made: made, None, context))  # type: ignore[misc]
            for number, made in environments.items()
        }

        await settle()
        assert [request.session for request in sent] == [1, 2, 3]
        for number in (1, 2):
            answers.pop(number).set_result(generated(sent[number - 1], [8, 9]))
        await settle()
        assert environments[1].actions == [], "1 and 2 wait for the generation of 3"
        assert not context.activity.running["environment"]

        episodes[2].cancel()  # at the barrier
        await settle()
        assert episodes[2].cancelled() and environments[2].closes == 1
        assert environments[1].actions == []

        answers.pop(3).set_result(generated(sent[2], [8, 9]))
        await settle()
        assert environments[1].actions == environments[3].actions == ["8 9"]
        assert [request.session for request in sent[3:]] == [1, 3]

        answers.pop(1).set_result(generated(sent[3], [8, 9]))
        await settle()
        episodes[3].cancel()  # inside its generation: nobody is left to be waited for
        assert (await asyncio.wait_for(episodes[1], 60)).stop_reason == "done"
        assert [environment.closes for environment in environments.values()] == [1, 1, 1]

    asyncio.run(scenario())


# ---------------------------------------------------------------- tools


class WithTools(Scripted):
    """Answers each call by its id, and remembers what it was given."""

    async def reset(self, task: Any) -> Any:
        return Opening([ChatMessage("user", "add 1 and 2")], TOOLS)

    async def step(self, action: str, truncated: bool = False) -> Step:
        assert isinstance(action, TurnText)
        self.actions.append(action)
        answers = [ChatMessage("tool", "3", call_id=call.id, name=call.name) for call in action.message.calls]
        return Step(answers, 1.0, not answers, not answers)


def test_tools_are_shown_and_their_calls_are_parsed(tmp_path: Path) -> None:
    chat = ChatTokenizer(make_folder("qwen3", tmp_path / "qwen3"))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    said = ["<think>\nhm\n</think>\n\n" + call, "3"]
    asked: list[str] = []

    async def scripted(request: Generate) -> Generated:
        asked.append(chat._tokenizer.decode(request.prompt_ids.tolist(), skip_special_tokens=False))
        return generated(request, [*chat.encode(said[len(asked) - 1]), chat.stop_ids[0]])

    settings = load_config(None, ["generator.max_model_len=1024", "env.max_turns=9"])
    environment = WithTools()
    context = EpisodeContext(settings, chat, scripted, reader=make_reader(settings, chat))
    result = run(environment, context)

    first = environment.actions[0]
    assert first == said[0] and isinstance(first, TurnText)  # markers of calls are special tokens, and are there
    assert first.message.reasoning == "hm" and first.message.calls[0].name == "add"
    assert '"name": "add"' in asked[0] and asked[1].startswith(asked[0] + said[0])
    assert asked[1].endswith("<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert result.stop_reason == "done" and len(result.sequence.turns) == 2

    class Elsewhere(DistantParser):
        opener = "assistant"

        async def parsed(self, turn: SampledText) -> ParsedTurn:
            await asyncio.sleep(0)
            assert turn.begun == "assistant" and turn.tools == TOOLS
            return HermesParser().parse(turn.text)

    asked.clear()
    elsewhere = run(WithTools(), EpisodeContext(settings, chat, scripted, reader=TurnReader(chat, Elsewhere())))
    assert elsewhere.sequence.token_ids.tolist() == result.sequence.token_ids.tolist()

    with pytest.raises(EpisodeFailed, match="its family does not say tools = True"):
        run(WithTools(), EpisodeContext(settings, chat, scripted))
