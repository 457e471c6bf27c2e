#!/usr/bin/env python3
# dev/test/test_data.py - text to token shards: text.py and prompt.py from the command line to the
# bytes.
#
# A tiny vocabulary stands in for GPT-2's. With GPT-2's own vocabulary files (see cases.TEST_DATA)
# the ids are compared with tiktoken's definition of gpt2.

import hashlib
import json
import os
import random
import resource
import signal
import struct
import sys
from pathlib import Path

import cases
from cases import (
    ROOT,
    TEST_DATA,
    case,
    expect_equal,
    expect_fails,
    expect_works,
    run,
    vocabulary,
)
from samples import (
    EOT,
    HELL,
    MODULES,
    SPACE_HELL,
    group_exists,
    ids_of,
    reference_gpt2,
    script,
    shard_16,
    shard_32,
    start,
    symbols,
    wait_for,
    write_vocabulary,
)

# ---- vocabularies --------------------------------------------------------------------------------


@case(*MODULES)
def test_both_vocabulary_spellings(folder):
    first = write_vocabulary(folder / "a")
    second = write_vocabulary(folder / "b", names=("merges.txt", "vocab.json"))
    for place in (first, second):
        result = expect_works(script("prompt", "hello hello", "--vocab", place))
        expect_equal(result.stdout, f"{HELL},111,{SPACE_HELL},111\n")


@case(*MODULES)
def test_wrong_vocabularies_refused(folder):
    broken = {
        "no files": lambda path: (path / "vocab.bpe").unlink(),
        "encoder.json": lambda path: (path / "encoder.json").write_text('{"a": 0}'),
        "merge 4": lambda path: (path / "vocab.bpe").write_text("h e\nl l\nhe ll\nh h\n"),
        "ids": lambda path: (path / "encoder.json").write_text(
            (path / "encoder.json").read_text().replace(f": {EOT}", ": 999")
        ),
    }
    for number, (what, damage) in enumerate(broken.items()):
        place = write_vocabulary(folder / str(number))
        damage(place)
        words = (place,) if what == "no files" else (place, what)
        expect_fails(script("prompt", "hello", "--vocab", place), 2, *words)


@case(*MODULES)
def test_tokenizer_file_by_hand(folder):
    text = folder / "a.txt"
    text.write_text("hello")
    expect_works(
        script("text", text, "--output", folder / "out", "--vocab", write_vocabulary(folder / "v"))
    )
    expected = struct.pack("<256I", 20240328, 2, EOT + 1, EOT, *[0] * 252)
    for token in [
        *(bytes([i]) for i in range(256)),
        b"he",
        b"ll",
        b"hell",
        b" hell",
        b"<|endoftext|>",
    ]:
        expected += bytes([len(token)]) + token
    expect_equal((folder / "out" / "gpt2_tokenizer.bin").read_bytes(), expected)
    expect_works(script("tokenizer", "--vocab", folder / "v", folder=folder))
    expect_equal((folder / "gpt2_tokenizer.bin").read_bytes(), expected)
    result = script(
        "prompt",
        "--decode",
        f"{HELL},111,{SPACE_HELL}",
        "--tokenizer-file",
        folder / "out" / "gpt2_tokenizer.bin",
    )
    expect_equal(result.stdout, "hello hell\n")


# ---- text.py -------------------------------------------------------------------------------------


@case(*MODULES)
def test_text_by_hand(folder):
    (folder / "a.txt").write_text("hello hello")
    (folder / "b.txt").write_bytes(b"Hi\r\n\xff")
    inputs = (folder / "a.txt", folder / "b.txt")
    expect_works(
        script(
            "text", *inputs, "--output", folder / "mine", "--vocab", write_vocabulary(folder / "v")
        )
    )
    replaced = [0xEF, 0xBF, 0xBD]  # U+FFFD, for the byte that is not UTF-8
    expect_equal(
        (folder / "mine" / "mine_train_000001.bin").read_bytes(),
        shard_16([EOT, HELL, 111, SPACE_HELL, 111, EOT, *b"Hi\r\n", *replaced]),
    )
    expect_works(script("text", *inputs, "--output", folder / "raw", "--tokenizer", "bytes"))
    expect_equal(
        (folder / "raw" / "raw_train_000001.bin").read_bytes(),
        shard_16([*b"hello hello", 256, *b"Hi\r\n\xff", 256]),
    )
    assert not (folder / "raw" / "gpt2_tokenizer.bin").exists()


@case(*MODULES)
def test_wide_vocabulary_by_hand(folder):
    """All pairs of bytes as tokens: ids above 65535 need the uint32 format."""
    names = symbols()
    pairs = [(names[i >> 8], names[i & 255]) for i in range(65535, -1, -1)]
    place = write_vocabulary(folder / "v", pairs)
    (folder / "a.txt").write_bytes(b"\0! \0!")
    expect_works(script("text", folder / "a.txt", "--output", folder / "out", "--vocab", place))
    low = 256 + 65535 - ord("!")  # the pair (0, !)
    expect_equal(
        (folder / "out" / "out_train_000001.bin").read_bytes(),
        shard_32([65792, low, 256 + 65535 - (ord(" ") << 8), ord("!")]),
    )


@case(*MODULES)
def test_shards_and_validation(folder):
    text = bytes(range(65, 91)) * 4  # 104 ids and the end
    (folder / "a.txt").write_bytes(text)
    out = folder / "set"
    expect_works(
        script(
            "text",
            folder / "a.txt",
            "--output",
            out,
            "--tokenizer",
            "bytes",
            "--val-tokens",
            10,
            "--shard-tokens",
            40,
        )
    )
    ids = [*text, 256]
    expect_equal(ids_of(out / "set_val_000000.bin"), ids[:10])
    expect_equal(
        [ids_of(out / f"set_train_00000{i}.bin") for i in (1, 2, 3)],
        [ids[10:50], ids[50:90], ids[90:]],
    )
    manifest = json.loads((out / "set.json").read_text())
    expect_equal((manifest["documents"], manifest["text_bytes"]), (1, 104))
    expect_equal(manifest["sources"][0]["sha256"], hashlib.sha256(text).hexdigest())
    for file in manifest["shards"]["train"] + manifest["shards"]["val"]:
        content = (out / file["name"]).read_bytes()
        expect_equal(
            (file["bytes"], file["sha256"]), (len(content), hashlib.sha256(content).hexdigest())
        )
        expect_equal(file["tokens"], len(ids_of(out / file["name"])))


@case(*MODULES)
def test_set_is_made_once(folder):
    (folder / "a.txt").write_text("some text " * 30)
    common = (folder / "a.txt", "--output", folder / "set", "--tokenizer", "bytes")
    expect_works(script("text", *common, "--shard-tokens", 50))
    before = {path: path.stat().st_mtime_ns for path in (folder / "set").iterdir()}
    result = expect_works(script("text", *common, "--shard-tokens", 50))
    assert "already made" in result.stdout
    expect_equal({path: path.stat().st_mtime_ns for path in (folder / "set").iterdir()}, before)
    expect_fails(script("text", *common, "--shard-tokens", 200), 2, "--overwrite")
    (folder / "set" / "set_b_train_000001.bin").write_bytes(b"of another set")
    expect_works(script("text", *common, "--shard-tokens", 200, "--overwrite"))
    expect_equal(
        sorted(path.name for path in (folder / "set").iterdir()),
        ["set.json", "set_b_train_000001.bin", "set_train_000001.bin", "set_train_000002.bin"],
    )


@case(*MODULES)
def test_other_vocabulary_is_another_set(folder):
    (folder / "a.txt").write_text("hello")
    one = write_vocabulary(folder / "one")
    two = write_vocabulary(folder / "two", [("h", "e")])
    common = ("text", folder / "a.txt", "--output", folder / "set")
    expect_works(script(*common, "--vocab", one))
    assert "already made" in expect_works(script(*common, "--vocab", one)).stdout
    expect_fails(script(*common, "--vocab", two), 2, "--overwrite")


@case(*MODULES)
def test_max_tokens(folder):
    (folder / "a.txt").write_text("0123456789" * 50)
    expect_works(
        script(
            "text",
            folder / "a.txt",
            "--output",
            folder / "set",
            "--tokenizer",
            "bytes",
            "--val-tokens",
            7,
            "--max-tokens",
            21,
        )
    )
    expect_equal(ids_of(folder / "set" / "set_val_000000.bin"), [*b"0123456"])
    expect_equal(ids_of(folder / "set" / "set_train_000001.bin"), [*b"789012345678901234567"])


@case(*MODULES)
def test_validation_files_and_separator(folder):
    (folder / "a.txt").write_text("one\n<|end|>\n two <|end|><|end|>three")
    (folder / "b.jsonl").write_text('{"text": "four"}\n{"text": ""}\n')
    expect_works(
        script(
            "text",
            folder / "a.txt",
            "--val",
            folder / "b.jsonl",
            "--separator",
            "<|end|>",
            "--output",
            folder / "set",
            "--tokenizer",
            "bytes",
        )
    )
    expect_equal(ids_of(folder / "set" / "set_val_000000.bin"), [*b"four", 256])
    expect_equal(
        ids_of(folder / "set" / "set_train_000001.bin"),
        [*b"one", 256, *b"two", 256, *b"three", 256],
    )
    manifest = json.loads((folder / "set" / "set.json").read_text())
    expect_equal((manifest["documents"], manifest["empty_documents"]), (6, 2))


@case(*MODULES)
def test_wrong_input_refused(folder):
    (folder / "bad.jsonl").write_text('{"text": "fine"}\n\n{"text": "torn\n')
    (folder / "field.jsonl").write_text('{"body": "x"}\n')
    (folder / "list.jsonl").write_text("[1, 2]\n")
    (folder / "null.jsonl").write_text('{"text": null}\n')
    (folder / "bad.parquet").write_text("PAR1 it is not")
    (folder / "short.txt").write_text("short")
    (folder / "empty.txt").write_text("")
    out = ("--output", folder / "set", "--tokenizer", "bytes")
    for name, words in (
        ("bad", (":3:",)),
        ("field", (":1:", "text", "--field")),
        ("list", (":1:",)),
        ("null", (":1:",)),
    ):
        expect_fails(
            script("text", folder / f"{name}.jsonl", *out), 2, folder / f"{name}.jsonl", *words
        )
    expect_fails(script("text", folder / "none.txt", *out), 2, folder / "none.txt")
    expect_fails(
        script("text", folder / "short.txt", *out, "--val-tokens", 100),
        2,
        "6 tokens",
        "--val-tokens",
    )
    expect_fails(script("text", folder / "empty.txt", *out), 2, "0 tokens")
    expect_fails(
        script("text", folder / "short.txt", "--output", "/dev/null/set", "--tokenizer", "bytes"),
        2,
        "/dev/null",
    )
    assert not list((folder / "set").glob("*.bin"))
    for arguments in (
        ("--processes", "0"),
        ("--shard-tokens", str(2**31)),
        ("--val-tokens", "-1"),
        ("--tokenizer", "x"),
    ):
        expect_equal(script("text", folder / "short.txt", *out, *arguments).returncode, 2)


@case(*MODULES, "pyarrow")
def test_parquet(folder):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"body": ["hello", None, "hell"], "n": [1, 2, 3]})
    parquet.write_table(table, folder / "a.parquet")
    vocab = ("--vocab", write_vocabulary(folder / "v"))
    expect_works(
        script("text", folder / "a.parquet", "--field", "body", "--output", folder / "set", *vocab)
    )
    expect_equal(ids_of(folder / "set" / "set_train_000001.bin"), [EOT, HELL, 111, EOT, HELL])
    expect_fails(
        script("text", folder / "a.parquet", "--output", folder / "b", *vocab),
        2,
        "body, n",
        "--field",
    )
    (folder / "c.parquet").write_text("PAR1 it is not")
    expect_fails(
        script("text", folder / "c.parquet", "--output", folder / "b", *vocab),
        2,
        folder / "c.parquet",
    )


@case(*MODULES)
def test_unicode_empty_and_huge_documents(folder):
    """Text to tokens and back, the same for any number of processes, pieces like the whole."""
    import tokenizer

    place = write_vocabulary(folder / "v")
    draw = random.Random(5)
    words = [
        "hello",
        "hell",
        "é",
        "漢字",
        "🙂",
        "\u00a0",
        "\u3000",
        "he's",
        "  ",
        "\n\n",
        "\t",
        "123",
        "!?",
        "<|endoftext|>",
    ]
    huge = " ".join(draw.choice(words) for _ in range(700_000))  # several pieces
    solid = "x" * 100_000  # nowhere to cut
    documents = ["", "naïve 漢字 🙂", huge, "", solid, " ", "\0", "end"]
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents)
    )
    for processes in (1, 3):
        expect_works(
            script(
                "text",
                folder / "a.jsonl",
                "--output",
                folder / str(processes) / "set",
                "--vocab",
                place,
                "--processes",
                processes,
            )
        )
    one, three = ((folder / n / "set" / "set_train_000001.bin").read_bytes() for n in "13")
    assert one == three, "the shards depend on the number of processes"
    coder = tokenizer.make("gpt2", place)
    expected = []
    for text in filter(None, documents):
        expected += [EOT, *coder.encode(text.encode()).tolist()]
    ids = ids_of(folder / "1" / "set" / "set_train_000001.bin")
    assert ids == expected, "cutting documents changed their ids"
    expect_equal(
        coder.decode(ids).decode().split("<|endoftext|>"),
        "<|endoftext|>".join(["", *filter(None, documents)]).split("<|endoftext|>"),
    )
    (folder / "b.jsonl").write_text('{"text": "a\\ud800b"}\n')  # half of a pair: not text
    expect_works(script("text", folder / "b.jsonl", "--output", folder / "set", "--vocab", place))
    expect_equal(ids_of(folder / "set" / "set_train_000001.bin"), [EOT, *b"a?b"])


@case(*MODULES, vocabulary)
def test_cuts_keep_the_ids(folder):
    """Random text of awkward characters has the same ids when it is cut into tiny pieces."""
    import corpus
    import tokenizer

    coder = tokenizer.make("gpt2", TEST_DATA)
    draw = random.Random(7)
    characters = " \n\t\r\x0b\x1c\u00a0\u2003\u3000aZé漢9٣.,'s!🙂\u0301\0"
    corpus.PIECE_BYTES, pieces = 3, 0
    for _ in range(2000):
        text = "".join(draw.choice(characters) for _ in range(draw.randrange(1, 60))).encode()
        cut = [coder.encode(piece).tolist() for piece, _, _ in corpus.cut(text)]
        pieces += len(cut)
        expect_equal(sum(cut, []), coder.encode(text).tolist())
    return f"{pieces} pieces of 2000 texts"


@case(*MODULES)
def test_missing_packages_named(folder):
    (folder / "a.parquet").write_bytes(b"")
    words = (folder / "a.parquet", "--output", folder / "set", "--tokenizer", "bytes")
    bare = (sys.executable, "-S", ROOT / "data" / "text.py")  # no installed packages
    expect_fails(run(*bare, *words), 2, "no numpy, tqdm for", "venv", "requirements.txt")
    expect_fails(run(*bare, *words[:3]), 2, "no numpy, tqdm, tiktoken for")
    scripts = "text tinyshakespeare tinystories fineweb hellaswag prompt tokenizer"
    for name in scripts.split():
        asked = run(*bare[:2], ROOT / "data" / f"{name}.py", "--help")
        assert "--vocab" in expect_works(asked).stdout, name
    (folder / "pyarrow.py").write_text("raise ModuleNotFoundError")
    expect_fails(script("text", *words, PYTHONPATH=folder), 2, "pyarrow")


@case(*MODULES)
def test_killed_run_leaves_the_old_set(folder):
    (folder / "a.txt").write_text("old text")
    common = ("--output", folder / "set", "--tokenizer", "bytes", "--overwrite")
    expect_works(script("text", folder / "a.txt", *common))
    before = {path.name: path.read_bytes() for path in (folder / "set").iterdir()}
    (folder / "b.txt").write_bytes(b"new text " * 30_000_000)
    process = start("text", folder / "b.txt", *common)
    wait_for((folder / "set" / ".set.tmp" / "set_train_000001.bin").exists)
    process.kill()
    try:
        expect_equal(process.wait(), -signal.SIGKILL)
        wait_for(lambda: not group_exists(process.pid))  # the workers go too
    finally:
        process.stderr.close()
        if group_exists(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    expect_equal({path.name: path.read_bytes() for path in (folder / "set").glob("[!.]*")}, before)
    expect_works(script("text", folder / "a.txt", *common))
    expect_equal({path.name: path.read_bytes() for path in (folder / "set").iterdir()}, before)


# ---- prompt.py -----------------------------------------------------------------------------------


@case(*MODULES)
def test_prompt(folder):
    (folder / "a.bin").write_bytes(shard_16([*b"text", 256, *b"more"]))
    expect_equal(script("prompt", "a é", "--tokenizer", "bytes").stdout, "97,32,195,169\n")
    result = script("prompt", "--shard", folder / "a.bin", "--tokenizer", "bytes", "--count", 6)
    expect_equal(result.stdout, "text<|endoftext|>m\n")
    expect_fails(script("prompt", "--decode", "1,x", "--tokenizer", "bytes"), 2, "1,x")
    expect_fails(script("prompt", "--decode", "1,257", "--tokenizer", "bytes"), 2, "257")
    for damaged in (
        b"",
        shard_16([1])[:-1],
        shard_16([1]) + b"x",
        shard_16([1]).replace(b"\x88", b"\x89", 1),
    ):
        (folder / "b.bin").write_bytes(damaged)
        expect_fails(
            script("prompt", "--shard", folder / "b.bin", "--tokenizer", "bytes"),
            2,
            folder / "b.bin",
        )


# ---- GPT-2's own vocabulary ----------------------------------------------------------------------


@case(*MODULES, vocabulary)
def test_hello_world(folder):
    expect_equal(script("prompt", "Hello world", "--vocab", TEST_DATA).stdout, "15496,995\n")
    (folder / "merges.txt").write_bytes((TEST_DATA / "vocab.bpe").read_bytes())
    (folder / "vocab.json").write_bytes((TEST_DATA / "encoder.json").read_bytes())
    expect_equal(script("prompt", "Hello world", "--vocab", folder).stdout, "15496,995\n")


def mixed_text(size):
    """Plays, program text, many scripts, numbers and white space; the last two grow with `size`."""
    draw = random.Random(3)
    plays = (TEST_DATA / "tinyshakespeare.txt").read_text()
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    program = "".join(path.read_text(errors="replace") for path in sources)
    alphabets = [
        range(97, 123),
        range(0x400, 0x450),
        range(0x4E00, 0x5000),
        range(0x1F600, 0x1F640),
        range(48, 58),
    ]
    words = []
    while len(words) < size // 8:
        alphabet = draw.choice(alphabets)
        words.append("".join(chr(draw.choice(alphabet)) for _ in range(draw.randrange(1, 12))))
        words.append(draw.choice([" ", " ", "  ", "\n", "\n\n", "\t", "\u00a0", ", ", "'s "]))
    strange = "".join(words)
    return plays * 4 + program[:size] + strange


@case(*MODULES, vocabulary)
def test_ten_megabytes_as_tiktoken(folder):
    """The ids are tiktoken's, at 5 MB/s or more on two cores.

    The speed comes from the processor time of the whole run, its start included, shared by two
    cores: other programs on the machine do not change it.
    """
    text = mixed_text(3_400_000)
    encoded = text.encode()
    assert len(encoded) > 10_000_000, len(encoded)
    (folder / "a.txt").write_bytes(encoded)
    seconds = []
    for attempt in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        output = folder / str(attempt) / "set"
        common = ("--vocab", TEST_DATA, "--processes", 2)
        expect_works(script("text", folder / "a.txt", "--output", output, *common))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    ids = ids_of(output / "set_train_000001.bin")
    assert ids == [50256, *reference_gpt2().encode_ordinary(text)]
    megabytes = len(encoded) / 1e6
    speed = megabytes / (min(seconds) / 2)
    assert speed >= 5, f"{speed:.1f} MB/s"
    return f"{megabytes:.1f} MB, {len(ids)} ids, {speed:.1f} MB/s on two cores"


if __name__ == "__main__":
    cases.main()
