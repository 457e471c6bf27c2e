#!/usr/bin/env python3
"""The CUDA kernels as nvcc and the machine see them: warnings, registers, spills, tensor-core
instructions, bytes moved, lines covered, products without the library, little shared memory.

    dev/test/test_kernels.py [WORD...]    cases whose names contain a word
    dev/test/test_kernels.py --update     writes dev/bench/results/kernel_resources.txt anew

Nothing here needs a GPU. Objects are kept in build/kernels.
"""

import collections
import concurrent.futures
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

from cases import ROOT, case, ci_tier, expect_fails, main, run

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
PRECISIONS = ["fp32", "bf16", "fp16"]
SOURCES = sorted((ROOT / "src/backend/cuda").glob("*.cu"))
BUILD = ROOT / "build/kernels"
TABLE = ROOT / "dev/bench/results/kernel_resources.txt"
CUDA_HOME = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
UPDATES_TABLE = "--update" in sys.argv
NVCC = shutil.which("nvcc") or str(CUDA_HOME / "bin/nvcc")
INCLUDES = [f"-I{ROOT}/src", f"-I{ROOT}"]


def nvcc():
    return None if os.access(NVCC, os.X_OK) else "no nvcc"


def clang():
    return None if shutil.which("clang++") else "no clang++"


def full_tier():
    return None if os.environ.get("TEST_TIER", "full") == "full" else "full tier only"


def call(*command, **environment):
    """Runs a command from the root; its output, both streams, or an error that holds it."""
    result = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout[-3000:]}"
    return result.stdout


# ---- what nvcc makes of the sources --------------------------------------------------------------

Compiled = collections.namedtuple("Compiled", "log cubin")
_compiled = {}


def compile_source(source, architecture, precision):
    cubin = BUILD / f"{source.stem}.{precision}.{architecture}.cubin"
    log = call(
        NVCC, "-std=c++17", "-O3", f"-arch={architecture}", "-cubin", "-lineinfo",
        "-Xptxas", "-v", "-Xcompiler", "-Wall,-Wextra", "-D_GNU_SOURCE",
        f"-DPRECISION_{precision.upper()}", *INCLUDES, "-o", cubin, source,
    )  # fmt: skip
    return Compiled(log, cubin)


def compile_all():
    """{(source, architecture, precision): Compiled} of everything; done once."""
    if not _compiled:
        BUILD.mkdir(parents=True, exist_ok=True)
        jobs = [(s, a, p) for s in SOURCES for a in ARCHITECTURES for p in PRECISIONS]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            results = pool.map(lambda job: compile_source(*job), jobs)
            _compiled.update(zip(jobs, results))
    return _compiled


Resources = collections.namedtuple("Resources", "registers shared spilled")


def resources(log):
    """{mangled kernel: Resources} of a ptxas report."""
    kernels, name, spilled = {}, None, 0
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)'", line):
            name = match[1]
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(match[1]) + int(match[2])
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[name] = Resources(int(match[1]), int(shared[1]) if shared else 0, spilled)
    return kernels


def readable(names):
    """Kernel names as in the source, without parameters."""
    text = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    return [
        re.sub(r"^void ", "", re.sub(r"\((?!anonymous|bool|int).*", "", line))
        .replace("(bool)1", "true")
        .replace("(bool)0", "false")
        .replace("(int)", "")
        for line in text.splitlines()
    ]


@case(nvcc)
def compiles_without_warnings(_):
    for (source, architecture, precision), compiled in compile_all().items():
        where = f"{source.name} {architecture} {precision}"
        assert "warning" not in compiled.log.lower(), f"{where}\n{compiled.log}"
    return f"{len(_compiled)} compilations"


@case(nvcc)
def no_kernel_spills(_):
    count = 0
    for (source, architecture, precision), compiled in compile_all().items():
        for kernel, used in resources(compiled.log).items():
            count += 1
            assert used.spilled == 0, f"{kernel} {architecture} {precision}: {used}"
    assert count > 0
    return f"{count} kernels"


# ---- machine code --------------------------------------------------------------------------------

# Opcode = low 12 bits of a 16-byte instruction (read off by compiling single PTX instructions).
OPCODES = {0x23C: "HMMA", 0x83B: "LDSM", 0xFAE: "LDGSTS"}


def opcode_counts(cubin):
    """{mangled kernel: Counter of OPCODES} of an ELF file with NVIDIA machine code."""
    data = cubin.read_bytes()
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, entries, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_size) for i in range(entries)
    ]
    counts = {}
    for header in headers:
        start = headers[names][4] + header[0]
        name = data[start : data.index(b"\0", start)].decode()
        if name.startswith(".text."):
            code = range(header[4], header[4] + header[5], 16)
            counts[name[6:]] = collections.Counter(
                OPCODES.get(struct.unpack_from("<Q", data, at)[0] & 0xFFF) for at in code
            )
    return counts


@case(nvcc)
def attention_uses_tensor_cores(_):
    count = 0
    for (source, architecture, precision), compiled in compile_all().items():
        if precision == "fp32" or source.stem not in ("attention_forward", "attention_backward"):
            continue
        for kernel, opcodes in opcode_counts(compiled.cubin).items():
            count += 1
            for opcode in OPCODES.values():
                assert opcodes[opcode] > 0, f"{kernel} {architecture} {precision}: no {opcode}"
    # 4 head sizes of 3 kernels
    assert count == 12 * 2 * len(ARCHITECTURES), count
    return f"{count} kernels with HMMA, LDSM and LDGSTS"


# ---- the table of resources ----------------------------------------------------------------------


def resource_table():
    version = re.search(r"V(\d\S+)", call(NVCC, "--version"))[1]
    rows = collections.defaultdict(dict)
    for (_, architecture, precision), compiled in compile_all().items():
        used = resources(compiled.log)
        for name, kernel in zip(readable(used), used.values()):
            rows[name, kernel.shared][precision, architecture] = kernel.registers
    columns = [(p, a) for p in PRECISIONS for a in ARCHITECTURES]
    lines = [
        f"nvcc {version}: registers of a thread, bytes of static shared memory, of every kernel.",
        "Dynamic shared memory depends on the shape: see each kernel's launch. No kernel spills.",
        "Written by dev/test/test_kernels.py --update, checked by the same without it.",
        "",
        f"{'kernel':56s} shared " + " ".join(f"{p}/{a[3:]:>3s}" for p, a in columns),
    ]
    for (name, shared), registers in sorted(rows.items()):
        cells = " ".join(f"{registers.get(column, '-'):>8}" for column in columns)
        lines.append(f"{name:56s} {shared:6d} {cells}")
    return "\n".join(lines) + "\n"


@case(nvcc)
def resource_table_is_current(_):
    table = resource_table()
    if UPDATES_TABLE:
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text(table)
    committed = TABLE.read_text()
    if committed.split(":")[0] != table.split(":")[0]:
        return f"not compared: the table is of {committed.split(':')[0]}"
    for old, new in zip(committed.splitlines(), table.splitlines()):
        assert old == new, f"run dev/test/test_kernels.py --update\n{old}\n{new}"
    assert committed == table, f"run dev/test/test_kernels.py --update"
    return f"{table.count(chr(10)) - 5} kernels"


# ---- on the CPU ----------------------------------------------------------------------------------


def make(variant, *targets, **variables):
    """Builds targets of the CUDA sources' CPU build in their own folder."""
    folder = BUILD / variant
    words = [f"{name}={value}" for name, value in variables.items()]
    call(
        "make", f"-j{os.cpu_count()}", "BACKEND=cuda_on_cpu", "MPI=0", f"BUILD={folder}", *words,
        *(folder / target for target in targets),
    )  # fmt: skip
    return folder


MEASURED = ["layernorm", "reduce", "adamw", "classifier"]


@case(ci_tier, clang)
def memory_bound_kernels_move_what_they_must(_):
    notes = []
    for precision in ("bf16", "fp32"):
        folder = make(precision, "libtrainer.a", "libcuda_on_cpu.a", PRECISION=precision)
        flags = [
            "-std=c++17", "-O2", "-fno-strict-aliasing", "-fcf-protection=none", "-D_GNU_SOURCE",
            "-Wno-unknown-pragmas", f"-DPRECISION_{precision.upper()}",
            f"-I{ROOT}/dev/cuda_on_cpu/include", "-isystem", CUDA_HOME / "include", *INCLUDES,
            "-x", "c++", "-c",
        ]  # fmt: skip
        # Accesses wider than 16 bytes would not be counted: no vectorisation.
        counting = [
            "-fsanitize=thread", "-mllvm", "-tsan-instrument-read-before-write=1",
            "-fno-vectorize", "-fno-slp-vectorize",
        ]  # fmt: skip
        objects = [folder / "kernel_accesses.o"]
        call("clang++", *flags, "dev/test/kernel_accesses.cu", "-o", objects[0])
        for name in MEASURED:
            objects.append(folder / f"counted_{name}.o")
            source = f"src/backend/cuda/{name}.cu"
            call("clang++", *flags, *counting, source, "-o", objects[-1])
        program = folder / "kernel_accesses"
        call(
            "g++", "-rdynamic", "-Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset",
            "-Wl,-T,dev/cuda_on_cpu/sh.ld", *objects,
            folder / "libtrainer.a", folder / "libcuda_on_cpu.a", "-fopenmp", "-lcjson", "-lz",
            "-lm", "-lpthread", "-o", program,
        )  # fmt: skip
        worst = max(float(ratio) for ratio in re.findall(r": ([\d.]+) of 1.10", call(program)))
        notes.append(f"{precision} at most {worst:.3f} of the least")
    return ", ".join(notes)


@case(ci_tier)
def products_without_the_library(_):
    """The operations where the library knows no fused epilogue, and where it knows nothing."""
    program = make("bf16", "test_ops", PRECISION="bf16") / "test_ops"
    without_epilogues = call(program, CUDA_ON_CPU_NO_EPILOGUES="1").splitlines()[-1]
    without_all = call(program, CUDA_ON_CPU_NO_EPILOGUES="all").splitlines()[-1]
    return f"no epilogues: {without_epilogues}; nothing: {without_all}"


@case(ci_tier)
def little_shared_memory(folder):
    """The operations with the 99 KB of sm_86, sm_89 and sm_120; too large heads are refused."""
    built = make("bf16", "test_ops", "train_gpt2cu", PRECISION="bf16")
    verdict = call(built / "test_ops", CUDA_ON_CPU_SHARED_KB="99").splitlines()[-1]
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    size = ["-e", "L=1,NH=1,C=3136,T=16", "-b", 1]
    refused = run(built / "train_gpt2cu", "-i", text, *size, CUDA_ON_CPU_SHARED_KB=48)
    expect_fails(refused, 2, "C/NH = 3136", "use more heads")
    return verdict


def covered_lines(folder):
    """{source: {line: was it executed}} of the sources that hold device code, by gcov."""
    covered = collections.defaultdict(dict)
    for notes in folder.glob("src/backend/cuda/*.gcda"):
        report = subprocess.run(
            ["gcov", "--stdout", str(notes)], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        source = None
        for line in report.splitlines():
            fields = line.split(":", 2)
            if len(fields) < 3:  # between the instantiations of a template
                continue
            count, number, text = fields
            if number.strip() == "0" and text.startswith("Source:"):
                path = ROOT / text[7:]
                has_kernels = path.parent.name == "cuda" and re.search(
                    "__(global|device)__", path.read_text()
                )
                source = path.name if has_kernels else None
            elif source and count.strip() != "-" and number.strip().isdigit():
                seen = not count.strip().startswith(("#", "="))
                line_number = int(number)
                covered[source][line_number] = covered[source].get(line_number, False) or seen
    return covered


@case(full_tier)
def kernel_lines_are_covered(_):
    notes = []
    for precision in ("bf16", "fp32"):
        folder = make(
            f"{precision}-coverage", "test_ops", "test_shard_ops", PRECISION=precision, COVERAGE=1
        )
        for counts in folder.rglob("*.gcda"):
            counts.unlink()
        for program in ("test_ops", "test_shard_ops"):
            call(folder / program)
        lines = covered_lines(folder)
        total = sum(len(seen) for seen in lines.values())
        executed = sum(sum(seen.values()) for seen in lines.values())
        for source, seen in sorted(lines.items()):
            missing = [line for line, is_seen in sorted(seen.items()) if not is_seen]
            print(f"       {source}: {len(seen) - len(missing)} of {len(seen)}, not {missing}")
        assert executed >= 0.9 * total > 0, f"{precision}: {executed} of {total} lines"
        notes.append(f"{precision} {100 * executed / total:.1f} % of {total} lines")
    return ", ".join(notes)


if __name__ == "__main__":
    if UPDATES_TABLE:
        sys.argv[1:] = ["resource_table"]
    main()
