"""The complete system with real vLLM, two FSDP ranks and the maths environment, on a tiny untrained model."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from rl.config.schema import load_config
from rl.learner import checkpoint
from rl.learner.trainer import Optimizer
from rl.models.packing import sequence_pack
from rl.models.policy import Policy
from rl.store.batch_files import read_batch_parts
from rl.wire.messages import BatchPart
from tests.rollout.generator.vllm_rig import names_in_shared_memory
from tests.test_end_to_end_simulated import SAMPLE_STATES, TOKEN_STATES, wait_for_step

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
STEPS = 6  # responses are long and seats are few: the learner waits for the engine, and requests span its updates
TEMPERATURE = 0.8
RECIPE = f"""
name: simulated
device: cpu
steps: {STEPS}
model: {{path: tiny, dtype: float32, tiny: {{hidden_size: 32, layers: 2, ffn_size: 64, sft_steps: 0}}}}
sampling: {{max_tokens: 384, temperature: {TEMPERATURE}}}
rollout: {{groups_per_batch: 2, group_size: 3, alpha: 1}}
generator: {{dtype: float32, max_model_len: 512, max_num_seqs: 2, options: {{kv_cache_bytes: 16777216}}}}
env: {{name: math, options: {{source: arithmetic}}}}
algo: {{loss: grpo}}
learner: {{ranks: 2, lr: 3.0e-3, checkpoint_every: 1, keep_checkpoints: 100}}
eval: {{tasks: 8}}
tracking: {{wandb: offline, replay: full}}
"""


@contextmanager
def system(folder: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "recipe.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "launch.cli", "run", str(folder / "recipe.yaml"), f"runs={folder}", *overrides]
    environment = os.environ | {"FRESCO_CACHE": str(folder.parent / "cache")}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

    try:
        yield process
    finally:
        process.kill()
        process.wait()


def nothing_is_left(folder: Path) -> None:
    run = json.loads((folder / "simulated" / "run.json").read_text())
    assert not list(Path("/dev/shm").glob(f"fresco-{run['run_id']}*"))
    assert not Path(run["socket_folder"]).exists()
    left = []

    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):  # an engine's core renames itself, but keeps its log
            words = [*(process.info["cmdline"] or []), *(file.path for file in process.open_files())]
            if str(folder) in " ".join(words):
                left.append(process)

    assert not left, left


def is_engine(process: psutil.Process) -> bool:
    """vLLM's process renames itself. One that has just ended is none."""
    try:
        return "EngineCore" in " ".join([process.name(), *process.cmdline()])
    except psutil.NoSuchProcess:
        return False


def steps_done(folder: Path) -> int:
    return (folder / "simulated" / "metrics.jsonl").read_text().count('"train/loss"')


def behaviour_and_learner(batch_parts: list[BatchPart], folder: Path, model: Path) -> tuple[float, int]:
    """Largest |difference| between behaviour logprobs and those of the version each token names; spanning samples."""
    config = load_config(None, ["learner.lr=3e-3"])
    policies: dict[int, Policy] = {0: Policy.load(model)}
    for n in range(1, STEPS + 1):
        policies[n] = Policy.load(model)
        adamw = Optimizer(policies[n].trainable(), config.learner, STEPS).adamw
        checkpoint.load(folder / "checkpoints" / f"step-{n}", {"policy": (policies[n], adamw)})

    worst = 0.0
    spanning = 0
    for batch_part in batch_parts:
        starts = np.cumsum([0, *batch_part.lengths])
        for begin, end in itertools.pairwise(starts):
            pack = sequence_pack(batch_part.token_ids[begin:end].tolist())
            versions = batch_part.policy_version[begin:end]
            used = sorted(set(versions[versions >= 0].tolist()))
            spanning += len(used) > 1

            for version in used:
                with torch.no_grad():
                    output = policies[version](pack, temperature=TEMPERATURE)
                here = versions == version
                gap = np.abs(output.logp.numpy()[here] - batch_part.logp_behavior[begin:end][here])
                worst = max(worst, float(gap.max()))

    return worst, spanning


@pytest.mark.docs
def test_a_real_run_is_right_end_to_end(tmp_path: Path) -> None:
    with system(tmp_path) as process:
        output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output[-5000:]
    folder = tmp_path / "simulated"
    summary = json.loads((folder / "summary.json").read_text())
    nothing_is_left(tmp_path)

    samples = summary["ledger"]["samples"]
    tokens = summary["ledger"]["tokens"]
    assert samples["issued"] == sum(samples[state] for state in SAMPLE_STATES) and samples["trained"] == STEPS * 6
    assert tokens["generated"] == sum(tokens[state] for state in TOKEN_STATES)
    assert summary["freshness_violations"] == 0 and summary["staleness"]["max"] <= 1

    sync = summary["weight_sync"]

    assert sync["count"] >= 2 and sync["mean_s"] > 0 and sync["pause_mean_s"] > 0 and sync["bytes"] > 0

    run = json.loads((folder / "run.json").read_text())
    worst, spanning = behaviour_and_learner(list(read_batch_parts(folder)), folder, Path(run["model_folder"]))
    assert spanning > 0, "no request spanned an update: the test does not test what it should"
    assert worst < 1e-4

    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    last = Policy.load(folder / "model").model.state_dict()

    assert all(torch.equal(tensor, last[name]) for name, tensor in exported.state_dict().items())

    goes_on_from_a_checkpoint(tmp_path)


def goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Weights, optimizer and the broker's books continue at step 4; the earlier run's folder is kept."""
    folder = tmp_path / "simulated"
    with system(tmp_path, "steps=6", f"resume={folder / 'checkpoints' / 'step-4'}") as process:
        output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output[-5000:]
    nothing_is_left(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    samples = summary["ledger"]["samples"]
    assert samples["issued"] == sum(samples[state] for state in SAMPLE_STATES)
    assert samples["trained"] == (4 + 2) * 6 and summary["freshness_violations"] == 0

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6], "one history"
    (aside,) = [path for path in tmp_path.glob("simulated*") if path != folder]
    assert (aside / "checkpoints" / f"step-{STEPS}").is_dir()

    before = {row.sample_id for batch_part in read_batch_parts(aside) if batch_part.step < 4 for row in batch_part.rows}
    after = {row.sample_id for batch_part in read_batch_parts(folder) for row in batch_part.rows}
    assert len(before) == 4 * 6 and len(after) == 2 * 6 and not before & after


@pytest.mark.docs
@pytest.mark.parametrize(("killed", "ranks"), [("core", 1), ("rank", 2)])
def test_a_killed_engine_process_is_replaced_and_ctrl_c_ends_its_successor_too(
    killed: str, ranks: int, tmp_path: Path
) -> None:
    """It is vLLM's own process that an out-of-memory kill hits, where it has one; nothing else restarts."""
    settings = ["steps=100000", "learner.checkpoint_every=0", "generator.options.own_process=true"]
    settings += [f"generator.tensor_parallel={ranks}"]
    with system(tmp_path, *settings) as process:
        wait_for_step(tmp_path, 2, deadline_s=400)
        (engine,) = [each for each in psutil.Process(process.pid).children(recursive=True) if is_engine(each)]
        processes = [engine, *engine.children(recursive=True)]
        assert names_in_shared_memory(processes) == set()
        victim = {"core": "EngineCore", "rank": "Worker_TP1"}[killed]
        next(each for each in processes if victim in each.name()).kill()
        done = steps_done(tmp_path)
        wait_for_step(tmp_path, done + 3, deadline_s=400)  # two batches may have been on their way

        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=240)

    assert process.returncode == 130, output[-3000:]
    how = "was killed by SIGKILL" if killed == "core" else ""  # ended by itself, or is about to
    assert f"vLLM's engine process {engine.pid} {how}" in output
    logs = tmp_path / "simulated" / "logs"
    assert [path.name for path in logs.glob("*.1.log")] == ["generator.0.1.log"]
    assert not [path.name for path in logs.glob("generator.*") if "Exception ignored" in path.read_text()]
    nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.path=/no/such/model"], "model.path='/no/such/model': no such folder"),
        (["algo.loss=grop"], "did you mean 'grpo'?"),
        (["algo.options={clip_hihg: 0.3}"], "clip_hihg"),
        (["model.path=none/such"], "model.path='none/such'"),
        (["weights.slots=100000000"], "lower weights.slots"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(tmp_path: Path, overrides: list[str], text: str) -> None:
    with system(tmp_path, *overrides) as process:
        output, _ = process.communicate(timeout=240)
    (line,) = [line for line in output.splitlines() if line.startswith("fresco:")]
    assert process.returncode == 2 and text in line
    assert not (tmp_path / "simulated").exists()
