"""What `--dry-run` prints: what each GPU holds and what is left, on one screen; all of the plan with `-v`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from launch.machine import Machine, size_text
from launch.memory import Need, on_host
from launch.preflight import Preflight
from launch.provenance import flat
from launch.terminal import CleanConsole
from rl.config.schema import Config, ConfigError, load_config
from rl.config.tree import differing

_LEAST_PACE = 10
"""Tokens a second that an engine on a GPU makes of each of its requests, also beside many others."""


def print_plan(checked: Preflight, recipe: Path, *, verbose: bool) -> None:
    """The plan, what differs from the recipe, and what could not be checked here."""
    console = CleanConsole(highlight=False)
    config = checked.config
    if verbose:
        console.print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), markup=False, end="")
        _print_processes(checked, console)

    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    line(f"{config.name}: {config.steps} steps, model {config.model.path}, planned for {checked.machine}")
    if changed := differences(recipe, config):
        line(f"differs from the recipe: {', '.join(changed)}")
    line(_roles(checked))

    print_gpus(checked.memory, checked.machine, console)
    memory = checked.machine.memory
    of = f" of {size_text(memory)}, {size_text(memory - on_host(checked.memory))} is left" if memory else ""
    line(f"memory of the host: {size_text(on_host(checked.memory))}{of}")
    if checked.written.together:
        line(f"on the disk: {checked.written}")
    if pace := _pace(config):
        line(pace)
    for need in checked.memory if verbose else ():
        line(f"memory ({need.where}): {need}")

    for unknown in checked.unchecked:
        line(f"not checked here: {unknown}")
    more = "" if verbose else " (-v shows all of it)"
    line(f"dry run: the configuration is valid; nothing was started{more}")


def differences(recipe: Path, config: Config) -> list[str]:
    """Each field that is not as the recipe says, with its own value in brackets."""
    try:
        before = load_config(recipe)
    except ConfigError:  # by itself it is not complete
        return []
    found = differing(*(flat(each.model_dump(mode="json")) for each in (config, before)))
    return [f"{name}={_value(ours)} ({_value(theirs)})" for name, (ours, theirs) in found.items()]


def _value(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()


def _pace(config: Config) -> str:
    """How fast the longest episode must be sampled, where that is a question."""
    tokens = config.episode_tokens
    seconds = config.rollout.episode_deadline_s
    if tokens < _LEAST_PACE * seconds:
        return ""
    return f"an episode of {tokens} tokens is cancelled below {tokens / seconds:.0f} tok/s: rollout.episode_deadline_s"


def _roles(checked: Preflight) -> str:
    """How many processes of each role there are, and their GPUs."""
    counts = Counter(spec.role for spec in checked.plan)
    gpus = {role: [gpu for spec in checked.plan if spec.role == role for gpu in spec.gpus] for role in counts}
    parts = [f"{n} × {role}" + (f" (cuda:{','.join(gpus[role])})" if gpus[role] else "") for role, n in counts.items()]
    return f"{len(checked.plan)} processes: {', '.join(parts)}"


def print_gpus(needs: Sequence[Need], machine: Machine, console: Console) -> None:
    """A column for each kind of GPU, with what it holds and what is left; and how many sequences fit."""
    kinds = [need for need in needs if need.where == "gpu"]
    if not kinds:
        return
    table = Table("memory of each GPU", box=None, pad_edge=False)
    for need in kinds:
        table.add_column(f"{need.count} × {need.what}", justify="right")
    for part in dict.fromkeys(part for need in kinds for part in need.parts):
        table.add_row(part, *(size_text(need.parts[part]) if need.parts.get(part) else "" for need in kinds))

    table.add_row("together", *(size_text(need.each) for need in kinds))
    if (gpu := machine.gpu_memory) is not None:
        table.add_row("left", *(size_text(need.left(gpu)) for need in kinds))
    console.print(table)
    for remark in (remark for need in kinds for remark in need.remarks):
        console.print(remark, markup=False, soft_wrap=True)


def _print_processes(checked: Preflight, console: Console) -> None:
    """Processes, devices, pinning and endpoints."""
    processes = Table("process", "module", "device", "cores", title=f"{len(checked.plan)} processes")
    for spec in checked.plan:
        where = f"cuda:{','.join(spec.gpus)}" if spec.gpus else "cpu"
        cores = f"{spec.cores[0]}-{spec.cores[-1]}" if spec.cores else "shared"
        processes.add_row(spec.name, spec.module, where, cores)
    console.print(processes)

    environments: dict[str, dict[str, str]] = {}
    for spec in checked.plan:
        environments.setdefault(spec.role, spec.environment)
    for role, values in environments.items():
        if variables := [f"{key}={value}" for key, value in values.items() if key != "CUDA_VISIBLE_DEVICES"]:
            console.print(f"environment of each {role}: {' '.join(variables)}", markup=False, soft_wrap=True)

    config = checked.config
    where = "<run>/ipc/<socket>" if config.network.transport == "ipc" else f"a free port of {config.network.host}"
    console.print(f"each socket is bound at {where}", markup=False, soft_wrap=True)
