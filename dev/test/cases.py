# dev/test/cases.py - the frame of the Python tests: one line a case, a count at the end.
#
# A case is a function marked with @case(...); its first argument is an empty folder. What it needs
# and does not find makes it a skipped case, counted like the others.

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A folder with GPT-2's vocab.bpe and encoder.json, and char-rnn's input.txt as tinyshakespeare.txt:
# $GPT2_TEST_DATA, else a */data/ beside this repository that has them.
_beside = [path.parent for path in ROOT.parent.glob("*/data/vocab.bpe")]
TEST_DATA = Path(os.environ.get("GPT2_TEST_DATA") or next(iter(_beside), "data"))
TRAINER = Path(os.environ.get("TRAINER", ROOT / "train_gpt2")).absolute()

_cases = []


def case(*needs):
    """Marks a case. `needs`: names of modules, or functions that give a reason to skip, or None."""
    return lambda function: _cases.append((function, needs)) or function


def vocabulary():
    return None if (TEST_DATA / "vocab.bpe").exists() else "no $GPT2_TEST_DATA/vocab.bpe"


def trainer():
    return None if os.access(TRAINER, os.X_OK) else f"no {TRAINER.name}"


def ci_tier():
    return "not in the quick tier" if os.environ.get("TEST_TIER") == "quick" else None


def mpirun():
    return None if shutil.which("mpirun") else "no mpirun"


def _missing(needs):
    for need in needs:
        reason = (
            need() if callable(need) else None if importlib.util.find_spec(need) else f"no {need}"
        )
        if reason:
            return reason
    return None


def run(*command, folder=ROOT, timeout=120, **environment):
    """Runs a command to its end; the result has returncode, stdout, stderr."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        timeout=timeout,
        capture_output=True,
        text=True,
        errors="replace",
        env=os.environ | {name: str(value) for name, value in environment.items()},
    )


def expect_fails(result, code, *words):
    """The command ended with this code and one line on stderr that holds the words."""
    assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
    assert result.stderr.count("\n") == 1, result.stderr
    for word in words:
        assert str(word) in result.stderr, (word, result.stderr)


def expect_works(result):
    assert result.returncode == 0, (result.returncode, result.stdout, result.stderr)
    return result


def expect_equal(value, expected):
    assert value == expected, f"{value!r:.300} instead of {expected!r:.300}"


def main():
    """Runs all cases, or those whose names contain one of the arguments."""
    counts = {"ok": 0, "FAIL": 0, "skip": 0}
    for function, needs in _cases:
        if sys.argv[1:] and not any(word in function.__name__ for word in sys.argv[1:]):
            continue
        begin, verdict, note = time.monotonic(), "ok", ""
        if reason := _missing(needs):
            verdict, note = "skip", reason
        else:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    note = function(Path(folder)) or ""
            except Exception:
                verdict, note = "FAIL", traceback.format_exc()
        counts[verdict] += 1
        print(
            f"{verdict:6s} {function.__name__:34s} {time.monotonic() - begin:5.1f} s   {note}",
            flush=True,
        )
    print("{ok} passed, {FAIL} failed, {skip} skipped".format(**counts))
    sys.exit(counts["FAIL"] != 0)
