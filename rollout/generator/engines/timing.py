"""How long an engine takes: continuous batching as a pure model in its own time.

`BatchModel` knows sequences only by key, prompt tokens to prefill and response length. The simulated
engine drives it with the wall clock, the virtual-time simulator with `next_event`; neither changes what it does.

In the model, prefills run one after another, ahead of decoding (as an engine without chunked prefill schedules them),
and yield the first token. Then every decode step gives each running sequence one token and takes `decode_base_s +
decode_per_seq_s * (n - 1)` seconds. A weight load stalls everything.

Where KV memory is limited, a sequence is prefilled once its context fits. When what runs has outgrown the memory, the
newest is pre-empted and waits, ahead of all others, until its context fits again and is computed again, as vLLM does.
The oldest never is, so every sequence that fits alone comes to its end.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import Field

from rl.config.section import Section

_EPSILON_S = 1e-9  # `advance(next_event())` reaches that event in spite of rounding
_KV_SLACK = 16  # tokens free for each sequence before another is prefilled, or it would be pre-empted at once
_SHORTEST_STEP_S = 1e-9  # a step of no time would be an endless number of steps


class SimulatedOptions(Section):
    """`generator.options` of the simulated engine."""

    where = "engine=simulated"
    prefill_tokens_per_s: float = Field(1e6, gt=0)
    """Prompt tokens processed per second."""
    decode_base_s: float = Field(0.0005, ge=0)
    """Seconds of one decode step at batch 1."""
    decode_per_seq_s: float = Field(0.00001, ge=0)
    """Additional seconds of one decode step per further running sequence."""
    length_mean: float = Field(24, gt=0)
    """Mean response length in tokens."""
    length_sigma: float = Field(0.5, ge=0)
    """Sigma of the log-normal length distribution; 0: constant length."""
    load_s: float = Field(0.0, ge=0)
    """Seconds that a weight load takes."""
    vocab_size: int = Field(128, ge=2, lt=1 << 31)
    """Ids are drawn uniformly from 1 up to this number."""

    def prefill_s(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_per_s

    def decode_step_s(self, batch: int) -> float:
        """The seconds of one step of a batch of `batch` >= 1 sequences."""
        return max(self.decode_base_s + self.decode_per_seq_s * (batch - 1), _SHORTEST_STEP_S)

    def response_length(self, seed: int) -> int:
        """Tokens that the policy would generate without a limit: log-normal, at least 1."""
        mu = math.log(self.length_mean) - self.length_sigma**2 / 2  # the mean is exp(mu + sigma^2 / 2)
        return max(1, round(random.Random(seed).lognormvariate(mu, self.length_sigma)))


class Event(NamedTuple):
    kind: Literal["first_token", "finished"]
    key: int
    at: float


@dataclass(slots=True, eq=False)
class _Sequence:
    key: int
    prompt_len: int
    prefill: int  # tokens of the prompt that are not cached
    length: int
    joined: float | None = None  # decode steps done when it joined the batch; None: not prefilled yet
    done: int = 0  # tokens before it was pre-empted
    end: float | None = None  # decode steps done when it ends; None: it does not run


class BatchModel:
    """One engine's batch at `self.now`, in seconds of any clock: `advance`, then add, remove or stall."""

    def __init__(
        self, timing: SimulatedOptions, max_num_seqs: int, now: float = 0.0, kv_tokens: float = math.inf
    ) -> None:
        self._timing = timing
        self._max_num_seqs = max_num_seqs
        self.now = now
        self._steps = 0.0  # decode steps done, fractions included
        self._sequences: dict[int, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._prefilling: _Sequence | None = None
        self._prefill_s = 0.0  # what is left of that prefill; the batch does not decode meanwhile
        self._stall_s = 0.0  # what is left of a load, which comes before anything else
        self._running = 0

        self.preempted = 0  # sequences, so far
        self._kv_tokens = kv_tokens
        self._held = 0.0  # tokens in KV memory: `_held` + `_running` * `_steps`
        self._ends: list[tuple[float, int, _Sequence]] = []  # (last step, key, sequence)

    def __len__(self) -> int:
        """Sequences that have not finished."""
        return len(self._sequences)

    def __contains__(self, key: int) -> bool:
        return key in self._sequences

    def add(self, key: int, prompt_len: int, prefill: int, length: int) -> None:
        """A new sequence, of which `prefill` prompt tokens are not cached, arrives at `self.now`."""
        sequence = _Sequence(key, prompt_len, prefill, length)
        self._sequences[key] = sequence
        self._waiting.append(sequence)
        self._start_prefill()

    def remove(self, key: int) -> None:
        """Abort; unknown keys are ignored."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        if sequence is self._prefilling:
            self._prefilling = None
        elif sequence.joined is not None:
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)
        self._start_prefill()

    def stall(self, seconds: float, *, recompute: bool) -> None:
        """A weight load: no token for `seconds`, and with `recompute` all running context is prefilled again."""
        if recompute:
            running = [each for each in self._sequences.values() if each.joined is not None]
            seconds += self._timing.prefill_s(sum(each.prompt_len + self._tokens(each) for each in running))
        self._stall_s += seconds

    def wake(self) -> None:
        """End the stall, however long it was to be."""
        self._stall_s = 0.0

    def tokens(self, key: int) -> int:
        """Tokens that this unfinished sequence has so far."""
        return self._tokens(self._sequences[key])

    def next_event(self) -> float | None:
        """When the next first token or end comes if nothing is added or removed; None: never."""
        resumes = self.now + self._stall_s
        if self._prefilling is not None:
            return resumes + self._prefill_s
        end = self._next_change()
        return None if end is None else resumes + max(0.0, end - self._steps) * self._step_s()

    def advance(self, now: float) -> list[Event]:
        """Run until `now`; returns the events in order, those at `now` included."""
        events: list[Event] = []
        while True:
            left = max(0.0, now - self.now)
            if self._stall_s > left + _EPSILON_S:
                self._stall_s -= left
                break

            if self._stall_s > 0:
                self.now += self._stall_s
                self._stall_s = 0.0
            elif self._prefilling is not None:
                if self._prefill_s > left + _EPSILON_S:
                    self._prefill_s -= left
                    break
                self.now += self._prefill_s
                self._finish_prefill(self._prefilling, events)
            elif not self._decode(left, events):
                break

        self.now = max(self.now, now)
        return events

    def _decode(self, left: float, events: list[Event]) -> bool:
        """Advance up to the next end or pre-emption, or for the `left` seconds (then False)."""
        end = self._next_change()
        if end is None:
            return False
        needed = max(0.0, end - self._steps) * self._step_s()
        if needed > left + _EPSILON_S:
            self._steps += left / self._step_s()
            return False

        self.now += needed
        self._steps = max(end, self._steps)
        if end == self._next_end():
            self._end(heapq.heappop(self._ends)[2], events)
        else:
            self._preempt()
        self._start_prefill()
        return True

    def _step_s(self) -> float:
        return self._timing.decode_step_s(self._running)

    def _tokens(self, sequence: _Sequence) -> int:
        if sequence.joined is None:
            return sequence.done
        return min(sequence.length, 1 + int(self._steps - sequence.joined + 1e-6))

    def _next_end(self) -> float | None:
        while self._ends and self._ends[0][0] != self._ends[0][2].end:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def _next_change(self) -> float | None:
        """Decode steps done at the next end, or before it when KV memory is full."""
        end = self._next_end()
        if end is None or self._running < 2:
            return end
        return min(end, max(self._steps, (self._kv_tokens - self._held) / self._running))

    def _preempt(self) -> None:
        """The newest gives its memory back, and will compute what it held again."""
        newest = max((each for each in self._sequences.values() if each.joined is not None), key=lambda each: each.key)
        newest.done = self._tokens(newest)
        newest.prefill = newest.prompt_len + newest.done
        self._leave(newest)
        newest.joined = None
        self._waiting.appendleft(newest)
        self.preempted += 1

    def _leave(self, sequence: _Sequence) -> None:
        """Take out a sequence that runs no more."""
        assert sequence.joined is not None
        self._running -= 1
        self._held -= sequence.prompt_len + 1 - sequence.joined
        sequence.end = None

    def _fits(self, sequence: _Sequence) -> bool:
        """Whether its context has room; alone every sequence has."""
        used = self._held + self._running * self._steps
        slack = _KV_SLACK * (self._running + 1)
        return not self._running or used + sequence.prompt_len + sequence.done + slack <= self._kv_tokens

    def _start_prefill(self) -> None:
        if self._prefilling is not None or not self._waiting or self._running >= self._max_num_seqs:
            return
        if self._fits(self._waiting[0]):
            self._prefilling = self._waiting.popleft()
            self._prefill_s = self._timing.prefill_s(self._prefilling.prefill)

    def _finish_prefill(self, sequence: _Sequence, events: list[Event]) -> None:
        self._prefilling = None
        sequence.joined = self._steps - sequence.done
        sequence.end = max(self._steps, sequence.joined + sequence.length - 1)
        self._running += 1
        self._held += sequence.prompt_len + 1 - sequence.joined

        if not sequence.done:
            events.append(Event("first_token", sequence.key, self.now))
        if sequence.end <= self._steps:
            self._end(sequence, events)
        else:
            heapq.heappush(self._ends, (sequence.end, sequence.key, sequence))
        self._start_prefill()

    def _end(self, sequence: _Sequence, events: list[Event]) -> None:
        del self._sequences[sequence.key]
        self._leave(sequence)
        events.append(Event("finished", sequence.key, self.now))
