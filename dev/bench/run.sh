#!/usr/bin/env bash
# make bench: steps of GPT-2 124M at B=4 T=64 and B=4 T=1024, in fp32 and bf16, beside their bare products.
# Tables on stdout, one JSON file per case in build/bench/. Several minutes on two cores.
#   ROUNDS_64=N ROUNDS_1024=N   repeats (default 12 and 6)      PRECISIONS="fp32 bf16"      SHAPES="64 1024"
set -euo pipefail
cd "$(dirname "$0")/../.."

# Every function that bench_step.c wraps.
wrap=$(sed -n 's/^TIMED([^,]*, \([a-z_]*\),.*/\1/p' dev/bench/bench_step.c | sed 's/^/-Wl,--wrap=/' | tr '\n' ' ')
mkdir -p build/bench
for precision in ${PRECISIONS:-fp32 bf16}; do
    program=build/cpu-$precision/bench_step
    rm -f "$program" # the flags of the linker are not among what make compares
    make -s "$program" BACKEND=cpu PRECISION="$precision" LDFLAGS="$wrap"
    for T in ${SHAPES:-64 1024}; do
        rounds=ROUNDS_$T
        "$program" 4 "$T" "${!rounds:-$([ "$T" -ge 512 ] && echo 6 || echo 12)}" \
            "build/bench/$precision-B4-T$T.json"
        echo
    done
done
