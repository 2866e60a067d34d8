"""The one plug-in loader: registered names and import paths, what is said about wrong ones, and whose packages win."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from algos.registry import get_loss, registered
from rl.config.plugins import load, make
from rl.config.schema import ConfigError, load_config
from rl.learner.algorithm import make_algorithm

ROOT = Path(__file__).parents[3]


class Sum:
    def __init__(self, a: int, b: int = 0) -> None:
        if a < 0:
            raise ValueError(f"a={a} must not be negative")
        self.value = a + b


KNOWN = {"sum": f"{__name__}:Sum", "seven": 7}


def test_a_registered_name_or_an_import_path() -> None:
    assert load("x.kind", "seven", KNOWN) == 7
    assert load("x.kind", "sum", KNOWN) is load("x.kind", f"{__name__}:Sum", KNOWN) is Sum
    assert make("x.kind", "sum", KNOWN, a=1, b=2).value == 3


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("smu", ["'smu' is not a registered name", "did you mean 'sum'?", "package.module:Name"]),
        ("zzz", ["known: seven, sum"]),
        ("algos.kimi.kimi", ["is not a registered name", "package.module:Name"]),
        ("algos.kimi:", ["is not a registered name"]),
        ("no.such.module:loss", ["cannot be imported", "No module named 'no'", os.getcwd()]),
        ("algos.kimi:kimmi", ["cannot be imported", "no 'kimmi' in it", "did you mean 'kimi'?"]),
    ],
)
def test_a_wrong_name_is_one_line_with_field_value_and_fix(name: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("x.kind", name, KNOWN)
    message = str(caught.value)
    assert "\n" not in message
    for part in [f"x.kind={name!r}", *parts]:
        assert part in message


@pytest.mark.parametrize(("arguments", "text"), [({"a": -1}, "must not be negative"), ({"c": 1}, "'c'")])
def test_refused_arguments_are_one_line(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"x.kind='sum' cannot be made: .*{text}"):
        make("x.kind", "sum", KNOWN, **arguments)


def test_losses_estimators_and_shapings_are_loaded_with_it() -> None:
    assert get_loss(load("algo.loss", "algos.kimi:kimi", registered("loss"))) is get_loss("kimi")
    for override, text in [
        ("algo.loss=grop", "algo.loss='grop' is not a registered name; did you mean 'grpo'"),
        ("algo.advantage=no.module:f", "algo.advantage='no.module:f' cannot be imported"),
        ("algo.shaping=[overlon]", r"algo\.shaping\.0='overlon' .* did you mean 'overlong'"),
    ]:
        with pytest.raises(ConfigError, match=text):
            make_algorithm(load_config(None, [override]))


REPORT = """
import envs, json
from rl.config.plugins import load
print(json.dumps([envs.__file__, load("env.name", "mine:Family", {}).name]), flush=True)
"""
COMMAND = f"""
import subprocess, sys
from rl.config.plugins import own_packages_first
own_packages_first()
{REPORT}
subprocess.run([sys.executable, "-c", {REPORT!r}])
"""


@pytest.mark.parametrize("inherited", ["", "."])
def test_a_users_folder_is_searched_last(tmp_path: Path, inherited: str) -> None:
    """In the command's own process, and in its child: both `-c` and `-m` put the working folder first by default."""
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").write_text("")
    (tmp_path / "mine.py").write_text("class Family:\n    name = 'mine'\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([inherited, str(ROOT)])}
    environment.pop("PYTHONSAFEPATH", None)

    # The script `fresco` stands in a folder of its own, which takes the working folder's place: `-P` does likewise.
    ended = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )

    ours = str(ROOT / "envs" / "__init__.py")
    command, child = ended.stdout.splitlines()
    assert json.loads(command) == json.loads(child) == [ours, "mine"]


def test_a_file_anywhere_is_a_plug_in(tmp_path: Path) -> None:
    """It is read once, beside what it imports, and takes the place of no installed module of its name."""
    (tmp_path / "beside.py").write_text("def half() -> float:\n    return 0.5\n")
    (tmp_path / "json.py").write_text("from beside import half\n\ndef reward() -> float:\n    return half()\n")
    path = tmp_path / "json.py"
    assert load("x.kind", f"{path}:reward", {})() == 0.5
    assert load("x.kind", f"{path}:reward", {}) is load("x.kind", f"{os.path.relpath(path)}:reward", {})
    assert json.loads("1") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def reward(:\n", "SyntaxError: invalid syntax (reward.py, line 1); mend the file"),
        ("reward = wanted\n", "NameError: name 'wanted' is not defined"),
        ("import no_such_library\n", "No module named 'no_such_library'"),
        ("def rewrad(): ...\n", "no 'reward' in it; did you mean 'rewrad'?"),
        (None, "there is no file "),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "reward.py"
    if text is not None:
        path.write_text(text)
    for _ in range(2):  # what failed once has left nothing behind
        with pytest.raises(ConfigError) as caught:
            load("x.kind", f"{path}:reward", {})
        assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_is_loaded_once_whether_it_is_named_as_file_or_as_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it registers would else be registered twice: a recipe names ./twice.py:one, the lab twice:other."""
    monkeypatch.chdir(tmp_path)
    for name, order in {"twice": ("twice:Any", "./twice.py:Any"), "again": ("again.py:Any", "again:Any")}.items():
        (tmp_path / f"{name}.py").write_text("class Any:\n    pass\n")
        one, other = (load("algo.loss", each, {}) for each in order)
        assert one is other and one is load("algo.loss", f"{tmp_path}/{name}.py:Any", {})
