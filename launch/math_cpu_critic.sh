#!/usr/bin/env bash
# Asynchronous PPO with a critic and GAE (alpha = 1) on the task of math_cpu.sh, on a laptop.
# Hardware: 2 CPU cores, 6 GB of memory, no GPU. Time: a quarter more than math_cpu.sh.
# Expected: held-out accuracy from the warm start's 10-40 % to at least 90 %, as with GRPO.
# Usage: bash launch/math_cpu_critic.sh [key=value ...] [--dry-run]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec fresco run experiments/math_cpu_critic.yaml "$@"
