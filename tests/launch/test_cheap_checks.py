"""What costs nothing to look at is looked at before a model is made or fetched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch import preflight
from rl.config.schema import ConfigError, load_config

ROOT = Path(__file__).parents[2]


def test_too_few_files_at_once_are_one_line_with_the_limit(tmp_path: Path) -> None:
    fresco = [sys.executable, "-m", "launch.cli", "run", "experiments/simulated.yaml", f"runs={tmp_path}"]
    limited = ["sh", "-c", 'ulimit -n 40 && exec "$@"', "sh", *fresco]
    ended = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("fresco: ulimit -n is 40: a run opens up to ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rows", "options", "told"),
    [
        ('{"prompt": "1 + 1?"}\n', [], "answer"),
        ('{"prompt": "1 + 1?", "answer": "2"}\n' * 9, ["env.options.workers=0"], "env.options.workers=0"),
        ('{"prompt": "1 + 1?", "answer": "2"}\n' * 9, ["rollout.groups_per_batch=500"], "rollout.groups_per_batch=500"),
    ],
    ids=["rows", "options", "too few"],
)
def test_the_environment_is_looked_at_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, options: list[str], told: str
) -> None:
    def made(*_: object, **__: object) -> None:
        raise AssertionError("the model was made first")

    monkeypatch.setattr(preflight, "prepare", made)
    (tmp_path / "rows.jsonl").write_text(rows)
    source = [
        f"env.options.source={tmp_path / 'rows.jsonl'}",
        "env.options.reward=exact",
        "env.options.eval_count=1",
        "eval.tasks=1",
    ]
    config = load_config(ROOT / "experiments" / "math_cpu.yaml", ["env.name=dataset", *source, *options])
    with pytest.raises(ConfigError, match=told):
        preflight.check(config, dry=False)
