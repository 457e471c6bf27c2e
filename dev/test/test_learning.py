#!/usr/bin/env python3
# dev/test/test_learning.py [NAME...] - the trainer learns what there is to learn, and no more.
#
# A Markov source has a known entropy: the validation loss must come down to what the true source
# scores on the same tokens, and must not go below. Runs that are repeated write the same bytes.
# TRAINER names the program. Standard library only.

import json
import math
import random
from pathlib import Path

import cases
from cases import TRAINER, case, expect_equal, expect_works, trainer

SYMBOLS = 12


def markov_source(seed):
    """Rows of next-symbol probabilities, some of them nearly certain, some nearly uniform."""
    rng = random.Random(seed)
    rows = []
    for _ in range(SYMBOLS):
        weights = [rng.random() ** rng.choice((1, 4, 12)) + 1e-3 for _ in range(SYMBOLS)]
        rows.append([w / sum(weights) for w in weights])
    return rows


def draw(rows, count, seed):
    rng = random.Random(seed)
    state, text = 0, bytearray()
    for _ in range(count):
        state = rng.choices(range(SYMBOLS), rows[state])[0]
        text.append(ord("a") + state)
    return bytes(text)


def true_loss(rows, text):
    """Mean negative log-likelihood of each symbol after the one before it."""
    pairs = zip(text, text[1:])
    return -sum(math.log(rows[a - 97][b - 97]) for a, b in pairs) / (len(text) - 1)


def events(out, kind):
    lines = (json.loads(line) for line in open(Path(out) / "log.jsonl"))
    return [event for event in lines if event["event"] == kind]


@case(trainer)
def converges_to_the_entropy_of_a_source(folder):
    rows, T = markov_source(7), 32
    (folder / "train.txt").write_bytes(draw(rows, 400_000, 1))
    val = draw(rows, 1 + 64 * T, 2)
    (folder / "val.txt").write_bytes(val)
    expect_works(
        cases.run(
            TRAINER, "-i", "train.txt", "-j", "val.txt", "-o", "out", "-e", "L=1,NH=2,C=32,T=32",
            "-b", 16, "-x", 500, "-l", "1e-2", "-u", 20, "-q", "0.02", "-v", 500, "-m", -1,
            "-s", 0, "-n", -1, folder=folder, timeout=200,
        )
    )
    loss, entropy = events(folder / "out", "val")[-1]["loss"], true_loss(rows, val)
    assert entropy - 0.005 < loss < entropy + 0.02, (loss, entropy)
    return f"loss {loss:.4f}, the source itself scores {entropy:.4f}"


@case(trainer)
def the_same_run_writes_the_same_bytes(folder):
    (folder / "train.txt").write_bytes(draw(markov_source(3), 20_000, 4))
    for out in ("a", "b"):
        expect_works(
            cases.run(
                TRAINER, "-i", "train.txt", "-o", out, "-e", "L=2,NH=3,C=48,T=32", "-b", 4, "-d", 256,
                "-x", 12, "-s", 6, "-n", 6, folder=folder,
            )
        )
    names = sorted(p.relative_to(folder / "a") for p in (folder / "a").rglob("*") if p.is_file())
    names.remove(Path("log.jsonl"))  # it holds times
    assert len(names) >= 10, names
    for name in names:
        expect_equal((folder / "a" / name).read_bytes(), (folder / "b" / name).read_bytes())
    untimed = [
        [{k: v for k, v in e.items() if "ms" not in k and k not in ("time", "tokens_per_s", "seconds")}
         for e in map(json.loads, open(folder / out / "log.jsonl"))]
        for out in ("a", "b")
    ]
    expect_equal(untimed[0], untimed[1])


@case(trainer)
def one_batch_is_learned_by_heart(folder):
    (folder / "train.txt").write_bytes(draw(markov_source(5), 5_000, 6))
    expect_works(
        cases.run(
            TRAINER, "-i", "train.txt", "-o", "out", "-e", "L=2,NH=2,C=64,T=16", "-b", 2, "-a", 1,
            "-x", 150, "-l", "3e-3", "-s", 0, "-n", -1, folder=folder,
        )
    )
    loss = events(folder / "out", "step")[-1]["loss"]
    assert loss < 0.1, loss
    return f"loss {loss:.4f}"


cases.main()
