# data/shard.py - the binary files that the trainer reads: token shards, evaluation sets,
# vocabularies.
#
# Owns the bytes on disk; README.md beside it has the same layouts in words. Everything is
# little-endian. A file appears under its name only when it is complete: it is written beside it and
# renamed.
#
# The formats are those of llm.c (https://github.com/karpathy/llm.c), so files are exchanged freely
# with it.

import contextlib
import hashlib
import os
from pathlib import Path

import packages

np = packages.optional("numpy")

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
TOKENS_16 = (20240520, 1)  # (magic, version) of a shard of uint16 tokens
TOKENS_32 = (20240801, 7)  # of uint32 tokens, for vocabularies above 65536
EVALUATION = (20240522, 1)
VOCABULARY = (20240328, 2)  # version 2 is the one that names the end-of-text token

MAX_SHARD_TOKENS = 2**31 - 1  # the count is an int32
EXAMPLE_START = 65535
TOKENIZER_FILE = "gpt2_tokenizer.bin"  # the name under which the trainer looks for it


class DataError(Exception):
    """What is wrong, where, and what helps: the scripts print it as one line and exit 2."""


def header(kind, *fields):
    """The 1024 bytes that open each file: (magic, version) and the fields, the rest zero."""
    ints = np.zeros(HEADER_INTS, dtype="<i4")
    ints[: 2 + len(fields)] = (*kind, *fields)
    return ints.tobytes()


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def atomic(path):
    """A binary file to write to; it gets its name when the block ends well, else it goes away."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# ---- tokens --------------------------------------------------------------------------------------


def token_type(vocab_size):
    return np.dtype("<u2") if vocab_size <= 65536 else np.dtype("<u4")


class TokenShards:
    """Cuts one stream of tokens into files of at most `shard_tokens` tokens each.

    `name(index)` is the name of the index-th file. Documents may run on into the next file.
    """

    def __init__(self, folder, name, vocab_size, shard_tokens):
        self.folder, self.name, self.shard_tokens = folder, name, shard_tokens
        self.dtype = token_type(vocab_size)
        self.kind = TOKENS_16 if self.dtype.itemsize == 2 else TOKENS_32
        self.num_tokens = 0
        self.shards = []  # [{name, tokens, bytes, sha256}], one per finished file
        self._file = None
        self._room = 0

    def write(self, tokens):
        while len(tokens):
            if self._room == 0:
                self._finish()
                path = self.folder / self.name(len(self.shards))
                self._file = open(path, "wb")
                self._file.write(bytes(HEADER_BYTES))  # the count is known at the end
                self._room = self.shard_tokens
            part = tokens[: self._room]
            self._file.write(part.astype(self.dtype, copy=False).tobytes())
            self._room -= len(part)
            self.num_tokens += len(part)
            tokens = tokens[len(part) :]

    def close(self):
        self._finish()
        return self.shards

    def _finish(self):
        if self._file is None:
            return
        count = self.shard_tokens - self._room
        self._file.seek(0)
        self._file.write(header(self.kind, count))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        path = Path(self._file.name)
        self.shards.append(
            {
                "name": path.name,
                "tokens": count,
                "bytes": path.stat().st_size,
                "sha256": sha256_of(path),
            }
        )
        self._file = None


def read_header(path):
    with open(path, "rb") as file:
        block = file.read(HEADER_BYTES)
    if len(block) < HEADER_BYTES:
        raise DataError(
            f"{path}: {len(block)} bytes, a header has {HEADER_BYTES}: not a file of ours"
        )
    return np.frombuffer(block, dtype="<i4")


def open_tokens(path):
    """The tokens of a shard, mapped into memory; header and size are checked against each other."""
    ints = read_header(path)
    itemsize = {TOKENS_16: 2, TOKENS_32: 4}.get((int(ints[0]), int(ints[1])))
    if itemsize is None:
        raise DataError(
            f"{path}: magic {ints[0]} version {ints[1]}, expected {TOKENS_16} or {TOKENS_32}"
        )
    size, expected = os.path.getsize(path), HEADER_BYTES + itemsize * int(ints[2])
    if ints[2] <= 0 or size != expected:
        raise DataError(f"{path}: {size} bytes, {expected} expected for its {ints[2]} tokens")
    return np.memmap(path, dtype=f"<u{itemsize}", mode="r", offset=HEADER_BYTES, shape=int(ints[2]))


# ---- evaluation ----------------------------------------------------------------------------------


def write_evaluation(path, examples):
    """Multiple choice: `examples` is a list of (label, context ids, [completion ids, ...])."""
    if not 0 < len(examples) < 65536:
        raise DataError(f"{path}: {len(examples)} examples, the format holds 1 to 65535")
    stream, longest = [], 0
    for index, (label, context, completions) in enumerate(examples):
        fields = [EXAMPLE_START, 0, index, label, len(completions)]
        for tokens in (context, *completions):
            fields += [len(tokens), *tokens]
        fields[1] = 2 * len(fields)
        if fields[1] > 65535 or max(fields[2:]) >= EXAMPLE_START:
            raise DataError(
                f"{path}: example {index} ({fields[1]} bytes) does not fit into 16-bit fields"
            )
        longest = max(longest, fields[1])
        stream += fields
    with atomic(path) as file:
        file.write(header(EVALUATION, len(examples), longest))
        file.write(np.array(stream, dtype="<u2").tobytes())


# ---- vocabulary ----------------------------------------------------------------------------------


def vocabulary_bytes(tokens, end_of_text):
    """The tokenizer file: `tokens[i]` is the byte string of token i."""
    long = next((i for i, token in enumerate(tokens) if len(token) > 255), None)
    if long is not None:
        raise DataError(
            f"token {long} has {len(tokens[long])} bytes, the tokenizer file holds 255 at most"
        )
    body = b"".join(bytes([len(token)]) + token for token in tokens)
    return header(VOCABULARY, len(tokens), end_of_text) + body


def read_vocabulary(path):
    """The byte string of every token of a tokenizer file."""
    ints = read_header(path)
    if (int(ints[0]), int(ints[1])) != VOCABULARY:
        raise DataError(f"{path}: magic {ints[0]} version {ints[1]}, expected {VOCABULARY}")
    content, at, tokens = Path(path).read_bytes(), HEADER_BYTES, []
    while len(tokens) < ints[2] and at < len(content):
        tokens.append(content[at + 1 : at + 1 + content[at]])
        at += 1 + content[at]
    if len(tokens) != ints[2] or at != len(content):
        raise DataError(
            f"{path}: {len(content)} bytes do not hold the {ints[2]} tokens of its header"
        )
    return tokens
