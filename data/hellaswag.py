#!/usr/bin/env python3
# data/hellaswag.py - HellaSwag: 10,042 beginnings, each with four endings of which one is right.
#
# The context is taken as published, each ending with a blank in front, as llm.c does it; the
# trainer scores an ending by its mean loss per token. Other harnesses clean the WikiHow texts first
# and so get other figures.
#
# Source: Zellers et al. 2019, arXiv:1905.07830; https://github.com/rowanz/hellaswag, MIT licence.

import json

import corpus
import dataset
import download
import shard
import tokenizer
from shard import DataError

SOURCE = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data"
BYTES = 12246618
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"


def read_examples(path, coder):
    """[(label, context ids, [ending ids, ...])] in the order of the file."""
    examples = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                item = json.loads(line)
                texts = [item["ctx"], *(" " + ending for ending in item["endings"])]
                context, *endings = (
                    coder.encode(text.encode("utf-8", errors="replace")).tolist() for text in texts
                )
                label = int(item["label"])
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise DataError(
                    f"{path}:{number}: no HellaSwag example ({type(error).__name__}: {error})"
                ) from None
            if len(endings) != 4 or not context or not all(endings) or not 0 <= label < 4:
                raise DataError(
                    f"{path}:{number}: empty text, or label {label} of {len(endings)} endings"
                )
            examples.append((label, context, endings))
    return examples


def main():
    options = corpus.parse(
        corpus.arguments("Fetch and tokenise HellaSwag's validation set.", "hellaswag", SOURCE)
    )
    data_set = dataset.DataSet(options, "hellaswag")
    if data_set.is_there():
        return
    coder = tokenizer.make(options.tokenizer, options.vocab)
    published = (None, None) if options.no_checksum else (BYTES, SHA256)
    file = download.File(f"{options.source}/hellaswag_val.jsonl", "hellaswag_val.jsonl", *published)
    source = download.fetch(file, dataset.downloads(options))
    examples = read_examples(source, coder)
    path = options.output / "hellaswag_val.bin"
    shard.write_evaluation(path, examples)
    data_set.write_manifest(
        tokenizer=dataset.describe_tokenizer(coder)[1],
        examples=len(examples),
        sources=dataset.fetched_sources(options, [file]),
        sha256=shard.sha256_of(path),
    )
    print(f"{path}: {len(examples)} examples; the trainer reads them with -h 1")


if __name__ == "__main__":
    corpus.run(main)
