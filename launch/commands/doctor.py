"""`fresco doctor`: what this machine has, and what is missing for which recipe."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import sys

import psutil

from launch.gpus import visible_gpus
from rl.config.schema import ConfigError
from rollout.generator.engines.environment import check_vllm

_REQUIRED = ("torch", "transformers", "zmq", "msgspec", "pydantic", "wandb", "rich", "xxhash")
_OPTIONAL = {
    "vllm": "the real engine",
    "sympy": "the maths environment",
    "alfworld": "the ALFWorld environment",
    "textworld": "the ALFWorld environment",
    "datasets": "data sets from a hub",
}
_PROGRAMS = {
    "g++": "compiles vLLM's and ALFWorld's parts: apt-get install g++",
    "bwrap": "sandboxes for code and software engineering: apt-get install bubblewrap",
    "git": "the software-engineering environment: apt-get install git",
}
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # do not match the CPU build of torch: transformers breaks


def diagnose(arguments: argparse.Namespace) -> int:
    """Print one line per finding. Returns 1 when something required is missing, else 0."""
    healthy = True
    python = f"Python {sys.version.split()[0]}"
    healthy &= _line((3, 11) <= sys.version_info[:2] <= (3, 13), python, "the pins are for Python 3.11, 3.12 and 3.13")
    for module in _REQUIRED:
        healthy &= _line(_has(module), module, "a launch script, `bash tests/run.sh` or `pip install .` installs it")
    for module, purpose in _OPTIONAL.items():
        _line(_has(module), f"{module} ({purpose})", f"missing: {purpose} does not work")
    healthy &= _is_our_vllm()
    if _has("torch") and importlib.metadata.version("torch").endswith("+cpu"):
        for module in _UNWANTED:
            healthy &= _line(not _has(module), f"no {module}", "does not match this torch: pip uninstall it")

    for program, purpose in _PROGRAMS.items():
        _line(shutil.which(program) is not None, program, f"missing; {purpose}")
    gpus = len(visible_gpus())
    if gpus:
        _line(_has("flash_attn"), "flash_attn", "missing: the learner's attention is slower (pip install flash-attn)")

    memory_gib = psutil.virtual_memory().total >> 30
    cores = len(os.sched_getaffinity(0))
    _line(memory_gib >= 6, f"{memory_gib} GiB memory, {cores} cores", "math_cpu needs about 6 GiB")
    shared_mib = shutil.disk_usage("/dev/shm").free >> 20
    _line(shared_mib >= 256, f"{shared_mib} MiB free in /dev/shm", "set weights.transport=zmq or enlarge it")
    disk_gib = shutil.disk_usage(".").free >> 30
    packages = 10 if gpus else 3.5
    otherwise = f"packages take {packages} GB, a checkpoint 12 bytes a parameter"
    _line(disk_gib >= packages + 1.5, f"{disk_gib} GiB free on this disk", otherwise)
    print(f"  {'+' if gpus else '-'} {gpus} GPUs" + ("" if gpus else " (the *_cpu recipes run)"))
    return 0 if healthy else 1


def _is_our_vllm() -> bool:
    try:
        check_vllm()
    except ConfigError as error:
        return _line(False, "vLLM", str(error))
    return True


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _line(good: bool, what: str, otherwise: str) -> bool:
    print(f"  {'+' if good else '!'} {what}" + ("" if good else f": {otherwise}"))
    return good
