# Sourced by tests/run.sh: SLURM and Ray for tests of cluster.engine, which stand on machines of their own. Nothing is installed:
# SLURM's packages are unpacked into build/slurm, and Ray has a virtual environment, build/ray, that sees the packages of ours.
# FRESCO_TEST_SLURM and FRESCO_TEST_RAY name others.
if [ "$(id -u)" = 0 ]; then
    _slurm="$FRESCO_ROOT/build/slurm"
    if [ -z "${FRESCO_TEST_SLURM:-}" ] && [ ! -d "$_slurm" ] && command -v apt-get >/dev/null; then
        echo "fresco: unpacking SLURM into build/slurm (apt-get, 4 MB) ..." >&2
        _debs="$(mktemp -d)"
        {
            rm -rf "$_slurm.part" && mkdir -p "$_debs/partial" "$_slurm.part/usr" "$_slurm.part/etc" \
                && apt-get update -qq \
                && apt-get install -y -qq --download-only --no-install-recommends -o Dir::Cache::archives="$_debs" \
                    slurmctld slurmd slurm-client munge \
                && ls "$_debs"/*.deb | xargs -I{} dpkg-deb -x {} "$_slurm.part" \
                && mv "$_slurm.part" "$_slurm"
        } >/dev/null 2>&1 || echo "fresco: apt-get has no SLURM: cluster.engine=slurm is tested without one" >&2
        rm -rf "$_debs"
    fi
    [ ! -d "$_slurm" ] || export FRESCO_TEST_SLURM="${FRESCO_TEST_SLURM:-$_slurm}"

    _ray="$FRESCO_ROOT/build/ray"
    _stamp="$(_stamp_of "$_ray" requirements/ray.txt)"
    if [ -z "${FRESCO_TEST_RAY:-}" ] && [ ! -e "$_stamp" ]; then
        echo "fresco: installing Ray into build/ray (290 MB) ..." >&2
        {
            rm -rf "$_ray" && python -m venv --without-pip "$_ray" \
                && python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
                    > "$(echo "$_ray"/lib/python3.*/site-packages)/fresco.pth" \
                && python -m pip --python "$_ray/bin/python" install -qqq --no-deps -r requirements/ray.txt \
                && touch "$_stamp"
        } >/dev/null 2>&1 || echo "fresco: installing requirements/ray.txt failed: cluster.engine=ray is tested without it" >&2
    fi
    [ ! -e "$_stamp" ] || export FRESCO_TEST_RAY="${FRESCO_TEST_RAY:-$_ray/bin/python}"
fi
