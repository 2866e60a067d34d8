"""ALFWorld behind the Environment protocol: text out, a command in, reward 1 for a won game."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from envs.alfworld.expert import Explorer
from envs.alfworld.games import GameEntry, GameRecipe, ensure_games, games_made, list_games
from envs.alfworld.requests import GameReply, GameRequest
from envs.answers import answer_of
from envs.workers.pool import Pool, Session
from envs.workers.process import WorkerKind
from rollout.episodes.environment import ChatMessage, Needs, Step

NOTHING = "Nothing happens."
TAGS = "Answer with the next command between <action> and </action>; you may think before it."
_TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
_TAKEN = re.compile(r"^You pick up the (\w+) \d+ from")
_WELCOME = re.compile(r"^-= Welcome to TextWorld, ALFRED! =-\s*")


class AlfworldOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    data: Path | None = None
    """Folder with the splits of the official data; None: games made here, by `games`."""
    games: GameRecipe = Field(default_factory=GameRecipe)
    """What to make where there is no `data`; made once and kept."""
    train_split: Literal["train", "valid_seen", "valid_unseen"] = "train"
    eval_split: Literal["train", "valid_seen", "valid_unseen"] = "valid_unseen"
    task_types: tuple[str, ...] | None = None
    """Only games of these types; None: all that there are."""
    system_prompt: str = ""
    """The system prompt; none if it is empty."""
    action: Literal["line", "tag"] = "line"
    """Where the command stands in what the model writes: the last line, or between <action> tags."""
    admissible: bool = False
    """Every observation lists the commands that the game admits."""
    history: int = Field(0, ge=0)
    """Commands and answers repeated before each observation, the last ones."""
    max_words: int | None = Field(None, ge=8)
    """Longest observation and longest list of commands, in words; the rest is cut and marked."""
    max_steps: int = Field(50, ge=1)
    """Steps after which the game is lost; `env.max_turns` may cut it earlier."""
    invalid_reward: float = Field(0.0, le=0)
    """Reward of a turn whose command the game does not admit, a penalty for "Nothing happens."; 0: none. Success is
    reported apart from it."""
    progress_reward: float = Field(0.0, ge=0)
    """Reward of the turn that first takes an object of the kind that the task asks for, half the way to success, which
    is reported apart from it; 0: none."""
    workers: int = Field(1, ge=1)
    """Processes per server that play the games; one core each."""
    kept_games: int = Field(2000, ge=1)
    """Translated games that a worker remembers, some 100 kB each."""
    request_deadline_s: float = Field(20.0, gt=0)
    """A worker that takes longer over one command is killed; its other games are restored."""


class AlfworldFamily:
    Options: type[BaseModel] = AlfworldOptions

    def __init__(self, options: AlfworldOptions, seed: int) -> None:
        self.options = options
        self.folder = options.data or ensure_games(options.games)
        wanted = options.task_types or None
        self._games: dict[str, list[GameEntry]] = {}
        for name, split in (("train", options.train_split), ("eval", options.eval_split)):
            self._games[name] = list_games(self.folder, split, wanted) if wanted else list_games(self.folder, split)

        kind = WorkerKind(
            name="a game worker",
            module="envs.alfworld.worker",
            arguments=[str(options.kept_games), *(["commands"] if options.admissible else [])],
            result=GameReply,
            deadline_s=options.request_deadline_s,
        )
        self.pool: Pool[GameRequest, GameReply] = Pool(kind, options.workers)

    @classmethod
    def needs(cls, options: AlfworldOptions) -> Needs:
        """Something is taken, and something done with it."""
        return Needs(options.request_deadline_s, f"env.options.request_deadline_s={options.request_deadline_s:g}", 2)

    @classmethod
    def planned(cls, options: AlfworldOptions) -> dict[str, int] | None:
        """Task counts of games that are yet to be made; None where they can be counted at once."""
        recipe = options.games
        if options.data is not None or games_made(recipe):
            return None
        splits = {"train": options.train_split, "eval": options.eval_split}
        return {name: int(getattr(recipe, split)) for name, split in splits.items()}

    def task_count(self, split: str) -> int:
        return len(self._games[split])

    def task(self, split: str, index: int) -> GameEntry:
        return self._games[split][index]

    def data(self) -> list[str]:
        """The games by their places in the folder, which may have been moved."""
        return [str(game.path.relative_to(self.folder)) for game in self._games["train"]]

    async def start(self) -> None:
        await self.pool.start()

    def make(self) -> AlfworldEnvironment:
        return AlfworldEnvironment(self)

    async def stop(self) -> None:
        await self.pool.stop()


class AlfworldEnvironment:
    def __init__(self, family: AlfworldFamily) -> None:
        self._pool = family.pool
        self._options = family.options
        self._game: Session[GameRequest, GameReply] | None = None
        self._past: list[str] = []
        self._played: list[tuple[str, str]] = []
        self._steps = self._invalid = 0
        self._progressed = False

    async def reset(self, task: GameEntry) -> list[ChatMessage]:
        self._task = task
        self._game = self._pool.open()
        reply = await self._game.ask(GameRequest("load", str(task.path)))
        system = self._options.system_prompt
        if self._options.action == "tag":
            system = f"{system}\n{TAGS}".strip()
        opening = [ChatMessage("system", system)] if system else []
        self._shown = reply
        self._opening = self._observation(_WELCOME.sub("", reply.text))
        return [*opening, ChatMessage("user", self._opening)]

    async def step(self, action: str, truncated: bool = False) -> Step:
        assert self._game is not None, "reset() comes before step()"
        # The last command of a turn that was cut off is half a command, or not the one that was to be the last.
        command = "" if truncated else parse_action(action, self._options.action)
        self._steps += 1
        if command:
            reply = await self._game.ask(GameRequest("step", command), remember=_is_admissible)
        else:  # nothing the game could answer to
            reply = GameReply(NOTHING, self._shown.commands, self._shown.won, admissible=False)

        self._shown = reply
        self._invalid += not reply.admissible
        done = reply.won or self._steps >= self._options.max_steps
        info = {
            f"success_{self._task.task_type}": float(reply.won),
            "invalid_actions": float(self._invalid),
            "invalid_share": self._invalid / self._steps,
            "unparsed": float(not command),
        }
        reward = float(reply.won) + self._shaping(reply)
        messages = [ChatMessage("user", self._observation(reply.text))]
        self._played.append((command, messages[0].content))

        if self._options.history:
            self._past.append(f"> {command}\n{reply.text}")
        return Step(messages, reward, done, reply.won, info)

    async def gold(self) -> str | None:
        """The next command of the demonstrator, who has read what the model has and nothing else."""
        explorer = Explorer(self._opening)
        for command, answer in self._played:
            explorer.next_command()
            explorer.observe(command, answer)
        command = explorer.next_command()
        return command if self._options.action == "line" else f"<action>{command}</action>"

    def _shaping(self, reply: GameReply) -> float:
        """What a turn earns apart from success."""
        if not reply.admissible:
            return self._options.invalid_reward
        if self._progressed or not self._options.progress_reward:
            return 0.0
        taken = _TAKEN.match(reply.text)
        if taken is None or taken[1] != object_kind(self._task):
            return 0.0
        self._progressed = True
        return self._options.progress_reward

    async def close(self) -> None:
        if self._game is not None:
            self._game.end()

    def _observation(self, text: str) -> str:
        options = self._options
        parts = self._past[-options.history :] if options.history else []
        parts = [*parts, _cut(text, options.max_words)]
        if options.admissible:
            listed = ", ".join(command.strip() for command in self._shown.commands)
            parts.append(f"Commands: {_cut(listed, options.max_words)}")
        return "\n".join(parts)


def object_kind(game: GameEntry) -> str:
    """What the task is about, as observations write it: `mug` of `pick_and_place_simple-Mug-None-Desk-308/TRIAL/`."""
    return game.path.parent.parent.name.split("-")[1].lower()


def parse_action(text: str, form: str) -> str:
    """The command in what the model wrote, in lower case; empty if there is none. Inner blanks stay as they are."""
    text = answer_of(text)
    if form == "tag":
        found = _TAGGED.findall(text)
        return found[-1].strip().lower() if found else ""
    lines = text.rstrip().splitlines()
    return lines[-1].strip().lower().removeprefix("> ") if lines else ""


def _is_admissible(reply: GameReply) -> bool:
    """What the game does not admit changes nothing, and need not be played again."""
    return reply.admissible


def _cut(text: str, words: int | None) -> str:
    """The text, cut to at most that many words, with their line breaks."""
    if words is None:
        return text
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    return text if len(ends) <= words else f"{text[: ends[words - 1]]} ..."
