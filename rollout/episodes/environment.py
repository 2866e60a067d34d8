"""What an environment is: the protocol that `rollout.episodes.episode` drives and every environment implements.

Ground level: imports nothing of the project, so that rollout and envs both may use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel


@dataclass(frozen=True)
class ChatMessage:
    """One chat message; `role` is system, user or tool."""

    role: str
    content: str


@dataclass(frozen=True)
class Step:
    """What a step answers: new messages (empty when done), this turn's reward, and whether it is over."""

    messages: list[ChatMessage]
    reward: float
    done: bool
    info: dict[str, float] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    """An entry of each registered column that environments make (`rl/core/columns.py`); none as a rule."""


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
        """Begin the task; the messages that open the conversation."""
        ...

    async def step(self, action: str) -> Step:
        """Apply the model's decoded text of this turn. Never raises for bad model output."""
        ...

    async def close(self) -> None:
        """Release what the episode holds; called exactly once, also after a failure or a cancel."""
        ...


class EnvironmentFamily(Protocol):
    """One per environment server: tasks, shared workers, and a maker of episodes.

    `Options` is the pydantic model that `env.options` is validated against (unknown keys refused).
    """

    Options: type[BaseModel]

    def __init__(self, options: Any, seed: int) -> None: ...

    def task_count(self, split: str) -> int:
        """Tasks of `train` or `eval`."""
        ...

    def task(self, split: str, index: int) -> Any:
        """The same task for the same (options, seed, split, index), in every process."""
        ...

    async def start(self) -> None:
        """Start shared workers; called once in the server before the first episode."""
        ...

    def make(self) -> Environment:
        """A fresh episode."""
        ...

    async def stop(self) -> None: ...
