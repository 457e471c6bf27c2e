#!/usr/bin/env bash
# scripts/run_gpt2_774M.sh - GPT-2 774M on 150 billion tokens, 1.5 epochs of FineWeb's 100B sample.
#
#   python3 data/fineweb.py --size 100B --ready && python3 data/hellaswag.py
#   scripts/run_gpt2_774M.sh
#
# hardware         8 GPUs of 80 GB on one host; --plan says 51 GiB a GPU in bf16
# tokens           286,102 steps of 524,288 = 150e9; 6 * 774e6 * 150e9 = 7.0e20 FLOPs
# published (1)    8 A100 80GB SXM at $14 an hour: 1.7 s a step, 5.6 days, about $2000;
#                  validation loss and HellaSwag not stated there
# published (2)    OpenAI's own on the same validation shard: 3.001, HellaSwag 43.2 %
# ours             not measured yet
#
# (1) llm.c, scripts/run_gpt2_774M.sh, of which these are the settings, and
# https://github.com/karpathy/llm.c/discussions/580. (2) llm.c, dev/vislog.ipynb. `recipe.sh` says
# what can be changed.

source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

options=(
    -e d36
    -i "data/fineweb100B/fineweb_train_*.bin"
    -j "data/fineweb100B/fineweb_val_*.bin"
    -o "log_gpt2_774M"
    -b 32 -t 1024 -d 524288 -x 286102 # 32 x 1024 x 2 x 8 ranks
    -z 1 -r 0
    -l 0.00025 -u 700 -q 0.0 -c 0.1
    -v 250 -h 1 -s 300000 -g 144
    -n 2000 -nk 2 -y 1
)
recipe "$@"
