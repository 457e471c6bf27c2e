#!/usr/bin/env python3
# data/tinyshakespeare.py - tiny Shakespeare: 1.1 MB of plays, the data set for a first run.
#
# Every speech is a document that keeps its blank line, and the first 32,768 tokens are the
# validation set: with GPT-2's vocabulary the files equal llm.c's, and so losses compare.
#
# Source: Karpathy 2015, https://github.com/karpathy/char-rnn, data/tinyshakespeare; public domain.

import corpus
import dataset
import download

SOURCE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
BYTES = 1115394
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def main():
    parser = corpus.arguments("Fetch and tokenise tiny Shakespeare.", "tinyshakespeare", SOURCE)
    options = corpus.parse(corpus.shard_arguments(parser, val_tokens=32768, shard_tokens=None))
    data_set = dataset.DataSet(options, "tiny_shakespeare")
    if data_set.is_there():
        return
    published = (None, None) if options.no_checksum else (BYTES, SHA256)
    files = [download.File(f"{options.source}/input.txt", "input.txt", *published)]
    dataset.build(
        options,
        data_set,
        dataset.fetched(options, files, lambda path: corpus.read_text(path, b"\n\n", strip=False)),
        BYTES,
        lambda: dataset.fetched_sources(options, files),
    )


if __name__ == "__main__":
    corpus.run(main)
