#!/usr/bin/env bash
# Asynchronous RL (alpha = 1) of a software-engineering agent with a model from the hub, on one node with 8 GPUs.
# Hardware: 8 x 80 GB (5 generators, 3 FSDP ranks: generator.count and learner.ranks), 32 CPU cores or more, root.
# Tasks: bugs in pinned packages, or env.options.source=SWE-Gym/SWE-Gym env.options.sandbox=docker (an image per task).
# Usage: bash launch/swe_8gpu.sh [model.path=Qwen/Qwen3-8B] [key=value ...] [--dry-run]
export FRESCO_REQUIREMENTS="${FRESCO_REQUIREMENTS:-$(command -v nvidia-smi >/dev/null && echo requirements/gpu.txt || echo requirements/cpu.txt)}"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source launch/sandbox.sh
# A dry run plans for the machine that is named here, on a laptop, too; a --gpus of your own goes before it.
[[ " $* " == *" --dry-run "* ]] && set -- --gpus 8x80 --host-memory 512G --cores 64 "$@"
exec fresco run experiments/swe_8gpu.yaml "$@"
