#!/usr/bin/env python3
# dev/test/test_downloads.py - the data sets, from a server on loopback to the bytes of their
# shards.
#
# The server stands in for the public addresses: it breaks off, stalls, lies, and changes its files.

import json
import random
import signal
import struct
import time

import cases
from cases import TEST_DATA, case, expect_equal, expect_fails, expect_works, vocabulary
from hub import Fault, Hub
from samples import (
    EOT,
    HE,
    HELL,
    MODULES,
    SPACE_HELL,
    ids_of,
    reference_gpt2,
    script,
    shard_16,
    start,
    wait_for,
    write_vocabulary,
)

SHAKESPEARE = "/input.txt"


# ---- downloads -----------------------------------------------------------------------------------


def content(size, seed=1):
    return random.Random(seed).randbytes(size)


def shakespeare(hub, folder, *arguments):
    return script(
        "tinyshakespeare",
        "--source",
        hub.url,
        "--output",
        folder / "out",
        "--tokenizer",
        "bytes",
        "--no-checksum",
        "--val-tokens",
        5,
        *arguments,
    )


@case(*MODULES)
def test_tinyshakespeare_by_hand(folder):
    """Speeches are documents that keep their blank line, all but the last."""
    with Hub({SHAKESPEARE: b"A:\nhello\n\nB:\nhell"}) as hub:
        expect_works(
            script(
                "tinyshakespeare",
                "--source",
                hub.url,
                "--output",
                folder,
                "--no-checksum",
                "--vocab",
                write_vocabulary(folder / "v"),
                "--val-tokens",
                3,
            )
        )
    ids = [EOT, *b"A:\n", HELL, *b"o\n\n", EOT, *b"B:\n", HELL]
    expect_equal((folder / "tiny_shakespeare_val.bin").read_bytes(), shard_16(ids[:3]))
    expect_equal((folder / "tiny_shakespeare_train.bin").read_bytes(), shard_16(ids[3:]))
    assert (folder / "gpt2_tokenizer.bin").exists()


@case(*MODULES)
def test_interrupted_download_is_resumed(folder):
    body = content(1_000_000)
    faults = [Fault(cut_after=300_000), Fault(status=503), Fault(cut_after=400_000)]
    with Hub({SHAKESPEARE: body}, faults={SHAKESPEARE: faults}) as hub:
        expect_works(shakespeare(hub, folder))
        sent = hub.sent(SHAKESPEARE)
    expect_equal((folder / "out" / "download" / "input.txt").read_bytes(), body)
    expect_equal(len(sent), 4)
    assert all(asked for asked, _ in sent[1:]), sent
    total = sum(count for _, count in sent)
    assert total < 1_200_000, f"{total} bytes sent for a file of {len(body)}"
    return f"{total} bytes for {len(body)} in {len(sent)} requests"


@case(*MODULES)
def test_killed_download_is_resumed(folder):
    body = content(1_000_000)
    part = folder / "out" / "download" / "input.txt.part"
    with Hub(
        {SHAKESPEARE: body}, faults={SHAKESPEARE: [Fault(cut_after=500_000, stall=True)]}
    ) as hub:
        process = start(
            "tinyshakespeare",
            "--source",
            hub.url,
            "--output",
            folder / "out",
            "--tokenizer",
            "bytes",
            "--no-checksum",
        )
        wait_for(lambda: part.exists() and part.stat().st_size > 400_000)
        process.kill()
        process.communicate()
        have = part.stat().st_size
        expect_works(shakespeare(hub, folder))
        expect_equal(hub.sent(SHAKESPEARE)[1], (f"bytes={have}-", len(body) - have))
    expect_equal((folder / "out" / "download" / "input.txt").read_bytes(), body)


@case(*MODULES)
def test_interrupt_ends_a_download_at_once(folder):
    address = "/datasets/kjj0/fineweb10B-gpt2/resolve/main/fineweb_train_000001.bin"
    with Hub({address: content(900_000)}, faults={address: [Fault(cut_after=500_000)] * 9}) as hub:
        process = start(
            "fineweb",
            "--ready",
            "--source",
            hub.url,
            "--output",
            folder / "out",
            "--vocab",
            write_vocabulary(folder / "v"),
        )
        wait_for((folder / "out" / "fineweb_train_000001.bin.part").exists)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=20)
        expect_equal(process.returncode, 130)
        expect_equal(message.count("\n"), 1)
    return f"{time.monotonic() - begin:.1f} s"


@case(*MODULES)
def test_other_version_starts_over(folder):
    old, new = content(1_000_000), content(800_000, seed=2)
    with Hub(
        {SHAKESPEARE: old}, faults={SHAKESPEARE: [Fault(cut_after=500_000, stall=True)]}
    ) as hub:
        process = start(
            "tinyshakespeare",
            "--source",
            hub.url,
            "--output",
            folder / "out",
            "--tokenizer",
            "bytes",
            "--no-checksum",
        )
        part = folder / "out" / "download" / "input.txt.part"
        wait_for(lambda: part.exists() and part.stat().st_size > 400_000)
        process.kill()
        process.communicate()
        hub.files[SHAKESPEARE] = new
        expect_works(shakespeare(hub, folder))
    expect_equal((folder / "out" / "download" / "input.txt").read_bytes(), new)


@case(*MODULES)
def test_wrong_files_refused(folder):
    import tinyshakespeare

    common = ("--output", folder / "out", "--tokenizer", "bytes")
    with Hub({SHAKESPEARE: b"not the plays"}) as hub:
        result = script("tinyshakespeare", "--source", hub.url, *common)
        expect_fails(result, 2, hub.url, "13 bytes", tinyshakespeare.BYTES)
        hub.files[SHAKESPEARE] = bytes(tinyshakespeare.BYTES)
        result = script("tinyshakespeare", "--source", hub.url, *common)
        expect_fails(result, 2, hub.url, "sha256", tinyshakespeare.SHA256)
        hub.types[SHAKESPEARE] = "text/html; charset=utf-8"
        expect_fails(
            script("tinyshakespeare", "--source", hub.url, *common), 2, hub.url, "web page"
        )
        del hub.files[SHAKESPEARE]
        expect_fails(script("tinyshakespeare", "--source", hub.url, *common), 2, hub.url, 404)
    assert not [path for path in folder.rglob("*") if path.is_file()], "a refused file was kept"


@case(*MODULES)
def test_changed_file_on_disk_refused(folder):
    with Hub({SHAKESPEARE: b"x"}) as hub:
        (folder / "out" / "download").mkdir(parents=True)
        (folder / "out" / "download" / "input.txt").write_bytes(b"changed")
        result = script(
            "tinyshakespeare",
            "--source",
            hub.url,
            "--output",
            folder / "out",
            "--tokenizer",
            "bytes",
        )
        expect_fails(result, 2, "input.txt", "7 bytes", "remove it")


@case(*MODULES, vocabulary)
def test_tinyshakespeare_itself(folder):
    """The published file: the counts of llm.c's shards, and ids as tiktoken's gpt2 gives them."""
    text = (TEST_DATA / "tinyshakespeare.txt").read_bytes()
    with Hub({SHAKESPEARE: text}) as hub:
        expect_works(
            script("tinyshakespeare", "--source", hub.url, "--output", folder, "--vocab", TEST_DATA)
        )
    val, train = (ids_of(folder / f"tiny_shakespeare_{split}.bin") for split in ("val", "train"))
    expect_equal((len(val), len(train)), (32768, 305260))
    speeches = text.decode().split("\n\n")
    speeches = [speech + "\n\n" for speech in speeches[:-1]] + speeches[-1:]
    expected = []
    for ids in reference_gpt2().encode_ordinary_batch(speeches):
        expected += [50256, *ids]
    assert val + train == expected


# ---- the other sets ------------------------------------------------------------------------------


@case(*MODULES)
def test_tinystories(folder):
    vocab = ("--vocab", write_vocabulary(folder / "v"))
    with Hub() as hub:
        hub.add("roneneldan/TinyStories", "README.md", b"# stories")
        hub.add(
            "roneneldan/TinyStories",
            "TinyStoriesV2-GPT4-train.txt",
            b"hello\n<|endoftext|>\nhell\n<|endoftext|>\n",
        )
        val = hub.add(
            "roneneldan/TinyStories", "TinyStoriesV2-GPT4-valid.txt", b"\nhe<|endoftext|>"
        )
        common = ("--source", hub.url, "--output", folder / "out", *vocab)
        expect_works(script("tinystories", *common))
        hub.wrong_sums.add(val)
        expect_fails(
            script("tinystories", *common[:-3], folder / "b", *vocab), 2, "valid.txt", "sha256"
        )
        del hub.files[val]
        expect_fails(
            script("tinystories", *common[:-3], folder / "c", *vocab),
            2,
            "TinyStoriesV2-GPT4-valid.txt",
        )
    expect_equal(
        ids_of(folder / "out" / "tinystories_train_000001.bin"), [EOT, HELL, 111, EOT, HELL]
    )
    expect_equal(ids_of(folder / "out" / "tinystories_val_000000.bin"), [EOT, HE])


@case(*MODULES, "pyarrow")
def test_fineweb_tokenised(folder):
    import pyarrow
    from pyarrow import parquet

    vocab = ("--vocab", write_vocabulary(folder / "v"))
    with Hub() as hub:
        for number, texts in enumerate((["hello", "hell"], ["he"])):
            parquet.write_table(pyarrow.table({"text": texts, "id": texts}), folder / "a.parquet")
            hub.add(
                "HuggingFaceFW/fineweb-edu",
                f"sample/10BT/00{number}.parquet",
                (folder / "a.parquet").read_bytes(),
            )
        common = ("--edu", "--source", hub.url, *vocab, "--val-tokens", 2)
        expect_works(script("fineweb", *common, "--output", folder / "out"))
        expect_works(script("fineweb", *common, "--output", folder / "b", "--max-tokens", 1))
        expect_fails(
            script("fineweb", "--source", hub.url, *vocab, "--output", folder / "c"),
            2,
            "fineweb, sample/10BT",
        )
    expect_equal(ids_of(folder / "out" / "edu_fineweb_val_000000.bin"), [EOT, HELL])
    expect_equal(ids_of(folder / "out" / "edu_fineweb_train_000001.bin"), [111, EOT, HELL, EOT, HE])
    expect_equal(ids_of(folder / "b" / "edu_fineweb_train_000001.bin"), [111])
    manifest = json.loads((folder / "out" / "edu_fineweb.json").read_text())
    expect_equal([source["name"] for source in manifest["sources"]], ["000.parquet", "001.parquet"])


@case(*MODULES)
def test_fineweb_ready(folder):
    repository = "kjj0/fineweb10B-gpt2"
    vocab = ("--vocab", write_vocabulary(folder / "v"))
    with Hub() as hub:
        hub.add(repository, "fineweb_val_000000.bin", shard_16([1, 2]))
        first = hub.add(repository, "fineweb_train_000001.bin", shard_16([3, 4, 5]))
        second = hub.add(repository, "fineweb_train_000002.bin", shard_16([6]))
        hub.faults[first] = [Fault(cut_after=900)]
        common = ("--ready", "--source", hub.url, *vocab)
        expect_works(script("fineweb", *common, "--output", folder / "out"))
        expect_works(script("fineweb", *common, "--output", folder / "one", "--max-tokens", 10**8))
        result = script(
            "fineweb", *common, "--output", folder / "out", "--max-tokens", 10**8, "--overwrite"
        )
        expect_works(result)
        hub.files[second] = shard_16([6])[:-1]
        expect_fails(
            script("fineweb", *common, "--output", folder / "b"),
            2,
            "000002.bin",
            "1025 bytes",
            1026,
        )
        hub.wrong_sums.add(first)
        expect_fails(script("fineweb", *common, "--output", folder / "c"), 2, first, "sha256")
    expect_equal(ids_of(folder / "one" / "fineweb_train_000001.bin"), [3, 4, 5])
    for place in ("one", "out"):
        expect_equal(
            sorted(path.name for path in (folder / place).iterdir()),
            [
                "fineweb.json",
                "fineweb_train_000001.bin",
                "fineweb_val_000000.bin",
                "gpt2_tokenizer.bin",
            ],
        )
    shards = json.loads((folder / "out" / "fineweb.json").read_text())["shards"]
    expect_equal((shards["val"][0]["tokens"], shards["train"][0]["tokens"]), (2, 3))


@case(*MODULES)
def test_hellaswag_by_hand(folder):
    examples = [
        {"ctx": "hello", "endings": ["hell", "a", "b", "c d"], "label": 2},
        {"ctx": "é", "endings": ["1", "2", "3", "4"], "label": "0"},
    ]
    vocab = ("--vocab", write_vocabulary(folder / "v"))
    with Hub(
        {"/hellaswag_val.jsonl": "".join(json.dumps(item) + "\n" for item in examples).encode()}
    ) as hub:
        common = ("--source", hub.url, *vocab, "--no-checksum")
        expect_works(script("hellaswag", *common, "--output", folder / "out"))
        for number, wrong in enumerate(
            ({"label": 4}, {"ctx": ""}, {"endings": ["x"] * 3}, {"endings": None})
        ):
            hub.files["/hellaswag_val.jsonl"] = json.dumps(examples[0] | wrong).encode()
            expect_fails(
                script("hellaswag", *common, "--output", folder / f"b{number}"),
                2,
                "hellaswag_val.jsonl:1:",
            )
    first = [
        65535,
        34,
        0,
        2,
        4,
        2,
        HELL,
        111,
        1,
        SPACE_HELL,
        2,
        32,
        97,
        2,
        32,
        98,
        4,
        32,
        99,
        32,
        100,
    ]
    first[1] = 2 * len(first)
    second = [65535, 0, 1, 0, 4, 2, 0xC3, 0xA9]
    for digit in b"1234":
        second += [2, 32, digit]
    second[1] = 2 * len(second)
    expected = struct.pack("<256i", 20240522, 1, 2, max(first[1], second[1]), *[0] * 252)
    expected += struct.pack(f"<{len(first + second)}H", *first, *second)
    expect_equal((folder / "out" / "hellaswag_val.bin").read_bytes(), expected)


if __name__ == "__main__":
    cases.main()
