"""`fresco run --help-fields PATTERN`: what a field is called, takes and says, without leaving the terminal."""

from __future__ import annotations

import pytest

from launch.cli import main
from rl.config.fields import described, sections
from rl.config.schema import Config


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["run", *words]) == 0
    return capsys.readouterr().out


def test_fields_are_found_by_name_and_by_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert "learner.lr  (number > 0; default 1e-06)\n    Peak learning rate of AdamW.\n" in told(
        capsys, "--help-fields", r"\.lr$"
    )
    assert "rollout.alpha  (" in told(capsys, "--help-fields", "asynchronous ratio")


def test_all_are_shown_and_options_are_those_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "own_reward_cpu", "--help-fields", "")
    names = [f"{title}.{each.name}".strip(".") for title, model in sections(Config) for each in described(model)]
    assert [name for name in names if f"{name}  (" not in shown] == []
    assert "env.options.reward  (mapping; required)" in shown and "generator.options.kv_block  (" in shown
    assert "model.lora  (mapping or null; default null)" in shown and "model.lora.rank  (whole number" in shown

    lake = told(capsys, "own_reward_cpu", "env.name=gymnasium", "--help-fields", "env.options")
    assert "env.options.id  (" in lake and "env.options.reward " not in lake


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help-fields", "zzz"], "--help-fields 'zzz': no field is called or says so"),
        (["--help-fields", "("], "--help-fields '(' is no regular expression"),
        ([], "fresco run needs a recipe"),
    ],
)
def test_what_is_wrong_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["run", *words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["replay", "eval", "sft", "check-loss"])
def test_what_may_be_left_out_is_not_asked_for(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command])
    assert "=value" not in capsys.readouterr().err.splitlines()[-1]
