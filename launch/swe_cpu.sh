#!/usr/bin/env bash
# Asynchronous RL on repositories with failing tests, on a laptop: sandboxes, tools, tests, a tiny model.
# It shows the complete loop and its timings; a model of this size does not learn to program.
# Hardware: 2 CPU cores, 8 GB of memory, root (bubblewrap and overlayfs), no GPU. First start generates tasks: minutes.
# Usage: bash launch/swe_cpu.sh [key=value ...] [--dry-run]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source launch/sandbox.sh
exec fresco run experiments/swe_cpu.yaml "$@"
