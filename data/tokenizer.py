#!/usr/bin/env python3
# data/tokenizer.py - text to token ids and back: GPT-2's byte-pair encoding and plain bytes.
#
# Run by itself it writes gpt2_tokenizer.bin into the current folder, with which the trainer prints
# text; the data sets have theirs beside their shards.
#
# Both have the same face: name, vocab_size, end_of_text, encode(bytes), decode(ids), tokens(). The
# encoding is tiktoken's; its vocabulary comes from the net (tiktoken keeps it) or from local files
# in either of the two public spellings, vocab.bpe + encoder.json or merges.txt + vocab.json.
#
# Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.

import argparse
import json
from pathlib import Path

import packages
import shard
from shard import DataError, token_type

np = packages.optional("numpy")
tiktoken = packages.optional("tiktoken")

END_OF_TEXT = "<|endoftext|>"
VOCABULARY_FILES = (("vocab.bpe", "encoder.json"), ("merges.txt", "vocab.json"))


class ByteTokenizer:
    """Ids 0 to 255 are bytes; 256 ends a text, as the trainer reads .txt files."""

    name, vocab_size, end_of_text = "bytes", 257, 256

    def encode(self, text):
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids):
        return bytes(i for i in ids if i < 256)

    def encode_piece(self, text, first, last):
        """The ids of one piece of a document: end-of-text follows the last one."""
        ids = self.encode(text)
        return np.append(ids, np.uint16(self.end_of_text)) if last else ids

    def tokens(self):
        return [bytes([i]) for i in range(256)] + [END_OF_TEXT.encode()]


class BpeTokenizer:
    """GPT-2's encoding. Text is taken as it is: a literal <|endoftext|> in it is ordinary text."""

    name = "gpt2"

    def __init__(self, encoding):
        self._encoding = encoding
        self.vocab_size, self.end_of_text = encoding.n_vocab, encoding.eot_token
        self._dtype = token_type(self.vocab_size)

    def encode(self, text):
        text = text.decode("utf-8", errors="replace")
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(self._dtype)

    def decode(self, ids):
        return self._encoding.decode_bytes(ids)

    def encode_piece(self, text, first, last):
        """The ids of one piece of a document: end-of-text precedes the first one, as in llm.c."""
        ids = self.encode(text)
        return np.insert(ids, 0, self.end_of_text) if first else ids

    def tokens(self):
        return [self._encoding.decode_single_token_bytes(i) for i in range(self.vocab_size)]


def make(name, folder=None):
    """The tokenizer called `name`; `folder` holds its vocabulary files, None fetches GPT-2's."""
    if name == "bytes":
        return ByteTokenizer()
    if folder is not None:
        return BpeTokenizer(_local_encoding(Path(folder)))
    try:
        return BpeTokenizer(tiktoken.get_encoding("gpt2"))
    except Exception as error:  # requests' many kinds, and tiktoken's own for a damaged copy
        names = " or ".join(" + ".join(pair) for pair in VOCABULARY_FILES)
        raise DataError(
            f"the GPT-2 vocabulary could not be fetched ({type(error).__name__}); "
            f"--vocab DIR takes it from {names}"
        ) from None


# ---- local vocabulary files ----------------------------------------------------------------------


def _byte_symbols():
    """{character: byte}: the printable character that stands for each byte in vocabulary files.

    Printable bytes of Latin-1 stand for themselves, the others take characters from 256 on.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    symbols = {chr(byte): byte for byte in plain}
    return symbols | {chr(256 + i): byte for i, byte in enumerate(others)}


def _local_encoding(folder):
    found = next(
        (pair for pair in VOCABULARY_FILES if all((folder / name).is_file() for name in pair)), None
    )
    if found is None:
        raise DataError(
            f"{folder}: neither " + " nor ".join(" + ".join(pair) for pair in VOCABULARY_FILES)
        )
    # How GPT-2 cuts text before the merges.
    from tiktoken_ext.openai_public import r50k_pat_str

    merges_path, vocab_path = (folder / name for name in found)
    try:
        vocab = json.loads(vocab_path.read_text(encoding="utf-8"))
        end_of_text = vocab.pop(END_OF_TEXT)
        symbols = _byte_symbols()
        ranks = {bytes(symbols[c] for c in token): rank for token, rank in vocab.items()}
    except (ValueError, AttributeError, KeyError) as error:
        raise DataError(
            f"{vocab_path}: not a GPT-2 vocabulary ({type(error).__name__}: {error})"
        ) from None
    _check_ranks(ranks, end_of_text, vocab_path)
    _check_merges(merges_path, vocab)
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: end_of_text},
        explicit_n_vocab=len(ranks) + 1,
    )


def _check_ranks(ranks, end_of_text, path):
    if sorted([*ranks.values(), end_of_text]) != list(range(len(ranks) + 1)):
        raise DataError(f"{path}: its {len(ranks) + 1} ids are not 0 to {len(ranks)}, each once")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise DataError(f"{path}: no token for the single byte {missing}")


def _check_merges(path, vocab):
    """tiktoken merges in the order of the ids, so the ids have to be in the order of the merges."""
    lines = path.read_text(encoding="utf-8").split("\n")
    merges = [line.split() for line in lines if line and not line.startswith("#version")]
    last = -1
    for number, merge in enumerate(merges, 1):
        rank = vocab.get("".join(merge)) if len(merge) == 2 else None
        if rank is None or rank <= last:
            raise DataError(
                f"{path}: merge {number} ({' '.join(merge)}) does not fit the vocabulary beside it"
            )
        last = rank
    if len(merges) != len(vocab) - 256:
        raise DataError(
            f"{path}: {len(merges)} merges, the vocabulary beside it has {len(vocab) - 256}"
        )


def main():
    parser = argparse.ArgumentParser(
        description="Write gpt2_tokenizer.bin into the current folder."
    )
    parser.add_argument("--vocab", type=Path, metavar="DIR", help="take the vocabulary from there")
    options = parser.parse_args()
    packages.require("numpy", "tiktoken")
    coder = make("gpt2", options.vocab)
    with shard.atomic(Path(shard.TOKENIZER_FILE)) as file:
        file.write(shard.vocabulary_bytes(coder.tokens(), coder.end_of_text))


if __name__ == "__main__":
    import corpus  # which imports this file: not when it is imported itself

    corpus.run(main)
