"""The kit that measures a GPU runs here on tiny sizes, keeps to its limits, and says what it could not run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from experiments.bench._processes import watched
from experiments.compare.job import Row
from experiments.gpu import __main__ as kit
from experiments.gpu import bundle, compare, kernels, part, runs
from tests.made_before import make_arithmetic_model

OURS = "tests.experiments.kit_parts:"


def told(out: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return found


@pytest.mark.docs
@pytest.mark.slow
def test_the_fast_parts_on_a_cpu(tmp_path: Path) -> None:
    parts = ["learner", "memory", "states", "kinds", "one_gpu", "start"]
    assert kit.main([*parts, "--device", "cpu", "--minutes", "8", "--out", str(tmp_path)]) == 0

    case = told(tmp_path, "learner")
    for name, kinds in (("fresco", ("repeated", "fresh")), ("bare", ("fresh",))):
        found = case[f"tiny {name}, activations again"]
        assert all(found[kind]["tokens_per_s"] > 0 and found[kind]["mfu"] > 0 for kind in kinds)
    pack = case["tiny fresco, activations again, a pack"]
    assert sum(pack["shares"].values()) == pytest.approx(1) and pack["shares"]["matrix products"] > 0
    assert pack["wall_s"] > 0 and pack["busy_s"] > 0
    ours, bare = (case[f"tiny {name}, activations again"]["fresh"]["tokens_per_s"] for name in ("fresco", "bare"))
    assert case["tiny fresco over bare, tokens a second"] == pytest.approx(ours / bare)
    assert (
        case["machine"]
        and case["versions"]["torch"]
        and case["date"]
        and case["command"].endswith("learner --device cpu")
    )
    places = told(tmp_path, "states")
    for name in ("device", "host", "host, added up in bfloat16"):
        assert {"gradients_s", "optimizer_s", "promised_host_gib"} <= places[f"tiny, {name}"].keys()
    models = told(tmp_path, "kinds")
    for name in ("tiny, in full", "tiny, LoRA", "tiny mixture, without replay", "tiny mixture, router replay"):
        assert models[name]["gradients_s"] > 0 and models[name]["optimizer_s"] > 0
    assert models["tiny, LoRA"]["promised_host_gib"] < models["tiny, in full"]["promised_host_gib"]
    assert told(tmp_path, "memory")["unrun"] == "torch does not count the bytes of a CPU"
    assert told(tmp_path, "start")["cpu, first"]["marks_s"]["first update"] > 0
    turns = told(tmp_path, "one_gpu")
    assert turns["alternate, tiny: exit_code"] == 0 and turns["alternate, tiny: seconds"] > 0
    assert turns["alternate, tiny: summary"]["steps"] == 1 and not any(key.startswith("shared") for key in turns)
    (trained,) = (row for row in turns["alternate, tiny: metrics"] if "time/train" in row)
    assert trained["time/take_device"] > 0 and trained["time/give_device"] > 0
    assert all((tmp_path / f"{name}.log").exists() for name in parts)


@pytest.mark.docs
@pytest.mark.slow
def test_a_learning_curve_on_a_cpu_in_engines_that_start_once(tmp_path: Path) -> None:
    make_arithmetic_model()  # as in a bundle: minutes, which are not the part's
    assert kit.main(["curve", "--device", "cpu", "--minutes", "8", "--out", str(tmp_path)]) == 0
    found = told(tmp_path, "curve")
    for name in ("α = 1", "α = 0"):
        first, second = found[name]["repeats"]
        assert first["steps"] == second["steps"] == 4
        assert len(first["points"]) >= 1 and all(0 <= score <= 1 for _, score in first["points"])
        assert second["start_s"] < first["start_s"]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_192x208_64x4_1x1_h_bz_coopB_TNT", "matrix products"),
        ("cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>", kernels._LEFT),
        ("Memcpy DtoD (Device -> Device)", kernels._LEFT),
        ("aten::mul", kernels._LEFT),
    ],
)
def test_kernels_are_told_apart_by_their_names(kernel: str, kind: str) -> None:
    assert kernels.kind_of(kernel) == kind


def test_repeats_are_summed_up_by_what_was_there_after_some_seconds() -> None:
    points = [[(1.0, 0.1), (4.9, 0.2), (9.0, 0.4)], [(2.0, 0.3), (9.5, 0.6)], [(3.0, 0.4), (12.0, 0.9)]]
    told = [{"to_target_s": n or None, "step_s": 1.0 + n, "points": each} for n, each in enumerate(points)]
    assert compare.summary(told) == {
        "to_target_s": "–, 1.0, 2.0",
        "step_s": 2.0,
        "after_5_s": 0.3,
        "after_10_s": 0.4,
        "after_20_s": 0.6,
    }
    assert "after_5_s" not in compare.summary([{"to_target_s": None, "step_s": 1.0, "points": [(6.0, 0.5)]}])


def test_held_out_scores_are_of_the_repeat_in_which_they_were_won(tmp_path: Path) -> None:
    rows = [Row(at, 0.5, 1, {"train": 1.0}) for at in (11.0, 20.0)]
    lines = [(0, 12.0), (2, 9.0), (2, 14.0), (4, 20.0), (6, 21.0)]
    told = [json.dumps({"step": step, "time": at, "eval/accuracy": at / 100}) for step, at in lines]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*told, '{"step": 4']))
    assert compare.held_out(tmp_path / "metrics.jsonl", rows) == [(4.0, 0.14), (10.0, 0.2)]


def test_trl_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESCO_TRL", str(tmp_path))
    with pytest.raises(part.Unrun, match=r"whose go\.sh unpacks it"):
        compare.trl_packages()
    (tmp_path / "trl").mkdir()
    assert compare.trl_packages() == tmp_path
    assert compare._with(tmp_path)["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert len(compare.pins_of(compare.PACKAGES)) == len(compare.PACKAGES) and compare.pins_of(["trl"]) == [
        "trl==1.16.0"
    ]


@pytest.fixture
def own_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts above; the kit's child, too, knows them."""
    limits = {"slow": 15, "broken": 60, "half_broken": 60}
    parts = {name: (f"{OURS}{name}", limit) for name, limit in limits.items()}
    monkeypatch.setattr(kit, "PARTS", parts)
    monkeypatch.setattr(kit, "_CHILD", f"from experiments.gpu import part; part.PARTS = {parts}; {kit._CHILD}")


def alive(pid: int) -> bool:
    """A test process may have adopted it, and then keeps it as a zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.usefixtures("own_parts")
def test_a_part_that_is_ended_keeps_what_it_noted(tmp_path: Path) -> None:
    assert kit.main(["slow", "broken", "--device", "cpu", "--minutes", "1", "--out", str(tmp_path)]) == 2
    found = told(tmp_path, "slow")
    assert found["ended_after_s"] == 15 and not alive(found["child"])
    assert told(tmp_path, "broken") | {"first": 1, "failed": "exit code 1; see broken.log"} == told(tmp_path, "broken")
    assert "RuntimeError: cpu" in (tmp_path / "broken.log").read_text()


@pytest.mark.usefixtures("own_parts")
def test_a_part_for_which_no_time_is_left_is_unrun(tmp_path: Path) -> None:
    assert kit.main(["broken", "--device", "cpu", "--minutes", "0.01", "--out", str(tmp_path)]) == 0
    assert told(tmp_path, "broken")["unrun"] == "no time was left for it"


@pytest.mark.usefixtures("own_parts")
def test_a_case_that_fails_leaves_those_behind_it(tmp_path: Path) -> None:
    assert kit.main(["half_broken", "--device", "cpu", "--minutes", "1", "--out", str(tmp_path)]) == 1
    found = told(tmp_path, "half_broken")
    assert found["first"] == {"error": "RuntimeError: cpu"} and found["third"] == 3
    assert found["second"] == {"error": "SystemExit: it ended too soon"}
    assert "in half_broken" in (tmp_path / "half_broken.log").read_text()


def test_a_case_does_not_keep_a_part_that_is_told_to_end(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), part.Result(tmp_path / "a.json").case("a"):
        sys.exit(143)
    assert not (tmp_path / "a.json").exists()


def test_who_kills_the_kit_finds_what_was_noted_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(name: str, limit_s: float, file: Path, device: str) -> dict[str, Any]:
        part.Result(file).note("first", 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(kit, "_carried_out", noted)
    with pytest.raises(KeyboardInterrupt):
        kit.run_part("tests", 60, tmp_path, "cpu")
    found = told(tmp_path, "tests")
    assert found["machine"] and found["date"] and found["commit"] and found["first"] == 1 and "seconds" not in found
    assert [each.name for each in tmp_path.iterdir()] == ["tests.json"]


RUN = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder,) = (word[5:] for word in sys.argv if word.startswith("runs="))
(Path(folder) / "run" / "logs").mkdir(parents=True)
(Path(folder) / "run" / "logs" / "learner-0.0.log").write_text("it hangs in a kernel")
(Path(folder) / "run" / "metrics.jsonl").write_text('{"step": 1, "time/step": 2, "other": 3}\\n{"step": 2, "ti')
print("ready", flush=True)
time.sleep(1000)
"""
"""A run that does not end when it is told to, with a row that is half written."""


def test_a_run_that_is_ended_leaves_its_metrics_and_says_where_it_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def limit() -> None:
        while "ready" not in capfd.readouterr().out:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(runs, "_FRESCO", [sys.executable, "-c", RUN])
    monkeypatch.setattr(runs, "_TIDY_S", 0.5)
    handler = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=limit).start()
    try:
        with pytest.raises(SystemExit):
            runs._run(part.Result(tmp_path / "a.json"), ["math_cpu"])
    finally:
        signal.signal(signal.SIGTERM, handler)

    found = told(tmp_path, "a")
    assert found["metrics"] == [{"step": 1, "time/step": 2}] and found["exit_code"] == -signal.SIGKILL
    assert "learner-0.0.log:\nit hangs in a kernel" in capfd.readouterr().out


def test_a_command_that_is_left_says_what_it_said_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "generator-0.0.log").write_text("it waits for a GPU")
    command = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(1000)"]
    with pytest.raises(KeyboardInterrupt), watched(command, tmp_path / "output") as watch:
        watch.until(lambda: "begun" in (tmp_path / "output").read_text(), 60, 0.05)
        raise KeyboardInterrupt
    assert "output:\nbegun" in (said := capsys.readouterr().out)
    assert "generator-0.0.log:\nit waits for a GPU" in said


@pytest.mark.parametrize("arguments", [["nope"], ["--minutes", "0"], ["--device", "tpu"]])
def test_what_it_is_asked_is_checked_first(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        kit.main(arguments)
    assert ended.value.code == 2 and arguments[-1] in capsys.readouterr().err


def entry(code: bytes, architecture: int, *, compressed: bool) -> bytes:
    """As nvcc writes one entry of a fat binary: its own header of 64 bytes, then the code."""
    header = struct.pack("<HHIQ", 2, 0, 64, len(code)).ljust(28, b"\0") + struct.pack("<I", architecture)
    return header.ljust(40, b"\0") + struct.pack("<Q", 0x8000 * compressed).ljust(24, b"\0") + code


def test_only_one_architectures_code_is_carried() -> None:
    entries = [
        entry(b"A" * 64, 80, compressed=True),
        entry(b"B" * 64, 90, compressed=True),
        entry(b"C" * 64, 90, compressed=False),
        entry(b"wanted--" * 8, 90, compressed=False),
    ]
    body = b"".join(entries)
    library = b"host" * 4 + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body + b"more host"
    thin = bundle.thinned(library, 16, 16 + len(body), 90, b"wanted")

    assert len(thin) == len(library) and thin.startswith(library[:16]) and thin.endswith(b"more host")
    assert b"A" * 64 not in thin and b"C" * 64 not in thin
    assert b"B" * 64 in thin and b"wanted--" * 8 in thin


SLEEPS = "vllm/cumem_allocator.abi3.so"
"""Without it vLLM's engine does not sleep."""


def test_what_is_left_out_of_vllm(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in ("vllm/__init__.py", "vllm/other.so", "vllm/third_party/deep_gemm/a.py", "vllm/x/logo.jpg"):
            file.writestr(name, "")
        file.write(shutil.which("true") or "", SLEEPS)
    bundle.unpack_vllm(wheel, tmp_path / "site", "90")
    left = {str(each.relative_to(tmp_path / "site")) for each in (tmp_path / "site").rglob("*") if each.is_file()}
    assert left == {"vllm/__init__.py", SLEEPS}


def test_a_bundle_unpacks_itself_and_measures(tmp_path: Path) -> None:
    """With this checkout, and a Python that says what it is asked and where it looks for modules."""
    bundle.archive_checkout(tmp_path / "fresco.tar.xz")
    for name in ("site", "cache"):
        (tmp_path / name).mkdir()
        bundle.archive(tmp_path / f"{name}.tar.xz", {"own": tmp_path / name})
    (tmp_path / "go.sh").write_text(bundle._GO)
    stand_in = f'#!/bin/sh\n[ "$2" = experiments.gpu ] || exec {sys.executable} "$@"\necho "$PWD $PYTHONPATH $*"\n'
    (tmp_path / "python3").write_text(stand_in)
    (tmp_path / "python3").chmod(0o755)
    with tarfile.open(tmp_path / "fresco.tar.xz") as file:
        assert {"experiments/gpu/__main__.py", "tests/rl/learner/test_gpu.py"} <= set(file.getnames())
        (carried,) = (file.extractfile(each) for each in file if each.name == part.COMMIT.name)
        assert carried is not None and carried.read().decode() == part.commit() != ""

    trl = tmp_path / "bundle-trl"
    trl.mkdir()
    bundle.archive(trl / "trl.tar.xz", {"trl": tmp_path / "site"})
    bundle.archive(trl / "cache-trl.tar.xz", {"model": tmp_path / "cache"})
    (trl / "go.sh").write_text(bundle._GO)

    kit_folder = tmp_path / "kit"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KIT": str(kit_folder), "OUT": "/results"}
    for folder in (tmp_path, tmp_path, trl):  # unpacked once
        command = ["bash", str(folder / "go.sh"), "--minutes", "4", "learner"]
        said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        asked = f"{kit_folder}/fresco {kit_folder}/fresco:{kit_folder}/site -m experiments.gpu --out /results"
        assert said == f"{asked} --minutes 4 learner\n"
        for name in ("fresco", "site", "cache"):
            (tmp_path / f"{name}.tar.xz").unlink(missing_ok=True)
    assert (kit_folder / "trl" / "trl").exists() and (kit_folder / "cache" / "model").exists()
    until = time.monotonic() + 60
    while not list((kit_folder / "fresco" / "experiments").glob("__pycache__/*.pyc")):
        assert time.monotonic() < until, "what is unpacked is compiled behind the measuring"
        time.sleep(0.1)


def test_nothing_that_fresco_imports_is_left_behind() -> None:
    project = tomllib.loads((bundle._ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=]", each)[0] for each in project["dependencies"]}
    carried = {line.partition("==")[0] for line in bundle._LIST.read_text().splitlines()}
    assert needed - carried - set(bundle.PRESENT) == {"wandb"}, "which is imported only where it is used"


def test_what_is_carried_is_pinned() -> None:
    lines = [line for line in bundle._LIST.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 50 and all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines)
