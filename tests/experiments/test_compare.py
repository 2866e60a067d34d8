"""The comparison with other trainers: tasks that are the same for both, rows, the target, and where seconds go."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from envs.math.answers import last_box
from experiments.bench import cores
from experiments.bench._bound import Bound
from experiments.bench._outcome import RunResult
from experiments.bench._pairs import Pair, pairs_of
from experiments.bench._processes import Used, watched
from experiments.bench._ratios import Idle, machine
from experiments.bench.compare import _BARE, _ROOT, _best, _code, _options, _report, _settings, _trainer
from experiments.compare import fresco, trl
from experiments.compare.job import Job, Row, began, has_ended, reached_at, read_lines
from experiments.compare.tasks import PIECE, TASKS, Task, job_of
from launch.warm_start.word_tokenizer import build_tokenizer
from rl.config.schema import load_config
from tests.launch.test_bad_configuration import EXPERIMENTS


def job(folder: Path, **changes: object) -> Job:
    fields: dict[str, object] = {
        "folder": folder / "run",
        "model": folder / "model",
        "questions": folder / "questions.jsonl",
        "seed": 0,
        "lr": 1e-4,
        "steps": 10,
        "groups": 16,
        "group_size": 8,
        "max_tokens": 16,
        "rows_at_once": 128,
    }
    return Job(**(fields | changes))  # type: ignore[arg-type]


def sums(asked: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The questions without the count to think down from."""
    return [(re.sub(r"^#\d+ ", "", question), answer) for question, answer in asked]


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_no_question_comes_twice_and_each_seed_has_its_own_order(task: Task) -> None:
    asked = sums(task.questions(0))
    assert len(set(asked)) == len(asked) == 8100
    assert task.questions(0) == task.questions(0) and sorted(sums(task.questions(1))) == sorted(asked)
    assert sums(task.questions(1)) != asked == sums(TASKS["addition"].questions(0))
    assert all(sum(map(int, question.split(" + "))) == int(answer) for question, answer in asked)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_the_student_is_right_one_time_in_three_and_fits(task: Task) -> None:
    rng = random.Random(0)
    asked = task.questions(0)[:3000]
    told = [task.demonstrate(question, rng) for question, _ in asked]
    right = sum(last_box(text) == answer for text, (_, answer) in zip(told, asked, strict=True))
    assert 0.30 < right / len(asked) < 0.37

    words = build_tokenizer([*told, *(question for question, _ in asked)], PIECE)
    lengths = sorted(len(words.encode(text)) + 1 for text in told)  # with the end of the turn
    assert lengths[-1] <= task.max_tokens
    if task.thinking:
        assert lengths[0] <= 13 and lengths[-1] > 490 and lengths[len(lengths) // 2] < 70


def test_thinking_counts_down_to_one_from_the_number_in_the_question_and_repeats_the_sum() -> None:
    told = TASKS["long"].demonstrate("#4 12 + 34", random.Random(0))
    assert re.fullmatch(r"#3#2#112\+34\\boxed\{\d+\}", told)


def test_the_target_is_reached_by_the_mean_of_five_steps() -> None:
    assert reached_at([1.0] * 4, 0.8) is None
    assert reached_at([0.6, 0.8, 0.8, 0.8, 0.9, 0.9, 0.0], 0.8) == 6
    assert reached_at([], 0.8) is None


def outcome(*accuracies: float, origin: float = 100.0) -> RunResult:
    rows = [
        Row(110.0 + 2 * step, value, 50, {"wait": 0.5 if step else 0.0, "train": 1.0})
        for step, value in enumerate(accuracies)
    ]
    return RunResult(rows, origin, reached_at(accuracies, 0.8), 30.0, {})


def test_seconds_of_the_parts_add_up_to_the_target() -> None:
    found = outcome(0.5, *[0.9] * 9)
    assert found.reached == 5 and found.wall_s == pytest.approx(18)
    assert found.seconds() == pytest.approx({"start": 9, "wait": 2, "train": 5, "rest": 2})
    assert sum(found.seconds().values()) == pytest.approx(found.wall_s)


def test_who_reached_the_target_is_ahead_of_who_did_not() -> None:
    quick, slow, never = outcome(*[0.9] * 6), outcome(*[0.2] * 6, *[0.9] * 5), outcome(*[0.2] * 3)
    assert quick.is_ahead_of(slow) and not slow.is_ahead_of(quick) and not quick.is_ahead_of(quick)
    assert not slow.is_ahead_of(never), "it gave up sooner than that"
    assert quick.is_ahead_of(outcome(*[0.2] * 9)) and not never.is_ahead_of(slow) and not never.is_ahead_of(never)


def report_of(ours: list[RunResult], theirs: list[RunResult]) -> dict[str, Any]:
    """What the bench reports of these pairs, on an idle machine."""
    with Idle() as idle:
        pass
    idle.others = 0.0
    return _report(_options(["trl", "--pairs", str(len(ours))]), {}, {"fresco": ours, "trl": theirs}, idle)


def test_a_trainer_that_was_stopped_bounds_the_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    ours, unreached = [outcome(*[0.9] * 6)] * 5, outcome(*[0.2] * 6)
    stopped = replace(unreached, given_up_s=180.0)
    assert sum(stopped.seconds().values()) == pytest.approx(stopped.wall_s) == pytest.approx(180)
    assert report_of(ours, [unreached] * 5).keys().isdisjoint({"verdict"}), "it might have got there with more steps"

    found = report_of(ours, [stopped] * 5)
    assert found["verdict"] == "met: at most 0.5 by wall" and found["stopped"] == found["ahead"] == 5
    assert found["to_target_s"]["trl"] == [None] * 5
    assert "fresco over trl, to the target: at most CPU seconds" in capsys.readouterr().out

    soon = replace(unreached, given_up_s=30.0)
    assert report_of(ours, [soon] * 5)["verdict"].startswith("no verdict"), "18 of at least 30 s may be more than half"


def test_pairs_that_were_kept_are_not_made_again_and_others_settings_are_refused(tmp_path: Path) -> None:
    never = replace(outcome(*[0.2] * 6), given_up_s=180.0, processes={"engine": Used(1.0, 2.0)})
    bound = Bound(start_s=5.0, stock_s=12.0, shared_s=8.0, engine_s=10.0, every=3, at_once=128)
    bounded = replace(outcome(*[0.9] * 6), bound=bound)
    path, settings, made = tmp_path / "pairs.jsonl", {"target": "0.8", "patience": "10"}, list[int]()

    def pair(seed: int) -> Pair:
        made.append(seed)
        if seed == 2:
            raise SystemExit("cut off")
        return Pair(seed, settings, 0.01 * seed, {"fresco": bounded, "trl": never})

    with pytest.raises(SystemExit, match="cut off"):
        pairs_of(3, pair, settings, path)
    assert made == [0, 1, 2]
    assert pairs_of(2, pair, settings, path) == pairs_of(2, pair, settings, None) and made == [0, 1, 2, 0, 1]
    assert len(path.read_text().splitlines()) == 2

    with pytest.raises(SystemExit, match=r"seed 0 was made with target 0.8, this call has 0.4; name another"):
        pairs_of(3, pair, settings | {"target": "0.4"}, path)
    assert len(made) == 5, "before anything is made"


def test_the_settings_of_kept_pairs_name_both_learning_rates_and_the_machine() -> None:
    options = _options(["trl", "--patience", "10"])
    assert _settings(options, {"fresco": 2e-4, "trl": 1e-4}) == {
        "trainer": "trl",
        "task": "addition",
        "target": "0.8",
        "steps": "500",
        "patience": "10.0",
        "lr of fresco": "0.0002",
        "lr of trl": "0.0001",
        "code": _code(_ROOT),
        "machine": machine(),
    }
    with pytest.raises(SystemExit):
        _options(["trl", "--keep", "pairs.jsonl", "--tune", "1e-4"])


def test_pairs_made_by_other_code_or_with_another_recipe_are_not_gone_on_from(tmp_path: Path) -> None:
    runs = [*_BARE, "experiments/compare/fresco.py", "experiments/math_cpu.yaml", "rl/learner/step.py"]
    for path in (*runs, "docs/results.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("alpha: 1\n")
    found = [_code(tmp_path)]

    for path in runs:
        (tmp_path / path).write_text("alpha: 2\n")
        found.append(_code(tmp_path))
    assert len(set(found)) == 1 + len(runs)

    (tmp_path / "docs" / "results.md").write_text("other words\n")
    assert _code(tmp_path) == found[-1] != _code(_ROOT), "a pair does not run its documentation"


def test_pairs_cannot_be_kept_where_there_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _options(["trl", "--keep", str(tmp_path / "pairs.jsonl")]).keep == tmp_path / "pairs.jsonl"
    with pytest.raises(SystemExit):
        _options(["trl", "--keep", str(tmp_path / "missing" / "pairs.jsonl")])
    assert "there is no folder" in capsys.readouterr().err, "before anything has been trained"


def test_the_best_learning_rate_is_the_first_at_the_target_else_the_best_end() -> None:
    slow, quick = outcome(*[0.2] * 6, *[0.9] * 5), outcome(*[0.9] * 6)
    assert _best({1.0: slow, 2.0: quick, 3.0: outcome(*[0.7] * 6)}, 9.0) == 2.0
    assert _best({1.0: outcome(*[0.3] * 6), 2.0: outcome(*[0.5] * 6)}, 9.0) == 2.0
    assert _best({}, 9.0) == 9.0


def test_a_job_has_its_questions_beside_it_and_no_more_steps_than_there_are_new_ones(tmp_path: Path) -> None:
    task = TASKS["addition"]
    made = job_of(task, tmp_path / "run", tmp_path / "model", 3, lr=1e-4, steps=505)
    assert not made.folder.exists() and made.questions.parent == tmp_path
    assert [(line["question"], line["answer"]) for line in read_lines(made.questions)] == task.questions(3)
    assert (made.groups, made.group_size, made.max_tokens) == (16, 8, 16)

    with pytest.raises(ValueError, match="506 steps: there are new questions for 505"):
        job_of(task, tmp_path / "run", tmp_path / "model", 3, lr=1e-4, steps=506)
    with pytest.raises(SystemExit):
        _options(["trl", "--steps", "506"])


def test_a_bench_of_cores_leaves_out_the_first_steps_and_says_what_was_used() -> None:
    assert cores.Spent(wall_s=0.15, cpu_s=0.27, learner_s=0.1, generator_s=0.1).share(2) == pytest.approx(0.9)
    assert cores._options(["--steps", "12"]).steps == 12
    for steps in ("11", "502"):
        with pytest.raises(SystemExit):
            cores._options(["--steps", steps])


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job(tmp_path).save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job(tmp_path)


def test_fresco_is_told_the_job_and_read_back(tmp_path: Path) -> None:
    command = fresco.command(job(tmp_path, max_tokens=512), "python")
    assert command[:5] == ["python", "-m", "launch.cli", "run", fresco.RECIPE]
    config = load_config(EXPERIMENTS / f"{fresco.RECIPE}.yaml", command[5:])
    assert config.model.path == str(tmp_path / "model") and config.sampling.max_tokens == 512
    assert config.rollout.groups_per_batch * config.rollout.group_size == 128

    assert (config.rollout.alpha, config.rollout.staleness_bound) == (3, 8) and config.generator.on_update == "keep"
    brief = load_config(EXPERIMENTS / f"{fresco.RECIPE}.yaml", fresco.command(job(tmp_path), "python")[5:])
    assert brief.rollout.alpha == 1.25 and brief.generator.on_update == "recompute"

    told = {"time": 5.0, "rollout/reward": 0.5, "rollout/length": 6.0}
    told |= {"time/wait_batch": 3.0, "time/train": 1.0, "time/publish": 0.1}
    told |= {"version/timeline": 0.0}
    lines = [{"eval/reward": 1.0}, told | {"train/loss": 0.1}, told | {"train/loss": 0.1}]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"train/lo')
    first, second = fresco.rows(job(tmp_path))
    assert first.parts["wait"] == 0 and second == Row(5.0, 0.5, 768, {"wait": 3.0, "train": 1.0, "publish": 0.1})


def test_on_a_gpu_fresco_shares_it(tmp_path: Path) -> None:
    words = fresco.command(job(tmp_path, device="cuda"), "python")[5:]
    config = load_config(EXPERIMENTS / f"{fresco.RECIPE}.yaml", words)
    assert config.device == "cuda" and config.placement == "shared" and config.generator.dtype == "bfloat16"
    assert not config.generator.options["enforce_eager"]


def timed(*steps: tuple[float, float], repeat: int = 0) -> list[Row]:
    """(time, accuracy) of steps that each trained for one second."""
    return [Row(at, accuracy, 10, {"wait": 0.5, "train": 1.0}, repeat) for at, accuracy in steps]


def test_a_repeat_ends_at_its_target_its_patience_or_its_last_step(tmp_path: Path) -> None:
    rows = timed(*((10.0 + n, 0.1 * n) for n in range(7)))
    assert began(rows) == 9 and not has_ended(job(tmp_path), []) and not has_ended(job(tmp_path), rows)
    assert has_ended(job(tmp_path, target=0.4), rows) and not has_ended(job(tmp_path, target=0.41), rows)
    assert has_ended(job(tmp_path, patience_s=6), rows) and not has_ended(job(tmp_path, patience_s=7), rows)
    assert has_ended(job(tmp_path, steps=7), rows)


def test_a_learner_that_begins_anew_is_the_next_repeat(tmp_path: Path) -> None:
    told = {"rollout/reward": 0.5, "rollout/length": 1.0, "train/loss": 0.1}
    told |= {"time/wait_batch": 3.0, "time/train": 1.0, "time/publish": 0.1}
    (tmp_path / "run").mkdir()
    lines = [json.dumps(told | {"time": n, "version/timeline": float(n // 2)}) + "\n" for n in range(4)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    found = fresco.rows(job(tmp_path))
    assert [row.repeat for row in found] == [0, 0, 1, 1] and [row.parts["wait"] for row in found] == [0, 3, 0, 3]


class _Told:
    should_training_stop = False


def test_trls_repeats_each_begin_from_the_start_model(tmp_path: Path) -> None:
    one = job(tmp_path, steps=5, repeats=2)
    one.folder.mkdir()
    model = torch.nn.Linear(2, 2)
    start = [each.detach().clone() for each in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    clock, told = {"generate": 0.0}, _Told()
    report = trl._report_to(one, clock, object)()
    report.on_train_begin(model=model)

    for step in range(10):
        assert not told.should_training_stop
        report.on_step_begin()
        clock["generate"] += 2.0
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert not torch.equal(model.weight, start[0])
        logs = {"reward": 0.25, "completions/mean_length": 3.0}
        report.on_log(None, None, told, {"loss": 0.0}, model=model, optimizer=optimizer)
        report.on_log(None, None, told, logs, model=model, optimizer=optimizer)
        again = step % 5 == 4
        assert torch.equal(model.weight, start[0]) == again and bool(optimizer.state) != again

    assert told.should_training_stop
    rows = trl.rows(one)
    assert [row.repeat for row in rows] == [0] * 5 + [1] * 5
    assert all(row.tokens == 384 and row.parts["generate"] == 2 for row in rows)


def test_both_sides_judge_alike() -> None:
    said = ["...\\boxed{81}", "\\boxed{80}\\boxed{81}", "81", "\\boxed{8}1"]
    rewards = trl.reward([[{"role": "assistant", "content": text}] for text in said], ["81"] * 4)
    assert rewards == [1.0, 1.0, 0.0, 0.0]


def test_a_trainer_is_one_file_found_by_its_name() -> None:
    assert _options(["trl", "--task", "long"]).trainer == "trl"
    assert (EXPERIMENTS.parent / _trainer("trl").PINS).exists() and not _trainer("fresco").PINS
    with pytest.raises(SystemExit):
        _options(["tasks"])


def test_the_cpu_seconds_of_two_processes_of_one_name_add_up(tmp_path: Path) -> None:
    burn = "import sys, time\nwhile time.process_time() < 0.5: pass\nsys.stdin.read()"  # until its parent has ended
    twice = f"pair = [subprocess.Popen([sys.executable, '-c', {burn!r}], stdin=subprocess.PIPE) for _ in 'ab']"
    script = f"import subprocess, sys, time\n{twice}\ntime.sleep(600)"
    with watched([sys.executable, "-c", script], tmp_path / "log") as watch:
        until = time.monotonic() + 60
        while watch.cpu_s < 0.9 and time.monotonic() < until:
            time.sleep(0.05)
    assert watch.cpu_s >= 0.9 and len(watch.used) == 2


def test_a_copy_that_takes_its_title_is_not_told_by_the_way_to_its_program(tmp_path: Path) -> None:
    title = "open('/proc/self/comm', 'w').write('/srv/.venv/bin')"
    child = f"import time\n{title}\nprint('titled', flush=True)\ntime.sleep(600)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with watched([sys.executable, "-c", script], tmp_path / "log") as watch:
        while "titled" not in (tmp_path / "log").read_text():
            assert watch.running
        watch.look()
        assert set(watch.used) == {"the command", "starting"}


def test_a_command_is_watched_and_ended_with_what_it_began(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint('burnt', flush=True)\ntime.sleep(600)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with watched([sys.executable, "-c", script], tmp_path / "log") as watch:
        while "burnt" not in (tmp_path / "log").read_text() or watch.cpu_s < 0.4:
            assert watch.running
            watch.process.poll()
    assert not watch.running and len(watch.used) == 2
    assert subprocess.run(["pgrep", "-P", str(watch.process.pid)]).returncode == 1
