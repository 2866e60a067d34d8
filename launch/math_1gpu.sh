#!/usr/bin/env bash
# Asynchronous GRPO (alpha = 1) on GSM8K with a Qwen3 model from the hub, on one GPU that engine and learner share.
# Hardware: 1 x 24 GB for 0.6B; 1 x 80 GB for model.path=Qwen/Qwen3-1.7B.
# 8B: 1 x 80 GB, 192 GB of memory, model.path=Qwen/Qwen3-8B learner.optimizer_states=host learner.reduce_dtype=bfloat16.
# Usage: bash launch/math_1gpu.sh [key=value ...] [--dry-run]
export FRESCO_REQUIREMENTS="${FRESCO_REQUIREMENTS:-$(command -v nvidia-smi >/dev/null && echo requirements/gpu.txt || echo requirements/cpu.txt)}"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# A dry run plans for the machine that is named here, on a laptop, too; a --gpus of your own goes before it.
[[ " $* " == *" --dry-run "* ]] && set -- --gpus 1x24 --host-memory 64G --cores 16 "$@"
exec fresco run experiments/math_1gpu.yaml "$@"
