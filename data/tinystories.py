#!/usr/bin/env python3
# data/tinystories.py - TinyStories: 2.2 GB of short stories in the words of a small child, written
# by GPT-4.
#
# Small models learn to tell a story from it. The set has a validation file of its own (22 MB).
#
# Source: Eldan and Li 2023, arXiv:2305.07759;
# https://huggingface.co/datasets/roneneldan/TinyStories, version 2, under the CDLA-Sharing-1.0
# licence.

import corpus
import dataset
import download
from shard import DataError

REPOSITORY = "roneneldan/TinyStories"
FILES = {"train": "TinyStoriesV2-GPT4-train.txt", "val": "TinyStoriesV2-GPT4-valid.txt"}
SEPARATOR = b"<|endoftext|>"


def main():
    parser = corpus.arguments("Fetch and tokenise TinyStories.", "tinystories", download.HUB)
    options = corpus.parse(corpus.shard_arguments(parser, val_tokens=None))
    data_set = dataset.DataSet(options, "tinystories")
    if data_set.is_there():
        return
    listed = {
        file.name: file
        for file in download.hub_files(options.source, REPOSITORY, options.no_checksum)
    }
    missing = [name for name in FILES.values() if name not in listed]
    if missing:
        raise DataError(f"{options.source}: {REPOSITORY} has no {' and no '.join(missing)}")
    files = {split: [listed[name]] for split, name in FILES.items()}
    documents = {
        split: dataset.fetched(
            options, files[split], lambda path: corpus.read_text(path, SEPARATOR)
        )
        for split in FILES
    }
    every = files["val"] + files["train"]
    dataset.build(
        options,
        data_set,
        documents["train"],
        sum(file.size for file in every),
        lambda: dataset.fetched_sources(options, every),
        val=documents["val"],
    )


if __name__ == "__main__":
    corpus.run(main)
