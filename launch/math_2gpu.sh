#!/usr/bin/env bash
# Asynchronous GRPO (alpha = 1) on GSM8K with a Qwen3 model from the hub, on two GPUs: an engine, and a learner.
# Hardware: 2 x 48 GB for 1.7B.
# Usage: bash launch/math_2gpu.sh [key=value ...] [--dry-run]
export FRESCO_REQUIREMENTS="${FRESCO_REQUIREMENTS:-$(command -v nvidia-smi >/dev/null && echo requirements/gpu.txt || echo requirements/cpu.txt)}"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# A dry run plans for the machine that is named here, on a laptop, too; a --gpus of your own goes before it.
[[ " $* " == *" --dry-run "* ]] && set -- --gpus 2x48 --host-memory 64G --cores 16 "$@"
exec fresco run experiments/math_2gpu.yaml "$@"
