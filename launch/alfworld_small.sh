#!/usr/bin/env bash
# Asynchronous RL (alpha = 1) on small ALFWorld text games, two of the six task types in rooms of six places: games,
# demonstrations, warm start and training, on a laptop.
# Hardware: 2 CPU cores, 8 GB of memory, no GPU, a C++ compiler. Time and result: see README.
# Usage: bash launch/alfworld_small.sh [key=value ...] [--dry-run]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec fresco run experiments/alfworld_small.yaml "$@"
