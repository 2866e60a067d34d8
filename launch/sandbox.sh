# Sourced where sandboxes are needed (swe recipes, tests): installs bubblewrap where it is missing and we may.
if ! command -v bwrap >/dev/null || ! command -v git >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "fresco: installing bubblewrap and git (apt-get) ..." >&2
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap git util-linux; } >/dev/null 2>&1 \
            || echo "fresco: apt-get install bubblewrap git util-linux failed: sandboxes will not run" >&2
    else
        echo "fresco: sandboxes need bubblewrap and git: apt-get install bubblewrap git util-linux" >&2
    fi
fi
