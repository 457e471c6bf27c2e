#!/usr/bin/env bash
# dev/gpu_check.sh [--pack | --on-cpu] - is train_gpt2cu right and fast on the GPU of this machine?
#
# Correct first (build, operations, whole model, compute-sanitizer, checkpoints with the CPU program,
# two ranks), then fast (every kernel against the card's measured peaks; GPT-2 of four sizes, two of
# them beside PyTorch). Each part has its own time limit and all together end within 7 minutes; each
# result is appended at once to report.txt in $OUT or build/gpu_check, all output to log.txt beside
# it. What a missing tool would do is reported as skipped. Without a GPU it says so and exits 0; else
# the exit code is 1 if a part failed.
#
# The machine needs gcc, make, nvcc and zlib, no network, and cJSON; without MPI there is one process.
# For a machine without cJSON or zlib's header run `dev/gpu_check.sh --pack` on one that has them and
# take build/deps along (a few hundred KB, found by itself). PyTorch in the python3 on the PATH is used.
#
#   --on-cpu   the same with tiny sizes on the CUDA-on-CPU layer: a test of this script
set -uo pipefail
cd "$(dirname "$0")/.."

deps=$PWD/build/deps
if [ "${1:-}" = --pack ]; then
    mkdir -p "$deps/include/cjson" "$deps/lib"
    library=$(ldconfig -p | sed -n 's/.*libcjson\.so\.1 .*=> //p' | head -n 1)
    [ -n "$library" ] || { echo "error: no libcjson.so.1 here" >&2; exit 2; }
    printf '#include <cjson/cJSON.h>\n#include <zlib.h>\n' | gcc -E -x c - |
        sed -n 's/^# 1 "\(.*\/\(cJSON\|zlib\|zconf\)\.h\)".*/\1/p' | while read -r header; do
        case $header in
            */cJSON.h) cp "$header" "$deps/include/cjson/" ;;
            *) cp "$header" "$deps/include/" ;;
        esac
    done
    for name in libcjson.so libcjson.so.1; do cp -L "$library" "$deps/lib/$name"; done
    cp "$(gcc -print-file-name=libz.a)" "$deps/lib/"
    du -sh "$deps"
    exit 0
fi
on_cpu=false
[ "${1:-}" = --on-cpu ] && on_cpu=true

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU' || compgen -G '/dev/nvidia[0-9]*' >/dev/null; }
if ! $on_cpu && ! has_gpu; then
    echo "no GPU here, so there is nothing to check (--on-cpu tries this script itself)"
    exit 0
fi

# ---- report ----------------------------------------------------------------------------------------

out=${OUT:-$PWD/build/gpu_check}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
report=$out/report.txt log=$out/log.txt
: >"$report"
: >"$log"
TOTAL_SECONDS=410 # of the seven minutes
failed=0

say() { echo "$*" | tee -a "$report"; }
seconds_left() { echo $((TOTAL_SECONDS - SECONDS)); }
skip() { say "$(printf 'skipped %-34s %s' "$1" "$2")"; }

# part NAME LIMIT COMMAND...: its last line, or what went wrong, in the report; all of it in the log.
part() {
    local name=$1 limit=$2 left started=$SECONDS rc
    shift 2
    left=$(seconds_left)
    [ "$left" -ge 10 ] || { skip "$name" "no time left"; return 1; }
    [ "$limit" -le "$left" ] || limit=$left
    printf '\n==== %s\n' "$name" >>"$log"
    timeout -k 5 "$limit" "$@" >"$work/part" 2>&1
    rc=$?
    cat "$work/part" >>"$log"
    if [ $rc -eq 0 ]; then
        say "$(printf 'ok      %-34s %4d s  %s' "$name" $((SECONDS - started)) "$(tail -n 1 "$work/part")")"
        return 0
    fi
    failed=$((failed + 1))
    say "$(printf 'FAILED  %-34s %4d s  exit code %d%s' "$name" $((SECONDS - started)) $rc \
        "$([ $rc -ge 124 ] && echo ", limit $limit s")")"
    grep -vE '^(ok|skip) ' "$work/part" | tail -n 12 | sed 's/^/        | /' | tee -a "$report"
    return 1
}

# ---- the machine and the build ---------------------------------------------------------------------

cuda_home=${CUDA_HOME:-/usr/local/cuda}
export PATH=$PATH:$cuda_home/bin OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
if [ -d "$deps" ]; then
    export CPATH=$deps/include LIBRARY_PATH=$deps/lib
    export LD_LIBRARY_PATH=$deps/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
includes() { echo "#include <$1>" | gcc -I"$cuda_home/include" -E -x c - >/dev/null 2>&1; }

say "$(date -u '+%F %T') UTC, version $(git describe --always --dirty 2>/dev/null || echo unknown)"
mpi=0
if mpicc --showme:version >/dev/null 2>&1 && command -v mpirun >/dev/null; then
    if $on_cpu || includes nccl.h; then mpi=1; fi
fi
dnnl=0
includes dnnl.h && dnnl=1
if $on_cpu; then
    backend=cuda_on_cpu arch=sm_80 build=build/cuda_on_cpu-bf16
    [ $mpi = 1 ] || build+=-nompi
    say "CUDA on the CPU: figures mean nothing"
else
    arch=sm_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    backend=cuda build=build/cuda-bf16$([ $mpi = 1 ] || echo -nompi)-$arch
    say "$(nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit \
        --format=csv,noheader | head -n 1), $arch, $(nvcc --version | tail -n 1)"
fi
cpu_build=build/cpu-bf16
[ $mpi = 1 ] || cpu_build+=-nompi
[ $dnnl = 1 ] || cpu_build+=-nodnnl
trainer=$build/train_gpt2cu cpu_trainer=$cpu_build/train_gpt2
for header in cjson/cJSON.h zlib.h; do
    includes $header || say "missing: $header; see --pack at the top of dev/gpu_check.sh"
done
[ $mpi = 1 ] || say "missing: Open MPI or NCCL, so there is one process (MPI=0)"

build_all() {
    local programs=()
    for name in train_gpt2cu test_gpt2cu test_ops test_shard_ops bench_kernels; do
        programs+=("$build/$name")
    done
    make -s -j"$(nproc)" BACKEND=$backend CUDA_ARCH="$arch" MPI=$mpi "${programs[@]}" &&
        make -s -j"$(nproc)" BACKEND=cpu PRECISION=bf16 MPI=$mpi DNNL=$dnnl "$cpu_trainer" &&
        echo "$build, $cpu_build"
}
export -f build_all
export build cpu_build cpu_trainer backend arch mpi dnnl
part "build" 150 bash -c build_all || { say "nothing to check without a build"; exit 1; }

# ---- correct? --------------------------------------------------------------------------------------

# Text is data enough: our own sources.
cat src/*/*.c src/*/*.h src/*/*/*.cu zero/*.c dev/test/*.c >"$work/text.txt"
small=(-e "L=2,NH=2,C=128,V=257,T=128" -i "$work/text.txt" -t 128 -b 4 -d 1024 -v 0 -s 0 --reduce exact)

part "operations, bf16" 90 "$build/test_ops"
part "operations on shards, bf16" 60 "$build/test_shard_ops"
part "whole model" 90 "$build/test_gpt2cu"

sanitizer=$(command -v compute-sanitizer || true)
if $on_cpu || [ -z "$sanitizer" ]; then
    skip "compute-sanitizer" "no compute-sanitizer"
else
    for tool in memcheck racecheck initcheck synccheck; do
        part "compute-sanitizer $tool" 30 "$sanitizer" --tool $tool --error-exitcode 86 \
            "$trainer" "${small[@]}" -d 512 -x 2
    done
fi

# $1 trains and writes, $2 loads and writes: a step that is skipped leaves every byte as it was.
exchange() {
    local dir=$work/exchange file
    rm -rf "$dir"
    "$1" "${small[@]}" -o "$dir" -x 4 --stop-at 2 &&
        ZERO_FAULT=nan:step=3 "$2" "${small[@]}" -o "$dir" -x 4 --stop-at 3 -y 1 --on-nan skip || return
    for file in model optimizer; do
        cmp "$dir/step_00000002/$file.safetensors" "$dir/step_00000003/$file.safetensors" || return
    done
    echo "weights and optimizer byte by byte, $(basename "$1") to $(basename "$2")"
}
# Equal bits from one rank and from two that share the GPU, staged through pinned memory.
two_ranks() {
    local hash=() command
    for command in "" "mpirun --oversubscribe -np 2"; do
        $command "$trainer" "${small[@]}" -x 3 -z 3 --comm mpi >"$work/ranks" || return
        hash+=("$(sed -n 's/ *params_hash *//p' "$work/ranks")")
    done
    [ -n "${hash[0]}" ] && [ "${hash[0]}" = "${hash[1]}" ] && echo "1 and 2 ranks: hash ${hash[0]}"
}
in_shell() { # a function with its variables, for timeout
    declare -f "$1"
    declare -p work trainer small
    printf '%q ' "$@"
}
part "checkpoint, CPU to GPU" 40 bash -c "$(in_shell exchange "$cpu_trainer" "$trainer")"
part "checkpoint, GPU to CPU" 40 bash -c "$(in_shell exchange "$trainer" "$cpu_trainer")"
if [ $mpi = 1 ]; then
    part "two ranks on one GPU, exact" 60 bash -c "$(in_shell two_ranks)"
else
    skip "two ranks on one GPU, exact" "no MPI"
fi

# ---- fast? -----------------------------------------------------------------------------------------

part "kernels against measured peaks" 60 "$build/bench_kernels" $($on_cpu && echo tiny) &&
    tee -a "$report" <"$work/part"

# Dense bf16 peak of the chip in TFLOP/s where it is known by name; else the program's own estimate.
peak=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | grep -qE 'H100|H200' && echo 989)
rows=()

# measure NAME MODEL BATCH STEPS: trains, and leaves tokens/s, MFU in percent, planned and used MiB.
measure() {
    local name=$1 model=$2 batch=$3 steps=$4 T=1024 sampler median
    $on_cpu && T=64
    shift 4
    rm -rf "$work/run"
    nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -lms 250 >"$work/used" 2>/dev/null &
    sampler=$!
    part "$name" 60 "$trainer" -e "$model" -i "$work/text.txt" -t $T -b "$batch" -d $((batch * T)) -x "$steps" \
        -v 0 -s 0 -n -1 -o "$work/run" ${peak:+--peak-tflops $peak} "$@"
    local rc=$?
    kill $sampler 2>/dev/null
    wait $sampler 2>/dev/null
    [ $rc -eq 0 ] || { rows+=("$name|-|-|-|-|-|-"); return 1; }
    median=$(grep '"event":"step"' "$work/run/log.jsonl" | tail -n $((steps / 2)) |
        sed -E 's/.*"tokens_per_s":([0-9.e+]+),"mfu":([0-9.e+-]+|null).*/\1 \2/' | sort -g |
        awk '{ line[NR] = $0 } END { print line[int((NR + 1) / 2)] }')
    tokens=$(awk '{ printf "%.0f", $1 }' <<<"$median")
    mfu=$(awk '{ printf "%.1f", 100 * $2 }' <<<"$median")
    planned=$(sed -nE 's/.*"peak_bytes":([0-9]+).*/\1/p' "$work/run/log.jsonl" | awk '{ printf "%.0f", $1 / 1048576 }')
    used=$(sort -n "$work/used" | tail -n 1)
}

# beside_torch LAYERS HEADS CHANNELS BATCH: the same in PyTorch, after measure.
beside_torch() {
    torch_tokens=- torch_mib=- ratio=-
    if ! python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        skip "PyTorch beside it" "no PyTorch with CUDA in python3"
    elif part "PyTorch, $1 layers" 110 python3 dev/bench/gpt2_torch.py "$@"; then
        read -r torch_tokens torch_mib < <(sed -nE 's/.*tokens_per_s ([0-9]+) mib ([0-9]+).*/\1 \2/p' "$work/part")
        ratio=$(awk -v a="$tokens" -v b="$torch_tokens" 'BEGIN { printf "%.2f", a / b }')
    fi
}

row() { rows+=("$1|$tokens|$mfu|$planned|${used:--}|${torch_tokens:--}|${torch_mib:--}|${ratio:--}"); }
alone() { torch_tokens=- torch_mib=- ratio=-; }

if $on_cpu; then
    measure "tiny" "L=2,NH=2,C=128,V=257,T=64" 2 4 -r 0 && beside_torch 2 2 128 2 && row "tiny"
else
    measure "124M" d12 32 30 -r 0 && beside_torch 12 12 768 32 && row "124M, B 32"
    measure "1558M" d48 16 12 -r 0 && beside_torch 48 25 1600 16 && row "1558M, B 16"
    for fusion in 0 1 2; do
        measure "124M, -ge $fusion" d12 32 30 -r 0 -ge $fusion && alone && row "124M, B 32, -ge $fusion"
    done
    measure "355M" d24 16 16 -r 0 && alone && row "355M, B 16"
    measure "774M" d36 16 12 -r 0 && alone && row "774M, B 16"
fi

# ---- the table -------------------------------------------------------------------------------------

say ""
table() { printf '%-20s %10s %7s %12s %10s %11s %10s %6s\n' "$@"; }
say "$(table model tokens/s "MFU %" "planned MiB" "used MiB" "PyTorch t/s" "its MiB" ratio)"
for line in ${rows[@]+"${rows[@]}"}; do
    IFS='|' read -ra cells <<<"$line"
    say "$(table "${cells[@]}")"
done
say ""
say "$failed parts failed, $SECONDS s"
[ $failed -eq 0 ]
