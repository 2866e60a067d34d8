#!/usr/bin/env bash
# All tests, the marked ones last, in the same local virtual environment as the launch scripts.
# Usage: bash tests/run.sh [pytest arguments]
source "$(dirname "${BASH_SOURCE[0]}")/../launch/setup.sh"
source launch/sandbox.sh
source tests/browser.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
ruff check .
ruff format --check .
mypy
code=0
python -m pytest "$@" || code=$?
[[ " $* " == *" -m "* ]] && exit "$code"

# Engines of every family, and what trains whole recipes, are left out of pytest's default and come last.
marked=0
python -m pytest -m "families or docs" "$@" || marked=$?
nothing=5  # pytest's code, where no test of this part was asked for
if [[ $code == "$nothing" || ($code == 0 && $marked != "$nothing") ]]; then code=$marked; fi
exit "$code"
