#!/usr/bin/env bash
# Runs the benchmarks on a GPU machine without a network, from a checkout: installs the wheels that
# `make gpu-wheels` fetched, if any, into a folder of their own, with the kernels of `make
# gpu-kernels` where they fit the machine, then runs the targets in order.
#
#   loadtest/benchmarks/gpu/run.sh OUT [bench-gpu] [bench-gpu-serving]
#
#   OUT          folder for the results, one folder a target
#   PYTHON       the interpreter that has torch (python3)
#   WHEELS       folder of wheels and kernels (wheels)
#   FLAGS        handed on to each target, e.g. FLAGS='--seconds 400'
#
# Every target is run, whatever the one before came to; the exit status is 1 if one failed.
set -euo pipefail

out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/../../.."
python=${PYTHON:-python3}
wheels=${WHEELS:-wheels}

if compgen -G "$wheels/*.whl" > /dev/null; then
    site=$(mktemp -d)
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --find-links "$wheels" --target "$site" "$wheels"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
    "$python" loadtest/benchmarks/gpu/carried_kernels.py unpack "$wheels" ||
        echo "$0: the kernels in $wheels are of no use here; they are compiled" >&2
fi

status=0
for target in "${@:-bench-gpu}"; do
    make --no-print-directory "$target" PYTHON="$python" OUT="$out/$target" ARGS="${FLAGS:-}" || status=1
done
exit "$status"
