#!/usr/bin/env bash
# Asynchronous RL (alpha = 1) on ALFWorld text games, all six task types in whole floor plans: games, demonstrations, warm
# start and 20 minutes of training, on a laptop.
# Hardware: 2 CPU cores, 8 GB of memory, no GPU, a C++ compiler. Time and result: see docs/alfworld.md.
# Usage: bash launch/alfworld_cpu.sh [key=value ...] [--dry-run]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec fresco run experiments/alfworld_cpu.yaml "$@"
