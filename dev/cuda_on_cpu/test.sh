#!/bin/bash
# test.sh - tests CUDA on the CPU: every planted bug is shown by the modes that should show it, and
# correct programs give the right results and no report in any mode. Exit code 1 if one fails.
#
#   ./test.sh            all tests; builds what it needs under build/cuda_on_cpu_tests
#   ./test.sh WORD       only those whose name contains WORD
# Compilers and headers that are missing skip the tests that need them; each is counted.

cd "$(dirname "$0")" || exit 1
WORD=${1:-}
JOBS=${JOBS:-2}
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
OUT=$(cd ../.. && pwd)/build/cuda_on_cpu_tests
export TSAN_OPTIONS="halt_on_error=1 report_signal_unsafe=0" ASAN_OPTIONS=detect_leaks=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1

# ---- modes ------------------------------------------------------------------
# A mode is a build (folder below OUT) and settings of the environment.

build_of() {
    case $1 in
        asan*) echo gcc-1 ;;
        tsan*) echo clang-thread ;;
        msan*) echo clang-memory ;;
        poison*) echo clang-0 ;;
        *) echo gcc-0 ;;
    esac
}

settings_of() {
    case $1 in
        reverse) echo CUDA_ON_CPU_ORDER=reverse ;;
        random1) echo CUDA_ON_CPU_ORDER=random:1 ;;
        random2) echo CUDA_ON_CPU_ORDER=random:2 ;;
        poison) echo CUDA_ON_CPU_POISON=1 ;;
        poison_random) echo CUDA_ON_CPU_POISON=1 CUDA_ON_CPU_ORDER=random:3 ;;
        early) echo CUDA_ON_CPU_ASYNC=early ;;
        early_reverse) echo CUDA_ON_CPU_ASYNC=early CUDA_ON_CPU_ORDER=reverse ;;
        lazy) echo CUDA_ON_CPU_LAZY=1 CUDA_ON_CPU_POISON=1 ;;
        ahead) echo CUDA_ON_CPU_LAZY=ahead CUDA_ON_CPU_POISON=1 ;;
        lazy_random) echo CUDA_ON_CPU_LAZY=random:7 CUDA_ON_CPU_POISON=1 ;;
        tsan_early) echo CUDA_ON_CPU_ASYNC=early ;;
        tsan_lazy) echo CUDA_ON_CPU_LAZY=1 ;;
        asan_reverse) echo CUDA_ON_CPU_ORDER=reverse ;;
    esac
}

CLEAN_MODES="plain reverse random1 random2 poison poison_random early early_reverse lazy ahead
             lazy_random asan asan_reverse tsan tsan_early tsan_lazy msan"

# run MODE PROGRAM ARGUMENTS...: all it prints.
run() {
    local mode=$1 program=$2
    shift 2
    env $(settings_of "$mode") timeout -k 5 60 "$OUT/$(build_of "$mode")/$program" "$@" 2>&1
}

# ---- results ----------------------------------------------------------------

ok() { echo "ok     $*"; }
skip() { echo "skip   $1 ($2)"; }
fail() { # name, what happened
    echo "FAIL   $1"
    head -c 1500 <<<"$2" | head -12 | sed 's/^/         /'
}
wanted() { [[ $1 == *"$WORD"* ]]; }

# ---- one test each ----------------------------------------------------------

# The broken program must show TEXT ("_" for blanks), or results unlike its twin's; the twin must run
# to its end.
test_bug() { # bug mode text
    local name="bug $1 $2" modes=$2 broken fixed
    case $2 in
        orders) modes="plain reverse random1" ;;
        early) modes="early early_reverse" ;;
    esac
    for mode in $modes; do
        broken=$(run "$mode" bugs "$1")
        fixed=$(run "$mode" bugs "$1" fixed)
        if [[ $? -ne 0 || $fixed != *checksum* ]]; then
            fail "$name" "the repaired program: $fixed"
            return
        fi
        if [[ $3 == differs ]]; then
            [[ $broken != "$fixed" ]] && { ok "$name"; return; }
        else
            [[ $broken == *"${3//_/ }"* ]] && { ok "$name"; return; }
        fi
    done
    fail "$name" "not shown: $broken"
}

# A correct program: exit code 0, and no report.
test_clean() { # program mode argument
    local output
    output=$(run "$2" "$1" $3)
    if [[ $? -eq 0 && $output != *Sanitizer* && $output != *cuda_on_cpu:* ]]; then ok "$1 $2"
    else fail "$1 $2" "$output"; fi
}

run_ranks() { # ranks mode argument
    # Open MPI leaks by itself.
    env $(settings_of "$2") ASAN_OPTIONS=detect_leaks=0 timeout -k 5 60 mpirun -np "$1" --oversubscribe \
        --mca mpi_yield_when_idle 1 "$OUT/$(build_of "$2")/nccl" $3 2>&1
}

test_nccl() { # ranks mode
    local output
    output=$(run_ranks "$1" "$2")
    if [[ $? -eq 0 && $output != *Sanitizer* && $output != *cuda_on_cpu:* ]]; then
        ok "nccl $1 ranks $2"
    else fail "nccl $1 ranks $2" "$output"; fi
}

test_nccl_disagreement() { # ranks
    local output
    output=$(run_ranks "$1" plain disagree)
    if [[ $output == *"ranks disagree"* ]]; then ok "nccl $1 ranks disagree"
    else fail "nccl $1 ranks disagree" "$output"; fi
}

# A setting of the environment, and what a program then does.
test_setting() { # setting exit-code program argument
    local output code
    output=$(env "$1" "$OUT/gcc-0/$3" $4 2>&1)
    code=$?
    if [[ $code -eq $2 ]]; then ok "setting $1"
    else fail "setting $1" "exit code $code: $output"; fi
}

# Every wait of a correct two-stream program is taken away in turn; each must be missed.
test_edge() { # number mode
    local output
    output=$(CUDA_ON_CPU_DROP_EDGE=$1 run "$2" edges)
    if [[ $? -ne 0 && $output != *"no edge"* ]]; then ok "edge $1 missed $2"
    else fail "edge $1 missed $2" "$output"; fi
}

test_nvcc() { # program architecture
    local output
    output=$("$CUDA_HOME/bin/nvcc" -std=c++17 -arch="$2" -I../../src -cubin -o "$OUT/$1.$2.cubin" \
        "tests/$1.cu" 2>&1)
    if [[ $? -ne 0 ]]; then fail "nvcc $1 $2" "$output"
    elif [[ $1 == tensor_core ]] && ! output=$(python3 tests/opcodes.py "$OUT/$1.$2.cubin" 2>&1); then
        fail "nvcc $1 $2" "$output"
    else ok "nvcc $1 $2"; fi
}

# Called by xargs with one test as arguments.
if [[ ${1:-} == --one ]]; then
    shift
    "$@"
    exit 0
fi

# ---- what there is ----------------------------------------------------------

missing() { # why tests of a build cannot run; empty if they can
    local compiler=${1%-*} sanitizer=${1#*-} flag=
    case $sanitizer in
        1) flag=-fsanitize=address,undefined ;;
        thread | memory) flag=-fsanitize=$sanitizer ;;
    esac
    [[ $compiler == gcc ]] && compiler=g++ || compiler=clang++
    [[ -f $CUDA_HOME/include/cuda_runtime_api.h ]] || { echo "no CUDA headers in $CUDA_HOME"; return; }
    command -v $compiler >/dev/null || { echo "no $compiler"; return; }
    echo 'int main() {}' | $compiler $flag -x c++ - -o "$OUT/probe" 2>/dev/null && "$OUT/probe" ||
        echo "$compiler cannot link $flag"
}

mkdir -p "$OUT"
declare -A WHY
BUILDS="gcc-0 gcc-1 clang-0 clang-thread clang-memory"
MPI=1
command -v mpirun >/dev/null && mpicxx --showme:version >/dev/null 2>&1 || MPI=0
for build in $BUILDS; do
    WHY[$build]=$(missing "$build")
    [[ -n ${WHY[$build]} ]] && continue
    make -s -j"$JOBS" programs CC="${build%-*}" SAN="${build#*-}" MPI=$MPI >"$OUT/$build.log" 2>&1 ||
        WHY[$build]="build failed"
done

# ---- the list ---------------------------------------------------------------

# add BUILD NAME FUNCTION ARGUMENTS...: a test, a skip, or a failed build.
add() {
    local build=$1 name=$2
    shift 2
    wanted "$name" || return
    case ${WHY[$build]} in
        "") printf '%q ' "$@"; echo ;;
        "build failed") printf '%q ' fail "$name" "$(tail -5 "$OUT/$build.log")"; echo ;;
        *) printf '%q ' skip "$name" "${WHY[$build]}"; echo ;;
    esac
}

list() {
    local program mode name modes entry edges edge ranks arch setting code argument
    for program in intrinsics kernels tensor_core runtime cublaslt edges; do
        for mode in $CLEAN_MODES; do
            add "$(build_of "$mode")" "$program $mode" test_clean $program "$mode"
        done
    done
    for mode in $CLEAN_MODES; do
        add "$(build_of "$mode")" "bugs $mode" test_clean bugs "$mode" fixed
    done
    sed -n 's/^ *BUG(\([a-z0-9_]*\), "\(.*\)"),$/\1 \2/p' tests/bugs.cu | while read -r name modes; do
        for entry in $modes; do
            mode=${entry%%=*}
            add "$(build_of "$mode")" "bug $name $mode" test_bug "$name" "$mode" "${entry#*=}"
        done
    done
    edges=$(CUDA_ON_CPU_LIST_EDGES=1 run plain edges | grep -c awaited)
    for mode in lazy tsan; do
        for edge in $(seq $((edges > 0 ? edges : 1))); do
            add "$(build_of $mode)" "edge $edge missed $mode" test_edge "$edge" $mode
        done
    done
    while read -r setting code program argument; do
        add gcc-0 "setting $setting" test_setting "$setting" "$code" "$program" "$argument"
    done <<'END'
CUDA_ON_CPU_DEVICES=0 0 runtime no_device
CUDA_ON_CPU_NO_EPILOGUES=1 0 cublaslt no_epilogues
CUDA_ON_CPU_NO_EPILOGUES=all 0 cublaslt no_products
CUDA_ON_CPU_SHARED_KB=99 0 runtime shared_99
CUDA_ON_CPU_SHARED_KB=228 2 kernels
CUDA_ON_CPU_HIDE=0 0 bugs host_reads_device_memory
CUDA_ON_CPU_ORDER=backwards 2 kernels
CUDA_ON_CPU_LAZZY=1 2 kernels
END
    for mode in plain lazy asan tsan; do
        for ranks in 1 2 3 4; do
            [[ $mode == *san && $ranks != 2 ]] && continue
            name="nccl $ranks ranks $mode"
            if [[ $MPI == 1 ]]; then add "$(build_of "$mode")" "$name" test_nccl $ranks $mode
            elif wanted "$name"; then printf '%q ' skip "$name" "no Open MPI"; echo; fi
        done
    done
    name="nccl 2 ranks disagree"
    [[ $MPI == 1 ]] && add gcc-0 "$name" test_nccl_disagreement 2
    for program in kernels tensor_core intrinsics; do
        for arch in sm_80 sm_90 sm_100; do
            name="nvcc $program $arch"
            wanted "$name" || continue
            if [[ -x $CUDA_HOME/bin/nvcc ]]; then echo "test_nvcc $program $arch"
            else printf '%q ' skip "$name" "no nvcc in $CUDA_HOME/bin"; echo; fi
        done
    done
}

list | xargs -P "$JOBS" -d '\n' -I{} bash -c "./test.sh --one {}" | tee "$OUT/results"

count() { grep -c "^$1 " "$OUT/results"; }
echo "$(count ok) passed, $(count FAIL) failed, $(count skip) skipped"
[[ -s $OUT/results && $(count FAIL) -eq 0 ]]
