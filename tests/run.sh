#!/usr/bin/env bash
# All tests, in the same local virtual environment as the launch scripts.
# Usage: bash tests/run.sh [pytest arguments]
source "$(dirname "${BASH_SOURCE[0]}")/../launch/setup.sh"
source launch/sandbox.sh
source tests/browser.sh
source tests/sshd.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
ruff check .
ruff format --check .
mypy
python -m pytest "$@"
if [ $# -eq 0 ]; then
    source tests/engines.sh
    python -m pytest -n 3 -m "families or docs" # what a plain pytest leaves out: whole runs
fi
