"""A Gymnasium environment behind the Environment protocol: what it prints or observes, and an action per turn."""

from __future__ import annotations

import inspect
import json
import os
import re
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from envs.answers import tagged
from envs.gymnasium import spaces
from envs.gymnasium.requests import GymReply, GymRequest
from envs.gymnasium.worker import make
from envs.workers.pool import Pool, Session
from envs.workers.process import WorkerKind
from rl.config.plugins import search_folder
from rollout.episodes.environment import ChatMessage, Needs, Step

MOST_RULES = 600  # characters of each part of a documentation that is used as rules


class GymnasiumOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    id: str
    """The game as `gymnasium.make` takes it: `FrozenLake-v1`, or `my_module:MyGame-v0`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `gymnasium.make`."""
    tasks: int = Field(10_000, ge=1, lt=1 << 30)
    """Training tasks: seeds of `reset`."""
    eval_tasks: int = Field(64, ge=0, lt=1 << 30)
    """Held-out tasks: other seeds."""
    rules: str | None = None
    """What the prompt says of the game; None: the description and the actions in its documentation."""
    actions: tuple[str, ...] = ()
    """Names of a Discrete space's actions, in order; empty: their numbers."""
    observe: Literal["auto", "text", "value"] = "auto"
    """What is shown: the game as it prints itself, or its observation as JSON; `auto`: printed where it can."""
    bare: bool = False
    """The whole turn is the action. Else it stands between <action> and </action>, after whatever the model thinks."""
    invalid_reward: float = Field(0.0, le=0)
    """Reward of a turn without a valid action."""
    reward_scale: float = Field(1.0, gt=0)
    """Rewards of the game are multiplied by it."""
    success_return: float | None = None
    """A game that has ended with at least this return, before scaling, is solved; None: the game's own
    `reward_threshold`, or anything above 0."""
    gold_discount: float = Field(0.999, gt=0, lt=1)
    """Haste of the player who knows a tabular game: what a reward is worth one step later. Lower it where
    `env.max_turns` ends games early, else that player is too slow to win in time and demonstrates little."""
    workers: int = Field(1, ge=1)
    """Processes per server that play the games."""
    request_deadline_s: float = Field(20.0, gt=0)
    """A worker that takes longer over one step is replaced; its other games are restored."""


@dataclass(frozen=True)
class GymTask:
    seed: int


class GymnasiumFamily:
    Options: type[BaseModel] = GymnasiumOptions

    def __init__(self, options: GymnasiumOptions, seed: int) -> None:
        """Raises ValueError for a game that cannot be made or has no form as text."""
        self.options = options
        self._settings = settings = _settings(options)
        self.introduction, self.success_return = _inspect(options, settings)
        self._first = Random(f"{seed} {options.id}").randrange(1 << 30)

        kind = WorkerKind(
            name=f"a worker of {options.id}",
            module="envs.gymnasium.worker",
            arguments=[json.dumps(settings)],
            result=GymReply,
            deadline_s=options.request_deadline_s,
        )
        self.pool: Pool[GymRequest, GymReply] = Pool(kind, options.workers)

    @classmethod
    def needs(cls, options: GymnasiumOptions) -> Needs:
        return Needs(options.request_deadline_s, f"env.options.request_deadline_s={options.request_deadline_s:g}")

    @classmethod
    def planned(cls, options: GymnasiumOptions) -> dict[str, int]:
        return {"train": options.tasks, "eval": options.eval_tasks}

    def task_count(self, split: str) -> int:
        return self.planned(self.options)[split]

    def task(self, split: str, index: int) -> GymTask:
        """Training seeds lie below 2^30, held-out ones above."""
        return GymTask((self._first + index) % (1 << 30) + ((1 << 30) if split == "eval" else 0))

    def data(self) -> list[object]:
        return [self._settings, self._first, self.options.tasks]

    async def start(self) -> None:
        await self.pool.start()

    def make(self) -> GymnasiumEnvironment:
        return GymnasiumEnvironment(self)

    async def stop(self) -> None:
        await self.pool.stop()


class GymnasiumEnvironment:
    def __init__(self, family: GymnasiumFamily) -> None:
        self._family = family
        self._options = family.options
        self._game: Session[GymRequest, GymReply] | None = None
        self._return = 0.0
        self._turns = 0
        self._invalid = 0

    async def reset(self, task: GymTask) -> list[ChatMessage]:
        self._game = self._family.pool.open()
        reply = await self._game.ask(GymRequest("reset", str(task.seed)))
        return [ChatMessage("user", f"{self._family.introduction}\n\n{reply.text}".strip())]

    async def step(self, action: str, truncated: bool = False) -> Step:
        assert self._game is not None, "reset() comes before step()"
        written = _written(action, truncated, self._options.bare)
        if written is None:
            reply = GymReply("no action between <action> and </action>", valid=False)
        else:
            reply = await self._game.ask(GymRequest("act", written), remember=_moved)

        self._turns += 1
        self._return += reply.reward
        self._invalid += not reply.valid
        ended = reply.ended or reply.cut
        info = {"return": self._return, "invalid_share": self._invalid / self._turns, "out_of_time": float(reply.cut)}

        success = ended and self._return >= self._family.success_return
        said = reply.text if reply.valid else f"Invalid: {reply.text}."
        reward = reply.reward * self._options.reward_scale if reply.valid else self._options.invalid_reward
        return Step([] if ended else [ChatMessage("user", said)], reward, ended, success, info)

    async def gold(self) -> str | None:
        assert self._game is not None, "reset() comes before gold()"
        action = (await self._game.ask(GymRequest("gold"), remember=lambda _: False)).text
        if not action:
            return None
        return action if self._options.bare else f"<action>{action}</action>"

    async def close(self) -> None:
        if self._game is not None:
            self._game.end()


def _moved(reply: GymReply) -> bool:
    """What is to be played again in a new process."""
    return reply.valid


def _written(text: str, truncated: bool, bare: bool) -> str | None:
    """The action in a turn; None: there is none, or it may end within a word."""
    if bare:
        return None if truncated else text.strip()
    return tagged(text, "action")


def _settings(options: GymnasiumOptions) -> dict[str, Any]:
    """What a worker has to know. Raises ValueError or ImportError."""
    try:
        import gymnasium
    except ImportError:
        raise ImportError("Gymnasium is not installed: pip install 'fresco-rl[gymnasium]'") from None

    search_folder(os.getcwd())
    settings = options.model_dump(include={"id", "kwargs", "actions", "gold_discount"}) | {"prints": False}
    try:
        env = make(settings)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(f"env.options.id={options.id!r}: {error}") from None
    except Exception as error:  # whatever the game's own constructor raises
        raise ValueError(f"env.options.id={options.id!r}, kwargs={options.kwargs}: {error}") from None

    prints = "ansi" in env.metadata.get("render_modes", [])
    env.close()
    if options.observe == "text" and not prints:
        raise ValueError(f"env.options.observe='text': {options.id} cannot print itself (no render mode `ansi`)")
    return settings | {"prints": prints and options.observe != "value"}


def _inspect(options: GymnasiumOptions, settings: dict[str, Any]) -> tuple[str, float]:
    """The prompt of every task, and the return from which on a game is solved. Raises ValueError."""
    env = make(settings)
    try:
        watched = [] if settings["prints"] else [("observations", env.observation_space)]
        for what, space in [("actions", env.action_space), *watched]:
            try:
                count = spaces.size(space)
            except ValueError as error:
                raise ValueError(f"env.options.id={options.id!r}: {error} ({what})") from None
            if count > spaces.MOST_NUMBERS:
                raise ValueError(f"env.options.id={options.id!r}: its {what} have {count} numbers: too many for a text")

        _check_names(options, env.action_space)
        rules = _documented(env.unwrapped) if options.rules is None else options.rules
        action = spaces.describe(env.action_space, options.actions)
        how = f"Answer with {action}." if options.bare else f"Act with <action>X</action>, X being {action}."
        threshold = getattr(env.spec, "reward_threshold", None)
    finally:
        env.close()

    default = 1e-9 if threshold is None else float(threshold)
    success = default if options.success_return is None else options.success_return
    return f"{rules}\n\n{how}".strip(), success


def _check_names(options: GymnasiumOptions, space: Any) -> None:
    names = options.actions
    if not names:
        return
    if type(space).__name__ != "Discrete":
        raise ValueError(f"env.options.actions={list(names)}: only a Discrete space has named actions")
    if len(names) != space.n or len({name.lower() for name in names}) != space.n:
        raise ValueError(f"env.options.actions={list(names)}: {options.id} wants {space.n} different names")


def _documented(env: Any) -> str:
    """The description and the actions in a game's documentation; other parts speak of seeds, versions and arguments."""
    text = inspect.getdoc(type(env)) or ""
    parts = re.split(r"^##+ *(.+?) *$", text, flags=re.MULTILINE)
    named = dict(zip(map(str.lower, parts[1::2]), parts[2::2], strict=True))
    kept = [named[name] for name in ("description", "action space", "actions") if name in named]
    return "\n\n".join(map(_first_paragraphs, kept or parts[:1]))


def _first_paragraphs(text: str) -> str:
    """As many paragraphs as MOST_RULES allows, and the first in any case."""
    first, *others = re.split(r"\n\s*\n", text.strip())
    kept = first[: 2 * MOST_RULES]
    for each in others:
        if len(kept) + len(each) > MOST_RULES:
            break
        kept = f"{kept}\n\n{each}"
    return kept
