"""What benchmarks share: works in turns, and batches that the learner accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.bench._measuring import (
    Timing,
    alternate,
    milliseconds,
    parser_of,
    random_batch_part,
    temporary_run,
    write,
)
from rl.learner.batches import check_batch_part
from rl.wire.run import RunFile


def test_works_take_turns_and_warm_up_unmeasured() -> None:
    calls: list[str] = []
    works = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    measured = alternate(works, rounds=2, warm_up=1)

    assert "".join(calls) == "ba" + "ab" + "ba", "every other round is backwards"
    assert [len(measured[name]) for name in works] == [2, 2]


def test_milliseconds_are_the_median_of_wall_and_the_mean_of_cpu_time() -> None:
    timings = [Timing(0.001, 0.001), Timing(0.002, 0.002), Timing(0.009, 0.006)]
    assert milliseconds({"step": timings}) == pytest.approx({"step_ms": 2.0, "step_cpu_ms": 3.0})


def test_the_samples_of_a_group_share_a_prompt_where_they_are_told_to() -> None:
    batch_part = random_batch_part(groups=2, size=3, prompt=5, answers=(2, 2), vocabulary=1000, shared=True)
    prompts = batch_part.columns["token_ids"].reshape(6, 7)[:, :5].tolist()
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3] == prompts[4] == prompts[5]


def test_a_random_batch_part_is_a_whole_batch() -> None:
    batch_part = random_batch_part(groups=3, size=4, prompt=5, answers=(2, 6), vocabulary=16)
    check_batch_part(batch_part, step=0, rank=0, timeline=0, staleness_bound=0)

    answers = [length - 5 for length in batch_part.lengths]
    assert len(answers) == 12 and min(answers) >= 2 and max(answers) <= 6
    assert batch_part.loss_tokens == sum(answers)


def test_a_temporary_run_is_saved_and_vanishes() -> None:
    with temporary_run(["rollout.alpha=3"], eval_tasks=7) as run:
        saved = RunFile.load(run.folder)
        assert saved.config.rollout.alpha == 3 and saved.eval_tasks == 7
    assert not run.folder.exists()


def test_results_are_written_only_where_asked(tmp_path: Path) -> None:
    arguments = parser_of("memory", None).parse_args(["--out", str(tmp_path / "found.json")])
    write(arguments.out, {"ratio": 0.5})
    write(None, {"ratio": 0.6})
    assert json.loads((tmp_path / "found.json").read_text()) == {"ratio": 0.5}
