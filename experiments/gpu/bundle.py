"""What a machine with a GPU, torch and transformers, but without vLLM and a registry lacks: some 50 MiB in a folder.

There `bash FOLDER/go.sh --minutes 10 [PART …]` unpacks it once and runs `python -m experiments.gpu`. The folder
`FOLDER-trl` beside it has some MiB more for a comparison with TRL. It has the same script, and travels with FOLDER or
after it.

vLLM's libraries keep the machine code of one architecture (ARCH, 90: H100 and H200); the rest becomes zeros, which
compress to nothing. They are built against torch's stable ABI, so another torch than vLLM's own may load them. It needs
binutils here.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from experiments.compare.start_model import ensure_start_model
from experiments.compare.tasks import TASKS
from experiments.gpu.compare import SITE, pins_of
from experiments.gpu.part import COMMIT, commit
from launch.prepare import prepare
from rl.config.recipes import find_recipe
from rl.config.schema import load_config

VLLM = "vllm==0.32.0"
PYTHON = "3.12"
_ROOT = Path(__file__).parents[2]
_LIST = _ROOT / "requirements" / "gpu_bundle.txt"
_GLIBC = ("2_28", "2_27", "2_26", "2_24", "2_31", "2_34", "2_35", "2_17", "2_12", "2_5")
_PLATFORMS = [f"manylinux_{version}_x86_64" for version in _GLIBC]
_PLATFORMS += [f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")]

# Libraries that are carried, and of which entries: FlashAttention 3 in bfloat16, with heads of 64 and 128; the
# allocator without which vLLM does not sleep (`placement=alternate`).
_LIBRARIES = {
    "vllm/_C_stable_libtorch.abi3.so": "",
    "vllm/_moe_C_stable_libtorch.abi3.so": "",
    "vllm/cumem_allocator.abi3.so": "",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": (
        r"FlashAttnFwdCombine|EmptyKernel|prepare_varlen|E(ELi128|ELi64)ENS_10bfloat16"
    ),
}
_LEFT_OUT = re.compile(
    r"\.so$|^vllm/vllm-rs|third_party/(fmha_sm100|deep_gemm)|kernels/helion/configs|fused_moe/configs|\.jpg$|swagger-ui"
)

PRESENT: tuple[str, ...] = ("filelock", "huggingface_hub", "jinja2", "matplotlib", "msgpack", "numpy", "psutil")
PRESENT += ("pyarrow", "pyyaml", "rich", "safetensors", "tokenizers", "torch", "transformers", "xxhash")
"""Of what Fresco needs: what such a machine has."""
_TRL = ("datasets", "dill", "fsspec", "multiprocess", "trl", "xxhash")
"""Of what TRL needs: the machine has the rest, which is large."""

_FAT, _COMPRESSED, _CUBIN = 0xBA55ED50, 0x8000, 2

_GO = """#!/usr/bin/env bash
# bash FOLDER/go.sh [--minutes N] [PART ...]: unpacks each archive beside it once (KIT, /tmp/fresco-gpu), then measures.
# $OUT: the folder of the results.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
kit="${KIT:-/tmp/fresco-gpu}"
for archive in "$here"/*.tar.xz; do
    name="$(basename "$archive" .tar.xz)"
    if [ -e "$archive" ] && [ ! -e "$kit/$name.unpacked" ]; then
        mkdir -p "$kit/${name%-*}"
        python3 -m tarfile -e "$archive" "$kit/${name%-*}"  # which needs no xz beside it
        touch "$kit/$name.unpacked"
        # Once for all processes, which would each compile what they import.
        (unset PYTHONDONTWRITEBYTECODE; exec python3 -m compileall -q -j 8 "$kit/${name%-*}") > /dev/null 2>&1 &
    fi
done
export PYTHONPATH="$kit/fresco:$kit/site" FRESCO_CACHE="$kit/cache" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export FRESCO_TRL="$kit/trl/site-packages"
export VLLM_USE_FLASHINFER_SAMPLER=0  # FlashInfer is not carried, and vLLM asks for it when it makes its sampler
cd "$kit/fresco"
exec python3 -m experiments.gpu --out "${OUT:-$kit/results}" "$@"
"""


def make_bundle(out: Path) -> None:
    """Three archives and `go.sh`; two more beside them for TRL. Needs the package index, and some GB of disk for a
    minute. A start model that is not there yet is made first, which takes minutes."""
    out.mkdir(parents=True, exist_ok=True)
    if shutil.which("strip") is None or shutil.which("readelf") is None:
        raise SystemExit("--bundle needs binutils (strip, readelf): apt-get install binutils")

    with tempfile.TemporaryDirectory(prefix="fresco-bundle-") as name:
        site = Path(name) / "site"
        _pip("install", "--no-compile", "--target", str(site), "-r", str(_LIST))
        _pip("download", "-d", name, VLLM)
        (wheel,) = Path(name).glob("vllm-*.whl")
        unpack_vllm(wheel, site, os.environ.get("ARCH", "90"))
        archive(out / "site.tar.xz", {each.name: each for each in site.iterdir()})

    archive_checkout(out / "fresco.tar.xz")
    model = prepare(load_config(find_recipe("math_cpu"))).folder  # of arithmetic
    assert model is not None
    _archive_models(out / "cache.tar.xz", model)
    _told(out)
    _make_trl(out.with_name(f"{out.name}-trl"))


def _make_trl(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fresco-bundle-") as name:
        _pip("install", "--no-compile", "--target", name, *pins_of(_TRL))
        archive(out / "trl.tar.xz", {SITE: Path(name)})
    _archive_models(out / "cache-trl.tar.xz", *map(ensure_start_model, TASKS.values()))
    _told(out)


def _archive_models(path: Path, *models: Path) -> None:
    """Folders of the cache, with the digests beside them."""
    parts = [each for model in models for each in (model, model.with_name(f"{model.name}.digests"))]
    archive(path, {each.name: each for each in parts if each.exists()})


def _told(out: Path) -> None:
    (out / "go.sh").write_text(_GO)
    size = sum(each.stat().st_size for each in out.iterdir())
    print(f"{out}: {size / 2**20:.0f} MiB; there: bash {out.name}/go.sh --minutes 10")


def unpack_vllm(wheel: Path, site: Path, architecture: str) -> None:
    """The wheel's Python, and of its libraries what is needed."""
    with zipfile.ZipFile(wheel) as file:
        names = [each for each in file.namelist() if each in _LIBRARIES or not _LEFT_OUT.search(each)]
        file.extractall(site, names)

    for library, wanted in _LIBRARIES.items():
        path = site / library
        if path.exists():
            path.write_bytes(thinned(path.read_bytes(), *_section(path), int(architecture), wanted.encode()))
            subprocess.run(["strip", "-s", str(path)], check=True)


def thinned(library: bytes, begin: int, size: int, architecture: int, wanted: bytes) -> bytes:
    """The library with zeros for all device code in that section that is not of this architecture.

    CUDA loads the entry of its own architecture when one of its kernels is first called, and looks at no other.
    Of entries that are not compressed, those stay in which the expression `wanted` matches.
    """
    after = bytearray(library)
    for at, length, kind, found, flags in _entries(library, begin, size):
        own = kind == _CUBIN and found == architecture
        if not own or not (flags & _COMPRESSED or re.search(wanted, library[at : at + length])):
            after[at : at + length] = bytes(length)
    return bytes(after)


def _entries(data: bytes, begin: int, size: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(first byte of its code, bytes, kind, architecture, flags) of each entry of each fat binary in a section."""
    at, end = begin, begin + size
    while at < end - 16:
        magic, _version, header, body = struct.unpack_from("<IHHQ", data, at)
        if magic != _FAT:
            at += 8
            continue

        inside, at = at + header, at + header + body
        while inside < at:
            kind, _, own_header, length = struct.unpack_from("<HHIQ", data, inside)
            (architecture,) = struct.unpack_from("<I", data, inside + 28)
            (flags,) = struct.unpack_from("<Q", data, inside + 40)
            yield inside + own_header, length, kind, architecture, flags
            inside += own_header + length
        at = (at + 7) // 8 * 8


def _section(path: Path) -> tuple[int, int]:
    """Offset and size of the fat binaries in a library; none: 0 and 0."""
    listed = subprocess.run(["readelf", "-SW", str(path)], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        if ".nv_fatbin" in line.split():
            parts = line.split("]")[1].split()
            return int(parts[3], 16), int(parts[4], 16)
    return 0, 0


def archive(path: Path, content: dict[str, Path]) -> None:
    """Files and folders, by their names in the archive, without what Python has compiled."""
    with tarfile.open(path, "w:xz", preset=4) as file:  # a fourth smaller than by gzip, and two minutes
        for name, each in content.items():
            file.add(each, name, filter=lambda info: None if "__pycache__" in info.name else info)


def archive_checkout(path: Path) -> None:
    """What git tracks of this checkout, as it is now, and which commit that is."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=_ROOT, capture_output=True, text=True, check=True).stdout
    files = {name: _ROOT / name for name in listed.split("\0") if name and (_ROOT / name).exists()}
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / COMMIT.name
        told.write_text(commit())
        archive(path, files | {COMMIT.name: told})


def _pip(command: str, *arguments: str) -> None:
    """For the machine of the bundle, not for this one."""
    there = ["--isolated", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    platforms = [part for platform in _PLATFORMS for part in ("--platform", platform)]
    subprocess.run([sys.executable, "-m", "pip", command, "-q", *there, *platforms, *arguments], check=True)
