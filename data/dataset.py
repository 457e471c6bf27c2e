# data/dataset.py - one data set in its folder: shards, vocabulary, and how they were made.
#
# Everything is written into a folder of its own inside the output folder and moved from there in
# one go: the trainer never sees half a data set. Last comes PREFIX.json, which says how the set was
# made; where it exists, the set is complete.

import collections
import contextlib
import hashlib
import json
import os
import re
import shutil

import corpus
import download
import packages
import shard
import tokenizer
from shard import DataError

tqdm = packages.optional("tqdm")

FIRST_INDEX = {"val": 0, "train": 1}  # llm.c numbers its validation shard 0


class DataSet:
    """One data set in its folder. `prefix` names its files and the PREFIX.json of how it was made.

    The choices are what determines the files: the common options and those of the script. A set
    that was made with the same ones is not made again.
    """

    COMMON = ("tokenizer", "val_tokens", "max_tokens", "shard_tokens")

    def __init__(self, options, prefix, **choices):
        self.folder, self.prefix = options.output, prefix
        self.manifest_path = self.folder / f"{prefix}.json"
        self.choices = {
            name: getattr(options, name) for name in self.COMMON if hasattr(options, name)
        } | choices
        self._overwrite, self._vocab = options.overwrite, options.vocab

    def is_there(self):
        """Whether the set was made before with the same choices; with other ones it is an error."""
        if self._overwrite or not self.manifest_path.exists():
            return False
        try:
            manifest = json.loads(self.manifest_path.read_text())
            same = manifest["choices"] == self.choices
            if self._vocab is not None and self.choices["tokenizer"] != "bytes":
                _, about = describe_tokenizer(tokenizer.make("gpt2", self._vocab))
                same = same and manifest["tokenizer"] == about
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"{self.manifest_path}: not readable; --overwrite makes the set anew"
            ) from None
        if not same:
            raise DataError(
                f"{self.folder} holds a set made with {manifest['choices']}, now asked for with "
                f"{self.choices}: --overwrite replaces it, --output puts the new one elsewhere"
            )
        print(f"{self.manifest_path}: already made, nothing to do (--overwrite makes it anew)")
        return True

    def finish(self, staging, **facts):
        """Moves the files of the staging folder into place and writes the manifest."""
        self.manifest_path.unlink(missing_ok=True)  # from here to the end the set is incomplete
        for old in self.shards():
            old.unlink()
        for path in sorted(staging.iterdir()):
            path.replace(self.folder / path.name)
        self.write_manifest(**facts)

    def write_manifest(self, **facts):
        text = json.dumps({"choices": self.choices, **facts}, indent=1) + "\n"
        with shard.atomic(self.manifest_path) as file:
            file.write(text.encode())

    def shards(self):
        """The token shards of this name that lie in the folder, from whatever run."""
        pattern = re.compile(re.escape(self.prefix) + r"_(train|val)(_\d+)?\.bin")
        return [path for path in self.folder.glob("*.bin") if pattern.fullmatch(path.name)]

    def expect(self, names):
        """Before shards are fetched into the folder itself: no others may stay beside them."""
        names = set(names)
        others = [path for path in self.shards() if path.name not in names]
        if others and not self._overwrite:
            raise DataError(f"{others[0]}: a shard of another set; --overwrite removes these")
        for path in others:
            path.unlink()
        self.manifest_path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def staging(self):
        """An empty folder to write into; leftovers of a run that was killed go away."""
        folder = self.folder / f".{self.prefix}.tmp"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def size_of(path):
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    return path.stat().st_size


def describe(path, url=None, sha256=None):
    """What the manifest says about one input file."""
    return {
        "name": path.name,
        "url": url,
        "bytes": path.stat().st_size,
        "sha256": sha256 or shard.sha256_of(path),
    }


def describe_tokenizer(coder):
    """The content of the tokenizer file, and what the manifest says about it."""
    content = shard.vocabulary_bytes(coder.tokens(), coder.end_of_text)
    return content, {
        "name": coder.name,
        "vocab_size": coder.vocab_size,
        "end_of_text": coder.end_of_text,
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def build(options, data_set, train, input_bytes, sources, val=None):
    """Encodes the documents and writes the set: shards, vocabulary, manifest.

    The first --val-tokens ids of `train` become the validation set, or all of `val` where it is
    given. `sources()` is asked at the end, when all input files are there.
    """
    coder = tokenizer.make(options.tokenizer, options.vocab)  # fails before anything is written
    vocabulary, about_tokenizer = describe_tokenizer(coder)
    with data_set.staging() as staging:
        writers = {
            split: _writer(options, data_set, staging, coder, split) for split in FIRST_INDEX
        }
        counts = collections.Counter()
        targets = [(writers["train"], options.max_tokens)]
        if val is None:
            targets.insert(0, (writers["val"], options.val_tokens))
        bar = tqdm.tqdm(desc=data_set.prefix, total=input_bytes, unit="B", unit_scale=True, disable=None)
        with corpus.Encoder(options) as encoder, contextlib.closing(train), bar:
            if val is not None:
                _write(encoder.encode(val), [(writers["val"], None)], counts, bar)
            _write(encoder.encode(train), targets, counts, bar)

        shards = {split: writer.close() for split, writer in writers.items()}
        if not shards["train"]:
            total = sum(writer.num_tokens for writer in writers.values())
            raise DataError(
                f"{total} tokens and none to train on: more text, or a smaller --val-tokens"
            )
        if options.tokenizer != "bytes":
            (staging / shard.TOKENIZER_FILE).write_bytes(vocabulary)
        facts = {"tokenizer": about_tokenizer, "sources": sources(), **counts, "shards": shards}
        data_set.finish(staging, **facts)
    report(data_set, shards, coder.vocab_size)


def _writer(options, data_set, staging, coder, split):
    numbered = hasattr(options, "shard_tokens")

    def name(index):
        number = f"_{FIRST_INDEX[split] + index:06d}" if numbered else ""
        return f"{data_set.prefix}_{split}{number}.bin"

    limit = options.shard_tokens if numbered else shard.MAX_SHARD_TOKENS
    return shard.TokenShards(staging, name, coder.vocab_size, limit)


def _write(encoded, targets, counts, bar):
    """Fills the targets, (writer, limit) pairs, one after the other; limit None takes the rest."""
    last, last_limit = targets[-1]
    for ids, batch in encoded:
        counts.update(
            documents=batch.documents, empty_documents=batch.empty, text_bytes=batch.text_bytes
        )
        bar.update(batch.weight)
        for writer, limit in targets:
            part = ids if limit is None else ids[: limit - writer.num_tokens]
            writer.write(part)
            ids = ids[len(part) :]
        if last.num_tokens == last_limit:
            break


def report(data_set, shards, vocab_size):
    """What a person wants to know at the end: the counts, and how to train on it."""
    for split, files in shards.items():
        tokens = sum(file["tokens"] for file in files)
        print(
            f"{split:5s} {tokens:>14,} tokens in {len(files)} file{'s' if len(files) != 1 else ''}"
        )
    here = os.path.relpath(data_set.folder)
    words = [f'-i "{here}/{data_set.prefix}_train*.bin"']
    if shards.get("val"):
        words.append(f'-j "{here}/{data_set.prefix}_val*.bin"')
    if vocab_size != 50257:
        words.append(f"-e L=4,NH=4,C=128,V={vocab_size}")
    print("train on it: ./train_gpt2", *words)


def fetched(options, files, read):
    """The documents of files that are downloaded on the way, one after the other."""
    for path in download.fetch_all(files, downloads(options)):
        yield from read(path)


def fetched_sources(options, files):
    """What the manifest says about the files that were needed: --max-tokens may leave some out."""
    paths = {file: downloads(options) / file.name for file in files}
    return [describe(path, file.url, file.sha256) for file, path in paths.items() if path.exists()]


def downloads(options):
    return options.output / "download"
