#!/usr/bin/env bash
# Installs what is missing, builds, runs the tests. The last line is "N passed, N failed, N skipped".
#
#   scripts/test.sh          make test and the lint: no GPU and no CUDA toolkit needed
#   scripts/test.sh --ci     also sanitizers, the CUDA sources run on the CPU, and nvcc where it is
set -euo pipefail
cd "$(dirname "$0")/.."

tier=quick
[ "${1:-}" = --ci ] && tier=ci
scripts/install_deps.sh "$([ $tier = ci ] && echo --ci || echo --test)"
exec dev/test/run.sh $tier
