"""An error of the user's own making is one line with the place in their file, and no traceback of ours."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from launch import cli, preflight
from launch.cli import main
from launch.prepare import Prepared, needs_validation, validate
from rl.config.schema import Config

FILES = {
    "no_name.py": "import json\nx = undefined_name\n",
    "no_colon.py": "def reward(response, row)\n    return 1.0\n",
    "mine.py": (
        "from rollout.broker.hooks import BrokerHook\n"
        "def reward(response): return 1.0\n"
        "def rows():\n    raise KeyError('question')\n"
        "class Short(BrokerHook):\n    def __init__(self, options): pass\n"
        "class Other(BrokerHook):\n    def issued(self, attempt): return ()\n"
        "def loss(a): return a\n"
        "from rl.weights.channel import Channel, Receiver, Sender\n"
        "class Half(Sender):\n    def offer(self, n, pieces): pass\n"
        "HALF, SWAPPED = Channel(Half, Receiver), Channel(Receiver, Half)\n"
    ),
    "cut.jsonl": '{"prompt": "a", "answer": "b"\n',
    "open.yaml": "name: x\nsteps: [\n",
}
NO_NAME = r"cannot be imported: NameError: name 'undefined_name' is not defined \(\S+no_name.py, line 2\)"
CASES = [
    ("own_reward_cpu", "env.options.reward={'no_name:reward': 1.0}", NO_NAME),
    ("own_reward_cpu", "env.options.reward={'no_colon:reward': 1.0}", r"SyntaxError: .* \(no_colon.py, line 1\)"),
    ("own_reward_cpu", "env.options.reward={'mine:reward': 1.0}", r"reward\(response\) is called with 2 arguments"),
    ("own_reward_cpu", "env.options.source=mine:rows", r"KeyError: 'question' \(\S+mine.py, line 4\)"),
    ("own_reward_cpu", "env.options.source=missing.jsonl", r"missing.jsonl cannot be read: no such file"),
    ("own_reward_cpu", "env.options.source=cut.jsonl", r"cut.jsonl, line 1 is not JSON"),
    ("open.yaml", "seed=1", r"recipe 'open.yaml' is not valid YAML: line 3"),
    ("simulated", "rollout.hooks=[mine:Short]", r"rollout.hooks='mine:Short' cannot be made"),
    ("simulated", "rollout.hooks=[mine:Other]", r"its issued\(self, attempt\) is called with 3 arguments"),
    ("simulated", "rollout.curriculum=no_name:C", rf"rollout.curriculum='no_name:C' {NO_NAME}"),
    ("math_cpu", "algo.loss=mine:loss", r"algo: loss\(\) takes 1 positional argument but 2 were given"),
    ("math_cpu", "env.name=no_name:Family", NO_NAME),
    ("math_cpu", "weights.transport=no_name:C", NO_NAME),
    ("math_cpu", "weights.transport=mine:HALF", r"weights.transport='mine:HALF': its Half has no method 'announce'"),
    ("math_cpu", "weights.transport=mine:SWAPPED", r"<class '\S+Receiver'> is no rl.weights.channel.Sender"),
    ("simulated", "launcher=mine:Short", r"launcher='mine:Short' is no class for this: it has no method 'place'"),
]


@pytest.fixture(autouse=True)
def in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(config: Config, *, make: bool, begin: object) -> Prepared:
        if needs_validation(config):
            validate(config)
        return Prepared(None, 0)

    monkeypatch.setattr(preflight, "prepare", prepare)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for name in ("no_name", "no_colon", "mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(("recipe", "change", "told"), CASES, ids=[change for _, change, _ in CASES])
def test_it_is_one_line(recipe: str, change: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", recipe, change, "--dry-run"]) == 2
    *before, line = capsys.readouterr().err.splitlines()
    assert line.startswith("fresco: ") and re.search(told, line), line
    assert "Traceback" not in "".join(before)


def test_what_is_raised_later_is_one_line_as_well_and_a_fault_of_ours_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "later.py").write_text("def call(arguments):\n    return {}['reward']\n")
    monkeypatch.syspath_prepend(tmp_path)
    called = import_module("later").call
    monkeypatch.setattr(cli, "resolve_name", lambda _: called)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == f"fresco: KeyError: 'reward' ({tmp_path / 'later.py'}, line 2)\n"

    monkeypatch.setattr(cli, "resolve_name", lambda _: preflight.check)
    with pytest.raises(TypeError):
        main(["doctor"])
