#!/usr/bin/env python3
# data/prompt.py - text to token ids for the trainer's --prompt-tokens, and ids or a shard back to
# text.
#
#   ./train_gpt2 -e DIR --prompt-tokens $(python3 data/prompt.py "Hello world")
#   python3 data/prompt.py --decode 15496,995 --tokenizer-file data/fineweb10B/gpt2_tokenizer.bin
#   python3 data/prompt.py --shard data/fineweb10B/fineweb_val_000000.bin --count 100

import argparse
import sys
from pathlib import Path

import corpus
import packages
import shard
import tokenizer
from shard import DataError


def parse():
    parser = argparse.ArgumentParser(description="Text to token ids and back.", allow_abbrev=False)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("text", nargs="?", help="text to encode")
    what.add_argument("--decode", metavar="ID,ID,...", help="ids to decode")
    what.add_argument(
        "--shard", type=Path, metavar="FILE", help="token shard to decode the beginning of"
    )
    parser.add_argument(
        "--count", type=int, default=256, metavar="N", help="tokens of the shard (256)"
    )
    parser.add_argument("--tokenizer", choices=("gpt2", "bytes"), default="gpt2", help="(gpt2)")
    parser.add_argument(
        "--vocab", type=Path, metavar="DIR", help="vocabulary files, as for the other scripts"
    )
    parser.add_argument(
        "--tokenizer-file", type=Path, metavar="FILE", help="decode with a gpt2_tokenizer.bin"
    )
    return parser.parse_args()


def decode(options, ids):
    if options.tokenizer_file is not None:
        tokens = shard.read_vocabulary(options.tokenizer_file)
    else:
        tokens = tokenizer.make(options.tokenizer, options.vocab).tokens()
    outside = next((i for i in ids if not 0 <= i < len(tokens)), None)
    if outside is not None:
        raise DataError(f"token {outside}: the vocabulary has {len(tokens)}")
    return b"".join(tokens[i] for i in ids)


def main():
    options = parse()
    packages.require("numpy", tokenizer=options.tokenizer)
    if options.text is not None:
        coder = tokenizer.make(options.tokenizer, options.vocab)
        print(
            ",".join(map(str, coder.encode(options.text.encode("utf-8", errors="surrogateescape"))))
        )
        return
    if options.shard is not None:
        ids = shard.open_tokens(options.shard)[: options.count].tolist()
    else:
        try:
            ids = [int(field) for field in options.decode.split(",")]
        except ValueError:
            raise DataError(
                f"--decode {options.decode}: ids are numbers with commas between them"
            ) from None
    sys.stdout.buffer.write(decode(options, ids) + b"\n")


if __name__ == "__main__":
    corpus.run(main)
