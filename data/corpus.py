# data/corpus.py - from files to token ids: the options, readers and encoders of the scripts.
#
# A reader yields (document, weight) pairs: the document as bytes, and its share of the input file's
# bytes for the progress bar. The encoder cuts documents into pieces, encodes these in worker
# processes, and gives the ids back in order, so that they do not depend on the number of processes
# or on where pieces were cut. dataset.py writes them.

import argparse
import collections
import concurrent.futures
import errno
import json
import mmap
import multiprocessing
import os
import re
import signal
import sys
import threading
from pathlib import Path

import packages
import shard
import tokenizer

np = packages.optional("numpy")

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
    downloads = ("requests",) if hasattr(options, "source") else ()
    packages.require("numpy", "tqdm", *downloads, tokenizer=options.tokenizer)
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
    ids = [_worker_tokenizer.encode_piece(*piece) for piece in pieces]
    return np.concatenate([np.empty(0, np.uint16), *ids])  # a batch may hold only empty documents


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
