#!/usr/bin/env python3
# data/text.py - your own text as token shards: plain text, JSON lines, parquet.
#
# The kind of a file follows from its name: .jsonl and .parquet hold a document per line or row,
# anything else is text, one document a file unless --separator cuts it. Files are taken in the
# given order, which the shards keep. For byte-level training on plain text no script is needed: the
# trainer takes .txt files.

from pathlib import Path

import corpus
import dataset


def parse():
    parser = corpus.arguments("Turn your own text, JSON lines or parquet into token shards.")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help=".jsonl, .parquet, or plain text"
    )
    parser.add_argument(
        "--val", nargs="+", type=Path, metavar="FILE", help="files of the validation set"
    )
    parser.add_argument("--field", default="text", help="field or column with the text (text)")
    parser.add_argument(
        "--separator", metavar="TEXT", help=r"ends a document in plain text; \n is a newline"
    )
    options = corpus.parse(corpus.shard_arguments(parser))
    if options.val and options.val_tokens:
        parser.error("--val and --val-tokens: one of the two")
    return options


def main():
    options = parse()
    separator = options.separator and options.separator.replace(r"\n", "\n").encode()
    inputs = [*(options.val or []), *options.files]
    data_set = dataset.DataSet(
        options,
        options.output.resolve().name,
        field=options.field,
        separator=options.separator,
        inputs=[[path.name, dataset.size_of(path)] for path in inputs],
    )
    if data_set.is_there():
        return

    def documents(paths):
        for path in paths:
            if path.suffix == ".jsonl":
                yield from corpus.read_jsonl(path, options.field)
            elif path.suffix == ".parquet":
                yield from corpus.read_parquet(path, options.field)
            else:
                yield from corpus.read_text(path, separator)

    dataset.build(
        options,
        data_set,
        documents(options.files),
        sum(dataset.size_of(path) for path in inputs),
        lambda: [dataset.describe(path) for path in inputs],
        val=options.val and documents(options.val),
    )


if __name__ == "__main__":
    corpus.run(main)
