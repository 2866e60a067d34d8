"""The figures, on code written for them."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import pytest

from experiments.structure.checkout import Module, folder_graph, import_graph
from experiments.structure.figures import (
    airless_functions,
    arrows,
    format_skips,
    long_runs,
    on_a_circle,
    prose_figures,
    repeated_defaults,
    tuple_assignments,
    upward,
)
from experiments.structure.picture import dot_text
from experiments.structure.synchronisations import synchronisations


def module(source: str, path: str = "rl/core/example.py") -> Module:
    return Module(Path(path), dedent(source))


def function(*runs: int) -> Module:
    """A function whose body has so many lines before each blank one."""
    body = "\n\n".join("\n".join(["step()"] * run) for run in runs)
    return module(f"def long():\n{indent(body, '    ')}\n")


def test_code_lines_and_statements_leave_out_notes() -> None:
    example = module(
        '''
        """A docstring
        of two lines."""

        # A comment.
        x = [  # a comment beside code
            1,

            2,
        ]


        class Plain:
            """Another."""

            y: int = 0
            """Of a field."""
        '''
    )

    assert example.code_lines == 6
    assert example.statements == 3


def test_air() -> None:
    assert airless_functions(function(25)) and not airless_functions(function(12, 12))
    assert not airless_functions(function(15)), "a short function needs none"
    assert long_runs(function(13)) and not long_runs(function(12, 12))

    items = "\n".join(f"        {n}," for n in range(30))
    one_statement = module(f"def table():\n    return [\n{items}\n    ]\n")

    assert not airless_functions(one_statement)
    assert not long_runs(one_statement)


def test_tuple_assignments_but_not_exchanges_or_calls() -> None:
    assert tuple_assignments(module("a, b = 1, 2\na, b = b, a\nb, a = a, []\na, b = pair()\na = 1, 2\n")) == 1


def test_format_skips_are_comments() -> None:
    assert format_skips(module("x = [1,\n 2]  # fmt: skip\ny = 'fmt: skip'\n# fmt: off\n")) == 2


def test_repeated_defaults_need_two_of_one_section() -> None:
    config = module(
        "class Config(Section):\n    cap: float = Field(2.0, gt=0)\n    low: float = 0.5\n    seed: int = 0\n"
    )
    copy = module("class Copy:\n    cap: float = 2.0\n    low: float = 0.5\n")
    other = module("class Other:\n    cap: float = 3.0\n    seed: int = 0\n")

    assert [where.split(": ")[1] for where in repeated_defaults([config, copy, other])] == [
        "Copy.cap = 2.0",
        "Copy.low = 0.5",
    ]


def test_the_docs_are_measured_without_their_code(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = f"Two words. W{'ord ord' * 30}\n\n| a b c | d |\n|---|---|\n\n```\nx y\n```\n"
    (tmp_path / "docs" / "a.md").write_text(page)
    found = prose_figures(tmp_path)
    assert found["docs: words of the longest table cell"] == 3
    assert found["docs: words of the mean sentence"] == (2 + 31) / 2
    assert found["docs: sentences of more than 30 words"] == 1


@pytest.fixture
def modules() -> list[Module]:
    return [
        module("", "rl/__init__.py"),
        module("from rl import helper", "rl/core/config.py"),
        module("import rl.core.config", "rl/helper.py"),
        module("from rl.core import config\nfrom rl.core.config import Config\nimport os", "envs/server.py"),
    ]


def test_imports_are_found_between_modules_and_folders(modules: list[Module]) -> None:
    assert import_graph(modules) == {
        "rl": set(),
        "rl.core.config": {"rl.helper"},
        "rl.helper": {"rl.core.config"},
        "envs.server": {"rl.core.config"},
    }

    assert folder_graph(modules, 1) == {"rl": set(), "envs": {"rl"}}
    assert folder_graph(modules, 2) == {"rl": {"rl/core"}, "rl/core": {"rl"}, "envs": {"rl/core"}}


def test_arrows_up_and_round(modules: list[Module]) -> None:
    nested = folder_graph(modules, 2)
    assert (arrows(nested), on_a_circle(nested)) == (3, 2)
    assert upward({"rl": {"envs"}, "envs": {"rl"}}) == ["rl imports envs"]


def test_the_picture_leaves_out_what_a_longer_way_implies() -> None:
    drawn = dot_text(
        [
            module("x = 1", "algos/kl.py"),
            module("import algos.kl", "rl/core/config.py"),
            module("import algos.kl, rl.core.config", "envs/server.py"),
        ]
    )

    assert '"rl/core" -> "algos" [color' in drawn
    assert '"envs" -> "rl/core" [color' in drawn
    assert '"envs" -> "algos" [color' not in drawn


def test_within_a_pack_the_host_reads_no_tensor() -> None:
    assert synchronisations(Path(__file__).parents[2]) == 0
