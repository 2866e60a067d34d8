"""The pages of figures are written from the files of the results, and from nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from experiments.arms.records import Record
from experiments.arms.study import START, Study
from experiments.results import pages as results
from experiments.results.pages import BEGIN, END, Measured, Row, Section, of_study, page, pages, readme, told

CONTENT = {
    "machine": "2 cores of AMD EPYC, Linux 6.1",
    "date": "2026-11-26",
    "seconds": [1.26, 2.0],
    "ratios": {"a over b": {"cpu": {"median": 1.034, "low": 0.97, "high": 1.1}}},
    "rows": [{"loss": "topr", "final": 0.78}, {"loss": "grpo", "final": 0.7}],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.content.cache_clear()
    (tmp_path / "a.json").write_text(json.dumps(CONTENT))
    return tmp_path


def row(**fields: object) -> Row:
    return msgspec.convert({"what": "w", "figure": "f", "command": "c", "file": "a.json"} | fields, Row)


def test_the_pages_are_what_the_command_writes() -> None:
    results.content.cache_clear()
    other = [path.name for path, text in pages().items() if path.read_text() != text]
    assert not other, "write them: python -m experiments.results"


@pytest.mark.parametrize(
    ("figure", "written"),
    [
        ("{ratios[a over b][cpu]}", "1.03 (0.97 to 1.10)"),
        ("{ratios[a over b][cpu]:.1f}", "1.0 (1.0 to 1.1)"),
        ("{ratios[a over b][cpu][low]}", "0.97"),
        ("{seconds:.1f} s", "1.3, 2.0 s"),
        ("{seconds[1]:.0f}", "2"),
        ("{seconds:count} runs", "2 runs"),
        ("{rows[final]:.1f}", "0.8, 0.7"),
    ],
)
def test_a_figure_has_its_spread(figure: str, written: str, folder: Path) -> None:
    assert told(row(figure=figure)) == (written, "2-core EPYC, 2026-11-26")


def test_an_entry_of_a_list_is_picked_by_its_values(folder: Path) -> None:
    assert told(row(figure="{final}", pick={"rows": {"loss": "topr"}}))[0] == "0.78"


@pytest.mark.parametrize(
    "wrong",
    [
        {"figure": "{nothing}"},
        {"figure": "{seconds[7]}"},
        {"file": "missing.json"},
        {"figure": "{final}", "pick": {"rows": {"loss": "ppo"}}},
    ],
)
def test_a_row_without_its_figure_is_named(wrong: dict[str, object], folder: Path) -> None:
    with pytest.raises(ValueError, match=r"measured\.yaml, 'w': .*; mend its figure or its file"):
        told(row(**wrong))


def test_a_file_that_does_not_say_where_and_when_is_refused(folder: Path) -> None:
    (folder / "error.json").write_text(json.dumps(CONTENT | {"4b": {"error": "out of memory"}}))
    (folder / "unseen.json").write_text(json.dumps(CONTENT | {"peak": {"unrun": "no nvidia-smi"}}))
    (folder / "b.json").write_text('{"a": 1, "machine": "m"}')
    with pytest.raises(ValueError, match="date"):
        told(row(figure="{a}", file="b.json"))


def test_what_a_test_asserts_needs_no_file() -> None:
    assert told(row(figure="equal", file="")) == ("equal", "any")


def test_a_study_says_what_each_arm_has_gained_and_how_much_sooner_it_was() -> None:
    fields = {"title": "t", "recipe": "simulated", "arms": {"slow": [], "quick": []}, "read": []}
    study = msgspec.convert(fields | {"baseline": "slow", "goal": 0.5, "window": 1, "evaluate": {"all": []}}, Study)
    records = [
        Record(arm="slow", seed=0, machine="a", date="1", seconds=[10, 20], scores=[0.1, 0.6], facts={"steps": 2}),
        Record(arm="quick", seed=0, machine="b", date="2", seconds=[5, 10], scores=[0.1, 0.6]),
        Record(arm=START, seed=0, how="all", machine="a", date="1", won={"all": "0000"}),
        *(Record(arm=arm, seed=0, how="all", machine="a", date="1", won={"all": "0011"}) for arm in ("slow", "quick")),
    ]
    found = of_study(study, records)
    figure = "{sooner[quick]}; {goal[quick]} s; {gained[quick][all]:+.0f}; {facts[slow][steps]}"
    assert figure.format_map(found).startswith("2.00 × (one seed); 10 s; +50 (+0 to +100); 2")
    assert (found["machine"], found["date"]) == (["a", "b"], "2")


def test_the_page_has_a_cell_for_each_thing_and_one_link(folder: Path) -> None:
    rows = [row(figure="{seconds[0]}"), row(command="d")]
    assert "| w | [1.26](" in page(Measured("", [Section("s", rows[:1])])), "of one command no number is needed"
    made = page(Measured("About.", [Section("Learning", rows, about="More.")]))
    assert made.endswith(
        "## Learning\n\nMore.\n\n| what | measured |\n|---|---|\n"
        "| w (1) | [1.26](../experiments/results/a.json) |\n"
        "| w (2) | [f](../experiments/results/a.json) |\n"
        "\n<!-- needs: hours -->\n```bash\nc  #1 EPYC, 2026-11-26\nd  #2 EPYC, 2026-11-26\n```\n"
    )


def test_what_was_not_measured_since_is_unrun_beside_the_earlier_figure(folder: Path) -> None:
    (folder / "ended.json").write_text(json.dumps(CONTENT | {"ended_after_s": 3}))
    (folder / "error.json").write_text(json.dumps(CONTENT | {"4b": {"error": "out of memory"}}))
    (folder / "b.json").write_text(json.dumps(CONTENT | {"unrun": "no GPU"}))
    (folder / "killed.json").write_text('{"machine": "m", "date": "d"}')  # which says no seconds
    rows = [
        row(figure="{seconds[0]}", before="{seconds[1]:.0f}"),
        row(figure="{seconds[0]}", file="missing.json"),
        row(figure="{seconds[0]}", file="b.json", before="{seconds[1]:.0f}"),
        row(figure="{later}", file="ended.json"),
        row(figure="{whole[4b][mfu]}", file="error.json"),
        row(figure="{whole[peak][ratio]}", file="unseen.json"),
        row(figure="{whole[rows][0][final]}", file="ended.json"),
        row(figure="{later}", file="killed.json"),
    ]
    made = page(Measured("", [Section("s", rows, before="a.json")]))
    assert "| what | 2026-11-26 | now |\n|---|---|---|\n" in made
    cells = [line.split(" | ", 1)[1].strip(" |") for line in made.splitlines() if line.startswith("| w (")]
    link = "](../experiments/results/"
    assert cells == [
        f"2 | [1.26{link}a.json)",
        "– | unrun",
        "2 | unrun",
        *["– | unrun"] * 3,
        f"– | [0.78{link}ended.json)",
        "– | unrun",
    ]

    with pytest.raises(ValueError, match="mend its figure"):  # a part that came to its end has every figure
        page(Measured("", [Section("s", [row(figure="{later}")], before="a.json")]))


def test_the_readme_keeps_all_but_its_table(folder: Path) -> None:
    measured = Measured("", [Section("s", [row(readme="short", figure="{seconds:count}"), row()])])
    text = f"before\n{BEGIN}old{END}\nafter"
    made = readme(measured, text)
    assert made.startswith(f"before\n{BEGIN}| what") and made.endswith(
        f"| short | 2 | 2-core EPYC, 2026-11-26 |\n{END}\nafter"
    )
    assert readme(measured, made) == made
    with pytest.raises(ValueError, match="put them back"):
        readme(measured, "no marks")
