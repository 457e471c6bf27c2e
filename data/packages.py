# data/packages.py - the packages of requirements.txt, which a bare Python does not have.

import importlib
import importlib.util
import shlex
import sys
from pathlib import Path


def optional(name):
    """The package, or None: --help works without any. require() comes before its use."""
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def require(*names, tokenizer="bytes"):
    """Ends a script whose packages are not installed with the commands that help."""
    if tokenizer == "gpt2":
        names = (*names, "tiktoken")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        requirements = Path(__file__).with_name("requirements.txt")
        print(
            f"no {', '.join(missing)} for Python: python3 -m venv build/venv && "
            f"build/venv/bin/pip install -r {requirements}, "
            f"then build/venv/bin/python3 {shlex.join(sys.argv)}",
            file=sys.stderr,
        )
        sys.exit(2)
