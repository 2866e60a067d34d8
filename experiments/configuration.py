"""The page of every field: `python -m experiments.configuration > docs/configuration.md`."""

from __future__ import annotations

from collections.abc import Sequence

from rl.config.fields import described, sections
from rl.config.lora import LoraOptions
from rl.config.schema import Config
from rl.config.section import Section
from rl.learner.simulated import SimulatedOptions as SimulatedLearner
from rl.observe.alarms import ALARMS
from rollout.generator.engines.environment import VllmOptions
from rollout.generator.engines.timing import SimulatedOptions as SimulatedEngine

HEAD = """# Configuration

Every field of a run, made from the code by `python -m experiments.configuration > docs/configuration.md`. A recipe is a
YAML file with these sections; `fresco run RECIPE section.field=value` sets one field. Unknown names are refused.
"""
PLUG_INS = """## Options of plug-ins

Environments say theirs in [environments.md](environments.md), losses in [losses.md](losses.md), advantages in
[advantages.md](advantages.md).
"""
LIMITS = """## Limits of alarms

`alarms.limits.NAME.LIMIT=value` sets one, as `alarms.limits.large-steps.kl=0.02` does. What each alarm watches, and
what to change, is in [alarms.yaml](../rl/observe/alarms.yaml).
"""
_COLUMNS = ("field", "type", "default", "what it says", "where it matters")


def page() -> str:
    """The whole page, as Markdown."""
    parts = [HEAD, *(_section(title, section) for title, section in sections(Config))]
    options: dict[str, type[Section]] = {"generator.options (vllm)": VllmOptions}
    options["generator.options (simulated)"] = SimulatedEngine
    options["learner.options (simulated)"] = SimulatedLearner
    options["model.lora"] = LoraOptions
    parts += [PLUG_INS, *(_section(title, each).replace("## ", "### ", 1) for title, each in options.items())]
    return "\n".join([*parts, LIMITS, _limits()])


def _section(title: str, section: type[Section]) -> str:
    rows = [(f"`{each.name}`", each.type, each.default, each.says, each.where) for each in described(section)]
    return f"## {title or 'The run itself'}\n\n{_table(_COLUMNS, rows)}\n"


def _limits() -> str:
    rows = [
        (f"`{name}.{each}`", f"`{own.value:g}`", f"{own.least:g} to {own.most:g}", own.meaning)
        for name, alarm in ALARMS.items()
        for each, own in alarm.limits.items()
    ]
    return _table(("limit", "value", "range", "what it says"), rows).replace(" to 9.0072e+15", " and above")


def _table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heading, ("---",) * len(heading), *(tuple(cell.replace("|", "&#124;") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(page())
