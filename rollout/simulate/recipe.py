"""Turns a recipe's configuration, with or without a finished run's measurements, into what is simulated."""

from __future__ import annotations

import statistics
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from msgspec import Struct

from rl.config.damage import read_lines
from rl.config.plugins import validated
from rl.config.schema import Config, ConfigError, validate
from rl.learner.simulated import simulated_options
from rl.store.batch_files import read_batch_parts
from rollout.broker.rules import Rules
from rollout.generator.engines.timing import SimulatedOptions
from rollout.simulate.distributions import Constant, Distribution, Empirical, Gaussian, LogNormal
from rollout.simulate.scenario import EnvServers, Generators, Scenario, TrainingCost, Work

SHORTEST_S = 1e-6
PROMPT_TOKENS = 16
OBSERVATION_TOKENS = 4
"""The tokens of an observation where neither a run nor the recipe says how many."""
GUESSED_SIGMA = 0.6
"""The standard deviation of the logarithm of a turn's length."""
WITHOUT_BATCHES = (
    f"the spread of lengths (log-normal, sigma {GUESSED_SIGMA}), equal numbers of turns, and tokens of prompts and "
    "observations (tracking.replay=full saves them)",
)
ALWAYS_GUESSED = (
    "environment latency is Gaussian, with the spread of its batch means, and nothing hangs or fails",
    "KV memory for every seat's whole context, and the simulated engine's prefill speed",
)


class Measured(Struct, frozen=True):
    """What a finished run took, in its own configuration. None: it did not say."""

    length: Distribution
    """Tokens of one turn, of trained samples."""
    turns: Distribution
    step_s: Distribution
    """Seconds of the environment after each turn."""
    train_s: float
    """The seconds of one step with `ranks` ranks."""
    ranks: int
    publish_s: float
    load_s: float
    decode_base_s: float
    decode_per_seq_s: float
    tasks: int
    seconds_per_step: float
    """The seconds that the run took for a step, for comparison."""
    prompt_tokens: int | None = None
    observation_tokens: int | None = None
    guessed: tuple[str, ...] = ()
    """What the run does not say, and what is taken for it."""


class Given(Struct, frozen=True):
    """What the command line says of times and lengths; None: nothing."""

    train_s: float | None = None
    """The seconds of one step with the recipe's ranks."""
    env_s: Distribution | None = None
    decode_s: tuple[float, float] | None = None
    """The seconds of one decode step, and what each further sequence adds."""
    answer: LogNormal | None = None
    """Tokens of one turn."""


def assumptions(config: Config, given: Given) -> list[str]:
    """What is predicted from, where no run was measured: a line each.

    Raises ConfigError where the recipe runs a real engine or learner and nobody says how long these take.
    """
    missing = []
    if config.generator.engine != "simulated" and given.decode_s is None:
        missing.append("--decode-s")
    if config.learner.kind != "simulated" and given.train_s is None:
        missing.append("--train-s")
    if config.env.name != "synthetic" and given.env_s is None:
        missing.append("--env-s")

    if missing:
        raise ConfigError(
            f"{config.name} was not measured: give --run with the folder of a finished run, or say yourself how long "
            f"things take: {', '.join(missing)}"
        )

    length = _answer(config, given)
    base_s, per_seq_s = _decode_s(config, given)
    return [
        f"answers of {length.mean:g} tokens on average (log-normal, sigma {length.sigma:g}): {_source(config, given)}",
        f"a decode step of {base_s:g} s and {per_seq_s:g} s for each other sequence",
        *ALWAYS_GUESSED[1:],
    ]


def _engine(config: Config) -> SimulatedOptions:
    """The recipe's simulated engine; for a real one, what a simulated one is where nothing is said."""
    given = config.generator.options if config.generator.engine == "simulated" else {}
    options: SimulatedOptions = validated(SimulatedOptions, given, "generator.options")
    return options


def _decode_s(config: Config, given: Given) -> tuple[float, float]:
    engine = _engine(config)
    return given.decode_s or (engine.decode_base_s, engine.decode_per_seq_s)


def _answer(config: Config, given: Given) -> LogNormal:
    """Tokens of one turn: as given, or as the recipe's simulated engine has them, else half of what is allowed."""
    if given.answer is not None:
        return given.answer
    engine = _engine(config)
    simulated = config.generator.engine == "simulated"
    return LogNormal(engine.length_mean if simulated else config.sampling.max_tokens / 2, engine.length_sigma)


def _source(config: Config, given: Given) -> str:
    if given.answer is not None:
        return "--answer"
    return "generator.options" if config.generator.engine == "simulated" else "half of sampling.max_tokens"


def assumed(config: Config, given: Given) -> Measured:
    """What the command line says, else the options of a simulated engine, learner and environment."""
    options = config.env.options
    synthetic = config.env.name == "synthetic"
    latency = Gaussian(options.get("mean_s", 0.0), options.get("sigma_s", 0.0)) if synthetic else Constant(0.0)
    base_s, per_seq_s = _decode_s(config, given)
    train_s = given.train_s

    return Measured(
        length=_answer(config, given),
        turns=Constant(options.get("turns", 1) if synthetic else config.env.max_turns),
        step_s=given.env_s or latency,
        train_s=simulated_options(config.learner).step_s if train_s is None else train_s,
        ranks=config.learner.ranks,
        publish_s=0.0,
        load_s=_engine(config).load_s,
        decode_base_s=base_s,
        decode_per_seq_s=per_seq_s,
        tasks=options.get("tasks", 1000),
        seconds_per_step=0.0,
    )


def scenario_of(config: Config, measured: Measured) -> Scenario:
    """The recipe's machine and rules with the measured times; how many seconds it may take is the question."""
    generator = config.generator
    options = config.env.options
    synthetic = config.env.name == "synthetic"

    return Scenario(
        broker=Rules.of(config, measured.tasks).changed(seconds=None),
        generators=Generators(
            count=generator.count,
            max_num_seqs=generator.max_num_seqs,
            max_model_len=generator.max_model_len,
            decode_base_s=measured.decode_base_s,
            decode_per_seq_s=measured.decode_per_seq_s,
            prefill_tokens_per_s=_engine(config).prefill_tokens_per_s,
            load_s=measured.load_s,
            on_update="keep" if generator.on_update == "keep" else "recompute",
            alternate=config.alternates,
        ),
        work=Work(
            length=measured.length,
            max_tokens=config.sampling.max_tokens,
            turns=measured.turns,
            prompt_tokens=_first(measured.prompt_tokens, options.get("prompt_tokens"), PROMPT_TOKENS),
            observation_tokens=_first(
                measured.observation_tokens, options.get("observation_tokens"), OBSERVATION_TOKENS
            ),
            step_s=measured.step_s,
            hang_probability=options.get("hang_probability", 0.0) if synthetic else 0.0,
            step_deadline_s=config.env.step_deadline_s,
        ),
        servers=EnvServers(count=config.env.servers, capacity=config.env.episodes_per_server),
        training=TrainingCost(step_s=measured.train_s, publish_s=measured.publish_s),
        seed=config.seed,
    )


def read_run(folder: Path) -> tuple[Config, Measured]:
    """Fit the distributions of a finished run. Raises ConfigError if the folder holds no training steps.

    Lengths of turns, prompts and observations, and the number of turns, come from its saved batches
    (`tracking.replay=full`). Without these they come from the means of its metrics, and `guessed` names what they
    do not say. Environment latency: mean and spread of the batch means, which understate hangs. Decoding: seconds per
    token against the sequences that ran at once, over the steps.
    """
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise ConfigError(f"{str(folder)!r} is no run: it has no metrics.jsonl; give the folder of a finished run")

    config = validate(yaml.safe_load((folder / "config.yaml").read_text()))
    steps = _Steps(read_lines(path, dict[str, Any]), config)
    if steps.count < 4:
        raise ConfigError(f"{str(path)!r} has {steps.count} training steps with rollout; a fit needs 4 or more")

    sizes = _from_batches(folder)
    guessed = ALWAYS_GUESSED if sizes else WITHOUT_BATCHES + ALWAYS_GUESSED
    if not sizes:
        per_turn = steps.mean("rollout/length") / max(1.0, steps.mean("rollout/turns"))
        turns = Constant(round(steps.mean("rollout/turns")))
        sizes = {"length": LogNormal(per_turn, GUESSED_SIGMA), "turns": turns}

    base_s, per_seq_s = steps.decoding()
    per_batch = config.batch_size * steps.mean("rollout/turns")
    env_mean = statistics.fmean(steps.latencies)
    spread = statistics.pstdev(steps.latencies) * per_batch**0.5

    return config, Measured(
        **sizes,
        step_s=Gaussian(env_mean, min(spread, 2 * env_mean)),
        train_s=steps.mean("time/train"),
        ranks=config.learner.ranks,
        publish_s=steps.mean("time/publish"),
        load_s=max(
            steps.mean("weight_sync/pause_mean_s") - steps.mean("weight_sync/drain_mean_s"),
            steps.mean("weight_sync/load_mean_s"),  # an engine may tell this alone
        ),
        decode_base_s=base_s,
        decode_per_seq_s=per_seq_s,
        tasks=100_000,
        seconds_per_step=steps.mean("time/step"),
        guessed=guessed,
    )


_AVERAGED = (
    *("rollout/length", "rollout/turns", "rollout/generate_s", "time/train", "time/publish", "time/step"),
    *("weight_sync/pause_mean_s", "weight_sync/drain_mean_s", "weight_sync/load_mean_s"),
)


_NEEDED = {"time/step", "rollout/env_s", "rollout/turns"}


class _Steps:
    """What the rows of metrics say of a run's steps, but for the first one, which contains the start.

    A row has hundreds of numbers: memory holds the dozen that a fit needs.
    """

    def __init__(self, rows: Iterable[dict[str, Any]], config: Config) -> None:
        self.count = 0
        """Of the steps, the first one included."""
        self.latencies = array("d")
        """Of the environment after a turn."""
        self._values: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self._loads = array("d")
        self._token_s = array("d")
        before: dict[str, Any] = {}

        for row in rows:
            if not row.keys() >= _NEEDED:  # of an evaluation, or of training without rollout
                continue
            self.count += 1
            if self.count > 1:
                self._add(row)
            if self.count > 2:
                self._compare(before, row, config.generator.count)
            before = row

    def mean(self, name: str) -> float:
        values = self._values[name]
        return statistics.fmean(values) if values else 0.0

    def _add(self, row: dict[str, Any]) -> None:
        self.latencies.append(row["rollout/env_s"] / max(1.0, row["rollout/turns"]))  # rows: of an episode
        for name in _AVERAGED:
            if row.get(name) is not None:
                self._values[name].append(row[name])

    def _compare(self, before: dict[str, Any], after: dict[str, Any], generators: int) -> None:
        """How many sequences ran at once between two rows, and the seconds of one token."""
        tokens = busy = 0.0
        for index in range(generators):
            names = (f"generator.{index}/tokens", f"generator.{index}/busy_s")
            if all(name in row for name in names for row in (before, after)):
                tokens += after[names[0]] - before[names[0]]
                busy += after[names[1]] - before[names[1]]

        token_s = after["rollout/generate_s"] / max(1.0, after["rollout/length"])
        if tokens > 0 and busy > 0:
            self._loads.append(max(1.0, tokens / busy * token_s))
            self._token_s.append(token_s)

    def decoding(self) -> tuple[float, float]:
        """(base, per further sequence) by least squares over steps: seconds of one token against sequences at once."""
        if not self._loads:
            return max(SHORTEST_S, self.mean("rollout/generate_s") / max(1.0, self.mean("rollout/length"))), 0.0

        loads = np.array(self._loads)
        seconds = np.array(self._token_s)
        deviation = loads - loads.mean()
        spread = float((deviation**2).sum())
        slope = float((deviation * (seconds - seconds.mean())).sum() / spread) if spread > 1e-9 else 0.0
        slope = min(max(0.0, slope), float(seconds.mean() / loads.mean()))

        return max(SHORTEST_S, float(seconds.mean() - slope * (loads.mean() - 1))), slope


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _from_batches(folder: Path) -> dict[str, Any]:
    """What saved batches say of the trained samples, as fields of `Measured`; nothing where there are none."""
    lengths: Counter[float] = Counter()
    turns: Counter[float] = Counter()
    prompted = observed = 0

    for batch_part in read_batch_parts(folder):
        ends = np.cumsum(batch_part.lengths)
        for starts, length, end in zip(batch_part.turn_starts, batch_part.lengths, ends, strict=True):
            mask = batch_part.loss_mask[end - length : end]
            parts = [float(part.sum()) for part in np.split(mask, starts)[1:]]

            turns[len(starts)] += 1
            prompt = int(starts[0]) if len(starts) else int(length)
            prompted += prompt
            observed += int(length - prompt - sum(parts))
            lengths.update(parts)

    if not lengths:
        return {}

    gaps = lengths.total() - turns.total()  # between two turns
    return {
        "length": Empirical.of(lengths),
        "turns": Empirical.of(turns),
        "prompt_tokens": round(prompted / turns.total()),
        "observation_tokens": round(observed / gaps) if gaps else 0,
    }
