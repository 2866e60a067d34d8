"""ALFWorld: the engine against the package's own, live environments in one server, and what the server adds.

python -m experiments.bench alfworld [--live 1 16 128 512] [--starts 3] [--seconds 1] [--out FILE.json]

Ratios are of CPU seconds (of the server's process and its game worker), so that they hold on a busy machine too. Both
sides know the same games and commands before. What else runs on the physical core comes and goes within a second
and up to doubles the cost of both, so server and bare engine take turns. The ratio is the median over pairs of slices.
Where processes happen to lie in memory moves it by another 10 %. Every size is measured in several fresh pairs of
processes. Of these the median, the lowest and the highest are told. `hop_over_bare` is the least that one environment
can cost: the same worker behind a loop that writes a request, waits for the reply, and does nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import psutil
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.envs.pddl import PddlEnv

from envs.alfworld.engine import Engine, GameCache
from envs.alfworld.environment import AlfworldFamily, AlfworldOptions
from envs.alfworld.games import GameEntry, GameRecipe
from envs.alfworld.requests import GameReply, GameRequest
from envs.workers.wire import CHUNK, CurrentRequest, FrameReader, WorkerReply, WorkerRequest, frame
from experiments.bench._measuring import parser_of, write
from rl.wire.process import die_with_parent

EPISODE_STEPS = 12
SLICES = 10
REQUESTS_PER_SLICE = 1024
BOUND_STOCK = 10.0
BOUND_SERVER = 1.2
GAMES = GameRecipe(train=48, valid_unseen=0, max_receptacles=12, clutter=(6, 12))


def main(argv: list[str]) -> None:
    parser = parser_of("alfworld", __doc__)
    parser.add_argument("--live", type=int, nargs="+", default=[1, 16, 128, 512])
    parser.add_argument("--starts", type=int, default=3, help="fresh servers of each size")
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU seconds of each engine")
    options = parser.parse_args(argv)
    measured: dict[str, float] = {}

    def tell(more: dict[str, float]) -> None:
        measured.update(more)
        for name, value in more.items():
            print(f"{name}: {value:.2f}", flush=True)

    tell(engines(_games(_family()), options.seconds))
    for live in options.live:
        tell(fresh(server, live, options.starts))
    tell(fresh(hop, 1, options.starts))
    tell({"load_average": os.getloadavg()[0]})
    print(f"bounds: steps_over_stock >= {BOUND_STOCK:g}, server_over_bare_N <= {BOUND_SERVER:g}")
    write(options.out, measured)


def _family() -> AlfworldFamily:
    return AlfworldFamily(AlfworldOptions(games=GAMES, max_steps=EPISODE_STEPS), 0)


def _games(family: AlfworldFamily) -> list[GameEntry]:
    return [family.task("train", index) for index in range(family.task_count("train"))]


def fresh(measure: Callable[[int], dict[str, float]], live: int, starts: int) -> dict[str, float]:
    """Medians of `measure(live)` over fresh processes; of ratios the lowest and the highest, too."""
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), die_with_parent, (os.getpid(),), max_tasks_per_child=1
    ) as executor:
        each = [executor.submit(measure, live).result() for _ in range(starts)]

    measured: dict[str, float] = {}
    for name in each[0]:
        values = sorted(one[name] for one in each)
        measured[f"{name}_{live}"] = statistics.median(values)
        if name.endswith("_over_bare"):
            measured |= {f"{name}_{live}_lowest": values[0], f"{name}_{live}_highest": values[-1]}

    return measured


def engines(games: Sequence[GameEntry], seconds: float) -> dict[str, float]:
    """Ours and the stock engine, alone in a process: per CPU second, loads of known games and steps."""
    ours = Engine()
    theirs = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
    game_cache = GameCache(len(games))
    rng = random.Random(0)
    begin = time.process_time()
    for game in games:
        game_cache.get(game.path)
    first = (time.process_time() - begin) / len(games)
    cpu = dict.fromkeys(("ours_reset", "ours_step", "stock_reset", "stock_step"), 0.0)
    count = dict.fromkeys(cpu, 0)

    def timed(name: str, begin: float) -> None:
        cpu[name] += time.process_time() - begin
        count[name] += 1

    while min(cpu["ours_reset"] + cpu["ours_step"], cpu["stock_reset"] + cpu["stock_step"]) < seconds:
        game = rng.choice(games)
        begin = time.process_time()
        theirs.load(str(game.path))
        state = theirs.reset()
        timed("stock_reset", begin)

        for _ in range(EPISODE_STEPS):
            begin = time.process_time()
            state = theirs.step(rng.choice(list(state["admissible_commands"])))[0]
            timed("stock_step", begin)

        for _ in range(8):
            begin = time.process_time()
            seen = ours.load(game_cache.get(game.path))
            timed("ours_reset", begin)
            for _ in range(EPISODE_STEPS):
                begin = time.process_time()
                seen = ours.step(rng.choice(seen.commands))
                timed("ours_step", begin)

    rate = {name: count[name] / cpu[name] for name in cpu}
    return {
        "first_load_ms": first * 1e3,
        "resets_per_cpu_s": rate["ours_reset"],
        "steps_per_cpu_s": rate["ours_step"],
        "resets_over_stock": rate["ours_reset"] / rate["stock_reset"],
        "steps_over_stock": rate["ours_step"] / rate["stock_step"],
    }


def scripts(games: Sequence[GameEntry]) -> list[list[str]]:
    """Random admissible commands of one episode of each game."""
    engine = Engine()
    game_cache = GameCache(len(games))
    rng = random.Random(0)
    written = []

    for game in games:
        engine.load(game_cache.get(game.path))
        script: list[str] = []
        while len(script) < EPISODE_STEPS and not engine.observation.won:
            script.append(rng.choice(engine.observation.commands))
            engine.step(script[-1])
        written.append(script)

    return written


def plan(written: Sequence[list[str]], number: int) -> Iterator[tuple[int, str | None]]:
    """What live environment `number` is asked, for ever: a game and a command; None begins the game."""
    for again in itertools.count(number):
        index = again % len(written)
        yield index, None
        yield from ((index, command) for command in written[index])


def server(live: int) -> dict[str, float]:
    """`live` environments at once over one game worker, and the bare engine with the same requests."""
    return asyncio.run(_server(_family(), live))


async def _server(family: AlfworldFamily, live: int) -> dict[str, float]:
    games = _games(family)
    written = scripts(games)
    await family.start()

    try:
        worker = family.pool.workers[0].pid
        assert worker is not None
        resident = psutil.Process(worker).memory_info().rss
        players = [Player(family, games, plan(written, number)) for number in range(live)]
        known = [Player(family, games, plan(written, number)) for number in range(len(games) - live)]
        await asyncio.gather(*(player.advance(1) for player in (*players, *known)))
        megabytes = (psutil.Process(worker).memory_info().rss - resident) / max(live, len(games)) / 2**20
        for player in known:
            await player.end()

        async def advance(requests: int) -> None:
            await asyncio.gather(*(player.advance(requests) for player in players))

        each = math.ceil(REQUESTS_PER_SLICE / live)
        seconds, ratio = await against(Bare(games, written, live), advance, each, worker)
        for player in players:
            await player.end()
    finally:
        await family.stop()

    return {
        "server_steps_per_s": live * each / seconds,
        "server_over_bare": ratio,
        "megabytes_per_environment": megabytes,
    }


class Player:
    """One live environment of the server."""

    def __init__(
        self, family: AlfworldFamily, games: Sequence[GameEntry], asked: Iterator[tuple[int, str | None]]
    ) -> None:
        self._family = family
        self._games = games
        self._asked = asked
        self._environment = family.make()

    async def advance(self, requests: int) -> None:
        for index, command in itertools.islice(self._asked, requests):
            if command is None:
                await self._environment.close()
                self._environment = self._family.make()
                await self._environment.reset(self._games[index])
            else:
                await self._environment.step(command)

    async def end(self) -> None:
        await self._environment.close()


class Bare:
    """The engine alone with as many live games, in turn: the same requests about known games, without a server."""

    def __init__(self, games: Sequence[GameEntry], written: Sequence[list[str]], live: int) -> None:
        self._game_cache = GameCache(len(games))
        self._paths = [game.path for game in games]
        self._live = [(Engine(), plan(written, number)) for number in range(live)]
        for path in self._paths:
            self._live[0][0].load(self._game_cache.get(path))
        self.cpu_s(1)

    def cpu_s(self, requests: int) -> float:
        """CPU seconds of so many requests of every game."""
        begin = time.process_time()
        for _ in range(requests):
            for engine, asked in self._live:
                index, command = next(asked)
                if command is None:
                    engine.load(self._game_cache.get(self._paths[index]))
                else:
                    engine.step(command)

        return time.process_time() - begin


async def against(
    bare: Bare, advance: Callable[[int], Awaitable[None]], requests: int, worker: int
) -> tuple[float, float]:
    """Median wall seconds of a slice with the worker, and the median ratio of CPU seconds to the bare engine's."""
    seconds = []
    ratios = []
    for number in range(SLICES):
        engine = bare.cpu_s(requests) if number % 2 else 0.0  # first one, then the other: drift meets both
        busy = _cpu(worker)
        begin = time.perf_counter()
        await advance(requests)
        seconds.append(time.perf_counter() - begin)
        busy = _cpu(worker) - busy
        ratios.append(busy / (engine or bare.cpu_s(requests)))

    return statistics.median(seconds), statistics.median(ratios)


def hop(live: int) -> dict[str, float]:
    """Requests over a worker's pipes, one at a time, without a server; and the bare engine with the same requests."""
    games = _games(_family())
    written = scripts(games)
    frames = FrameReader(WorkerReply[GameReply])
    current = CurrentRequest()
    command = [sys.executable, "-m", "envs.alfworld.worker", str(current.descriptor), "2000"]
    environment = os.environ | {"FRESCO_PARENT_PID": str(os.getpid()), "PYTHONHASHSEED": "0"}

    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(current.descriptor,), env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        requests = process.stdin.fileno()
        replies = process.stdout.fileno()

        def receive() -> None:
            while not frames.feed(os.read(replies, CHUNK)):
                pass

        def ask(index: int, command: str | None) -> None:
            load = GameRequest("load", str(games[index].path))
            request = load if command is None else GameRequest("step", command)
            os.write(requests, frame(WorkerRequest(1, 0, request)))
            receive()

        async def advance(requests: int) -> None:
            for index, command in itertools.islice(asked, requests):
                ask(index, command)

        receive()  # ready
        for index in range(len(games)):
            ask(index, None)
        asked = plan(written, 0)
        ask(*next(asked))
        _, ratio = asyncio.run(against(Bare(games, written, live), advance, REQUESTS_PER_SLICE, process.pid))

    return {"hop_over_bare": ratio}


def _cpu(worker: int) -> float:
    """CPU seconds of this process and the worker."""
    return (
        time.clock_gettime(~worker << 3 | 2) + time.process_time()
    )  # the clock of another process, clock_getcpuclockid
