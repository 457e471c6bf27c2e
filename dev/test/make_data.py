#!/usr/bin/env python3
# dev/test/make_data.py FOLDER - small data files for the tests, good ones and bad ones.
#
# Good: even_train_{0,1,2}.bin (3 x 8193 tokens), uneq_train_{0,1,2}.bin (8193, 8193, 1500),
# even_val.bin, text.txt, hellaswag.bin. Bad: short.bin holds too few tokens, the others are named
# after what is wrong. Tokens are below 256 and follow a fixed pattern with some noise, so that a
# model can learn from them. Standard library only.

import struct
import sys
from pathlib import Path

VOCABULARY = 256


def tokens(count, seed):
    """A repeating walk over the vocabulary in which every fifth token is noise."""
    state, out = seed, []
    for i in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append((state >> 33) % VOCABULARY if i % 5 == 4 else (3 * i + seed) % VOCABULARY)
    return out


def shard(values, magic=20240520, version=1, count=None):
    header = [magic, version, len(values) if count is None else count] + [0] * 253
    return struct.pack("<256i", *header) + struct.pack(f"<{len(values)}H", *values)


def hellaswag(examples, longest=None):
    """examples: (label, context, four endings), each a list of ids."""
    out = []
    for index, (label, context, endings) in enumerate(examples):
        words = [65535, 0, index, label, len(endings), len(context), *context]
        for ending in endings:
            words += [len(ending), *ending]
        words[1] = 2 * len(words)
        out.append(struct.pack(f"<{len(words)}H", *words))
    header = [20240522, 1, len(out), max(map(len, out)) if longest is None else longest] + [0] * 252
    return struct.pack("<256i", *header) + b"".join(out)


def hellaswag_examples(count):
    examples = []
    for e in range(count):
        values = tokens(60, 100 + e)
        endings = [values[20 + 9 * i : 20 + 9 * i + 3 + (e + i) % 6] for i in range(4)]
        examples.append((e % 4, values[: 5 + e % 10], endings))
    return examples


def make(folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    good = shard(tokens(8193, 1))
    files = {
        "even_train_0.bin": good,
        "even_train_1.bin": shard(tokens(8193, 2)),
        "even_train_2.bin": shard(tokens(8193, 3)),
        "uneq_train_0.bin": good,
        "uneq_train_1.bin": shard(tokens(8193, 2)),
        "uneq_train_2.bin": shard(tokens(1500, 3)),
        "even_val.bin": shard(tokens(4097, 4)),
        "text.txt": b"the quick brown fox jumps over the lazy dog. " * 400,
        "short.bin": shard(tokens(60, 1)),
        "trunc.bin": good[:-100],
        "badmagic.bin": shard(tokens(8193, 1), magic=20240521),
        "badver.bin": shard(tokens(8193, 1), version=9),
        "hdrbig.bin": shard(tokens(8193, 1), count=9000),
        "hdrneg.bin": shard(tokens(8193, 1), count=-8193),
        "empty.bin": b"",
        "text.bin": b"the quick brown fox jumps over the lazy dog. " * 400,
        "html.bin": b"<!DOCTYPE html><html><body>404 Not Found</body></html>" * 40,
        "oov.bin": shard(tokens(5000, 1) + [60000] + tokens(3192, 1)),
        "hellaswag.bin": hellaswag(hellaswag_examples(13)),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_data.py FOLDER")
    make(sys.argv[1])
