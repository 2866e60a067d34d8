# Sourced by tests/run.sh: installs Chromium, which opens reports, where it is missing and we may.
if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null && ! command -v google-chrome >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "fresco: installing chromium (apt-get) ..." >&2
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 \
            || echo "fresco: apt-get install chromium failed: tests of the report in a browser are skipped" >&2
    else
        echo "fresco: tests of the report in a browser are skipped without it: apt-get install chromium" >&2
    fi
fi
