#!/usr/bin/env bash
# Measures fastpipe on a machine with one GPU, in at most eight minutes. Nothing is fetched.
#
#     benches/device.sh [--wheels DIR] [options of device.py]
#
# DIR (.wheels by default) has the wheel of fastpipe, and wheels of what the machine lacks: the tests need fastavro and
# hypothesis. They are installed into a temporary directory. Without a wheel, the fastpipe that PYTHON (python3 by
# default) imports is measured. Figures and failures are written to benches/results/device.json. With --dry-run the
# same code runs over plain memory, on little data, and keeps nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
wheels=.wheels
if [ "${1-}" = --wheels ]; then
    wheels="${2:?--wheels needs a directory}"
    shift 2
fi
site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT
if compgen -G "$wheels/*.whl" >/dev/null; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
        --target "$site" "$wheels"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$python" benches/device.py "$@"
