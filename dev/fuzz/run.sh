#!/usr/bin/env bash
# Coverage-guided fuzzing of the readers: safetensors, tokens, config, state.
#
#   dev/fuzz/run.sh [SECONDS] [TARGET...]     SECONDS for each target, 300 unless given
#
# Needs clang with libFuzzer. What is found stays in build/fuzz/ and is named; inputs that reach new
# code are kept in build/fuzz/corpus-TARGET. The few that matter go to dev/fuzz/corpus/TARGET, which
# test_fuzz_corpus replays; libFuzzer chooses them:
#
#   build/fuzz/TARGET -merge=1 -use_counters=0 FOLDER dev/fuzz/corpus/TARGET build/fuzz/corpus-TARGET
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=${1:-300}
shift || true
all=(safetensors tokens config state)
targets=("${@:-${all[@]}}")
clang=$(command -v clang || command -v clang-14 || true)
if [ -z "$clang" ]; then
    echo "skip   fuzz: no clang"
    echo "0 passed, 0 failed, ${#targets[@]} skipped"
    exit 0
fi

mkdir -p build/fuzz
library=build/fuzz/library
nice make -s -j"$(nproc)" BUILD=$library PRECISION=fp32 SAN=1 MPI=0 DNNL=0 CC="$clang" \
    CFLAGS="-fsanitize=fuzzer-no-link -Wno-pass-failed" $library/libtrainer.a $library/dev/test/fuzz_targets.o >/dev/null
passed=0 failed=0
for target in "${targets[@]}"; do
    index=-1
    for i in "${!all[@]}"; do [ "${all[$i]}" = "$target" ] && index=$i; done
    if [ "$index" -lt 0 ]; then
        echo "error: no target '$target' (${all[*]})" >&2
        exit 2
    fi
    "$clang" -std=c11 -DFUZZ_TARGET="$index" -g -fopenmp -fsanitize=fuzzer,address,undefined -Isrc \
        -Idev/test dev/fuzz/fuzzer.c $library/dev/test/fuzz_targets.o $library/libtrainer.a \
        -lcjson -lz -lm -o "build/fuzz/$target"
    mkdir -p "build/fuzz/corpus-$target"
    log=build/fuzz/$target.log
    if "build/fuzz/$target" -max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=1024 \
        -dict=dev/fuzz/json.dict -artifact_prefix="build/fuzz/$target-" -print_final_stats=1 \
        "build/fuzz/corpus-$target" "dev/fuzz/corpus/$target" >"$log" 2>&1; then
        passed=$((passed + 1))
        echo "ok     fuzz $target: $(grep -oE 'number_of_executed_units: *[0-9]+' "$log" | grep -oE '[0-9]+') inputs in $seconds s"
    else
        failed=$((failed + 1))
        echo "FAILED fuzz $target: see $log"
        grep -E 'ERROR|SUMMARY|Test unit written|\[rank' "$log" | head -5 | sed 's/^/       /' || true
    fi
done
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]
