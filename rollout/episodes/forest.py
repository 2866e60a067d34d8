"""The requests of an agent that owns its loop, as a forest of token sequences. This is a pure state machine.

An agent sends its whole history as text with every request. Encoding that text again would train tokens that nobody
sampled. So each request is attached to what was sampled:

    root: the ids of an opening ── turn ── turn ── turn          one sequence
                                     └──── turn                  a fork: the shared turns are trained in the first one
    root: an edited history ────── turn                          another sequence

* A request attaches at the deepest turn whose history it repeats: role, content, canonical tool calls, and reasoning
  where the client sends it. It goes on with the ids of the bridge (`rollout/episodes/bridge.py`).
* What repeats nothing opens a new root, whose ids are all read and never trained. `forks` counts why: `edited` (an
  assistant's message that was not sampled there), `compacted` (no assistant's message is left), `subagent` (another
  first message) or `tools` (other tools). The others are `bridge` (it was refused) and `thinking` (the template drops
  old reasoning, and `thinking="template"` follows it).
* A turn that was aborted, or that nobody was answered with, is no part of any sequence.

    forest = Forest(reader)
    turn = forest.attach(messages, tools)       # its prompt stands in turn.growing
    turn.growing.append_generated(reply)        # once or more
    ended = forest.end(turn, "stop")            # what a parser is to read
    message = forest.read(turn, parsed)         # what the agent is answered
    forest.answered(turn, message)
    forest.sequences()                          # of the trajectory
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import numpy as np

from rl.config.chat import ChatConfig
from rl.wire.messages import TokenSequence, Turn
from rl.wire.text import Mender
from rollout.episodes.bridge import BridgeRefused
from rollout.episodes.environment import ChatMessage, Tools
from rollout.episodes.live import LiveTurn
from rollout.episodes.parsing import ParsedTurn, SampledText, TurnReader, mended
from rollout.episodes.sequence import GrowingSequence
from rollout.episodes.thinking import Thinking, drift, keeps_thoughts
from rollout.episodes.tokenizer import AgentTokenizer

Ids = Sequence[int] | np.ndarray
_ROLES = ("system", "developer", "user", "assistant", "tool")
_DEFAULTS = ChatConfig()
_UNSAID = ChatMessage("assistant")


class RequestRefused(ValueError):
    """The request makes no sense here; the message is for the agent's author."""


@dataclass(eq=False)
class ForestTurn:
    """A turn that is being sampled, or was. `history` are the messages before it."""

    number: int
    history: tuple[ChatMessage, ...]
    tools: Tools
    parent: ForestTurn | None
    read: np.ndarray  # (n,) int32: the ids between the parent's turn (or the start) and this one
    growing: GrowingSequence  # the whole prompt, then what is sampled
    prompt_length: int
    message: ChatMessage = _UNSAID  # as it was answered, once it is finished
    finish_reason: str = ""
    generator: int = -1
    generate_s: float = 0.0
    reward: float = 0.0
    sampled: dict[str, np.ndarray] = field(default_factory=dict)  # as the generator answered it

    @property
    def path(self) -> list[ForestTurn]:
        """The turns from the root to this turn."""
        found: list[ForestTurn] = []
        turn: ForestTurn | None = self
        while turn is not None:
            found.append(turn)
            turn = turn.parent
        return found[::-1]

    @property
    def context(self) -> np.ndarray:
        """(T,) int32: the prompt and what was sampled so far."""
        return self.growing.context()


class Forest:
    """The forest of one ticket. `limit`: the longest context, in tokens."""

    def __init__(
        self,
        reader: TurnReader,
        *,
        thinking: Thinking = _DEFAULTS.thinking,
        limit: int = 1 << 31,
        name: str = "",
    ) -> None:
        self.forks: Counter[str] = Counter()  # new roots after the first, by reason
        self.turns: list[ForestTurn] = []  # finished, in this order

        self.mender = Mender()  # of what clients and the model wrote
        self.reader = reader
        self._tokenizer = reader.tokenizer
        self._thinking = thinking
        self._limit = limit
        self._name = name
        self._begun = 0

        self._by_history: defaultdict[bytes, list[ForestTurn]] = defaultdict(list)  # that ends with their turn
        self._openings: dict[bytes, np.ndarray] = {}  # ids, by tools and messages
        self._first_messages: set[bytes] = set()
        self._histories: set[bytes] = set()  # openings, and what ends with a turn, whatever the tools

    def attach(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> ForestTurn:
        """A turn to be sampled after these messages. Raises RequestRefused."""
        _check(messages)
        history, tools = self._whole(messages, tools)
        parent, ids, reason = self._place(history, tools)
        before = parent.context if parent else np.zeros(0, np.int32)

        prompt = np.concatenate([before, np.array(ids, np.int32)])
        if len(prompt) >= self._limit:
            raise RequestRefused(
                f"the context is full: the prompt has {len(prompt)} tokens, the limit is {self._limit}"
            )
        if parent is None:
            self._open_root(reason, history, tools, ids)

        self._begun += 1
        growing = GrowingSequence(prompt, parent.growing if parent else None)
        return ForestTurn(self._begun, history, tools, parent, prompt[len(before) :], growing, len(prompt))

    def count_tokens(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> int:
        """The number of tokens in the prompt of such a request. Raises RequestRefused."""
        _check(messages)
        parent, ids, _ = self._place(*self._whole(messages, tools))
        return len(ids) + (len(parent.context) if parent else 0)

    def live(self, turn: ForestTurn, stop: Sequence[str] = ()) -> LiveTurn:
        """A reader of this turn while it is being sampled."""
        return LiveTurn(self.reader, self._begun_by_prompt(turn), stop)

    def end(
        self, turn: ForestTurn, finish_reason: str, stop: Sequence[str] = (), text: str | None = None
    ) -> SampledText:
        """The turn was sampled: what a parser is to read of it.

        stop: texts that end a turn. What was sampled beyond the first one is no part of it, and neither is its text.
        text: that of the turn, where somebody has read along.
        """
        sampled = turn.growing.generated(turn.prompt_length)
        ids: list[int] = sampled["token_ids"].tolist()
        text = self._tokenizer.turn_text(ids) if text is None else text
        if any(each in text for each in stop):
            tokens = _tokens_with(stop, ids, self._tokenizer)
            sampled = {name: each[:tokens] if len(each) == len(ids) else each for name, each in sampled.items()}
            text = text[: min(text.index(each) for each in stop if each in text)]
            finish_reason = "stop"

        growing = GrowingSequence(turn.context[: turn.prompt_length], turn.growing)
        growing.append_generated(sampled, growing.context_entries(growing.known, len(growing)))
        turn.growing = growing
        turn.sampled = sampled
        turn.finish_reason = finish_reason

        return SampledText(text, self._begun_by_prompt(turn), turn.tools)

    def read(self, turn: ForestTurn, parsed: ParsedTurn) -> ChatMessage:
        """The message that answers the request. `answered` makes it a part of the episode."""
        return self.reader.message(parsed, f"{self._name}{turn.number}", self.mender)

    def answered(self, turn: ForestTurn, message: ChatMessage) -> None:
        """The agent is given this message for the finished turn: it is a part of the episode from now on."""
        turn.message = message
        self.turns.append(turn)
        key = _digests([*turn.history, message], _tools_key(turn.tools))[-1]
        self._by_history[key].append(turn)
        self._histories.add(_digests([*turn.history, message], b"")[-1])

    def sequences(self) -> list[TokenSequence]:
        """Each finished turn is trained in exactly one of them: the first that it is on."""
        open_at: dict[ForestTurn, tuple[GrowingSequence, int]] = {}
        found: list[tuple[GrowingSequence, int]] = []
        for number, turn in enumerate(self.turns):
            begun = open_at.pop(turn.parent, None) if turn.parent else None
            if begun is None:
                before = turn.parent.context if turn.parent else np.zeros(0, np.int32)
                begun = GrowingSequence(before, turn.growing), len(before)
                found.append(begun)

            sequence = begun[0]
            sequence.append_read(turn.read)
            context = turn.growing.context_entries(sequence.known, len(sequence))
            start, end = sequence.append_generated(turn.sampled, context)
            told = (turn.reward, turn.generate_s, 0.0, turn.finish_reason, turn.generator)
            sequence.end_turn(Turn(start, end, *told, number), {})
            open_at[turn] = begun
        return [sequence.sequence(shared) for sequence, shared in found]

    def sample_columns(self) -> dict[str, np.ndarray]:
        """What stands once for the sample, as the last turn said."""
        growing = GrowingSequence([])
        for turn in self.turns[-1:]:
            growing.append_generated(turn.sampled)
            growing.end_turn(Turn(0, len(growing), 0.0, 0.0, 0.0, "stop", -1), {})
        return growing.sample_columns()

    def drift(self) -> Counter[str]:
        """How sequences differ from what the template writes for their whole history, by kind."""
        parents = {turn.parent for turn in self.turns}
        kinds: Counter[str] = Counter()
        for turn in self.turns:
            if turn in parents:
                continue
            prompt = turn.context[: turn.prompt_length].tolist()
            kinds[drift(self._tokenizer, prompt, _with_reasoning(turn), turn.tools)] += 1
        return kinds

    # ------------------------------------------------------------ inside

    def _whole(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[tuple[ChatMessage, ...], Tools]:
        return tuple(mended(each, self.mender) for each in messages), self.mender.value(list(tools))

    def _begun_by_prompt(self, turn: ForestTurn) -> str:
        return self.reader.begun(turn.context[: turn.prompt_length].tolist())

    def _place(self, history: tuple[ChatMessage, ...], tools: Tools) -> tuple[ForestTurn | None, Ids, str]:
        """The turn to go on from, the ids that follow it, and why a new root is opened (if it is)."""
        digests = _digests(history, _tools_key(tools))
        turn, length = self._deepest(history, digests)
        new = history[length:]
        reason = ""
        if turn is not None and all(message.role != "assistant" for message in new):
            try:
                if self._keeps_reasoning(turn, new, tools):
                    last_id = int(turn.context[-1])
                    return turn, self._tokenizer.bridge(turn.message.calls, new, last_id, tools), ""
                reason = "thinking"
            except BridgeRefused:
                reason = "bridge"

        if digests[-1] in self._openings:
            return None, self._openings[digests[-1]], ""
        try:
            ids = self._tokenizer.prompt(history, tools)
        except ValueError as error:
            raise RequestRefused(str(error)) from None
        return None, ids, reason or self._why(history, digests)

    def _deepest(self, history: tuple[ChatMessage, ...], digests: list[bytes]) -> tuple[ForestTurn | None, int]:
        for length in range(len(history), 0, -1):
            for turn in reversed(self._by_history.get(digests[length - 1], [])):
                if _same_reasoning(turn, history[:length]):
                    return turn, length
        return None, 0

    def _keeps_reasoning(self, turn: ForestTurn, new: Sequence[ChatMessage], tools: Tools) -> bool:
        """Whether, with `thinking="template"`, the template still writes the reasoning of all turns before."""
        if self._thinking == "keep":
            return True
        sampled = [len(each.history) for each in turn.path]
        return keeps_thoughts(self._tokenizer, [*_with_reasoning(turn), turn.message, *new], sampled, tools)

    def _why(self, history: tuple[ChatMessage, ...], with_tools: list[bytes]) -> str:
        """Why this history opens a root of its own; empty for the first one."""
        if not self._first_messages:
            return ""
        digests = _digests(history, b"")
        if digests[0] not in self._first_messages:
            return "subagent"
        if all(message.role != "assistant" for message in history):
            return "tools" if digests[-1] in self._histories else "compacted"

        last = max(place for place, message in enumerate(history) if message.role == "assistant")
        repeats = digests[last] in self._histories
        return "tools" if repeats and with_tools[last] not in self._by_history else "edited"

    def _open_root(self, reason: str, history: tuple[ChatMessage, ...], tools: Tools, root: Ids) -> None:
        self._openings[_digests(history, _tools_key(tools))[-1]] = np.array(root, np.int32)
        digests = _digests(history, b"")
        self._first_messages.add(digests[0])
        self._histories.add(digests[-1])
        if reason:
            self.forks[reason] += 1


def _check(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise RequestRefused("messages: there is none")
    for place, message in enumerate(messages):
        if message.role not in _ROLES:
            raise RequestRefused(f"messages[{place}].role={message.role!r}: one of {', '.join(_ROLES)}")
    if messages[-1].role == "assistant":
        raise RequestRefused("the last message is the assistant's: a turn that was sampled is not gone on with")


def _tokens_with(stop: Sequence[str], ids: list[int], tokenizer: AgentTokenizer) -> int:
    """The fewest tokens whose text holds one of these texts."""

    def has_one(tokens: int) -> bool:
        return any(each in tokenizer.turn_text(ids[:tokens]) for each in stop)

    return 1 + bisect_left(range(1, len(ids)), True, key=has_one)


def _same_reasoning(turn: ForestTurn, history: Sequence[ChatMessage]) -> bool:
    """Many clients drop the reasoning of their history; one that sends it must send what was sampled."""
    sent = ((history[len(each.history)].reasoning, each.message.reasoning) for each in turn.path)
    return all(theirs in ("", ours) for theirs, ours in sent)


def _with_reasoning(turn: ForestTurn) -> list[ChatMessage]:
    """The messages before a turn, those of the assistant as they were sampled."""
    found = list(turn.history)
    for each in turn.path[:-1]:
        found[len(each.history)] = each.message
    return found


def _tools_key(tools: Tools) -> bytes:
    return json.dumps(list(tools), sort_keys=True, default=str).encode()


def _digests(messages: Sequence[ChatMessage], start: bytes) -> list[bytes]:
    """Digests of every beginning of a history; reasoning is left out, which clients may drop."""
    state = blake2b(start, digest_size=16)
    found = []
    for message in messages:
        calls = [(call.id, call.name, _canonical(call.arguments)) for call in message.calls]
        state.update(msgspec.json.encode((message.role, message.content, calls, message.call_id)))
        found.append(state.copy().digest())
    return found


def _canonical(arguments: str) -> str:
    """Clients may write the JSON of a call again: spaces and order do not count."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
