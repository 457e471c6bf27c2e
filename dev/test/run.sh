#!/usr/bin/env bash
# Runs the tests of a tier and counts their cases.
#
#   quick   under 3 minutes on two cores, no CUDA: operations, golden model, exactness, resume, errors
#   ci      quick, and sanitizers, other builds, the CUDA sources on the CPU, nvcc: under 25 minutes
#   full    everything, no limit
#
# A test is a program or a script that prints a line per case and "N passed, N failed, N skipped" last.
# Its output is kept in build/test/. The tests of the CUDA sources, which use one core, run beside the
# others. The last line is the sum over all tests.
set -uo pipefail
cd "$(dirname "$0")/../.."

tier=${1:-quick}
case $tier in quick | ci | full) ;; *) echo "usage: $0 quick|ci|full" >&2; exit 2 ;; esac
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1
export ASAN_OPTIONS=fast_unwind_on_malloc=0 LSAN_OPTIONS=suppressions=$PWD/dev/lsan.supp
export TEST_TIER=$tier
logs=build/test
mkdir -p $logs
: >$logs/counts
begin=$SECONDS

# in_tier TIER: is a test of that tier part of this run?
in_tier() {
    case $tier in
        quick) [ "$1" = quick ] ;;
        ci) [ "$1" != full ] ;;
        full) true ;;
    esac
}

# job TIER NAME SECONDS COMMAND...: runs one test and books its counts.
job() {
    local job_tier=$1 name=$2 limit=$3 started=$SECONDS log=$logs/${2//[ \/,]/_}.log rc counts p f s
    shift 3
    in_tier "$job_tier" || return 0
    timeout -k 5 "$limit" "$@" >"$log" 2>&1
    rc=$?
    counts=$(grep -aE '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$log" | tail -n 1)
    read -r p f s <<<"$(sed -E 's/[a-z,]+//g' <<<"${counts:-0 0 0}")"
    s=${s:-0}
    if [ $rc -ne 0 ] && [ "$f" -eq 0 ]; then f=1; fi
    if [ $rc -eq 0 ] && [ -z "$counts" ]; then p=1; fi
    echo "$p $f $s" >>$logs/counts
    if [ "$f" -gt 0 ]; then
        printf 'FAILED %-48s %4d failed, %d passed in %d s, exit %d: %s\n' "$name" "$f" "$p" \
            $((SECONDS - started)) $rc "$log"
        grep -avE '^(ok|skip) ' "$log" | tail -n 15 | cut -c1-200 | sed 's/^/       | /'
    else
        printf 'ok     %-48s %4d passed%s in %d s\n' "$name" "$p" \
            "$([ "$s" -gt 0 ] && echo ", $s skipped")" $((SECONDS - started))
        grep -aE '^skip ' "$log" | sed 's/^/       | /' | head -n 5
    fi
}

# build TIER VARIABLE=VALUE...: the tests and programs of one variant; a failure counts as one.
build() {
    local build_tier=$1 log=$logs/build_${*//[ =\/]/_}.log
    shift
    in_tier "$build_tier" || return 1
    make -s -j"$(nproc)" WERROR=1 "$@" tests >"${log// /_}" 2>&1 && return 0
    echo "0 1 0" >>$logs/counts
    echo "FAILED build ${*:-(default)}"
    grep -aE 'error|warning' "${log// /_}" | head -n 10 | sed 's/^/       | /'
    return 1
}

# unit VARIANT TIER [NAME=VALUE...]: every C test program of a built variant.
unit() {
    local variant=$1 unit_tier=$2 source name
    shift 2
    for source in test_gpt2.cu dev/test/test_*.c; do
        name=$(basename "${source%.*}")
        job "$unit_tier" "$variant $name" 300 env "$@" "build/$variant/$name"
    done
}

# ops VARIANT TIER ORDER [NAME=VALUE...]: the tests of the operations, of CUDA sources on the CPU.
ops() {
    local variant=$1 ops_tier=$2 order=$3 name
    shift 3
    for name in test_ops test_shard_ops; do
        job "$ops_tier" "$variant $name $order" $([ $tier = full ] && echo 3600 || echo 900) \
            env CUDA_ON_CPU_ORDER="$order" CUDA_ON_CPU_POISON=1 "$@" "build/$variant/$name"
    done
}

# python_with_numpy: a python3 that has data/requirements.txt; installs them where the tier allows it.
python_with_numpy() {
    if [ $tier != quick ] && [ ! -x build/venv/bin/python3 ]; then
        python3 -m venv build/venv && build/venv/bin/pip install -q -r data/requirements.txt
    fi >$logs/venv.log 2>&1
    if [ -x build/venv/bin/python3 ]; then echo build/venv/bin/python3; else echo python3; fi
}

# ---- the CPU program ------------------------------------------------------------------------------

cpu_tests() {
    local python ranks
    job quick "lint" 120 dev/lint.sh
    build quick PRECISION=fp32 && unit cpu-fp32 quick
    build quick PRECISION=bf16 && unit cpu-bf16 quick
    for ranks in 2 3; do
        job quick "cpu-fp32 test_gpt2, $ranks ranks" 120 mpirun -np $ranks build/cpu-fp32/test_gpt2
    done
    job ci "cpu-bf16 test_gpt2, 4 ranks" 120 mpirun -np 4 build/cpu-bf16/test_gpt2

    export TRAINER=$PWD/build/cpu-fp32/train_gpt2
    python=$(python_with_numpy)
    job quick "contract" 400 dev/test/test_contract.py
    job quick "resume" $([ $tier = full ] && echo 3600 || echo 600) dev/test/test_resume.py
    job quick "ranks" 300 dev/test/test_ranks.sh build/cpu-fp32
    job ci "ranks, bf16" 600 dev/test/test_ranks.sh build/cpu-bf16
    job quick "learning" 200 dev/test/test_learning.py
    job quick "recipes" 300 "$python" dev/test/test_recipes.py
    job ci "data" 300 "$python" dev/test/test_data.py
    job ci "downloads" 300 "$python" dev/test/test_downloads.py
    job full "transformers" 600 "$python" dev/test/test_transformers.py
    job ci "fuzz" 1500 dev/fuzz/run.sh $([ $tier = full ] && echo 300 || echo 3)

    build ci PRECISION=fp16 && unit cpu-fp16 ci
    build ci PRECISION=fp32 SAN=1 && unit cpu-fp32-san ci
    build ci PRECISION=bf16 HOSTILE=1 && unit cpu-bf16-hostile ci
    build ci PRECISION=fp32 DNNL=0 MPI=0 && unit cpu-fp32-nompi-nodnnl ci
    build ci PRECISION=bf16 MARCH=x86-64-v3 && unit cpu-bf16-x86-64-v3 ci ONEDNN_MAX_CPU_ISA=AVX2
    build full PRECISION=bf16 SAN=1 && unit cpu-bf16-san full
    build full PRECISION=fp32 CC=clang && unit cpu-fp32-clang full
}

# ---- the CUDA sources: on the CPU, and through nvcc -------------------------------------------------

cuda_tests() {
    local order precision ops_tier small
    job ci "cuda_on_cpu" 900 dev/cuda_on_cpu/test.sh
    job ci "cuda program" 900 dev/test/test_cuda_program.py
    job ci "contract, CUDA" 600 env TRAINER="$PWD/build/cuda_on_cpu-bf16/train_gpt2cu" \
        CUDA_ON_CPU_DEVICES=4 TEST_TIER=quick dev/test/test_contract.py
    small=$([ $tier = full ] || echo TEST_SMALL=1) # of ThreadSanitizer, which takes 20 minutes for all
    for precision in bf16 fp16 fp32; do
        ops_tier=$([ $precision = bf16 ] && echo ci || echo full)
        build $ops_tier BACKEND=cuda_on_cpu PRECISION=$precision SAN=1 &&
            ops cuda_on_cpu-$precision-san $ops_tier random:1
        build $ops_tier BACKEND=cuda_on_cpu PRECISION=$precision SAN=thread CC=clang &&
            ops cuda_on_cpu-$precision-clang-santhread $ops_tier random:2 $small
        build full BACKEND=cuda_on_cpu PRECISION=$precision SAN=memory CC=clang &&
            ops cuda_on_cpu-$precision-clang-sanmemory full random:3
    done
    for order in forward reverse; do
        build full BACKEND=cuda_on_cpu PRECISION=fp16 && ops cuda_on_cpu-fp16 full $order
    done
}

if [ $tier = quick ]; then
    cpu_tests
elif [ -f "${CUDA_HOME:-/usr/local/cuda}/include/cuda_runtime_api.h" ]; then
    cuda_tests & # the two take about as long
    cpu_tests
    job ci "kernels" 900 dev/test/test_kernels.py
    wait
else
    echo "skip   CUDA sources (no CUDA headers in ${CUDA_HOME:-/usr/local/cuda})"
    echo "0 0 5" >>$logs/counts
    cpu_tests
fi

echo "tests took $((SECONDS - begin)) s"
awk '{p += $1; f += $2; s += $3}
    END {print p + 0 " passed, " f + 0 " failed, " s + 0 " skipped"; exit f > 0 || p == 0}' $logs/counts
