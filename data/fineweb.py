#!/usr/bin/env python3
# data/fineweb.py - FineWeb and FineWeb-Edu: cleaned text of the web, 10 or 100 billion tokens.
#
# Two ways to the same shards: the published parquet files tokenised here, or with --ready shards
# that others have tokenised with GPT-2's vocabulary (20 GB instead of 28 GB to fetch for 10B).
# The first 100 million tokens are the validation set, in both.
#
# Source: Penedo et al. 2024, arXiv:2406.17557;
# https://huggingface.co/datasets/HuggingFaceFW/fineweb and .../fineweb-edu, under ODC-By 1.0. Ready
# shards: see READY.

import math

import corpus
import dataset
import download
import shard
import tokenizer
from shard import DataError

VAL_TOKENS = 10**8

# repository, training tokens of the set; a shard holds 10^8 tokens, all made with llm.c's script
READY = {
    ("fineweb", "10B"): ("kjj0/fineweb10B-gpt2", None),
    ("fineweb", "100B"): ("kjj0/fineweb100B-gpt2", None),
    ("edu_fineweb", "10B"): ("karpathy/fineweb-edu-100B-gpt2-token-shards", 10**10),
    ("edu_fineweb", "100B"): ("karpathy/fineweb-edu-100B-gpt2-token-shards", None),
}


def parse():
    parser = corpus.arguments("Fetch and tokenise FineWeb.", "fineweb10B", download.HUB)
    parser.add_argument(
        "--edu", action="store_true", help="FineWeb-Edu, the part with educational value"
    )
    parser.add_argument("--size", choices=("10B", "100B"), default="10B", help="(10B)")
    parser.add_argument(
        "--ready",
        action="store_true",
        help="fetch ready-made shards (of 10^8 tokens, GPT-2's vocabulary; "
        "--val-tokens, --shard-tokens and --processes do not apply)",
    )
    parser.set_defaults(output=None)
    options = corpus.parse(corpus.shard_arguments(parser, val_tokens=VAL_TOKENS))
    options.prefix = "edu_fineweb" if options.edu else "fineweb"
    options.output = options.output or corpus.HERE / (options.prefix + options.size)
    if options.ready and options.tokenizer != "gpt2":
        parser.error("--ready shards exist for --tokenizer gpt2 only")
    return options


def tokenise(options, data_set):
    repository = "HuggingFaceFW/" + ("fineweb-edu" if options.edu else "fineweb")
    listed = download.hub_files(
        options.source, repository, options.no_checksum, f"sample/{options.size}T"
    )
    files = [file for file in listed if file.name.endswith(".parquet")]
    if not files:
        raise DataError(
            f"{options.source}: no parquet files in {repository}, sample/{options.size}T"
        )
    dataset.build(
        options,
        data_set,
        dataset.fetched(options, files, corpus.read_parquet),
        sum(file.size for file in files),
        lambda: dataset.fetched_sources(options, files),
    )


def fetch_ready(options, data_set):
    repository, limit = READY[options.prefix, options.size]
    limit = options.max_tokens or limit
    coder = tokenizer.make(options.tokenizer, options.vocab)
    vocabulary, about_tokenizer = dataset.describe_tokenizer(coder)
    listed = download.hub_files(options.source, repository, options.no_checksum)
    files = {
        split: [file for file in listed if file.name.startswith(f"{options.prefix}_{split}_")]
        for split in ("val", "train")
    }
    if not files["train"]:
        raise DataError(f"{options.source}: no shards {options.prefix}_train_* in {repository}")
    if limit is not None:
        files["train"] = files["train"][: math.ceil(limit / 10**8)]

    data_set.expect(file.name for split in files for file in files[split])
    shards = {}
    for split in files:
        paths = download.fetch_all(files[split], options.output)
        shards[split] = [
            {
                "name": path.name,
                "tokens": len(shard.open_tokens(path)),
                "bytes": path.stat().st_size,
                "sha256": file.sha256 or shard.sha256_of(path),
            }
            for file, path in zip(files[split], paths, strict=True)
        ]
    with shard.atomic(options.output / shard.TOKENIZER_FILE) as file:
        file.write(vocabulary)
    data_set.write_manifest(
        tokenizer=about_tokenizer,
        sources=[f"{options.source}/datasets/{repository}"],
        shards=shards,
    )
    dataset.report(data_set, shards, coder.vocab_size)


def main():
    options = parse()
    data_set = dataset.DataSet(
        options, options.prefix, edu=options.edu, size=options.size, ready=options.ready
    )
    if not data_set.is_there():
        (fetch_ready if options.ready else tokenise)(options, data_set)


if __name__ == "__main__":
    corpus.run(main)
