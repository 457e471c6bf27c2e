#!/usr/bin/env bash
# scripts/run_gpt2_355M.sh - GPT-2 355M (the paper's 345M) on 31 billion tokens of FineWeb.
#
#   python3 data/fineweb.py --size 100B --ready --max-tokens 32000000000
#   python3 data/hellaswag.py && scripts/run_gpt2_355M.sh
#
# hardware         8 GPUs of 80 GB on one host; --plan says 52 GiB a GPU in bf16
# tokens           60,000 steps of 524,288 = 31.5e9; 6 * 355e6 * 31.5e9 = 6.7e19 FLOPs
# published (1)    8 A100 80GB SXM at $14 an hour: 820 ms a step, 13.7 hours, about $200;
#                  validation loss and HellaSwag not stated there
# published (2)    OpenAI's own on the same validation shard: 3.083, HellaSwag 37.5 %
# ours             not measured yet
#
# (1) llm.c, scripts/run_gpt2_350M.sh, of which these are the settings. (2) llm.c, dev/vislog.ipynb.
# `recipe.sh` says what can be changed.

source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

options=(
    -e d24
    -i "data/fineweb100B/fineweb_train_*.bin"
    -j "data/fineweb100B/fineweb_val_*.bin"
    -o "log_gpt2_355M"
    -b 64 -t 1024 -d 524288 -x 60000 # 64 x 1024 x 1 x 8 ranks
    -z 1 -r 0
    -l 0.0003 -u 700 -q 0.0 -c 0.1
    -v 250 -h 1 -s 100000 -g 144
    -n 1000 -nk 2 -y 1
)
recipe "$@"
