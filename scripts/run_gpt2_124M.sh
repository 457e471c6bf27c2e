#!/usr/bin/env bash
# scripts/run_gpt2_124M.sh - GPT-2 124M on 10 billion tokens of FineWeb.
#
#   python3 data/fineweb.py --ready && python3 data/hellaswag.py && scripts/run_gpt2_124M.sh
#
# hardware         8 GPUs of 80 GB on one host; --plan says 20 GiB a GPU in bf16
# tokens           18,865 steps of 524,288 = 9.9e9; 6 * 124e6 * 9.9e9 = 7.4e18 FLOPs
# published (1)    8 A100 80GB SXM at $14 an hour: 300 ms a step, 94 minutes, about $20;
#                  validation loss about 3.29, HellaSwag 29.9 %
# published (2)    OpenAI's own 124M on the same validation shard: 3.425, HellaSwag 29.4 %
# ours             not measured yet
#
# (1) llm.c, https://github.com/karpathy/llm.c/discussions/481 and its scripts/run_gpt2_124M.sh, of
# which these are the settings. (2) llm.c, dev/vislog.ipynb. `recipe.sh` says what can be changed.

source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

options=(
    -e d12
    -i "data/fineweb10B/fineweb_train_*.bin"
    -j "data/fineweb10B/fineweb_val_*.bin"
    -o "log_gpt2_124M"
    -b 64 -t 1024 -d 524288 -x 18865 # 64 x 1024 x 1 x 8 ranks
    -z 1 -r 0
    -l 0.0006 -u 700 -q 0.0 -c 0.1
    -v 250 -h 1 -s 20000 -g 144
    -n 1000 -nk 2 -y 1
)
recipe "$@"
