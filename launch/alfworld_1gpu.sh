#!/usr/bin/env bash
# Asynchronous RL (alpha = 1) on ALFWorld with a Qwen model from the hub, on one GPU that engine and learner share.
# Hardware: 1 x 80 GB, 16 CPU cores or more.
# Usage: bash launch/alfworld_1gpu.sh [key=value ...] [--dry-run]
export FRESCO_REQUIREMENTS="${FRESCO_REQUIREMENTS:-$(command -v nvidia-smi >/dev/null && echo requirements/gpu.txt || echo requirements/cpu.txt)}"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# A dry run plans for the machine that is named here, on a laptop, too; a --gpus of your own goes before it.
[[ " $* " == *" --dry-run "* ]] && set -- --gpus 1x80 --host-memory 128G --cores 16 "$@"
exec fresco run experiments/alfworld_1gpu.yaml "$@"
