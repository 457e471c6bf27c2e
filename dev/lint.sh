#!/usr/bin/env bash
# What the compiler does not check: who may include whom, how long files are, that headers stand alone,
# where CUDA and MPI may appear. Prints a line per rule and "N passed, N failed, N skipped" last.
set -uo pipefail
shopt -s lastpipe # `... | rule` counts in this shell
cd "$(dirname "$0")/.."

passed=0 failed=0 skipped=0
# rule NAME: reads offending lines from stdin; none means the rule holds.
rule() {
    local lines
    lines=$(cat)
    if [ -z "$lines" ]; then
        passed=$((passed + 1))
        echo "ok     lint: $1"
    else
        failed=$((failed + 1))
        echo "FAILED lint: $1"
        sed 's/^/       /' <<<"$lines"
    fi
}

mapfile -t sources < <(git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp')
[ ${#sources[@]} -gt 0 ] || { echo "error: git lists no sources here: no git, or not a clone of one's own" >&2; exit 2; }
mapfile -t product < <(printf '%s\n' "${sources[@]}" | grep -Ev '^(dev|data|scripts)/')

# ---- includes point down: core < backend < {gpt2, zero} < train < root ----------------------------

# forbid FOLDER PATTERN...: files of FOLDER must not include what begins with a pattern.
forbid() {
    local folder=$1 alternatives
    shift
    alternatives=$(IFS='|'; echo "$*")
    printf '%s\n' "${product[@]}" | grep "^$folder/" |
        xargs -r grep -nE "^#include \"($alternatives)/" /dev/null
}
{
    forbid src/core backend gpt2 zero train
    forbid src/backend gpt2 zero train
    forbid src/gpt2 zero train
    forbid zero gpt2 train
} | rule "includes point down, gpt2 and zero are blind to each other"

grep -nE '^#include "\.\.?/' "${sources[@]}" | rule "includes name the path from src/ or the root"

# ---- sizes ----------------------------------------------------------------------------------------

wc -l "${sources[@]}" | awk '$2 != "total" && $1 > 900 {print $2 ": " $1 " lines (at most 900)"}' |
    rule "no file above 900 lines"
awk 'length($0) > 100 {print FILENAME ":" FNR ": " length($0) " columns"; if (++n == 20) exit}' "${sources[@]}" |
    rule "no line above 100 columns"

# ---- where CUDA and MPI may appear ----------------------------------------------------------------

printf '%s\n' "${product[@]}" | grep -Ev '^src/backend/(cuda/|comm/comm_nccl\.cu)' |
    xargs grep -nE '<<<|#include <(cuda|cublas|nccl)|\bcuda(Malloc|Memcpy|Stream|Event|Launch)|__global__' /dev/null |
    rule "CUDA only in src/backend/cuda and comm_nccl.cu"
printf '%s\n' "${product[@]}" | grep -Ev '^src/backend/comm/' |
    xargs grep -nE '#include <mpi\.h>|\bMPI_[A-Z][a-z]' /dev/null | grep -vE ':[0-9]+: *//' |
    rule "MPI only in src/backend/comm"
grep -nE '^ *#(if|ifdef|ifndef|elif|else)' train_gpt2.cu test_gpt2.cu |
    rule "no #if in the two root programs"

# ---- headers stand alone, in C11 and in C++17 -------------------------------------------------------

mapfile -t headers < <(printf '%s\n' "${product[@]}" | grep '\.h$')
for header in "${headers[@]}"; do
    ${CC:-gcc} -std=c11 -D_GNU_SOURCE -DPRECISION_BF16 -fopenmp -Wall -Werror \
        -Isrc -I. -fsyntax-only -x c "$header" 2>&1 | head -3
    case $header in src/backend/cpu/*) continue ;; esac # of C sources only
    ${CXX:-g++} -std=c++17 -D_GNU_SOURCE -DPRECISION_BF16 -fopenmp -Wall -Werror -Isrc -I. -fsyntax-only \
        -x c++ "$header" 2>&1 | head -3
done | rule "every header compiles alone, as C11 and (but for backend/cpu) as C++17"

# ---- text -----------------------------------------------------------------------------------------

grep -nE '[[:space:]]$|	' "${sources[@]}" | head -20 | rule "no tabs, no blanks at line ends"
grep -nE '\b(TODO|FIXME|XXX|HACK)\b' "${sources[@]}" | rule "no TODO without an issue"
if command -v clang-format >/dev/null && [ "$(clang-format --version | grep -oE 'version [0-9]+' | grep -oE '[0-9]+')" -ge 14 ]; then
    printf '%s\n' "${sources[@]}" | xargs clang-format --dry-run 2>&1 | grep -E 'warning:' | head -20 |
        rule "clang-format has nothing to change"
else
    skipped=$((skipped + 1))
    echo "skip   lint: clang-format (version 14 or later is not installed)"
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
