"""`fresco check-loss`: on a registered loss, on one of the user's own, on the example of the documentation."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from algos import registry
from launch.cli import main
from rl.config.recipes import find_recipe
from rl.config.schema import load_config
from rl.learner.algorithm import make_algorithm

DOCUMENT = Path(__file__).parents[3] / "docs" / "adding-a-loss.md"


def test_a_registered_loss_with_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-loss", "ppo", "clip_high=0.28", "dual_clip=3"]) == 0
    output = capsys.readouterr().out
    assert "all 8 checks hold" in output

    advised = output.splitlines()[-1].removeprefix("try it: fresco ")
    _, recipe, *overrides = shlex.split(advised)
    config = load_config(find_recipe(recipe), overrides)
    assert config.algo.loss == "ppo" and config.algo.options == {"clip_high": 0.28, "dual_clip": 3}
    make_algorithm(config)


def test_the_documented_example_holds_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example, *_ = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(example.splitlines()) <= 25
    (tmp_path / "mine_of_the_docs.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(registry._registered, "loss", dict(registry.registered("loss")))  # what the example adds, goes

    assert main(["check-loss", "mine_of_the_docs:soft_clip", "tau=0.3"]) == 0
    (tmp_path / "wrong_one.py").write_text(
        "from algos.types import LossResult\n"
        "def loss(inputs, options):\n    return LossResult(inputs.advantages * inputs.logp_current)\n"
    )
    assert main(["check-loss", "wrong_one:loss"]) == 1
    output = capsys.readouterr().out
    assert "FAIL masked_tokens" in output and "FAIL direction" in output and "checks fail" in output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["grppo"], "did you mean 'grpo'?"),
        (["ppo", "clip_hihg=1"], "did you mean 'clip_high'?"),
        (["ppo", "0.3"], "'0.3' is not of the form key=value"),
        (["no_such_module:loss"], "cannot be imported"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-loss", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fresco: ") and message in line
