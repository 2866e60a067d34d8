#!/usr/bin/env bash
# Asynchronous GRPO (alpha = 1) on GSM8K with a Qwen3 model from the hub, on one node with 8 GPUs.
# Hardware: 8 x 80 GB (5 generators, 3 FSDP ranks; change generator.count and learner.ranks).
# Usage: bash launch/math_8gpu.sh [key=value ...] [--dry-run]
export FRESCO_REQUIREMENTS="${FRESCO_REQUIREMENTS:-$(command -v nvidia-smi >/dev/null && echo requirements/gpu.txt || echo requirements/cpu.txt)}"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# A dry run plans for the machine that is named here, on a laptop, too; a --gpus of your own goes before it.
[[ " $* " == *" --dry-run "* ]] && set -- --gpus 8x80 --host-memory 512G --cores 64 "$@"
exec fresco run experiments/math_8gpu.yaml "$@"
