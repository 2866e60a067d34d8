# Sourced by tests/run.sh: installs an SSH daemon, which tests start on machines of their own, where it is missing and we may.
if ! command -v sshd >/dev/null && [ ! -x /usr/sbin/sshd ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "fresco: installing openssh-server (apt-get) ..." >&2
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends openssh-server openssh-client; } >/dev/null 2>&1 \
            || echo "fresco: apt-get install openssh-server failed: cluster.engine=ssh is tested without one" >&2
    else
        echo "fresco: cluster.engine=ssh is tested without a daemon: apt-get install openssh-server" >&2
    fi
fi
