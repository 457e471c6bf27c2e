# data/corpus.py - from documents to token shards: the options, the readers and the pipeline of
# every script.
#
# A reader yields (document, weight) pairs: the document as bytes, and its share of the input file's
# bytes for the progress bar. The pipeline cuts documents into pieces, encodes them in worker
# processes, and writes the ids in order, so the output does not depend on the number of processes
# or on where pieces were cut.
#
# Everything is written into a folder of its own inside the output folder and moved from there in
# one go: the trainer never sees half a data set. Last comes PREFIX.json, which says how the set was
# made; where it exists, the set is complete.

import argparse
import collections
import concurrent.futures
import contextlib
import errno
import hashlib
import json
import mmap
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path

try:
    import numpy as np
    from tqdm import tqdm

    import download
    import shard
    import tokenizer
except ModuleNotFoundError as missing:
    print(
        f"{missing}: pip install -r {Path(__file__).with_name('requirements.txt')}", file=sys.stderr
    )
    sys.exit(2)

HERE = Path(__file__).resolve().parent
PIECE_BYTES = 1 << 20
BATCHES_PER_PROCESS = 4  # in flight, so that neither the workers nor the writer wait

# Between a printable ASCII character and a blank or newline GPT-2's encoding always cuts, whatever
# follows: its patterns take a blank only as their first character. So pieces cut there encode like
# the whole.
BOUNDARY = re.compile(rb"[!-~](?=[ \n])")


# ---- options -------------------------------------------------------------------------------------


def arguments(description, output=None, source=None):
    """The options of every script. `source`: the address of the files, None for local ones."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument(
        "--output",
        type=Path,
        default=output and HERE / output,
        required=output is None,
        metavar="DIR",
        help="where the files go" + (f" (data/{output})" if output else ""),
    )
    parser.add_argument("--tokenizer", choices=("gpt2", "bytes"), default="gpt2", help="(gpt2)")
    parser.add_argument(
        "--vocab",
        type=Path,
        metavar="DIR",
        help="take the vocabulary from vocab.bpe + encoder.json or merges.txt + vocab.json there",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a data set that was made before"
    )
    if source is not None:
        parser.add_argument("--source", default=source, metavar="URL", help=f"a mirror of {source}")
        parser.add_argument(
            "--no-checksum", action="store_true", help="take files other than the published ones"
        )
    return parser


def shard_arguments(parser, val_tokens=0, shard_tokens=10**8):
    """The further options of the scripts that write token shards.

    val_tokens None: the set has validation files of its own; shard_tokens None: one file per split.
    """
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), metavar="N", help="(all cores)"
    )
    if val_tokens is not None:
        parser.add_argument(
            "--val-tokens",
            type=int,
            default=val_tokens,
            metavar="N",
            help=f"the first N tokens become the validation set ({val_tokens})",
        )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="stop after N training tokens (no limit)"
    )
    if shard_tokens is not None:
        parser.add_argument(
            "--shard-tokens",
            type=int,
            default=shard_tokens,
            metavar="N",
            help=f"tokens in a file ({shard_tokens})",
        )
    return parser


def parse(parser):
    options = parser.parse_args()
    for name, least in (
        ("processes", 1),
        ("val_tokens", 0),
        ("max_tokens", 1),
        ("shard_tokens", 1),
    ):
        value = getattr(options, name, None)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value}: at least {least}")
    if getattr(options, "shard_tokens", 0) > shard.MAX_SHARD_TOKENS:
        parser.error(
            f"--shard-tokens {options.shard_tokens}: a file holds {shard.MAX_SHARD_TOKENS}"
        )
    return options


def run(main):
    """Runs a script: every foreseeable failure is one line on stderr and an exit code."""
    name = Path(sys.argv[0]).name
    try:
        main()
    except shard.DataError as error:
        sys.exit(_complain(name, error, 2))
    except KeyboardInterrupt:
        sys.exit(_complain(name, "stopped; downloads go on from here when it is run again", 130))
    except OSError as error:
        if error.errno is None:
            raise
        sys.exit(
            _complain(
                name, error, 4 if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else 2
            )
        )


def _complain(name, what, code):
    print(f"{name}: {what}", file=sys.stderr)
    return code


# ---- readers -------------------------------------------------------------------------------------


def read_text(path, separator=None, strip=True):
    """The documents of a text file: all of it, or what lies between separators.

    These are stripped of white space, or else keep their separator.
    """
    if path.stat().st_size == 0:
        return
    with open(path, "rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if separator is None:
        yield memoryview(text), len(text)
        return
    start = 0
    while start < len(text):
        found = text.find(separator, start)
        stop = len(text) if found < 0 else found + len(separator)
        yield (
            text[start : len(text) if found < 0 else found].strip() if strip else text[start:stop]
        ), stop - start
        start = stop


def read_jsonl(path, field="text"):
    """One JSON object a line; `field` holds the text."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                text = json.loads(line)[field]
                yield text.encode("utf-8", errors="replace"), len(line)
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                raise shard.DataError(
                    f'{path}:{number}: no JSON object with text in "{field}" '
                    f"({type(error).__name__}: {error}); --field names another"
                ) from None


def read_parquet(path, field="text"):
    """A parquet file; `field` is the column with the text."""
    try:
        import pyarrow  # only here: the other scripts run without it
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise shard.DataError(
            f"{path}: reading parquet takes pyarrow: pip install pyarrow"
        ) from None
    try:
        table = parquet.ParquetFile(path)
        if field not in table.schema_arrow.names:
            columns = ", ".join(table.schema_arrow.names)
            raise shard.DataError(
                f'{path}: no column "{field}" among {columns}; --field names another'
            )
        weight = path.stat().st_size / max(1, table.metadata.num_rows)
        for batch in table.iter_batches(batch_size=1024, columns=[field]):
            for text in batch.column(0):
                yield (text.as_py() or "").encode("utf-8", errors="replace"), weight
    except pyarrow.ArrowException as error:
        raise shard.DataError(f"{path}: not a readable parquet file ({error})") from None


# ---- pipeline ------------------------------------------------------------------------------------


def cut(document):
    """The pieces of a document as (bytes, is the first, is the last); see BOUNDARY."""
    start = 0
    while start < len(document):
        stop = len(document)
        if stop - start > PIECE_BYTES:
            boundary = BOUNDARY.search(document, start + PIECE_BYTES)
            stop = boundary.end() if boundary else stop
        yield bytes(document[start:stop]), start == 0, stop == len(document)
        start = stop


class Batch:
    """Work for one call of a worker, and what it stands for."""

    def __init__(self):
        self.pieces, self.text_bytes, self.weight = [], 0, 0.0
        self.documents, self.empty = 0, 0


def _batches(documents):
    batch = Batch()
    for document, weight in documents:
        batch.documents += 1
        batch.empty += len(document) == 0
        batch.weight += weight
        for piece in cut(document):
            batch.pieces.append(piece)
            batch.text_bytes += len(piece[0])
            if batch.text_bytes >= PIECE_BYTES:
                yield batch
                batch = Batch()
    yield batch


_worker_tokenizer = None


def _start_worker(name, vocab):
    global _worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process reports an interrupt, once
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_tokenizer = tokenizer.make(name, vocab)


def _end_with_parent():
    """Workers wait on a pipe that their siblings hold open too: a killed parent does not end it."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _encode(pieces):
    return np.concatenate([_worker_tokenizer.encode_piece(*piece) for piece in pieces])


class Encoder:
    """Worker processes that turn documents into ids, in order. A context manager."""

    def __init__(self, options):
        # Spawned, not forked: downloads run in threads, and a fork would copy their locks.
        self._processes = options.processes
        self._pool = concurrent.futures.ProcessPoolExecutor(
            options.processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(options.tokenizer, options.vocab),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pool.shutdown(cancel_futures=True)

    def encode(self, documents):
        """Yields (ids, batch) in the order of the documents."""
        waiting = collections.deque()
        for batch in _batches(documents):
            if batch.pieces:
                waiting.append((self._pool.submit(_encode, batch.pieces), batch))
            if len(waiting) >= BATCHES_PER_PROCESS * self._processes:
                yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    @staticmethod
    def _next(waiting):
        future, batch = waiting.popleft()
        try:
            return future.result(), batch
        except concurrent.futures.process.BrokenProcessPool:
            raise shard.DataError(
                "a worker process died, perhaps for want of memory: fewer --processes"
            ) from None


# ---- a data set ----------------------------------------------------------------------------------


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
        self._overwrite = options.overwrite

    def is_there(self):
        """Whether the set was made before with the same choices; with other ones it is an error."""
        if self._overwrite or not self.manifest_path.exists():
            return False
        try:
            manifest = json.loads(self.manifest_path.read_text())
            same = manifest["choices"] == self.choices
        except (ValueError, KeyError, TypeError):
            raise shard.DataError(
                f"{self.manifest_path}: not readable; --overwrite makes the set anew"
            ) from None
        if not same:
            raise shard.DataError(
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
        staging.rmdir()
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
            raise shard.DataError(f"{others[0]}: a shard of another set; --overwrite removes these")
        for path in others:
            path.unlink()
        self.manifest_path.unlink(missing_ok=True)

    def staging(self):
        """An empty folder to write into; leftovers of a run that was stopped go away."""
        folder = self.folder / f".{self.prefix}.tmp"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


def size_of(path):
    if not path.is_file():
        raise shard.DataError(f"{path}: no such file")
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
    staging = data_set.staging()
    numbered = hasattr(options, "shard_tokens")
    splits = {}
    for split, first in (("val", 0), ("train", 1)):  # llm.c numbers its validation shard 0

        def name(index, split=split, first=first):
            number = f"_{first + index:06d}" if numbered else ""
            return f"{data_set.prefix}_{split}{number}.bin"

        limit = options.shard_tokens if numbered else shard.MAX_SHARD_TOKENS
        splits[split] = shard.TokenShards(staging, name, coder.vocab_size, limit)

    counts = collections.Counter()
    train_targets = [(splits["train"], options.max_tokens)]
    if val is None:
        train_targets.insert(0, (splits["val"], options.val_tokens))
    bar = tqdm(desc=data_set.prefix, total=input_bytes, unit="B", unit_scale=True, disable=None)
    with Encoder(options) as encoder, contextlib.closing(train), bar:
        if val is not None:
            _write(encoder.encode(val), [(splits["val"], None)], counts, bar)
        _write(encoder.encode(train), train_targets, counts, bar)

    shards = {split: writer.close() for split, writer in splits.items()}
    if not shards["train"]:
        total = sum(writer.num_tokens for writer in splits.values())
        raise shard.DataError(
            f"{total} tokens in all, none left for training after --val-tokens {options.val_tokens}"
        )
    if options.tokenizer != "bytes":
        (staging / shard.TOKENIZER_FILE).write_bytes(vocabulary)
    data_set.finish(staging, tokenizer=about_tokenizer, sources=sources(), **counts, shards=shards)
    report(data_set, shards, coder.vocab_size)


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
