"""What an environment is: the protocol that `rollout.episodes.episode` drives and every environment implements.

Ground level: imports nothing of the project, so that rollout and envs both may use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is JSON text; `id` is what the tool's answer names in `ChatMessage.call_id`."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatMessage:
    """One chat message; `role` is system, user, assistant or tool."""

    role: str
    content: str = ""
    reasoning: str = ""
    """What an assistant thought before it answered."""
    calls: tuple[ToolCall, ...] = ()
    """The tools that an assistant calls."""
    call_id: str = ""
    """The call that a tool's message answers."""
    name: str = ""
    """The name of a tool, where the client says it."""


class TurnText(str):
    """The text of a turn, special tokens included, with its parts: what `step` gets after an `Opening`."""

    message: ChatMessage


Tools = Sequence[Mapping[str, Any]]
"""Tools as OpenAI writes them: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


@dataclass(frozen=True)
class Opening:
    """What `reset` may answer in the place of messages, in a family that says `tools = True`.

    The chat template shows the tools to the model. `step` then gets a `TurnText`, whose `message` has the calls.
    """

    messages: list[ChatMessage]
    tools: Tools = ()


@dataclass(frozen=True)
class Step:
    """What a step answers: new messages (empty when done), this turn's reward, and whether it is over.

    `reward`: None is no opinion. An episode of which no turn has one is not trained (`RewardFailed`).
    `success`: whether the task is solved as things stand now. The last one said is the episode's: accuracy, curricula
    and statistics count it, whatever the rewards were.
    """

    messages: list[ChatMessage]
    reward: float | None
    done: bool
    success: bool
    info: dict[str, float] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    """An entry of each registered column that environments make (`rl/wire/columns.py`); none as a rule."""
    notes: dict[str, str] = field(default_factory=dict)
    """What people read beside the episode: as a rule `expected`, the gold answer, and `read`, what the verifier took
    for the model's. They are kept with its conversation and go nowhere else."""


class RewardFailed(Exception):
    """Raised by `step`, `finish` or `run` where the reward cannot be told: the message names the function and says why.

    The episode ends and is not tried again, so that a model is not spared a bad answer. It is not trained either, and
    the baseline of its group leaves it out: a failure is no zero. A reward that is not finite, or larger than
    a million, does the same.
    """


@dataclass(frozen=True)
class DemonstratedTurn:
    """What a demonstrator wrote, whether to imitate it (a mistake is only shown), and what was answered."""

    action: str
    imitate: bool
    answer: list[ChatMessage]


@dataclass(frozen=True)
class Demonstration:
    """One solved episode, for supervised training (`launch/warm_start/imitation.py`)."""

    opening: list[ChatMessage]
    turns: list[DemonstratedTurn]


@runtime_checkable
class Environment(Protocol):
    """One live episode. Methods are awaited by the episode loop; blocking work belongs in a worker process.

    A raised exception or an overrun deadline fails the ticket of this episode and no other.
    """

    async def reset(self, task: Any) -> list[ChatMessage]:
        """Begin the task; the messages that open the conversation, or an `Opening` with tools."""

    async def step(self, action: str, truncated: bool = False) -> Step:
        """Apply the model's decoded text of this turn. Never raises for bad model output.

        `truncated`: it was cut off by `sampling.max_tokens` or by the full context, so it may end within a command.
        """

    async def close(self) -> None:
        """Release what the episode holds; called exactly once, also after a failure or a cancel."""


@runtime_checkable
class FinishedOnDemand(Environment, Protocol):
    """An environment that judges work as it stands, such as by tests, and not after every turn."""

    async def finish(self) -> Step:
        """The end of an episode that is cut before a step was `done` (full context, `env.max_turns`).

        Its reward is added to that of the last turn; its `messages` and `done` say nothing.
        """


@dataclass(frozen=True)
class EpisodeTerms:
    """What one episode has of its own where a run plays several environments (`envs/mixture.py`).

    Limits only narrow those of the run. None: the run's own.
    """

    label: str = ""
    """The name under which its metrics stand beside those of all: `rollout/<label>/reward`, `eval/<label>/accuracy`."""
    max_turns: int | None = None
    max_tokens: int | None = None
    """The most tokens of one turn."""
    eval_temperature: float | None = None
    """The temperature of evaluations. Training has one temperature, by which the learner divides its logits."""


@runtime_checkable
class OnOwnTerms(Environment, Protocol):
    """An environment whose episodes differ in their terms; read once `reset` has answered."""

    terms: EpisodeTerms


@runtime_checkable
class Solvable(Environment, Protocol):
    """An environment that knows how its task is solved: for `fresco env check` and for demonstrations."""

    async def gold(self) -> str | None:
        """What one who knows the solution writes in the next turn; None: nobody knows."""


@dataclass(frozen=True)
class Endpoint:
    """The endpoint of one ticket. Clients of OpenAI take `base_url` + "/v1", those of Anthropic `base_url`; both take
    `api_key`."""

    base_url: str
    api_key: str

    @property
    def openai(self) -> dict[str, Any]:
        """Arguments of `openai.OpenAI` and `openai.AsyncOpenAI`."""
        return {"base_url": f"{self.base_url}/v1", "api_key": self.api_key}

    @property
    def anthropic(self) -> dict[str, Any]:
        """Arguments of `anthropic.Anthropic` and `anthropic.AsyncAnthropic`."""
        return {"base_url": self.base_url, "api_key": self.api_key}


@dataclass(frozen=True)
class Outcome:
    """What an episode was worth: `reward` for all of it, and `rewards` of single responses by their `id`, added up.

    `reward` None is no opinion: then `rewards` decide, if there are any.
    """

    reward: float | None
    success: bool
    rewards: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class ForeignLoop(Protocol):
    async def run(self, task: Any, endpoint: Endpoint) -> Outcome:
        """Play the task to its end. Blocking work belongs in a process of its own (`envs/gateway/command.py`).

        What it raises before the model has answered fails the ticket, and the sample is tried again. Later it may be
        the answer's doing, and is a `RewardFailed`.
        """

    async def close(self) -> None:
        """Release what the episode holds; called exactly once, also after a failure or a cancel."""


@dataclass(frozen=True)
class Needs:
    """What a family's options take for granted of the section `env`; anything else is refused at the start."""

    step_s: float
    """The longest step: `env.step_deadline_s` and `rollout.episode_deadline_s` must be longer."""
    why: str
    """The options behind `step_s`, with their values."""
    turns: int = 1
    """The fewest turns in which a task can be solved."""
    episodes: int | None = None
    """The most episodes that a server can run at once, where more would wait for room within their `reset`."""
    room: str = ""
    """The option behind `episodes`, with its value."""
    tokens: int = 1
    """The longest turn that it names: `sampling.max_tokens` must not be less."""


class EnvironmentFamily(Protocol):
    """One per environment server: tasks, shared workers, and a maker of episodes.

    With `tools = True` its episodes begin with an `Opening`, with `foreign = True` they are `ForeignLoop`s.
    `Options` is the pydantic model that `env.options` is validated against (unknown keys refused). A class may also
    have `needs(options) -> Needs`, and `planned(options)` where tasks take long to make (`envs/registry.py`). A family
    may have `data()`: values by which a resume knows its training data again, where the tasks do not say it. With
    `opening(task)`, the messages of `reset`, their length is checked at the start. One whose tasks are made in `start`
    says `knows_tasks = False` before.
    """

    Options: type[BaseModel]

    def __init__(self, options: Any, seed: int) -> None: ...

    def task_count(self, split: str) -> int:
        """Tasks of `train` or `eval`."""

    def task(self, split: str, index: int) -> Any:
        """The same task for the same (options, seed, split, index), in every process."""

    async def start(self) -> None:
        """Start shared workers; called once in the server before the first episode."""

    def make(self) -> Environment:
        """A fresh episode; a `ForeignLoop` from a family that says `foreign = True`."""

    async def stop(self) -> None: ...
