# Sourced by every launch script: a local virtual environment with pinned packages, made once.
# FRESCO_REQUIREMENTS names another pin list (requirements/gpu.txt on GPU machines).
set -euo pipefail
FRESCO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$FRESCO_ROOT"
_pins="${FRESCO_REQUIREMENTS:-requirements/cpu.txt}"
# What is installed depends on the pins and on the package's metadata, not on the settings of tools below it.
_stamp=".venv/.installed-$({ cat "$_pins"; sed '/^\[tool\.ruff\]/,$d' pyproject.toml; } | sha256sum | cut -c1-16)"
if [ ! -e "$_stamp" ]; then
    _python="${FRESCO_PYTHON:-$(command -v python3.11 || command -v python3 || true)}"
    [ -n "$_python" ] || { echo "fresco: no python3.11 found; install it (apt-get install python3.11-venv)" >&2; exit 1; }
    "$_python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
        || { echo "fresco: $_python is $("$_python" -V); the pinned packages need Python 3.11 (set FRESCO_PYTHON)" >&2; exit 1; }
    echo "fresco: installing pinned packages into .venv (once; a few minutes, about 3 GB) ..." >&2
    if [ ! -x .venv/bin/python ]; then
        "$_python" -m venv .venv \
            || { rm -rf .venv; echo "fresco: cannot make .venv; apt-get install python3.11-venv" >&2; exit 1; }
    fi
    # The CPU list is complete; vLLM's own dependencies would bring packages that break transformers.
    case "$_pins" in *cpu.txt) _deps=--no-deps ;; *) _deps= ;; esac
    # fast-downward (ALFWorld's engine) is compiled, by a script that calls `python`: it must be this one.
    PATH="$FRESCO_ROOT/.venv/bin:$PATH" .venv/bin/python -m pip install -q $_deps -r "$_pins" \
        || { echo "fresco: installing $_pins failed; the CPU build of torch needs PyTorch's CPU wheel index in PIP_EXTRA_INDEX_URL" >&2; exit 1; }
    .venv/bin/python -m pip install -qqq --no-deps --no-build-isolation -e . \
        || { echo "fresco: installing the fresco command into .venv failed (pip install --no-deps -e .)" >&2; exit 1; }
    rm -f .venv/.installed-*
    touch "$_stamp"
fi
export PATH="$FRESCO_ROOT/.venv/bin:$PATH" PYTHONPATH="$FRESCO_ROOT${PYTHONPATH:+:$PYTHONPATH}"
