"""A plan for another machine: what each GPU holds, what fits, what is left, and what cannot run is refused."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from huggingface_hub import constants

from launch.cli import main
from launch.gpus import Gpu
from launch.machine import GIB, Machine
from launch.memory import estimate
from rl.config.schema import load_config
from rl.models.shape import ModelShape
from tests.launch.test_bad_configuration import EXPERIMENTS, prepared_here
from tests.launch.test_memory import EIGHT_B, FOUR_B, SEVEN_B

__all__ = ["prepared_here"]

ROOT = Path(__file__).parents[2]
NODE = ["--gpus", "8x80", "--host-memory", "1T", "--cores", "192"]
QWEN3 = FOUR_B | {"model_type": "qwen3"}
OF_EXPERTS = QWEN3 | {"model_type": "gpt_oss", "num_local_experts": 128}
BY_SIZE = {
    "0.5B": SEVEN_B
    | {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 24}
    | {"intermediate_size": 4864, "vocab_size": 151936, "head_dim": 64, "tie_word_embeddings": True},
    "1.5B": SEVEN_B
    | {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "num_hidden_layers": 28}
    | {"intermediate_size": 8960, "vocab_size": 151936, "head_dim": 128, "tie_word_embeddings": True},
}


@pytest.fixture(autouse=True)
def a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has little memory, and no GPU."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": 4 * GIB}))
    monkeypatch.setattr("launch.machine.visible_gpus", list)
    monkeypatch.setenv("COLUMNS", "80")


def folder_of(told: dict[str, Any], folder: Path) -> str:
    """A folder with a `config.json`, and nothing else."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(told))
    return f"model.path={folder}"


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    ended = main(["run", *arguments, "--dry-run"])
    told = capsys.readouterr()
    assert ended == code, told.err
    return told.out if code == 0 else told.err


@pytest.mark.parametrize(
    ("size", "checkpointing", "chunk", "gib"),
    [
        ("0.5B", False, 256, 31.92),
        ("0.5B", True, 256, 9.89),
        ("1.5B", False, 256, 73.55),
        ("1.5B", True, 256, 27.71),
        ("1.5B", True, 4096, 31.91),
    ],
)
def test_the_estimate_is_what_an_h100_held(size: str, checkpointing: bool, chunk: int, gib: float) -> None:
    """Peak bytes of torch on one H100, packs of 16 384 tokens in bfloat16, of 2026-11-26, with FSDP around the rank: it
    gathered again for the backward what a rank that is alone keeps."""
    overrides = [
        "learner.ranks=1",
        "learner.max_tokens_per_pack=16384",
        f"learner.logprob_chunk={chunk}",
        f"learner.activation_checkpointing={str(checkpointing).lower()}",
    ]
    plain, again = (
        estimate(load_config(EXPERIMENTS / "math_8gpu.yaml", each), "cuda", ModelShape.of(BY_SIZE[size]))
        for each in (overrides, [*overrides, "learner.activation_checkpointing=true"])
    )
    (rank,) = [need for need in plain if need.what == "learner's GPU"]
    (sharded,) = [need.parts["gathered"] for need in again if need.what == "learner's GPU"]
    held = rank.each - rank.parts["CUDA"] - rank.parts["gathered"] + sharded
    assert held == pytest.approx(gib * GIB, rel=0.05)


def test_an_engines_cache_is_what_vllm_gave_it() -> None:
    """Tokens of the cache at 1.5B with two fifths of an H100, of 2026-11-26."""
    overrides = ["generator.options.gpu_memory_utilization=0.4", "generator.max_model_len=2048"]
    config = load_config(EXPERIMENTS / "math_8gpu.yaml", [*overrides, "sampling.max_tokens=256"])
    shape = ModelShape.of(BY_SIZE["1.5B"])
    (engine,) = [
        need
        for need in estimate(config, "cuda", shape, Machine([Gpu("0", int(79.18 * GIB))]))
        if need.what == "engine's GPU"
    ]
    assert engine.parts["KV cache"] / shape.kv_bytes(2) == pytest.approx(1_022_288, rel=0.05)


def test_what_each_gpu_holds_fits_on_one_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(capsys, "math_8gpu", folder_of(QWEN3, tmp_path / "m"), "generator.count=4", "learner.ranks=4", *NODE)
    lines = [part for line in told.splitlines() for part in (line[i : i + 80] for i in range(0, len(line) or 1, 80))]
    assert len(lines) <= 30
    assert "8 GPUs of 79.2 GiB, 1024.0 GiB of memory, 192 cores" in told
    assert "generator.count=4 (5), learner.ranks=4 (3)" in told and "model.path=" in told and "(Qwen/Qwen3-4B)" in told
    for part in ("weights", "gradients", "optimizer", "activations", "KV cache", "left"):
        assert re.search(rf"^{part} .*GiB", told, re.MULTILINE), part
    assert re.search(r"^\d+ sequences of 4096 tokens fit an engine at once", told, re.MULTILINE)

    everything = planned(capsys, "math_8gpu", folder_of(QWEN3, tmp_path / "m"), *NODE, "-v")
    assert "max_tokens_per_pack: 16384" in everything and "rl.learner.process" in everything


@pytest.mark.parametrize(
    ("told", "arguments", "words"),
    [
        (SEVEN_B, ["learner.ranks=1"], r"learner.ranks: 1 × learner's GPU: 1\d\d.* a GPU has 79.2 GiB"),
        (QWEN3, ["learner.activation_checkpointing=false"], "learner.activation_checkpointing: 3 × learner's GPU"),
        (QWEN3, ["learner.max_tokens_per_pack=1000000"], "learner.max_tokens_per_pack: 3 × learner's GPU"),
        (QWEN3, ["generator.count=6"], "the plan needs 9 GPUs, --gpus 8x80 shows 8"),
        (QWEN3, ["generator.options.kv_cache_bytes=90000000000"], "generator.tensor_parallel: 5 × engine's GPU"),
        (QWEN3, ["--host-memory", "16G"], r"needs about .* and --gpus 8x80 has 16.0 GiB"),
        (OF_EXPERTS, [], "gpt_oss: its attention has sinks"),
        (QWEN3, ["learner.context_parallel=2"], "context_parallel=2 does not divide ranks=3"),
        (QWEN3, ["learner.context_parallel=3"], "learner.context_parallel=3: .* 3 ranks cannot share its 32 heads"),
        (
            QWEN3 | {"rope_scaling": {"rope_type": "longrope"}, "num_attention_heads": 33, "num_key_value_heads": 3},
            ["learner.context_parallel=3"],
            "learner.context_parallel=3: .* positions are of the kind longrope",
        ),
    ],
)
def test_what_cannot_run_there_is_refused(
    told: dict[str, Any], arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder_of({"model_type": "qwen2"} | told, tmp_path / "m")
    assert re.search(words, planned(capsys, "math_8gpu", path, *NODE, *arguments, code=2))


def test_a_teacher_has_a_gpu_that_must_hold_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While it loads it has four bytes a parameter."""
    taught = ["math_1gpu", folder_of(QWEN3 | {"num_hidden_layers": 4}, tmp_path / "m"), "algo.loss=reverse_kl"]
    taught += ["generator.max_model_len=1024", "sampling.max_tokens=512", "learner.logprob_chunk=256", "--gpus", "2x24"]
    told = planned(capsys, *taught, f"algo.teacher={tmp_path / 'm'}")
    assert "1 × teacher's GPU" in told

    folder_of(SEVEN_B | {"model_type": "qwen2"}, tmp_path / "large")
    told = planned(capsys, *taught, f"algo.teacher={tmp_path / 'large'}", code=2)
    assert re.search(r"algo.teacher: 1 × teacher's GPU: 2\d\.\d GiB each .*, and a GPU has 23.8 GiB", told)
    told = planned(capsys, *taught, f"algo.teacher={tmp_path / 'none'}")
    assert f"not checked here: algo.teacher='{tmp_path / 'none'}': there is no such folder yet" in told.replace(
        "\n", " "
    )


def test_without_a_target_nothing_of_a_node_is_held_against_a_laptop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = planned(capsys, "swe_8gpu", folder_of(EIGHT_B | {"model_type": "qwen3"}, tmp_path / "m"))
    assert "the plan needs 8 GPUs, this machine shows 0; name the machine that it is for: --gpus 8x80" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "eight"], "--gpus=eight: how many, and the GB of each: 8x80"),
        (["--gpus", "8x0"], "--gpus=8x0"),
        (["--gpus", "8x80", "--host-memory", "much"], "--host-memory=much: a size is wanted, for instance 512G"),
        (["--gpus", "8x80", "--cores", "0"], "--cores=0: a number of cores"),
        (["--cores", "8"], "name these as well"),
    ],
)
def test_a_machine_that_is_described_badly(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in planned(capsys, "simulated", *arguments, code=2)


def test_a_run_is_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "math_8gpu", *NODE]) == 2
    assert "--gpus 8x80: only with --dry-run" in capsys.readouterr().err


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        models = {"/Qwen/dense/resolve/main/config.json": QWEN3, "/Qwen/moe/resolve/main/config.json": OF_EXPERTS}
        told = models.get(self.path)
        self.send_response(404 if told is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())

    def log_message(self, *_parts: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    template = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield
    server.shutdown()
    server.server_close()
    assert not (tmp_path / "cache").exists(), "a dry run keeps nothing"


@pytest.mark.usefixtures("hub")
def test_a_hub_name_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search("^KV cache +6", planned(capsys, "math_8gpu", "model.path=Qwen/dense", *NODE), re.MULTILINE)
    assert "gpt_oss" in planned(capsys, "math_8gpu", "model.path=Qwen/moe", *NODE, code=2)
    assert "the hub shows no such model (404)" in planned(capsys, "math_8gpu", "model.path=Qwen/none", *NODE, code=2)


def test_a_hub_that_cannot_be_reached(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    told = planned(capsys, "math_8gpu", "model.path=Qwen/unheard-of", *NODE)
    assert "neither its family nor its memory: the hub cannot be reached (HF_HUB_OFFLINE is set)" in told


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "launch").glob("*gpu.sh")))
def test_a_script_for_gpus_names_its_target(script: str, tmp_path: Path) -> None:
    """With a `fresco` that only says what it is asked, and nothing installed."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / script).write_text((ROOT / "launch" / script).read_text())
    (tmp_path / "launch" / "sandbox.sh").touch()
    (tmp_path / "launch" / "setup.sh").write_text(f'set -euo pipefail\ncd {tmp_path}\nfresco() {{ echo "$@"; }}\n')
    program = tmp_path / "launch" / script
    program.write_text(program.read_text().replace("exec fresco", "fresco"))

    def asked(*arguments: str) -> str:
        command = ["bash", str(program), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    count = re.search(r"_(\d)gpu", script)
    assert count is not None and re.search(rf"--gpus {count[1]}x\d+ --host-memory", asked("--dry-run"))
    assert asked("--dry-run", "--gpus", "8x141").index("--host-memory") < asked("--dry-run", "--gpus", "8x141").index(
        "8x141"
    )
    assert "--gpus" not in asked("learner.lr=1")


def test_how_fast_a_long_episode_must_be_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    long = ["sampling.max_tokens=30000", "generator.max_model_len=32768"]
    told = "an episode of 30000 tokens is cancelled below 33 tok/s: rollout.episode_deadline_s"
    assert told in planned(capsys, "math_8gpu", *NODE, *long)
    assert "tok/s" not in planned(capsys, "math_8gpu", *NODE, *long, "rollout.episode_deadline_s=3600")

    told = "an episode of 32768 tokens is cancelled below 36 tok/s"
    assert told in planned(capsys, "math_8gpu", *NODE, *long, "env.max_turns=4"), "all turns are in one context"
