#!/usr/bin/env bash
# Asynchronous RL (alpha = 1) on ALFWorld with a Qwen model from the hub or a path, on one node with 8 GPUs.
# Hardware: 8 x 80 GB (5 generators, 3 FSDP ranks: generator.count and learner.ranks), 16 CPU cores or more.
# Usage: bash launch/alfworld_8gpu.sh [model.path=Qwen/Qwen3-8B] [key=value ...] [--dry-run]
export FRESCO_REQUIREMENTS="${FRESCO_REQUIREMENTS:-$(command -v nvidia-smi >/dev/null && echo requirements/gpu.txt || echo requirements/cpu.txt)}"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# A dry run plans for the machine that is named here, on a laptop, too; a --gpus of your own goes before it.
[[ " $* " == *" --dry-run "* ]] && set -- --gpus 8x80 --host-memory 512G --cores 64 "$@"
exec fresco run experiments/alfworld_8gpu.yaml "$@"
