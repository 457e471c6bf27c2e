#!/usr/bin/env bash
# What ZeRO costs on one machine: GPT-2 124M in bf16, the same global batch on 1 rank and on 4 ranks at
# every stage, interleaved; then 1 rank with 2 threads against 2 ranks with 1 thread at T=1024.
# Prints the median step of each case and its ratio to the one rank of its table.
#   ROUNDS=N   interleaved rounds (default 3)      STEPS=N   steps of a run (default 4; the first is dropped)
set -euo pipefail
cd "$(dirname "$0")/../.."
make -s -j"$(nproc)" programs BACKEND=cpu PRECISION=bf16
trainer=$PWD/build/cpu-bf16/train_gpt2
rounds=${ROUNDS:-3} steps=${STEPS:-4}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for _ in $(seq 40); do cat README.md src/train/*.c; done >"$work/text.txt"

# measure NAME RANKS THREADS OPTIONS...: adds the steps' milliseconds to the file NAME.
measure() {
    local name=$1 ranks=$2 threads=$3
    shift 3
    mpirun -np "$ranks" --oversubscribe --bind-to none "$trainer" -i "$work/text.txt" -e d12 -x "$steps" \
        -v 0 -s 0 -n -1 -o "$work/out" --overwrite --threads "$threads" "$@" >/dev/null 2>"$work/err" ||
        { cat "$work/err" >&2; exit 1; }
    grep '"event":"step"' "$work/out/log.jsonl" | sed 1d | sed -E 's/.*"ms":([0-9.e+]+).*/\1/' >>"$work/$name"
}

median() { sort -g "$1" | awk '{v[NR] = $1} END {print (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2}'; }

# row NAME FILE BASE
row() {
    awk -v name="$1" -v ms="$(median "$work/$2")" -v base="$(median "$work/$3")" \
        'BEGIN {printf "| %-34s | %8.0f | %5.2f |\n", name, ms, ms / base}'
}

small="-b 4 -t 64 -d 1024"
for _ in $(seq "$rounds"); do
    measure one 1 2 $small --reduce fast
    for stage in 0 1 2 3; do
        measure fast$stage 4 1 $small --reduce fast -z $stage
        measure exact$stage 4 1 $small --reduce exact -z $stage
    done
done
echo "| B=4 T=64, 1024 tokens a step       | ms, median | ratio |"
echo "|---|---|---|"
row "1 rank x 2 threads, fast" one one
for mode in fast exact; do
    for stage in 0 1 2 3; do row "4 ranks x 1 thread, stage $stage, $mode" $mode$stage one; done
done

long="-b 2 -t 1024 -d 4096 --reduce fast"
for _ in $(seq "$rounds"); do
    measure long1 1 2 $long
    measure long2 2 1 $long -z 1
done
echo
echo "| B=2 T=1024, 4096 tokens a step     | ms, median | ratio |"
echo "|---|---|---|"
row "1 rank x 2 threads" long1 long1
row "2 ranks x 1 thread, stage 1" long2 long1
