"""What the start of a run learns of its data: whether they are those of a checkpoint, and whether prompts fit."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs import lengths
from envs.data import _written, data_of
from envs.lengths import check_lengths
from envs.registry import make_family
from rl.config.schema import ConfigError, load_config
from rollout.episodes.tokenizer import ChatTokenizer
from tests.envs.model_folder import make_model_folder

DATASET = ("env.name=dataset", "env.options.reward=exact", "env.options.eval_count=2")


def rows(path: Path, prompts: Sequence[str], answer: str = "1") -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt in prompts))
    return path


def told(*overrides: str) -> dict[str, str]:
    config = load_config(None, list(overrides))
    return data_of(config.env.name, make_family(config))


def digest(*overrides: str) -> str:
    (line,) = told(*overrides).values()
    return line.rpartition(" ")[2]


def test_a_digest_is_that_of_the_training_rows(tmp_path: Path) -> None:
    """Order, answers and number count; the file's place, its form, and options of the environment do not."""
    prompts = [f"{number}?" for number in range(10)]
    same = rows(tmp_path / "a.jsonl", prompts)
    own = digest(*DATASET, f"env.options.source={same}")
    assert told(*DATASET, f"env.options.source={same}") == {"dataset": f"8 tasks of {same}, digest {own}"}

    (tmp_path / "b.json").write_text(json.dumps([json.loads(line) for line in same.read_text().splitlines()]))
    for changes in ((f"env.options.source={tmp_path / 'b.json'}",), ("env.options.instruction=Be brief.", "seed=3")):
        assert digest(*DATASET, f"env.options.source={same}", *changes) == own
    others = [
        rows(tmp_path / "c.jsonl", prompts[::-1]),
        rows(tmp_path / "d.jsonl", prompts, answer="2"),
        rows(tmp_path / "e.jsonl", [*prompts, "10?"]),
    ]
    assert len({own, *(digest(*DATASET, f"env.options.source={other}") for other in others)}) == 4


def test_a_digest_is_of_what_the_data_say(tmp_path: Path) -> None:
    """The order of a row's fields and of a set's members says nothing; numbers in an array or an object do."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "1?", "answer": "1"}\n')
    (tmp_path / "b.jsonl").write_text('{"answer": "1", "prompt": "1?"}\n')
    options = ("env.options.eval_count=0",)
    of = [digest(*DATASET, *options, f"env.options.source={tmp_path / name}") for name in ("a.jsonl", "b.jsonl")]
    assert of[0] == of[1]

    class Plain:
        def __init__(self, number: int) -> None:
            self.number = number

    long = np.arange(5000)
    assert _written({"b", "a"}) == _written({"a", "b"}) == "{'a','b'}"
    assert len({_written(Plain(1)), _written(Plain(2)), _written(long), _written(long[::-1])}) == 4


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


def test_a_digest_is_of_what_no_repr_shows() -> None:
    """An address of a program's text is data, an object's own is none; long arrays of objects are shown in part."""
    members = np.array(["a"] * 2000 + ["b"] + ["a"] * 2000, object)
    pairs: list[tuple[Any, Any]] = [
        ("jump at 0x10", "jump at 0x20"),
        (Slotted(1), Slotted(2)),
        (members, members[::-1][1:]),
        (members[1999:2001], members[1999:2001][::-1]),
        (members, np.roll(members, 1)),
        (members[:4].reshape(2, 2), members[:4]),
    ]
    for one, other in pairs:
        assert _written([one]) != _written([other])
    assert _written(Slotted(1)) == _written(Slotted(1)) and "0x" not in _written([Slotted, object(), print])


@pytest.mark.parametrize("source", ["rows.csv", "rows.jsonl.gz", "rows.json", "rows*.jsonl"])
def test_held_out_problems_of_files_are_not_those_of_training(source: str, tmp_path: Path) -> None:
    """A file has no splits, so its last rows are held out, whatever its form."""
    written = [{"question": f"{number}+1?", "answer": str(number + 1)} for number in range(20)]
    lines = "".join(json.dumps(row) + "\n" for row in written)
    table = "".join(f"{row['question']},{row['answer']}\n" for row in written)
    (tmp_path / "rows.csv").write_text("question,answer\n" + table)
    (tmp_path / "rows.json").write_text(json.dumps(written))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "rows1.jsonl").write_text(lines)

    overrides = ["env.name=math", f"env.options.source={tmp_path / source}", "env.options.eval_count=5"]
    family = make_family(load_config(None, overrides))
    assert (family.task_count("train"), family.task_count("eval")) == (15, 5)


SEEDED = {
    "synthetic": ("env.options.mean_s=1", "env.options.prompt_tokens=17"),
    "math": ("env.options.verifier_workers=2", "env.options.tasks=77"),
    "gymnasium": ("env.options.workers=2", "env.options.kwargs={is_slippery: true}"),
    "reasoning_gym": ("env.options.instruction=Be brief.", "env.options.config={max_terms: 3}"),
    "swe": ("env.options.threads=3", "env.options.generated_count=99"),
}
NEEDED: dict[str, tuple[str, ...]] = {
    "gymnasium": ("env.options.id=FrozenLake-v1",),
    "reasoning_gym": ("env.options.dataset=chain_sum",),
}


@pytest.mark.parametrize("name", SEEDED)
def test_data_that_a_seed_makes_are_known_by_what_makes_them(name: str) -> None:
    base = (f"env.name={name}", *NEEDED.get(name, ()))
    technical, other = SEEDED[name]
    own = digest(*base)
    assert digest(*base) == digest(*base, technical) == own
    assert len({own, digest(*base, other), digest(*base, "seed=1")}) == 3


def test_a_mixture_has_a_line_for_each_member_with_its_share() -> None:
    members = "env.options.members={sums: {env: math, options: {tasks: 20}, weight: %d}, other: {env: synthetic}}"
    one, two = (told("env.name=mixture", members % weight, "env.options.tasks=60") for weight in (1, 2))
    assert one.keys() == {"sums", "other"} and one["sums"].startswith("30 tasks of arithmetic, digest ")
    assert two["sums"].startswith("40 tasks") and two["other"].startswith("20 tasks")
    assert one["sums"].rpartition(" ")[2] == two["sums"].rpartition(" ")[2]


# ---------------------------------------------------------------- lengths


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "model")


def check(folder: Path, source: Path, *overrides: str) -> None:
    settings = ("generator.max_model_len=100", "sampling.max_tokens=40", f"env.options.source={source}", *overrides)
    config = load_config(None, [*DATASET, *settings])
    check_lengths(config, make_family(config), folder)


def tokens(folder: Path, prompt: str) -> int:
    from rollout.episodes.environment import ChatMessage

    return len(ChatTokenizer(folder).prompt([ChatMessage("user", prompt)]))


def test_prompts_that_leave_too_little_are_counted_and_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = "0" * 75
    assert 60 < (length := tokens(folder, cut)) < 100 and tokens(folder, "0" * 60) > 60
    exact = next(size for size in range(75) if tokens(folder, "0" * size) == 60)
    prompts = ["a", cut, "b", "0" * exact, *[cut] * 6, "held out", cut]
    check(folder, rows(tmp_path / "a.jsonl", prompts))
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(
        f"! 7 of 10 training prompts (rows 2, 5, 6, 7, 8, …; row 2 has {length} tokens) leave less than 40 tokens"
    )
    assert said[1].startswith(f"! 1 of 2 held-out prompts (rows 2; row 2 has {length} tokens) leave less than 40")
    assert len(said) == 2 and "generator.max_model_len=100" in said[0]

    check(folder, rows(tmp_path / "a.jsonl", ["a", "b", "c"]))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("place", "which"), [(1, "training prompts (rows 2;"), (4, "held-out prompts (rows 1;")])
def test_prompts_that_cannot_be_answered_are_refused(folder: Path, tmp_path: Path, place: int, which: str) -> None:
    prompts = ["a"] * 6
    prompts[place] = "0" * 200
    with pytest.raises(ConfigError) as caught:
        check(folder, rows(tmp_path / "a.jsonl", prompts))
    message = str(caught.value)
    assert f"{which} row {2 if place == 1 else 1} has" in message and "\n" not in message
    assert "do not fit into generator.max_model_len=100; raise it, or leave these rows out of the data" in message


def test_large_data_are_not_encoded_without_need(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Short prompts are known as such by their bytes; of long ones the longest come first, for as long as there is
    time."""
    encoded: list[int] = []
    encode = ChatTokenizer.encode

    def counted(self: Any, text: str) -> list[int]:
        if "short" in text or "00" in text:  # of a row; the template's own marks are read besides
            encoded.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(ChatTokenizer, "encode", counted)
    check(folder, rows(tmp_path / "a.jsonl", ["short"] * 1000))
    assert not encoded

    monkeypatch.setattr(lengths, "MOST_S", -1.0)
    check(folder, rows(tmp_path / "a.jsonl", ["short", *["0" * 70] * 20]))
    assert not encoded and "! of 19 training prompts 18 more that may be too long" in capsys.readouterr().err


def test_a_member_of_a_mixture_has_its_own_longest_answer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = rows(tmp_path / "a.jsonl", ["a", "0" * 75, "b"])
    for most, cut in ((None, True), (5, False)):
        one = {
            "env": "dataset",
            "options": {"source": str(source), "reward": "exact", "eval_count": 1},
            "max_tokens": most,
        }
        members = json.dumps({"texts": one, "other": {"env": "synthetic"}})
        options = ("env.name=mixture", f"env.options.members={members}", "generator.max_model_len=100")
        config = load_config(None, [*options, "sampling.max_tokens=40"])
        check_lengths(config, make_family(config), folder)
        assert ("1 of 2 texts's training prompts" in capsys.readouterr().err) == cut


def test_a_family_may_keep_a_text_under_the_name_of_what_it_need_not_tell(folder: Path) -> None:
    """An environment that knows nothing of the check had an `opening` of its own, and its run ended in a traceback."""
    config = load_config(None, ["env.name=synthetic"])
    family = make_family(config)
    family.opening = "A lake."  # type: ignore[attr-defined]
    check_lengths(config, family, folder)
