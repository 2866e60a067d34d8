#!/usr/bin/env bash
# Asynchronous GRPO (alpha = 1) on arithmetic word problems, on a laptop.
# Hardware: 2 CPU cores, 6 GB of memory, no GPU. Time: see README (first start installs and warm-starts).
# Expected: held-out accuracy from the warm start's 10-40 % to at least 80 %.
# Usage: bash launch/math_cpu.sh [key=value ...] [--dry-run]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec fresco run experiments/math_cpu.yaml "$@"
