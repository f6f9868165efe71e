#!/usr/bin/env bash
# Lint, types and all tests. Arguments go to pytest: bash scripts/test.sh tests/unit/core -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
export OMP_NUM_THREADS=1 # ranks share the cores; threads of one rank would fight those of another

step() {
    local start=$SECONDS
    echo "== $1"
    shift
    "$@"
    echo "   $((SECONDS - start)) s"
}

step "ruff check" "$python" -m ruff check .
step "ruff format" "$python" -m ruff format --check .
step "mypy" "$python" -m mypy
[ $# -gt 0 ] || set -- tests
# Files stay whole, so that fixtures of a module are made once; two at a time suit two cores.
step "pytest" "$python" -m pytest --durations=15 -n "${TEST_WORKERS:-2}" --dist loadfile "$@"
