"""Ten seeded pathologies, each in a short run of its own, and which alarm named it after which step.

    python -m experiments.pathologies                        # all of them and two clean runs, about ten minutes
    python -m experiments.pathologies slow-server            # one
    python -m experiments.pathologies recipes                # the recipes as they are: none may raise an alarm
    python -m experiments.pathologies all --out experiments/results/pathologies

Run folders have names that do not tell, for a reader of their reports. Exits with 1 if a pathology is not named by one
of its alarms, or a clean run raises one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.pathologies.cases import CASES, CLEAN, RUNS, Case
from experiments.pathologies.recipes import RECIPES, nearest, trained
from launch.commands.run import execute
from launch.cpu.fork_server import begin_as_copies
from launch.launcher.local import Begin, begin_process
from launch.plan import ProcessSpec
from launch.preflight import Preflight, check, make_run
from launch.provenance import write_provenance
from rl.config.plugins import own_packages_first
from rl.config.recipes import find_recipe
from rl.config.schema import Config, load_config
from rl.observe.alarms import read_alarms

_FILES = {"all": "result.json", "recipes": "recipes.json"}
_SPOILT = "experiments.pathologies.spoilt"


def play(case: Case, runs: Path) -> dict[str, Any]:
    """Play one run; returns what it raised, in order."""
    name = RUNS.get(case.name, case.name)
    settings = (*case.overrides, f"runs={runs}", f"name={name}", "tracking.wandb=disabled")
    config = load_config(find_recipe(case.recipe), list(settings))

    begin = time.time()
    shutil.rmtree(runs / name, ignore_errors=True)
    with begin_as_copies(config) if case.spoilt is None else nullcontext(begin_process) as begin_child:
        code = _run(case, config, runs, begin_child, begin)

    run = runs / name
    kept = ("step", "last_step", "count", "detail")
    raised = [{"alarm": each.name} | {name: getattr(each, name) for name in kept} for each in read_alarms(run)]

    what = {"pathology": case.name, "what": case.what, "run": name, "recipe": case.recipe}
    result = what | {
        "overrides": list(case.overrides),
        "exit_code": code,
        "raised": raised,
        "seconds": round(time.time() - begin, 1),
        "load": [round(each, 1) for each in os.getloadavg()],
    }

    if case.alarms:
        return result | {"named": next((each for each in raised if each["alarm"] in case.alarms), None)}
    return result | {"trained": trained(run), "nearest": nearest(run, config)}


def _run(case: Case, config: Config, runs: Path, begin_child: Begin, begin: float) -> int:
    """Run as `fresco run` does, with what is wrong in its place. Returns the exit code."""
    checked = check(config, dry=False, begin=begin_child)
    if case.name in RUNS and checked.prepared.folder is not None:  # all of them, or the folder's name would tell
        config = _with_template(config, checked, runs / f"model-{config.name}", case.template)
        checked = check(config, dry=False, begin=begin_child)

    checked = replace(checked, plan=[_spoilt(spec, case) for spec in checked.plan])
    run = make_run(checked, begin)
    write_provenance(run.folder, find_recipe(case.recipe), config, run)
    return execute(run, checked, begin_child)


def _with_template(config: Config, checked: Preflight, folder: Path, template: str) -> Config:
    """The same model in a folder of its own, with another chat template if one is given."""
    assert checked.prepared.folder is not None
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checked.prepared.folder, folder)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder), "tiny": {}})})


def _spoilt(spec: ProcessSpec, case: Case) -> ProcessSpec:
    if case.spoilt is None or (spec.role, spec.index) != case.spoilt[:2]:
        return spec
    return replace(spec, module=_SPOILT, environment=spec.environment | {"FRESCO_SPOILT": case.spoilt[2]})


def table(results: list[dict[str, Any]]) -> str:
    """The table, as Markdown."""
    lines = ["| pathology | what is wrong | named by | after step | also raised |", "|---|---|---|---|---|"]
    for result in results:
        named = result.get("named")
        others = [f"`{each['alarm']}` ({each['step']})" for each in result["raised"] if each != named]
        first = (f"`{named['alarm']}`", str(named["step"])) if named else ("", "")
        lines.append(f"| {result['pathology']} | {result['what']} | {' | '.join(first)} | {', '.join(others)} |")
    return "\n".join(lines)


def clean_table(results: list[dict[str, Any]]) -> str:
    """The table, as Markdown, of runs in which nothing is wrong."""
    lines = ["| run | recipe | steps | samples | raised | seconds | load |", "|---|---|---|---|---|---|---|"]
    for result in results:
        changed = [each for each in result["overrides"] if not each.startswith("tracking.")]
        recipe = f"`{' '.join([result['recipe'], *changed])}`"
        raised = ", ".join(f"`{each['alarm']}` ({each['step']})" for each in result["raised"]) or "nothing"
        counts = " | ".join(str(result["trained"][each]) for each in ("steps", "samples"))
        last = f"{result['seconds']:.0f} | {result['load'][0]}"
        lines.append(f"| {result['pathology']} | {recipe} | {counts} | {raised} | {last} |")
    return "\n".join(lines)


def as_expected(result: dict[str, Any]) -> bool:
    """A pathology is named; a clean run ends well and raises nothing."""
    if "named" in result:
        return result["named"] is not None
    return not result["raised"] and result["exit_code"] == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = {"all": [*CASES, *CLEAN], "recipes": list(RECIPES)}
    cases = {case.name: case for group in groups.values() for case in group}
    parser.add_argument(
        "names", nargs="*", choices=[*groups, *cases], default="all", metavar="NAME", help=", ".join([*groups, *cases])
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/seeded"))
    parser.add_argument(
        "--out", type=Path, help="a folder: result.json and recipes.json, into which results are merged"
    )
    arguments = parser.parse_args()

    own_packages_first()
    names = [arguments.names] if isinstance(arguments.names, str) else arguments.names
    chosen = [case for name in names for case in groups.get(name, [cases.get(name)]) if case is not None]
    failed = []
    for case in chosen:
        result = play(case, arguments.runs.absolute())
        failed += [] if as_expected(result) else [case.name]
        group, print_table = ("recipes", clean_table) if case in RECIPES else ("all", table)
        results = [result]
        if arguments.out is not None:
            results = _merged(arguments.out / _FILES[group], result, [each.name for each in groups[group]])
        print(print_table(results), flush=True)

    print(f"not as expected: {', '.join(failed)}" if failed else "all as expected")
    return 1 if failed else 0


def _merged(path: Path, result: dict[str, Any], order: list[str]) -> list[dict[str, Any]]:
    """The result with those that stand there already, in the order of the cases."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {each["pathology"]: each for each in json.loads(path.read_text())} if path.exists() else {}
    known[result["pathology"]] = result
    merged = [known[name] for name in order if name in known]
    path.write_text(json.dumps(merged, indent=1) + "\n")
    return merged


if __name__ == "__main__":
    sys.exit(main())
