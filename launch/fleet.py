"""Several machines before there is a run: what each of them runs, and how long an update of the weights takes.

`Members` says who stands where, as it does in a run. An update takes what the cables take, what hosts take to make,
receive and verify it, and the pause in which an engine loads it. A machine fetches a version once for all its engines.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby

import numpy as np
from rich.console import Console
from rich.table import Table

from launch.gpus import Gpu
from launch.launcher.members import AT_HEAD, Members
from launch.machine import size_text
from launch.plan import make_plan
from rl.config.lora import served_adapter
from rl.config.schema import MOST_CHANGED, Config, ConfigError
from rl.weights.updater import at_once

_UNITS = {"M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Changes:
    """What one step changes at a learning rate, and what it takes to send that and no more."""

    lr: float
    changed: float
    """Share of the weights."""
    over_dense: float
    """Bytes of a patch over those of the weights."""
    made: float
    """Bytes of weights a second, of one core that makes the patch."""
    applied: float


MEASURED = (
    Changes(1e-6, 0.0116, 0.0083, 1.73e9, 4.38e9),
    Changes(1e-5, 0.0788, 0.0412, 0.58e9, 2.04e9),
    Changes(1e-4, 0.391, 0.1506, 0.145e9, 0.603e9),
)
"""By `python -m experiments.bench deltas`, bfloat16 on the wire."""

RECEIVED = 1.44e9
"""Bytes a second that one process receives, however fast the cable, by `python -m experiments.bench link`."""
WHOLE_S, SPARSE_S = 0.57e-9, 0.66e-9
"""Seconds of a byte of the weights, beside cables and patches, by the same: a copy, and verified twice."""


def bytes_a_second(link: str) -> float:
    """Of `--link`, in bits a second: 10G, 400M. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])(?:bit(?:/s)?)?", link)
    if found is None or not float(found[1]):
        raise ConfigError(f"--link={link}: bits a second of each machine's cable are wanted: 10G, 400M")
    return float(found[1]) * _UNITS[found[2]] / 8


def standing(config: Config, machines: int, gpus_each: int) -> dict[str, int]:
    """The machine, from 1, of each process that agents begin, as `generator.0`.

    gpus_each: of one machine. Raises ConfigError where a process finds no machine.
    """
    members = Members(machines, 0.0, config.cluster.place)
    for number in range(1, machines + 1):
        own = [f"{number}.{gpu}" for gpu in range(gpus_each)]
        members.join(0.0, b"%d" % number, own, number).sees = True

    found = {}
    gpus = [Gpu(str(number), None) for number in range(machines * gpus_each)]
    begun = sorted(make_plan(config, device_of(config), gpus, {}), key=lambda each: bool(each.imports))
    for spec in (each for each in begun if each.role not in AT_HEAD):
        member = members.assign(f"{spec.name}.0", len(spec.gpus))
        if member is None:
            raise ConfigError(
                f"--machines={machines}: none of them has {len(spec.gpus)} of its {gpus_each} GPUs left for "
                f"{spec.name}; plan for more of them, or for machines with more GPUs"
            )
        found[spec.name] = member.number
    return found


def device_of(config: Config) -> str:
    """Where engines and ranks of a plan run: a recipe for CPUs says so."""
    return "cpu" if config.device == "cpu" else "cuda"


def show(config: Config, stand: Mapping[str, int], machines: int, console: Console) -> None:
    """Which machine runs what."""
    table = Table("machine", "runs", title=f"{machines} machines", title_justify="left", box=None, pad_edge=False)
    for number, runs in _rows(stand, machines):
        table.add_row(number, runs)
    console.print(table)
    console.print(
        f"at the head: broker and proxy; ranks of engines that read the weights: {config.weight_readers}; any number "
        "of machines may join later, and take over engines of these",
        soft_wrap=True,
    )


def _rows(stand: Mapping[str, int], machines: int) -> Iterator[tuple[str, str]]:
    """Machines that run alike, as `2-4`, and what each of them runs."""
    counts: dict[int, Counter[str]] = {number: Counter() for number in range(1, machines + 1)}
    for name, number in stand.items():
        counts[number][name.partition(".")[0]] += 1

    for runs, alike in groupby(counts, key=lambda number: counts[number]):
        first, *others = alike
        names = ", ".join(f"{count} × {role}" for role, count in runs.items())
        yield f"{first}-{others[-1]}" if others else str(first), names or "nothing"


@dataclass(frozen=True)
class Update:
    """How long a version takes from the learner to the engines, in one way of sending it."""

    nbytes: float
    """Of the version, as it crosses a cable."""
    first_s: float
    """Until the first engines have it."""
    all_s: float
    """Until all have it."""


class Cables:
    """rate: bytes a second of each machine's cable, in either direction. load_s: the pause of an engine."""

    def __init__(self, config: Config, stand: Mapping[str, int], rate: float, load_s: float) -> None:
        self.config = config
        self._rate = rate
        self._load_s = load_s
        ranks = [number for name, number in stand.items() if name.startswith("learner.")]
        self._ranks = len(ranks)
        self._shares = {number: count / len(ranks) for number, count in Counter(ranks).items()}
        self._waves = list(_waves(config, stand))

    def whole(self, nbytes: int) -> Update:
        return self._update(nbytes, 1.0, WHOLE_S)

    def sparse(self, nbytes: int, changes: Changes) -> Update:
        """Ranks make their patches at the same time, once."""
        made_s = nbytes / self._ranks / changes.made
        return self._update(nbytes, changes.over_dense, SPARSE_S + 1 / changes.applied, made_s)

    def _update(self, nbytes: int, over_dense: float, host_s: float, made_s: float = 0.0) -> Update:
        """host_s: of each byte of the weights, beside cables."""
        fetched = [self._wave(wave, nbytes, over_dense) + nbytes * host_s * bool(wave) for wave in self._waves]
        each = [seconds + self._load_s for seconds in fetched]
        return Update(nbytes * over_dense, made_s + each[0], made_s + sum(each))

    def _wave(self, machines: Sequence[int], nbytes: int, over_dense: float) -> float:
        """Seconds until machines that fetch at the same time have received. What a rank of the same machine wrote comes
        whole, over no cable."""
        if not machines:
            return 0.0
        remote = [1 - self._shares.get(number, 0.0) for number in machines]
        comes = max(remote) * over_dense
        goes = max(share * sum(number != at for number in machines) for at, share in self._shares.items()) * over_dense
        received = max(part * over_dense + 1 - part for part in remote)
        return nbytes * max(comes / self._rate, goes / self._rate, received / RECEIVED)


def _waves(config: Config, stand: Mapping[str, int]) -> Iterator[list[int]]:
    """For the engines that are updated at one time: the machines that have not fetched before."""
    count = config.generator.count
    together = at_once(count, rolling=config.rollout.alpha > 0)
    served: set[int] = set()
    for first in range(0, count, together):
        wave = {stand[f"generator.{index}"] for index in range(first, min(count, first + together))} - served
        served |= wave
        yield sorted(wave)


def show_updates(cables: Cables, nbytes: int | None, step_s: float, console: Console) -> None:
    """What an update takes whole and as what changed, and whether the one that the run takes fits within a step.

    nbytes: of one version of the weights; None: it is not known.
    """
    config = cables.config
    whose = f"model.path={config.model.path}" if nbytes is None else f"weights.transport={config.weights.transport}"
    if nbytes is None or config.weights.transport not in ("auto", "tcp"):
        console.print(f"updates of the weights: nothing is known here of {whose}", soft_wrap=True)
        return

    changes = changes_at(config.learner.lr)
    taken = whole = cables.whole(nbytes)
    updates = {"whole": whole}
    if why := unknown(config):
        console.print(f"updates of the weights go whole: {why}", soft_wrap=True)
    else:
        updates["what changed"] = sparse = cables.sparse(nbytes, changes)
        taken = sparse if sends_changes(config, changes) else whole

    table = Table("update", "bytes to a machine", "first engines", "all engines", box=None, pad_edge=False)
    for name, each in updates.items():
        table.add_row(name, size_text(each.nbytes), f"{each.first_s:.3g} s", f"{each.all_s:.3g} s")
    console.print(table)

    if not why:
        sent = "all" if taken is whole else "what changed"
        console.print(
            f"at learner.lr={config.learner.lr:g} a step changes {changes.changed:.2%} of the weights (measured on a "
            f"small model, from 1e-6 to 1e-4); weights.delta={config.weights.delta} sends {sent}",
            soft_wrap=True,
        )
    fits = "fits within" if taken.all_s <= step_s else "does not fit within"
    console.print(f"until all have it {taken.all_s:.3g} s: it {fits} a step of {step_s:.3g} s", soft_wrap=True)


def changes_at(lr: float) -> Changes:
    """Between two measured rates on a line of logarithms; beyond them as at the nearest."""
    rates, *columns = np.log([astuple(each) for each in MEASURED]).T
    return Changes(lr, *(math.exp(np.interp(math.log(lr), rates, column)) for column in columns))


def sends_changes(config: Config, changes: Changes) -> bool:
    """Whether a run sends patches."""
    return config.weights.delta == "always" or (config.weights.delta == "auto" and changes.changed <= MOST_CHANGED)


def unknown(config: Config) -> str:
    """Why nothing is known of patches; empty where it is."""
    if config.generator.dtype != "bfloat16":
        return f"what a step changes was measured in bfloat16, not in generator.dtype={config.generator.dtype}"
    if served_adapter(config.model) is not None:
        return "adapters change wholly"
    return ""
