"""Rows from the hub: what the client is asked for, and its errors as one of ours. No network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from envs.code.problems import load_problems
from envs.rows import RowError, read_rows
from envs.swe.tasks import load_tasks
from tests.envs.test_code import MBPP
from tests.envs.test_swe_tasks import GYM


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A hub with two data sets; the requests that were made of it."""
    held = {"SWE-Gym/SWE-Gym": GYM, "mbpp": MBPP}
    asked: list[tuple[Any, ...]] = []

    def load(name: str, subset: str | None = None, *, split: str) -> datasets.Dataset:
        asked.append((name, subset, split))
        if name not in held:
            raise FileNotFoundError(f"{name} is not on the hub")
        return datasets.Dataset.from_list([held[name]])

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def test_tasks_and_problems_come_from_the_hub(hub: list[tuple[Any, ...]]) -> None:
    (task,) = load_tasks("SWE-Gym/SWE-Gym", split="test")
    assert task.schema == "swe-gym" and task.instance_id == GYM["instance_id"]
    assert len(load_problems("mbpp", "sanitized", "train")) == 1
    assert hub == [("SWE-Gym/SWE-Gym", None, "test"), ("mbpp", "sanitized", "train")]


def test_rows_say_where_they_stand(hub: list[tuple[Any, ...]]) -> None:
    (row,) = read_rows("SWE-Gym/SWE-Gym")
    assert row.where == "SWE-Gym/SWE-Gym, row 1"
    with pytest.raises(RowError, match=r"SWE-Gym/SWE-Gym, row 1, field 'repo': .* is not an integer"):
        row.integer("repo")


def test_a_name_that_does_not_load_is_named(hub: list[tuple[Any, ...]]) -> None:
    with pytest.raises(RowError) as error:
        list(read_rows("no/such", None, "dev"))
    assert str(error.value) == (
        "'no/such' (dev) is no file and did not load from the hub: FileNotFoundError: no/such is not on the hub"
    )


def test_files_are_not_sought_on_the_hub(hub: list[tuple[Any, ...]], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    for source in (tmp_path / "a.csv", tmp_path / "missing.jsonl"):
        with pytest.raises(RowError):
            list(read_rows(str(source)))
    assert hub == []


def test_without_the_client_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RowError, match="'no/such' is no file, and hub data sets need `pip install datasets`"):
        list(read_rows("no/such"))
