"""The checks, in order. Each plays episodes and writes one line on the page."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from envs.audit.auditor import Audited, Change, Tally, audit
from envs.check import agents
from envs.check.attacks import HOSTILE
from envs.check.elsewhere import openings_elsewhere
from envs.check.findings import Earned, Page
from envs.check.player import Agent, Player, PlayResult, Said, View
from envs.check.resources import held
from envs.check.watch import LoopWatch
from envs.held_out import Seen, seen_in_training
from rl.observe.alarms import limit
from rollout.episodes.environment import Solvable

FEW = 0.8  # share of training tasks in which a script meets something else below which the game has few of them
LUCK = 0.25  # success that an agent may have by chance
QUICK_S = 0.1  # of an audited answer: then as many are audited as there are openings
SHOWN = 100  # characters of a text in a message


@dataclass(frozen=True)
class Scope:
    """How much is played."""

    tasks: int = 16
    """Tasks that each agent plays."""
    openings: int = 200
    """Tasks of each split that are compared with each other."""
    episodes: int = 1000
    """Episodes over which nothing may grow."""
    deadline_s: float = 3600.0
    """The deadline of the whole check."""


SHORT = Scope(tasks=4, openings=24, episodes=60, deadline_s=300.0)


@dataclass
class Lab:
    player: Player
    scope: Scope
    page: Page
    watch: LoopWatch
    temporary: Path
    scripted: list[PlayResult] = field(default_factory=list)
    """What a random agent got in the first tasks: what other checks compare with."""

    @property
    def indices(self) -> list[int]:
        return self.spread("train", self.scope.tasks)

    def spread(self, split: str, count: int) -> list[int]:
        """The indices of that many tasks, evenly spread."""
        there = self.player.family.task_count(split)
        count = min(there, count)
        return [index * there // count for index in range(count)]


@runtime_checkable
class HasAnswerTypes(Protocol):
    """A family whose gold answers are read in types."""

    def answer_types(self) -> dict[str, list[str]]:
        """The training tasks' gold answers by their type."""
        ...


Check = Callable[[Lab], Coroutine[Any, Any, None]]


async def elsewhere(lab: Lab) -> None:
    """A task is the same in another process."""
    indices = lab.indices[:4]
    here = [outcome.opening or outcome.error for outcome in await lab.player.play_all(indices, agents.nothing)]
    try:
        there = await asyncio.to_thread(openings_elsewhere, lab.player.config, indices)
    except RuntimeError as error:
        lab.page.add("elsewhere", str(error), "")
        return
    differing = [index for index, ours, theirs in zip(indices, here, there, strict=True) if ours != theirs]
    wrong = f"tasks {differing} open otherwise in another process" if differing else ""
    lab.page.add("elsewhere", wrong, f"{len(indices)} tasks open the same in another process")


async def again(lab: Lab) -> None:
    """The same task and the same turns lead to the same, whatever was played before."""
    first = await lab.player.play_all(lab.indices, agents.at_random)
    second = await lab.player.play_all(lab.indices[::-1], agents.at_random)
    lab.scripted = first
    wrong = _difference(lab.indices, first, second[::-1])
    lab.page.add("again", wrong, f"{len(first)} episodes played again came out the same")


async def neighbours(lab: Lab) -> None:
    """Episodes that run together do not touch each other."""
    together = await lab.player.play_all([*lab.indices, *lab.indices], agents.at_random, together=True)
    wrong = _difference([*lab.indices, *lab.indices], lab.scripted * 2, together)
    lab.page.add("neighbours", wrong, f"{len(together)} episodes at once came out as alone")


async def ends(lab: Lab) -> None:
    """Episodes end, and no step leaves the model without an answer."""
    errors = [outcome.error for outcome in lab.scripted if outcome.error]
    silent = sum(outcome.silent for outcome in lab.scripted)
    wrong = f"an episode failed: {errors[0][:300]}" if errors else ""
    if not wrong and silent:
        wrong = f"{silent} episodes go on after a step without a message"
    reasons = sorted({outcome.stop_reason for outcome in lab.scripted})
    lab.page.add("ends", wrong, f"every episode ends ({', '.join(reasons)})")


async def tasks_differ(lab: Lab) -> None:
    """Tasks are not one and the same, and held-out ones are no training tasks.

    Two tasks are alike if a fixed script meets the same in both, and so do their solutions; or if they are written
    alike.
    """
    seen = await _meets(lab)

    train = len(seen["train"])
    distinct = len(set(seen["train"])) / max(1, train)
    one = train > 1 and len(set(seen["train"])) == 1
    lab.page.add("tasks differ", f"all {train} tasks are the same" if one else "", f"{distinct:.0%} of {train} differ")

    config = lab.player.config
    count = min(config.eval.tasks or len(seen["eval"]), lab.player.family.task_count("eval"))
    found = [Seen.of(seen["train"], seen["eval"], FEW), *seen_in_training(lab.player.family, count)]
    most = limit(config.alarms, "eval-on-train", "share")
    worst = min(found, key=lambda each: (each.share <= most, each.few, -each.share))
    lab.page.add("held out", str(worst) if worst.share > most else "", str(worst), note=worst.few)


async def _meets(lab: Lab) -> dict[str, list[tuple[object, ...]]]:
    """What happens in tasks of each split to a fixed script. Where it meets the same in several, also to the solution:
    the script may be no action of that game.
    """
    met: dict[tuple[str, int], tuple[object, ...]] = {}
    for split in ("train", "eval"):
        count = min(lab.player.family.task_count(split), lab.scope.openings)
        for index in range(count) if split == "eval" else lab.spread(split, count):
            met[split, index] = (await lab.player.play(index, agents.script, split)).what_happened

    often = Counter(met.values())
    for (split, index), what in met.items():
        if often[what] > 1:
            with contextlib.suppress(agents.NoSolution):
                met[split, index] = what + (await lab.player.play(index, agents.gold, split)).what_happened
    return {each: [what for (split, _), what in met.items() if split == each] for each in ("train", "eval")}


async def answer_types(lab: Lab) -> None:
    """Where gold answers have types, which they are: what is a text is matched by the same text only."""
    family: object = lab.player.family
    if not isinstance(family, HasAnswerTypes):
        return
    found = sorted(family.answer_types().items(), key=lambda each: -len(each[1]))
    said = ", ".join(f"{len(golds)} {kind} ({golds[0][:SHOWN]})" for kind, golds in found)
    texts = "; a text is matched by the same text only" if any(kind == "text" for kind, _ in found) else ""
    lab.page.add("answer types", said + texts if texts else "", said, note=True)


async def audited(lab: Lab) -> None:
    """Solutions that were changed into wrong ones earn nothing, and what is spelled otherwise earns the same."""
    family: object = lab.player.family
    if not isinstance(family, Audited):
        return
    count = lab.scope.openings if family.audit_s < QUICK_S else lab.scope.tasks
    tally = Tally()
    for index in lab.spread("train", count):
        task = lab.player.family.task("train", index)
        said = await _solution(lab.player.family.make(), task)
        if said and await family.judged(Change("as it is", True, task, said)):
            tally.add(await audit(family, task, said, random.Random(index)))

    lab.page.audit = tally
    wrong = f"{tally.accepted} of {tally.wrong} wrong answers are accepted" if tally.accepted else ""
    if tally.refused and not wrong:
        wrong = f"{tally.refused} of {tally.equal} equal answers are refused"
    found = f"{wrong}; {tally.examples[0][:SHOWN]}" if wrong else ""
    lab.page.add("audit", found, tally.said())


async def _solution(environment: Any, task: Any) -> str | None:
    try:
        await environment.reset(task)
        said: str | None = await environment.gold() if isinstance(environment, Solvable) else None
        return said
    finally:
        await environment.close()


async def bad_output(lab: Lab) -> None:
    """Whatever a model writes, the step answers."""
    broken = []
    index = lab.indices[0]
    for name, said in HOSTILE.items():
        outcome = await lab.player.play(index, _always(said))
        if outcome.error:
            broken.append(f"{name}: {outcome.error[:SHOWN]}")
    wrong = f"{len(broken)} of {len(HOSTILE)} outputs break it; {broken[0]}" if broken else ""
    lab.page.add("bad output", wrong, f"{len(HOSTILE)} kinds of bad output survived")


async def who_earns(lab: Lab) -> None:
    """Nothing and cheating earn nothing, chance little, and the solution earns most."""
    play = lab.player.play_all
    nothing = Earned.of("nothing", await play(lab.indices, agents.nothing))
    chance = Earned.of("at random", lab.scripted)
    cheats = [Earned.of(f"cheat: {name}", await play(lab.indices, cheat)) for name, cheat in agents.CHEATS.items()]
    gold, borrowed = await _gold(lab)
    worst = max(cheats, key=lambda each: (each.success, each.reward))
    lab.page.earned += [nothing, chance, worst, *(each for each in (borrowed, gold) if each is not None)]

    does = "an agent that writes nothing solves" if nothing.success else ""
    lab.page.add(
        "nothing", f"{does} {nothing.success:.0%} of the tasks" if does else "", "writing nothing solves nothing"
    )
    lucky = f"guessing solves {chance.success:.0%} of the tasks" if chance.success > LUCK else ""
    lab.page.add("at random", lucky, f"guessing solves {chance.success:.0%}", note=True)
    cheated = [f"{each.agent.removeprefix('cheat: ')} ({each.success:.0%})" for each in cheats if each.success > LUCK]
    lab.page.add(
        "cheats", f"tasks are solved by: {', '.join(cheated)}" if cheated else "", f"{len(cheats)} cheats fail"
    )

    if gold is None:
        lab.page.add("gold", "nobody knows a solution (no method `gold`): rewards are not proven", "", note=True)
        return
    lab.page.add("gold", _gold_is_wrong(gold, [nothing, chance, *cheats]), f"the solution solves {gold.success:.0%}")
    if borrowed is not None:
        same = f"the solution of another task solves {borrowed.success:.0%}" if borrowed.success > 2 * LUCK else ""
        lab.page.add("another's gold", same, f"the solution of another task solves {borrowed.success:.0%}")


async def flat(lab: Lab) -> None:
    """Episodes leave nothing behind. The first fifth of them may fill caches."""
    indices = lab.spread("train", max(2, lab.scope.episodes // 10))
    count = lab.scope.episodes

    async def some(first: int, last: int) -> None:
        for number in range(first, last):
            await lab.player.play(indices[number % len(indices)], agents.script)

    await some(0, count // 5)
    before = held(lab.temporary)
    await some(count // 5, count)
    await asyncio.sleep(0.1)  # what is being closed
    grown = before.growth(held(lab.temporary), count - count // 5)
    lab.page.add("flat", f"over {count} episodes: {'; '.join(grown)}" if grown else "", f"flat over {count} episodes")


async def deadlines(lab: Lab) -> None:
    """Last: no call of all those before took the event loop, and every episode could be closed."""
    blocked = f"the event loop was blocked by {lab.watch.found}" if lab.watch.found else ""
    unclosed = lab.player.activity.close_failures
    wrong = blocked or (f"close failed or hung {unclosed} times" if unclosed else "")
    lab.page.add("deadlines", wrong, "the event loop was free, and every episode was closed")


CHECKS: tuple[Check, ...] = (
    elsewhere,
    again,
    neighbours,
    ends,
    tasks_differ,
    answer_types,
    bad_output,
    who_earns,
    audited,
    flat,
    deadlines,
)


def _always(said: Said) -> Agent:
    async def act(_: View) -> Said:
        return said

    return act


def _difference(indices: list[int], first: list[PlayResult], second: list[PlayResult]) -> str:
    """What differs where the same was done and something else came of it."""
    for index, one, other in zip(indices, first, second, strict=True):
        if one.what_happened == other.what_happened:
            continue
        for name in ("opening", "rewards", "success", "stop_reason", "error"):
            left = getattr(one, name)
            right = getattr(other, name)
            if left != right:
                return f"task {index}: {name} {str(left)[-SHOWN:]!r}, and then {str(right)[-SHOWN:]!r}"
        return f"task {index}: the environment answered otherwise"
    return ""


def _gold_is_wrong(gold: Earned, others: list[Earned]) -> str:
    best = max(others, key=lambda each: each.reward)
    if gold.success < 0.5:
        return f"the solution solves {gold.success:.0%} of the tasks"
    if gold.reward <= best.reward:
        return f"{best.agent} earns {best.reward:.3g}, the solution {gold.reward:.3g}"
    return ""


async def _gold(lab: Lab) -> tuple[Earned | None, Earned | None]:
    """What the solution earns, and what that of the task before earns; None where nobody knows one."""
    written: dict[int, list[str]] = {}

    async def recorded(view: View) -> Said:
        said = await agents.gold(view)
        written.setdefault(view.task_index, []).append(said.text)
        return said

    outcomes = []
    for index in lab.indices:
        with contextlib.suppress(agents.NoSolution):
            outcomes.append(await lab.player.play(index, recorded))
    if not outcomes:
        return None, None

    known = list(written)
    borrowed = [
        await lab.player.play(index, agents.repeated(written[other]))
        for index, other in zip(known, [*known[1:], *known[:1]], strict=True)
        if written[index] != written[other]
    ]
    of_others = Earned.of("the solution of another task", borrowed) if borrowed else None
    return Earned.of("the solution", outcomes), of_others
