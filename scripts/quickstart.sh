#!/usr/bin/env bash
# From nothing to a trained model in a few minutes: installs what is missing, builds, trains a small
# byte-level GPT-2 on this project's own sources and pages, draws the loss, prints a sample.
#
#   scripts/quickstart.sh [RANKS] [ZERO_STAGE]     RANKS: 1 (default), 2, 4 or 8; try `2 3`
#
# Files go to build/quickstart/; the trained model is build/quickstart/out/latest/.
set -euo pipefail
cd "$(dirname "$0")/.."
ranks=${1:-1} stage=${2:-0}
work=build/quickstart

echo "== 1/4 tools"
scripts/install_deps.sh
echo "== 2/4 build"
make -s -j"$(nproc)" programs BACKEND=cpu

echo "== 3/4 train: a good minute on two cores that have nothing else to do"
mkdir -p $work
# Every tenth file is kept back for validation.
find . -path ./build -prune -o -type f \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' \
    -o -name '*.md' -o -name '*.sh' -o -name '*.py' -o -name Makefile \) -print | LC_ALL=C sort >$work/files.txt
awk 'NR % 10 != 5' $work/files.txt | xargs -d '\n' cat >$work/train.txt
awk 'NR % 10 == 5' $work/files.txt | xargs -d '\n' cat >$work/val.txt
echo "$(wc -c <$work/train.txt) bytes of text to learn from, $(wc -c <$work/val.txt) to validate on"

launch=()
if [ "$ranks" -gt 1 ]; then
    launch=(mpirun -np "$ranks" --oversubscribe)
    [ "$(id -u)" -eq 0 ] && launch+=(--allow-run-as-root)
fi
# Threads that wait give their core away: several times faster where other programs run too.
export OMP_WAIT_POLICY=passive
train() {
    "${launch[@]}" ./train_gpt2 -i $work/train.txt -j $work/val.txt -o $work/out --overwrite \
        -e L=4,NH=4,C=192,T=128 -b $((8 / ranks)) -d 1024 -x 2000 -l 2e-3 -u 100 -q 0.05 -c 0.1 \
        -v 500 -m -1 -s 0 -z "$stage"
}
# A terminal gets the progress bar; elsewhere every hundredth step is enough. log.jsonl has them all.
if [ -t 1 ] && [ -t 2 ]; then
    train
else
    train | grep --line-buffered -vE '^step +[0-9]*([1-9]|[1-9]0)/'
fi

echo "== 4/4 result"
# The loss over the steps, from log.jsonl, 64 columns by 12 rows.
awk '
    /"event": *"step"/ || /"event":"step"/ {
        match($0, /"step": *[0-9]+/); s = substr($0, RSTART, RLENGTH); sub(/.*: */, "", s)
        match($0, /"loss": *[0-9.e+-]+/); l = substr($0, RSTART, RLENGTH); sub(/.*: */, "", l)
        n++; step[n] = s + 0; loss[n] = l + 0
        if (n == 1 || loss[n] > high) high = loss[n]
        if (n == 1 || loss[n] < low) low = loss[n]
    }
    END {
        if (n < 2) exit
        W = 64; H = 12
        for (i = 1; i <= n; i++) {
            x = int((i - 1) * W / n)
            sum[x] += loss[i]; count[x]++
        }
        for (y = 0; y < H; y++) {
            line = ""
            for (x = 0; x < W; x++) {
                at = count[x] ? int((high - sum[x] / count[x]) / (high - low) * (H - 1) + 0.5) : -1
                line = line (at == y ? "*" : " ")
            }
            printf "  %5.2f |%s\n", high - (high - low) * y / (H - 1), line
        }
        printf "   loss +"; for (x = 0; x < W; x++) printf "-"; printf "\n"
        printf "         %-10s%*s\n", "step " step[1], W - 10, "step " step[n]
    }' $work/out/log.jsonl

sample="./train_gpt2 -e $work/out/latest --prompt 'static int' -g 118 --temperature 0.6"
printf '\nA sample (%s):\n\n' "$sample"
eval "$sample" 2>$work/sample.log
printf '\n\n'
echo "What would the real one take?  ./train_gpt2 --plan -e d12 -z all --ranks 4"
