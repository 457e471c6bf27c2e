#!/usr/bin/env python3
# dev/test/test_cuda_program.py [NAME...] - train_gpt2cu as a whole, without a GPU.
#
# Builds it on the CUDA-on-CPU layer, where NCCL runs over MPI, and compares it with golden values,
# with itself over stages, ranks and transports, and with the CPU program; then takes every event
# between the two streams away in turn. Last it is built by nvcc against the real libraries.
# Standard library only.

import collections
import json
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import cases
import make_data
from cases import ROOT, case, ci_tier, expect_equal, mpirun

PROGRAM = ROOT / "build/cuda_on_cpu-bf16/train_gpt2cu"
TEST_PROGRAM = ROOT / "build/cuda_on_cpu-bf16/test_gpt2cu"
CPU_PROGRAM = ROOT / "build/cpu-bf16/train_gpt2"

os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
os.environ |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_ON_CPU_DEVICES": "4"}

_scratch = tempfile.TemporaryDirectory()
DATA = Path(_scratch.name)
make_data.make(DATA)
IS_FULL = os.environ.get("TEST_TIER") == "full"


def make(*targets, **variables):
    words = [f"{name}={value}" for name, value in variables.items()]
    return cases.run("make", "-s", "-j2", "WERROR=1", *words, *targets, timeout=1200)


@cache
def built():
    """A need of the cases: both programs, up to date."""
    if not cases.shutil.which("mpirun"):
        return "no mpirun"
    for backend, programs in (("cuda_on_cpu", (PROGRAM, TEST_PROGRAM)), ("cpu", (CPU_PROGRAM,))):
        names = [program.relative_to(ROOT) for program in programs]
        result = make(*names, BACKEND=backend, PRECISION="bf16")
        assert result.returncode == 0, result.stderr[-2000:]
    return None


def nvcc():
    return None if Path(find_nvcc()).exists() else "no nvcc"


def find_nvcc():
    cuda_home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or f"{cuda_home}/bin/nvcc"


Run = collections.namedtuple("Run", "rc out err losses norms hash")


def train(folder, *arguments, ranks=1, program=PROGRAM, timeout=90, **environment):
    """Three steps of a small model; later options override these."""
    shutil.rmtree(folder, ignore_errors=True)
    return go_on(folder, *arguments, ranks=ranks, program=program, timeout=timeout, **environment)


def go_on(folder, *arguments, ranks=1, program=PROGRAM, timeout=90, **environment):
    """The same into a folder that holds a run already."""
    command = ["mpirun", "-np", ranks] if ranks > 1 else []
    command += [program, "-e", "L=2,NH=2,C=32,V=256,T=32", "-i", f"{DATA}/even_train_*.bin"]
    command += ["-t", 32, "-b", 1, "-d", 12 * 32, "-x", 3, "-v", 0, "-s", 0, "--reduce", "exact"]
    result = cases.run(*command, "-o", folder, *arguments, timeout=timeout, **environment)
    log = Path(folder) / "log.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return Run(
        result.returncode,
        result.stdout,
        result.stderr,
        [(e["event"], e["step"], e["loss"]) for e in events if "loss" in e],
        [e["grad_norm"] for e in events if "grad_norm" in e],
        events[-1]["params_hash"] if events and events[-1]["event"] == "end" else None,
    )


def works(run):
    assert run.rc == 0 and run.hash, (run.rc, run.out[-800:], run.err[-800:])
    return run


def our_lines(run):
    """stderr without the launcher's lines."""
    return [line for line in run.err.splitlines() if re.match(r"(error|warning): |\[rank ", line)]


def refused(run, code, *words):
    """Ended with this code, one line that holds the words, and no step."""
    lines = our_lines(run)
    assert run.rc == code and len(lines) == 1, (run.rc, run.out[-300:], run.err[-800:])
    for word in words:
        assert word in lines[0], (word, lines)
    assert "step 1/" not in run.out, run.out


# ---- the same numbers ----------------------------------------------------------------------------


@case(built, ci_tier)
def golden_values(folder):
    passed = []
    for ranks in (1, 2):
        command = ["mpirun", "-np", ranks] if ranks > 1 else []
        result = cases.expect_works(cases.run(*command, TEST_PROGRAM, timeout=200))
        passed.append(result.stdout.splitlines()[-1])
    return f"1 rank {passed[0]}; 2 ranks {passed[1]}"


def parity(folder, comm, runs):
    expected = works(train(folder / "one"))
    assert expected.losses[-1][2] < expected.losses[0][2] and len(expected.norms) == 3
    for ranks, stage in runs:
        run = works(train(folder / "many", "-z", stage, "--comm", comm, ranks=ranks))
        name = f"{ranks} ranks, stage {stage}, {comm}: "
        expect_equal(name + str(run[3:]), name + str(expected[3:]))
    return f"{len(runs)} runs, hash {expected.hash}"


@case(built, ci_tier)
def exact_parity_nccl(folder):
    return parity(folder, "nccl", [(n, z) for n in (1, 2, 3, 4) for z in range(4)])


@case(built, ci_tier)
def exact_parity_staged(folder):
    few = [(2, 0), (2, 1), (2, 2), (2, 3), (3, 3), (4, 0)]
    return parity(folder, "mpi", [(n, z) for n in (2, 3, 4) for z in range(4)] if IS_FULL else few)


@case(built, ci_tier)
def fast_reductions(folder):
    """--reduce fast sums in another order: close to exact, and the same for equal runs."""
    exact = works(train(folder / "exact"))
    for stage in range(4):
        options = ("-z", stage, "--reduce", "fast", "-d", 6 * 32)
        run, again = (works(train(folder / str(i), *options, ranks=3)) for i in (1, 2))
        one = works(train(folder / "one", "--reduce", "fast", "-d", 6 * 32))
        expect_equal(run[3:], again[3:])
        for got, expected in zip(run.norms, one.norms):
            assert abs(got / expected - 1) < 2e-3, (stage, run.norms, one.norms)
    return f"exact {exact.norms[0]:.6f}"


@case(built, ci_tier)
def products_other_ways(folder):
    """-ge with and without fused epilogues, -f in a build where it means nothing: small changes."""
    plain = works(train(folder / "plain"))
    for options, environment in (
        (("-ge", 2), {}),
        (("-ge", 2), {"CUDA_ON_CPU_NO_EPILOGUES": 1}),
        (("-ge", 2), {"CUDA_ON_CPU_NO_EPILOGUES": "late"}),
        (("-f", 1), {"CUDA_ON_CPU_NO_EPILOGUES": "all"}),
    ):
        run = works(train(folder / "other", *options, **environment))
        for got, expected in zip(run.norms, plain.norms):
            assert abs(got / expected - 1) < 1e-2, (options, run.norms, plain.norms)
        is_late = "late" in environment.values()
        assert ("cuBLASLt refuses" in run.err) == is_late, run.err


FAKE_NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) { return *device = 0, !id[0]; }
int nvmlDeviceGetClockInfo(void* device, int kind, unsigned* mhz) { return *mhz = 1980, kind != 1; }
int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) { return *milliwatts = 691500, 0; }
int nvmlDeviceGetTemperature(void* device, int at, unsigned* celsius) { return *celsius = 61, at; }
"""


@case(built, ci_tier)
def health_of_the_gpu(folder):
    (folder / "nvml.c").write_text(FAKE_NVML)
    library = folder / "libnvidia-ml.so.1"
    cases.expect_works(cases.run("cc", "-shared", "-fPIC", "-o", library, folder / "nvml.c"))
    run = works(train(folder / "out", "-lg", 2, LD_LIBRARY_PATH=folder))
    expect_equal(re.findall(r"^gpu .*$", run.out, re.M), ["gpu  2/3 | SM clock 1980 MHz | 692 W | 61 C"])
    if not Path("/dev/nvidiactl").exists():
        missing = works(train(folder / "out", "-lg", 1, ranks=2))
        assert len(our_lines(missing)) == 1 and "libnvidia-ml.so.1" in missing.err, missing.err
    cpu = works(train(folder / "out", "-lg", 1, program=CPU_PROGRAM))
    assert len(our_lines(cpu)) == 1 and "ignored" in cpu.err, cpu.err


# ---- checkpoints ---------------------------------------------------------------------------------


@case(built, ci_tier)
def checkpoints_both_ways(folder):
    """What one program has written the other loads and writes again, byte by byte."""
    for writer, reader in ((CPU_PROGRAM, PROGRAM), (PROGRAM, CPU_PROGRAM)):
        out = folder / writer.name
        works(train(out, "-x", 4, "--stop-at", 2, "-z", 2, ranks=2, program=writer))
        # A step that is skipped changes neither weights nor optimizer, so step 3 equals step 2.
        fault = {"ZERO_FAULT": "nan:step=3"}
        skip = ("-y", 1, "--stop-at", 3, "--on-nan", "skip", "-x", 4, "-z", 3)
        works(go_on(out, *skip, ranks=2, program=reader, **fault))
        for name in ("model", "optimizer"):
            before, after = (out / f"step_0000000{k}/{name}.safetensors" for k in (2, 3))
            assert before.read_bytes() == after.read_bytes(), (writer.name, name)
        # And the step after it is close to what the writer does.
        shutil.copytree(out, folder / "again", symlinks=True)
        here = works(go_on(out, "-y", 1, "-x", 4, program=reader))
        there = works(go_on(folder / "again", "-y", 1, "-x", 4, program=writer))
        shutil.rmtree(folder / "again")
        assert abs(here.norms[-1] / there.norms[-1] - 1) < 2e-2, (here.norms, there.norms)
        hashes = {cases.run(p, "--hash", out / "latest").stdout for p in (reader, writer)}
        expect_equal(hashes, {here.hash + "\n"})


# ---- what goes wrong -----------------------------------------------------------------------------


@case(built, ci_tier)
def watchdog_over_nccl(folder):
    for fault, stage, line in (
        ("skip:rank=1:seq=30", 2, r"error: rank 1 has not entered seq 30 "),
        ("count:rank=2:seq=30", 1, r"error: rank 2 entered seq 30 .* ranks 0,1 entered"),
        ("stop:rank=0:step=2", 3, r"error: rank 0 has not entered seq .* step 2 .* ranks 1,2 wait"),
    ):
        options = ("-z", stage, "--comm-timeout", 3)
        run = train(folder / "out", *options, ranks=3, ZERO_FAULT=fault)
        lines = [line for line in our_lines(run) if line.startswith("error: ")]
        assert run.rc == 5 and len(lines) == 1, (fault, run.rc, run.err[-800:])
        assert re.match(line, lines[0]), (fault, lines)


@case(built, ci_tier)
def self_test_of_nccl(folder):
    """A link that brings wrong numbers or nothing is named before the first step."""
    wrong = train(folder / "out", ranks=3, ZERO_FAULT="link:rank=1")
    words = ("self-test on rank 0 (host ", "CUDA device 0", "288 instead of 287 from rank 1")
    refused(wrong, 5, *words, "NCCL_P2P_DISABLE", "--comm mpi")
    mute = train(folder / "out", ranks=3, ZERO_FAULT="link:rank=1:ms=80000")
    refused(mute, 5, "self-test has not ended for 30 s", "(host ", "NCCL_P2P_DISABLE", "--comm mpi")
    late = works(train(folder / "out", ranks=2, ZERO_FAULT="link:rank=1:ms=500"))
    expect_equal(late.hash, works(train(folder / "one")).hash)


@case(built, ci_tier)
def two_ranks_on_one_gpu(folder):
    one = {"CUDA_ON_CPU_DEVICES": 1}
    run = train(folder / "nccl", ranks=2, **one)
    refused(run, 2, "ranks 0 and 1", "share one GPU", "--comm mpi")
    staged = works(train(folder / "mpi", "--comm", "mpi", ranks=2, **one))
    expect_equal(staged.hash, works(train(folder / "one")).hash)


@case(built, ci_tier)
def no_device(folder):
    for ranks in (1, 2):
        run = train(folder / "out", ranks=ranks, CUDA_ON_CPU_DEVICES=0)
        refused(run, 2, "no usable CUDA device", "train_gpt2")


@case(built, ci_tier)
def out_of_device_memory(folder):
    run = train(folder / "out", CUDA_ON_CPU_MEMORY_MB=20)
    refused(run, 2, "out of GPU memory", "the plan takes", "MiB free of 20.0", "-b", "-r", "-z 3")


# ---- events between the streams ------------------------------------------------------------------

LAYERS = 4  # two units for each slot

# Where the loss of an event shows, by the first part of its name (zero/engine.h). On demand a
# stream runs only when something waits for it, so a reader without a wait reads too early; ahead
# the other stream runs as far as it can, so a writer without a wait writes too early. In other
# places some events are implied by others: at stage 3 the gathers' order implies `gfree`.
SHOWS = {
    "uploaded": ("stage 2", "1"),
    "published": ("stage 2", "1"),
    "updated": ("stage 2", "ahead"),
    "gready": ("stage 2", "ahead"),
    "gfree": ("stage 2", "1"),
    "reduced": ("stage 2", "1"),
    "ready": ("stage 3", "1"),
    "free": ("stage 3", "ahead"),
    "written": ("stage 1, fast", "ahead"),
    "staged": ("stage 2, staged", "1"),
}
PLACES = {  # options, weight slots and gradient slots of blocks
    "stage 2": (("-z", 2), 0, 2),
    "stage 3": (("-z", 3), 2, 2),
    "stage 1, fast": (("-z", 1, "--reduce", "fast"), 0, 0),
    "stage 2, staged": (("-z", 2, "--comm", "mpi"), 0, 2),
}


def event_names(weight_slots, grad_slots):
    """In the order in which device_init, zero_create and the loop make them."""
    names = ["uploaded 0", "uploaded 1"]
    for slot in [*range(weight_slots), "E"]:
        names += [f"ready {slot}", f"free {slot}"]
    names += [f"updated {u}" for u in range(LAYERS + 1)]
    names += [f"published {u}" for u in range(LAYERS + 1)]
    names += ["pace"] * 16
    for slot in [*range(grad_slots), "E"]:
        names += [f"gready {slot}", f"gfree {slot}"]
    return names + ["written", "reduced"]


def run_lazily(folder, place, schedule, **settings):
    """Three steps with validation after each, so that weights are read right after an update."""
    model = f"L={LAYERS},NH=2,C=32,V=256,T=32"
    options = ("-e", model, "-d", 4 * 32, "-j", f"{DATA}/even_val.bin", "-v", 1, "-m", 1, "-n", -1)
    settings |= {"LAZY": schedule, "POISON": 1}
    environment = {f"CUDA_ON_CPU_{name}": value for name, value in settings.items()}
    options += (*PLACES[place][0], "--comm-timeout", 10)
    return train(folder, *options, ranks=2, ZERO_DEBUG="poison", **environment)


def edges_of(run, place):
    """{index: event's name} of what the layer has listed; all but the host's pace, which orders nothing."""
    names = event_names(*PLACES[place][1:])
    found = re.findall(r"edge (\d+): event (\d+), awaited by", run.err)
    events = {int(index): int(event) for index, event in found}
    edges = {i: names[e - 1] if e <= len(names) else "staged" for i, e in events.items()}
    return {i: name for i, name in edges.items() if name != "pace"}


@case(built, ci_tier)
def every_event_is_needed(folder):
    """Each event taken away in turn changes the numbers, brings NaN, or is reported."""
    seen, caught, missed = set(), set(), []
    for place in PLACES:
        for schedule in ("1", "ahead"):
            if not IS_FULL and (place, schedule) not in SHOWS.values():
                continue
            whole = works(run_lazily(folder / "out", place, schedule, LIST_EDGES=1))
            edges = edges_of(whole, place)
            seen |= set(edges.values())
            for index, name in edges.items():
                is_expected = SHOWS[name.split()[0]] == (place, schedule)
                if not (is_expected or IS_FULL):
                    continue
                run = run_lazily(folder / "out", place, schedule, DROP_EDGE=index)
                if run.rc != 0 or run[3:] != whole[3:]:
                    caught.add(name)
                elif is_expected:
                    missed.append(name)
    expect_equal(missed, [])
    expect_equal(sorted(caught), sorted(seen))
    expect_equal({name.split()[0] for name in seen}, set(SHOWS))
    return f"{len(caught)} events"


# ---- the real libraries --------------------------------------------------------------------------


@case(nvcc, mpirun, ci_tier)
def nvcc_builds(folder):
    """Compiled and linked without a warning; without a device the program says so."""
    variants = [("sm_80", 1), ("sm_90", 1), ("sm_100", 1), ("sm_90", 0)]
    for arch, mpi in variants:
        build = f"build/cuda-bf16-{'' if mpi else 'nompi-'}{arch}"
        programs = [f"{build}/train_gpt2cu", f"{build}/test_gpt2cu"]
        result = make(*programs, BACKEND="cuda", CUDA_ARCH=arch, MPI=mpi)
        output = result.stdout + result.stderr
        assert result.returncode == 0, output[-2000:]
        assert not re.search("warning", output, re.IGNORECASE), output[-2000:]
        if Path("/dev/nvidiactl").exists():
            continue
        run = train(folder / "out", program=ROOT / programs[0])
        refused(run, 2, "no usable CUDA device", "nvidia-smi", "train_gpt2")
    return f"{len(variants)} builds"


# ---- the script for a machine with a GPU ---------------------------------------------------------


@case(built, ci_tier)
def gpu_check(folder):
    """Runs through without a GPU, with tiny sizes; and says so where there is none."""
    result = cases.run("dev/gpu_check.sh", "--on-cpu", timeout=420, OUT=folder)
    report = (folder / "report.txt").read_text()
    assert result.returncode == 0, report[-2000:]
    expect_equal(result.stdout, report)
    parts = re.findall(r"^(ok|FAILED|skipped) ", report, re.M)
    assert parts.count("ok") >= 9 and "FAILED" not in parts, report
    assert re.search(r"^tiny +\d+ ", report, re.M) and "0 parts failed" in report, report
    if not Path("/dev/nvidiactl").exists():
        nothing = cases.expect_works(cases.run("dev/gpu_check.sh", OUT=folder / "none"))
        assert "no GPU here" in nothing.stdout and not (folder / "none").exists(), nothing.stdout


if __name__ == "__main__":
    cases.main()
