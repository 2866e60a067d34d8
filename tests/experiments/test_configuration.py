"""docs/configuration.md is made from the fields, and each field says in one plain sentence what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.configuration import page
from experiments.structure.checkout import FLOORS, modules_of
from experiments.structure.figures import configuration_fields
from rl.config.fields import inner_sections, sections
from rl.config.lora import LoraOptions
from rl.config.schema import Config
from rl.config.section import Section
from rl.learner.simulated import SimulatedOptions as SimulatedLearner
from rl.observe.alarms import ALARMS
from rollout.generator.engines.environment import VllmOptions
from rollout.generator.engines.timing import SimulatedOptions as SimulatedEngine

ROOT = Path(__file__).parents[2]
MOST_FIELDS = 165
MOST_WORDS = 30
SECTIONS = {title or "Config": section for title, section in sections(Config)}
OPTIONS = {each.where: each for each in (VllmOptions, SimulatedEngine, SimulatedLearner, LoraOptions)}


def test_the_committed_page_is_what_the_command_prints() -> None:
    told = "python -m experiments.configuration > docs/configuration.md"
    assert (ROOT / "docs" / "configuration.md").read_text() == page() + "\n", told


@pytest.mark.parametrize("section", (SECTIONS | OPTIONS).values(), ids=(SECTIONS | OPTIONS).keys())
def test_every_field_says_in_one_short_sentence_what_it_is(section: type[Section]) -> None:
    assert section.where
    for name, field in section.model_fields.items():
        if not inner_sections(field) or field.description:
            said = field.description or ""
            assert said.endswith(".") and len(said.split()) <= MOST_WORDS, f"{name}: {said}"
            assert not [word for word in said.split()[:-1] if word.endswith(".")], f"{name} has two sentences"


def test_every_field_and_every_limit_stands_in_the_page() -> None:
    text = page()
    for section in (SECTIONS | OPTIONS).values():
        for name, field in section.model_fields.items():
            assert f"| `{name}` | " in text or inner_sections(field)
    for name, alarm in ALARMS.items():
        assert all(f"| `{name}.{each}` | " in text for each in alarm.limits)


def test_fields_are_counted_without_importing_them_and_are_few() -> None:
    counted = configuration_fields(modules_of(ROOT, *FLOORS))
    assert counted == sum(len(section.model_fields) for section in SECTIONS.values()) <= MOST_FIELDS
