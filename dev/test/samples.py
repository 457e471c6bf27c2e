# dev/test/samples.py - small inputs for the tests of the data scripts, and the bytes to expect.
#
# Expected files are put together here by struct, not by the code under test.

import json
import os
import string
import struct
import subprocess
import sys
import time
from pathlib import Path

from cases import ROOT, TEST_DATA, expect_equal, run

sys.path.insert(0, str(ROOT / "data"))

MODULES = ("numpy", "tiktoken", "requests", "tqdm")


def script(name, *arguments, **environment):
    return run(sys.executable, ROOT / "data" / f"{name}.py", *arguments, **environment)


def start(name, *arguments):
    """A script in a process group of its own, to be sent signals."""
    command = [sys.executable, ROOT / "data" / f"{name}.py", *map(str, arguments)]
    return subprocess.Popen(
        command,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def group_exists(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# ---- expected bytes ------------------------------------------------------------------------------


def shard_16(ids):
    return struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253) + struct.pack(
        f"<{len(ids)}H", *ids
    )


def shard_32(ids):
    return struct.pack("<256i", 20240801, 7, len(ids), *[0] * 253) + struct.pack(
        f"<{len(ids)}I", *ids
    )


def ids_of(path):
    """The ids of a uint16 shard, after a check of its header."""
    content = Path(path).read_bytes()
    expect_equal(struct.unpack("<3i", content[:12]), (20240520, 1, (len(content) - 1024) // 2))
    return list(struct.unpack(f"<{(len(content) - 1024) // 2}H", content[1024:]))


# ---- vocabularies --------------------------------------------------------------------------------

# Ids 0 to 255 are the bytes in order here, which GPT-2's own vocabulary does not keep.
HE, LL, HELL, SPACE_HELL, EOT = 256, 257, 258, 259, 260
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "hell")]  # Ġ is the blank


def symbols():
    """The characters that stand for the bytes 0 to 255 in vocabulary files."""
    printable = string.ascii_letters + string.digits + string.punctuation
    latin = "¡¢£¤¥¦§¨©ª«¬®¯°±²³´µ¶·¸¹º»¼½¾¿"
    latin += "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖ×ØÙÚÛÜÝÞß"
    latin += "àáâãäåæçèéêëìíîïðñòóôõö÷øùúûüýþÿ"
    other = iter(range(256, 512))
    return [
        chr(byte) if chr(byte) in printable + latin else chr(next(other)) for byte in range(256)
    ]


def write_vocabulary(folder, merges=MERGES, names=("vocab.bpe", "encoder.json")):
    folder.mkdir(parents=True, exist_ok=True)
    tokens = symbols() + [left + right for left, right in merges] + ["<|endoftext|>"]
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges), ""]
    (folder / names[0]).write_text("\n".join(lines), encoding="utf-8")
    (folder / names[1]).write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    return folder


def reference_gpt2():
    """tiktoken's own definition of gpt2, with its checksums, fed from the local files."""
    import tiktoken
    from tiktoken_ext import openai_public

    fetch = openai_public.data_gym_to_mergeable_bpe_ranks

    def local(vocab_bpe_file, encoder_json_file, **sums):
        return fetch(str(TEST_DATA / "vocab.bpe"), str(TEST_DATA / "encoder.json"), **sums)

    openai_public.data_gym_to_mergeable_bpe_ranks = local
    try:
        return tiktoken.Encoding(**openai_public.gpt2())
    finally:
        openai_public.data_gym_to_mergeable_bpe_ranks = fetch
