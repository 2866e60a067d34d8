"""`fresco plan`: which split of the GPUs, which alpha, how much redundancy, from the real scheduler in virtual time.

    fresco plan experiments/simulated.yaml --gpus 8          # what the recipe says of simulated engines
    fresco plan --run runs/math_8gpu --gpus 8x80              # what a finished run measured; splits that fit 80 GB
    fresco plan --run runs/math_8gpu --gpus 32x80 --machines 4 --link 10G

Training time scales with 1 / ranks, generation with the number of generators; both are what the plan varies.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable

from matplotlib.figure import Figure
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from launch import fleet
from launch.dry_run import print_gpus
from launch.machine import Machine, machine_of
from launch.memory import Need, check_memory, estimate, shape_of, version_bytes
from launch.model_config import model_config
from launch.prepare import check_family_of
from launch.terminal import CleanConsole
from rl.config.schema import MOST_NODES, Config, ConfigError, load_config
from rl.models.shape import ModelShape
from rollout.simulate.clock import SimulationStopped
from rollout.simulate.distributions import Gaussian, LogNormal
from rollout.simulate.lower_bound import lower_bound_s
from rollout.simulate.recipe import Given, Measured, assumed, assumptions, read_run, scenario_of
from rollout.simulate.result import SimulationResult
from rollout.simulate.simulation import Simulation

ALPHAS = (0.0, 0.5, 1.0, 2.0)
REDUNDANCIES = ((0, 0), (1, 1))  # groups and episodes per group beyond the need
MEASURED_STEPS = 8
ENOUGH = 0.98  # of the best speed: of what reaches it, the freshest is the choice


class Candidate(Struct, frozen=True):
    """One line of the plan; seconds are per training step."""

    generators: int
    ranks: int
    alpha: float
    extra_groups: int
    extra_episodes: int
    result: SimulationResult
    lower_bound_s: float  # of the simulated run from its start, for the episodes it trained

    @property
    def over_bound(self) -> float:
        """The run from its start, the warm-up included, over what no schedule of its trained episodes undercuts."""
        times = self.result.step_times
        return sum(times) / len(times) / self.lower_bound_s if self.lower_bound_s else float("inf")

    @property
    def redundant(self) -> bool:
        return bool(self.extra_groups or self.extra_episodes)


def candidates(
    config: Config,
    measured: Measured,
    gpus: int,
    alphas: tuple[float, ...] = ALPHAS,
    fits: Callable[[int, int], bool] = lambda generators, ranks: True,
) -> list[Candidate]:
    """Every combination that the recipe can run, simulated in steady state; those that cannot run are left out.

    fits: whether so many generators and ranks have the memory that they need.
    """
    per_generator = config.generator.tensor_parallel
    base = scenario_of(config, measured)
    most = config.rollout.max_staleness
    possible = [alpha for alpha in alphas if most is None or alpha <= most]
    found = []

    for ranks, alpha, (groups, episodes) in itertools.product(_splits(gpus, per_generator), possible, REDUNDANCIES):
        generators = (gpus - ranks) // per_generator
        if not fits(generators, ranks):
            continue

        training = replace(base.training, step_s=measured.train_s * measured.ranks / ranks)
        machine = replace(base.with_generators(count=generators), training=training, measured=MEASURED_STEPS)
        scenario = machine.with_broker(
            steps=1_000_000, alpha=alpha, redundant_groups=groups, redundant_episodes=episodes
        )
        simulation = Simulation(scenario, limit_s=1e7)
        try:
            result = simulation.run()
        except SimulationStopped:
            continue

        steps = len(result.step_times)
        bound_s = lower_bound_s(scenario, simulation.record.batches[:steps]) / steps
        found.append(Candidate(generators, ranks, alpha, groups, episodes, result, bound_s))
    return found


class Memory:
    """What a split of a machine's GPUs needs of them; of a machine whose memory is not known, nothing."""

    def __init__(self, config: Config, machine: Machine | None, machines: int = 0, gpus_each: int = 0) -> None:
        """machines: how many share the GPUs, gpus_each for one; 0: there is one, and none has an agent.

        Raises ConfigError for a model that cannot be trained.
        """
        self._config = config
        self._machine = machine or Machine()
        self._machines = machines, gpus_each
        self._unchecked: list[str] = []
        self._model: ModelShape | None = None
        self.refused: dict[str, str] = {}
        """Why, by split."""

        asked = (self._machine.gpu_memory is not None or machines) and config.generator.engine == "vllm"
        if asked and (told := model_config(config, fetch=False, unchecked=self._unchecked)):
            check_family_of(config, told)
            self._model = shape_of(config, told)

    def fits(self, generators: int, ranks: int) -> bool:
        try:
            check_memory(self._needs(generators, ranks), self._machine)
            if self._machines[0]:
                fleet.standing(_split(self._config, generators, ranks), *self._machines)
        except ConfigError as error:
            self.refused[f"{generators} + {ranks}"] = str(error)
        return f"{generators} + {ranks}" not in self.refused

    @property
    def version_bytes(self) -> int | None:
        """Of the weights as they are sent; None: they are not known here."""
        unknown = self._model is None and self._config.generator.engine == "vllm"
        return None if unknown else version_bytes(self._config, self._model, fleet.device_of(self._config))

    def show(self, chosen: Candidate, console: Console) -> None:
        if self._machine.gpu_memory is not None:
            print_gpus(self._needs(chosen.generators, chosen.ranks), self._machine, console)
        for split, reason in self.refused.items():
            console.print(f"left out, generators + ranks {split}: {reason}", markup=False, soft_wrap=True)
        for unknown in self._unchecked:
            console.print(f"not checked here: {unknown}", markup=False, soft_wrap=True)

    def _needs(self, generators: int, ranks: int) -> list[Need]:
        return estimate(_split(self._config, generators, ranks), "cuda", self._model, self._machine)


def _split(config: Config, generators: int, ranks: int, alpha: float | None = None) -> Config:
    generator = config.generator.model_copy(update={"count": generators})
    learner = config.learner.model_copy(update={"ranks": ranks})
    rollout = config.rollout.model_copy(update={} if alpha is None else {"alpha": alpha})
    return config.model_copy(update={"generator": generator, "learner": learner, "rollout": rollout})


def _splits(gpus: int, per_generator: int, most: int = 6) -> list[int]:
    """Numbers of training GPUs, about `most` of them, evenly spread."""
    possible = [ranks for ranks in range(1, gpus) if (gpus - ranks) % per_generator == 0]
    stride = max(1, -(-len(possible) // most))
    return possible[stride // 2 :: stride]


def best(found: list[Candidate]) -> Candidate:
    """Useful tokens per second decide; within 2 % the smaller alpha, then the least redundancy."""
    top = max(candidate.result.useful_tokens_per_s for candidate in found)
    good = [candidate for candidate in found if candidate.result.useful_tokens_per_s >= ENOUGH * top]
    return min(good, key=lambda c: (c.alpha, c.extra_groups + c.extra_episodes, -c.result.useful_tokens_per_s))


def advice(chosen: Candidate) -> str:
    """Overrides, to be pasted behind `fresco run RECIPE`."""
    return (
        f"generator.count={chosen.generators} learner.ranks={chosen.ranks} rollout.alpha={chosen.alpha:g} "
        f"rollout.redundant_groups={chosen.extra_groups} rollout.redundant_episodes={chosen.extra_episodes}"
    )


def _show(found: list[Candidate], chosen: Candidate, config: Config, console: Console) -> None:
    names = "generators,ranks,alpha,extra,step s,tokens/s,gen idle,train idle,staleness,kept/issued,x bound"
    table = Table(title=f"{config.name}: predicted", box=None)
    for name in names.split(","):
        table.add_column(name, justify="right")

    for each in sorted(found, key=lambda c: -c.result.useful_tokens_per_s):
        result = each.result
        choice = f"{each.generators} {each.ranks} {each.alpha:g} {each.extra_groups}+{each.extra_episodes}"
        speed = f"{result.step_s:.3g} {result.useful_tokens_per_s:,.0f}"
        shares = f"{result.generator_idle:z.0%} {result.learner_idle:z.0%} {result.staleness:.2f}"
        cost = f"{result.kept_over_issued:.2f} {each.over_bound:.2f}"
        table.add_row(*f"{choice} {speed} {shares} {cost}".split(), style="bold" if each is chosen else "")
    console.print(table)

    console.print(
        f"best: {advice(chosen)}\n"
        f"{chosen.result.step_s:.3g} s a step; from the start {chosen.over_bound:.2f} times the lower bound of "
        f"{chosen.lower_bound_s:.3g} s a step; generators idle {chosen.result.generator_idle:z.0%}, learner "
        f"{chosen.result.learner_idle:z.0%}, mean staleness {chosen.result.staleness:.2f}",
        soft_wrap=True,
    )


def figure_of(found: list[Candidate], chosen: Candidate) -> Figure:
    """Useful tokens a second over training GPUs: dashed with redundancy, dotted the bound of the chosen scenario's
    line, a star at the choice."""
    figure = Figure(figsize=(6.0, 3.6), layout="tight")
    axis = figure.subplots()
    lines: dict[tuple[float, bool], list[Candidate]] = {}
    for candidate in sorted(found, key=lambda c: (c.alpha, c.redundant, c.ranks)):
        lines.setdefault((candidate.alpha, candidate.redundant), []).append(candidate)

    colours = {alpha: f"C{place}" for place, alpha in enumerate(sorted({alpha for alpha, _ in lines}))}
    for (alpha, redundant), line in lines.items():
        label = f"alpha {alpha:g}" + (", redundant" if redundant else "")
        speeds = [candidate.result.useful_tokens_per_s for candidate in line]
        style = "x--" if redundant else "o-"
        axis.plot([candidate.ranks for candidate in line], speeds, style, label=label, color=colours[alpha])

    alike = lines[chosen.alpha, chosen.redundant]
    bounds = [c.result.useful_tokens_per_s * c.result.step_s / c.lower_bound_s for c in alike]
    axis.plot([candidate.ranks for candidate in alike], bounds, "k:", label=f"bound, alpha {chosen.alpha:g}")
    axis.plot([chosen.ranks], [chosen.result.useful_tokens_per_s], "k*", markersize=14, label="chosen")
    axis.set(xlabel="training GPUs", ylabel="useful tokens per second")
    axis.legend(fontsize="small")
    return figure


def plan(arguments: argparse.Namespace) -> int:
    """Print the table and the choice, write the plot. Raises ConfigError for what cannot be planned."""
    machine = machine_of(arguments)
    config, measured = _inputs(arguments)
    machines, rate = _machines(arguments, config)

    gpus = config.generator.count * config.generator.tensor_parallel + config.learner.ranks
    gpus = gpus if machine is None else len(machine.gpus)
    if gpus < 1 + config.generator.tensor_parallel:
        raise ConfigError(f"--gpus={gpus} leaves no GPU for training beside one generator: give {gpus + 1} or more")
    if gpus % max(1, machines):
        raise ConfigError(f"--gpus={gpus}, in all: each of {machines} machines has the same number; give a multiple")

    memory = Memory(config, machine, machines, gpus // max(1, machines))
    found = candidates(config, measured, gpus, fits=memory.fits)
    if not found:
        told = next(iter(memory.refused.values()), "") or "see generator.max_model_len and timeouts"
        raise ConfigError(f"no split of these GPUs can run this recipe: {told}")

    chosen = best(found)
    console = CleanConsole(file=sys.stdout, width=120)
    _show(found, chosen, config, console)
    memory.show(chosen, console)

    if machines:
        split = _split(config, chosen.generators, chosen.ranks, chosen.alpha)
        stand = fleet.standing(split, machines, gpus // machines)
        fleet.show(split, stand, machines, console)
        if rate is not None:
            cables = fleet.Cables(split, stand, rate, measured.load_s)
            fleet.show_updates(cables, memory.version_bytes, chosen.result.step_s, console)

    if measured.seconds_per_step:
        _show_fit(config, measured, console)
    else:
        for line in assumptions(config, _given(arguments)):
            console.print(f"assumed: {line}", soft_wrap=True)

    arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    figure_of(found, chosen).savefig(arguments.plot, dpi=110)
    console.print(f"plot: {arguments.plot}")
    return 0


def _show_fit(config: Config, measured: Measured, console: Console) -> None:
    """What a finished run says, and how well the simulator repeats it."""
    sizes = f"{measured.prompt_tokens} and {measured.observation_tokens} tokens of prompt and observation, "
    console.print(
        f"fitted: {measured.length.mean:.4g} tokens a turn, {measured.turns.mean:.3g} turns, "
        f"{sizes if measured.prompt_tokens is not None else ''}{measured.step_s.mean:.3g} s of environment a turn, "
        f"{measured.train_s:.3g} s of training, {measured.decode_base_s:.3g} s a token\n"
        f"assumed, not fitted: {'; '.join(measured.guessed)}",
        soft_wrap=True,
    )
    again = Simulation(scenario_of(config, measured)).run()
    console.print(f"the run took {measured.seconds_per_step:.3g} s a step; simulated as it was: {again.step_s:.3g} s")


def _machines(arguments: argparse.Namespace, config: Config) -> tuple[int, float | None]:
    """How many have an agent, and the bytes a second of a cable; None: it is not said. Raises ConfigError."""
    told, link = arguments.machines, arguments.link
    if told is not None and not (told.isdecimal() and 1 <= int(told) <= MOST_NODES):
        raise ConfigError(f"--machines={told}: how many share the GPUs: 1 to {MOST_NODES}")
    machines = config.cluster.count if told is None else int(told)
    if link is not None and not machines:
        raise ConfigError(f"--link={link} is the cable of each of several machines: name these as well, --machines 4")
    return machines, None if link is None else fleet.bytes_a_second(link)


def _inputs(arguments: argparse.Namespace) -> tuple[Config, Measured]:
    if arguments.run is not None:
        return read_run(arguments.run)
    if arguments.recipe is None:
        raise ConfigError("fresco plan needs a recipe, or --run with a finished run's folder")
    config = load_config(arguments.recipe, arguments.overrides)
    given = _given(arguments)
    assumptions(config, given)
    return config, assumed(config, given)


def _given(arguments: argparse.Namespace) -> Given:
    env_s = _pair("--env-s", arguments.env_s, "MEAN,SIGMA in seconds: for instance --env-s=10,5")
    decode_s = _pair("--decode-s", arguments.decode_s, "BASE,MORE in seconds: for instance --decode-s=0.02,0.0001")
    answer = _pair("--answer", arguments.answer, "MEAN,SIGMA in tokens: for instance --answer=800,0.5")
    return Given(arguments.train_s, env_s and Gaussian(*env_s), decode_s, answer and LogNormal(*answer))


def _pair(option: str, text: str | None, wanted: str) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        first, second = map(float, text.split(","))
    except ValueError:
        raise ConfigError(f"{option}={text!r} is not {wanted}") from None
    return first, second
