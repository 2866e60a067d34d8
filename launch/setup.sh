# Sourced by every launch script: a local virtual environment with pinned packages, made once, of Python 3.11, 3.12 or 3.13.
# FRESCO_REQUIREMENTS names another pin list (requirements/gpu.txt on GPU machines).
# A dry run needs neither engine nor torch: before they are installed it has a small environment of its own.
set -euo pipefail
# A shell in which one types would end at the first command that fails.
_leave() { case $- in *i*) set +eu +o pipefail ;; esac; }
_refuse() { echo "fresco: $1" >&2; _leave; }
FRESCO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$FRESCO_ROOT"
_pins="${FRESCO_REQUIREMENTS:-requirements/cpu.txt}"
_venv=.venv
# What is installed depends on the pins and on the package's metadata, not on the settings of tools below it.
_metadata="$(sed '/^\[tool\.ruff\]/,$d' pyproject.toml)"
_stamp_of() { echo "$1/.installed-$({ cat "$2"; echo "$_metadata"; } | sha256sum | cut -c1-16)"; }
_stamp="$(_stamp_of "$_venv" "$_pins")"
if [[ ! -e "$_stamp" && " $* " == *" --dry-run "* ]]; then
    _pins=requirements/dry_run.txt
    _venv=.venv-dry-run
    _stamp="$(_stamp_of "$_venv" "$_pins")"
fi
if [ ! -e "$_stamp" ]; then
    # A program may be found and not run: pyenv has one for each version that it knows.
    _candidates=(python3.11 python3.12 python3.13 python3)
    [ -z "${FRESCO_PYTHON:-}" ] || _candidates=("$FRESCO_PYTHON")
    _python="" _others=""
    for _each in "${_candidates[@]}"; do
        _version="$("$_each" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || continue
        case "$_version" in
            3.11 | 3.12 | 3.13) _python="$_each"; break ;;
            *) _others="$_others$_each is $_version; " ;;
        esac
    done
    [ -n "$_python" ] || { _refuse "${_others}no Python 3.11, 3.12 or 3.13 among: ${_candidates[*]}; install one (apt-get install python3.11-venv) or name it in FRESCO_PYTHON"; return 1; }
    _size="$(sed -n 's/^# Size: //p' "$_pins")"
    echo "fresco: installing pinned packages into $_venv (once; ${_size:-its size is unknown}) ..." >&2
    if [ ! -x "$_venv/bin/python" ]; then
        echo "fresco: $_venv is of $_python, Python $_version" >&2
        "$_python" -m venv "$_venv" \
            || { rm -rf "$_venv"; _refuse "cannot make $_venv; apt-get install python$_version-venv"; return 1; }
    fi
    # The CPU list is complete; vLLM's own dependencies would bring packages that break transformers.
    case "$_pins" in *cpu.txt) _deps=--no-deps ;; *) _deps= ;; esac
    # fast-downward (ALFWorld's engine) is compiled, by a script that calls `python`: it must be this one.
    _all="$(grep -c '^[A-Za-z]' "$_pins")"
    PATH="$FRESCO_ROOT/$_venv/bin:$PATH" PYTHONUNBUFFERED=1 "$_venv/bin/python" -m pip install $_deps -r "$_pins" \
        | { _seen=0; while read -r _what _package _; do
                case "$_what $_package" in
                    Collecting\ * | Processing\ *) _seen=$((_seen + 1)); printf '\r\033[Kfresco: %d of %d: %s' "$_seen" "$_all" "${_package##*/}" >&2 ;;
                    "Installing collected") printf '\r\033[Kfresco: unpacking %d packages ...\n' "$_seen" >&2 ;;
                esac
            done; } \
        || { _refuse "installing $_pins failed; the CPU build of torch needs PyTorch's CPU wheel index in PIP_EXTRA_INDEX_URL"; return 1; }
    "$_venv/bin/python" -m pip install -qqq --no-deps --no-build-isolation -e . \
        || { _refuse "installing the fresco command into $_venv failed (pip install --no-deps -e .)"; return 1; }
    rm -f "$_venv"/.installed-*
    touch "$_stamp"
fi
export PATH="$FRESCO_ROOT/$_venv/bin:$PATH" PYTHONPATH="$FRESCO_ROOT${PYTHONPATH:+:$PYTHONPATH}"
_leave
