"""`python -m experiments.audit` takes the names of environments whose answers can be checked."""

from __future__ import annotations

import pytest

from experiments.audit.__main__ import CHECKED, main


def test_help_names_the_environments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert ", ".join(CHECKED) in " ".join(capsys.readouterr().out.split())


def test_an_unknown_name_is_told_in_one_line_before_anything_is_audited() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["math", "maths"])
    assert ended.value.code == f"audit: 'maths' is none of {', '.join(CHECKED)}"
