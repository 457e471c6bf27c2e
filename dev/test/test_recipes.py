#!/usr/bin/env python3
# dev/test/test_recipes.py - recipes, launchers and plots; and the trainer on files of the data
# scripts.
#
# The flow of a recipe (plan, check, run, start again) is tested with a stand-in for the trainer
# that writes down how it was called and ends as it is told. Where the trainer is built, the recipes
# and llm.c's own command lines are checked by it with --dry-run, and it trains on what the data
# scripts wrote.

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import cases
from cases import ROOT, TRAINER, case, ci_tier, expect_equal, expect_works, mpirun, run, trainer
from hub import Hub
from samples import MODULES, script, shard_16, wait_for

RECIPES = sorted(ROOT.glob("scripts/run_gpt*.sh"))

# Number of parameters, tokens in the head of the recipe.
EXPECTED = {
    "run_gpt2_124M.sh": ("d12", 9.9e9),
    "run_gpt2_355M.sh": ("d24", 31.5e9),
    "run_gpt2_774M.sh": ("d36", 150e9),
    "run_gpt2_1558M.sh": ("d48", 33.6e9),
    "run_gpt3_125M.sh": ("gpt3:c768", 300e9),
}

# The command lines of llm.c's single-node recipes, its scripts/run_gpt*.sh: facts, not text.
LLMC = {
    "fineweb10B/fineweb": [
        "-s 20000 -g 144 -b 64 -t 1024 -d 524288 -l 0.0006 -q 0.0 -n 5000 -e d12"
    ],
    "fineweb100B/fineweb": [
        "-s 100000 -g 144 -b 64 -t 1024 -d 524288 -l 0.0003 -q 0.0 -n 2000 -x 60000 -e d24",
        "-s 300000 -g 144 -b 32 -t 1024 -d 524288 -l 0.00025 -q 0.0 -n 4000 -x 286102 -e d36",
        "-s 20000 -g 144 -b 32 -t 2048 -d 524288 -l 0.0006 -q 0.1 -n 10000 -nk 5 -nm 50000 -ge 1 "
        "-sl 7.0 -sg 7.0 -x 572204 -e gpt3:c768",
    ],
    "edu_fineweb100B/edu_fineweb": [
        "-s 300000 -g 384 -b 16 -t 1024 -d 1048576 -k cosine -l 0.0006 -q 0.1 -n 2000 -x 32000 "
        "-ge 1 -e d48"
    ],
}
LLMC_COMMON = "-v 250 -h 1 -r 0 -z 1 -c 0.1 -u 700 -y 1"


# ---- a stand-in for the trainer ------------------------------------------------------------------

STAND_IN = """#!/usr/bin/env bash
echo "$*" >> calls
case " $* " in *" --plan "* | *" --dry-run "*) exit $((SLURM_NTASKS > 1 ? 2 : 0)) ;; esac
run=$(grep -cv -e --plan -e --dry-run calls)
read -ra ends < ends
end=${ends[run - 1]}
case $end in
    save:*) mkdir -p out && ln -sfn "step_$run" out/latest ;;
    done) mkdir -p out && touch out/DONE_00000010 && exit 0 ;;
    wait) trap 'echo saved > saved; exit 0' USR1; while true; do sleep 0.05; done ;;
esac
exit "${end#save:}"
"""


def stand_in(folder, ends):
    (folder / "trainer").write_text(
        STAND_IN.replace("calls", str(folder / "calls"))
        .replace("< ends", f"< {folder}/ends")
        .replace("out/", f"{folder}/out/")
        .replace("-p out", f"-p {folder}/out")
        .replace("> saved", f"> {folder}/saved")
    )
    (folder / "trainer").chmod(0o755)
    (folder / "ends").write_text(ends + "\n")
    return {"TRAINER": folder / "trainer", "NP": 1, "RESTART_S": 0}


def calls(folder):
    return (folder / "calls").read_text().splitlines()


@case()
def test_recipes_plan_check_and_run(folder):
    for number, recipe in enumerate(RECIPES):
        place = folder / str(number)
        place.mkdir()
        expect_works(run(recipe, "-o", place / "out", "-x", 5, **stand_in(place, "done")))
        plan, check, start = calls(place)
        expect_equal(plan, f"--plan --ranks 1 --memory-gb 80 {start}")
        expect_equal(check, f"--dry-run --ranks 1 {start}")
        assert start.endswith(f"-o {place}/out -x 5"), start
        words = start.split()
        options = dict(zip(words[0:-4:2], words[1:-4:2], strict=True))
        model, tokens = EXPECTED[recipe.name]
        expect_equal(options["-e"], model)
        micro = int(options["-b"]) * int(options["-t"]) * 8
        expect_equal(int(options["-d"]) % micro, 0)
        assert math.isclose(int(options["-d"]) * int(options["-x"]), tokens, rel_tol=0.01), recipe
        expect_equal(options["-y"], "1")
        head = recipe.read_text()
        for word in ("hardware", "tokens", "published (1)", "ours             not measured yet"):
            assert word in head, (recipe, word)
    expect_equal(sorted(EXPECTED), sorted(recipe.name for recipe in RECIPES))


@case()
def test_dry_run_stops_after_the_check(folder):
    environment = stand_in(folder, "done")
    expect_works(run(RECIPES[0], "--dry-run", **environment))
    expect_equal(len(calls(folder)), 2)


@case()
def test_restart_after_failure(folder):
    """Which ends are followed by another try, and how many of them."""
    table = {
        "1 5 137 done": (137, 3),  # three in a row without a new checkpoint
        "1 5 done": (0, 3),
        "1 1 save:1 1 done": (0, 5),  # a new checkpoint starts the count anew
        "1 1 save:1 1 1 done": (1, 5),
        "2 done": (2, 1),
        "3 done": (3, 1),
        "4 done": (4, 1),
        "0 done": (75, 1),  # ended well, but before the last step
    }
    for number, (ends, (code, runs)) in enumerate(table.items()):
        place = folder / str(number)
        place.mkdir()
        result = run(RECIPES[0], "-o", place / "out", **stand_in(place, ends))
        expect_equal((ends, result.returncode, len(calls(place)) - 2), (ends, code, runs))


@case()
def test_signals_save_and_stop(folder):
    for name in ("SIGUSR1", "SIGTERM", "SIGINT"):
        place = folder / name
        place.mkdir()
        environment = os.environ | {
            key: str(value) for key, value in stand_in(place, "wait wait").items()
        }
        process = subprocess.Popen(
            [RECIPES[0], "-o", place / "out"], env=environment, start_new_session=True
        )
        try:
            wait_for(lambda place=place: (place / "calls").exists() and len(calls(place)) == 3)
            time.sleep(0.3)  # until its trap is set
            process.send_signal(getattr(signal, name))
            expect_equal((name, process.wait(20), (place / "saved").exists()), (name, 75, True))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@case()
def test_missing_program_named(folder):
    result = run(RECIPES[0], TRAINER=folder / "none")
    expect_equal(result.returncode, 2)
    assert str(folder / "none") in result.stderr and result.stderr.count("\n") == 1, result.stderr


# ---- launchers -----------------------------------------------------------------------------------


def command(folder, name, text):
    """A stand-in for a program of the system, found first on the PATH."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text("#!/usr/bin/env bash\n" + text)
    (folder / "bin" / name).chmod(0o755)
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}"}


@case()
def test_multihost(folder):
    environment = stand_in(folder, "done") | {"NCCL_DEBUG": "INFO", "INTERFACE": "eth0"}
    mpirun_text = f"""echo "$*" >> {folder}/launches
until [[ $1 == {folder}/trainer || $1 == sha256sum ]]; do shift; done
"$@"
"""
    environment |= command(folder, "mpirun", mpirun_text)
    launcher = ROOT / "scripts" / "run_multihost.sh"
    expect_works(run(launcher, "a:8,b:4", RECIPES[0], "-o", folder / "out", **environment))
    check, launch = (folder / "launches").read_text().splitlines()
    assert check.startswith("-np 2 --map-by node --host a:8,b:4 sha256sum"), check
    assert launch.startswith("-np 12 --host a:8,b:4 --mca oob_tcp_if_include eth0"), launch
    for word in ("-x NCCL_DEBUG", "-x NCCL_SOCKET_IFNAME", f"{folder}/trainer -e"):
        assert word in launch, launch
    assert calls(folder)[0].startswith("--plan --ranks 12 "), calls(folder)
    for hosts in ("a", "a:0", "a:x", ":8"):
        expect_equal(run(launcher, hosts, RECIPES[0], **environment).returncode, 2)
    environment |= command(
        folder, "sha256sum", 'echo "$RANDOM$RANDOM a"; echo "$RANDOM$RANDOM b"\n'
    )
    result = run(launcher, "a:8,b:4", RECIPES[0], **environment)
    expect_equal(result.returncode, 2)
    assert "different programs" in result.stderr, result.stderr
    environment |= command(folder, "mpirun", "exit 1\n")
    result = run(launcher, "a:8,b:4", RECIPES[0], **environment)
    expect_equal(result.returncode, 2)
    assert "failed on some host" in result.stderr, result.stderr


@case()
def test_slurm(folder):
    launcher = ROOT / "scripts" / "run_slurm.sh"
    text = launcher.read_text()
    for line in ("--signal=USR1@180", "--requeue"):
        assert f"\n#SBATCH {line}\n" in text, line
    requeue = command(folder, "scontrol", f'echo "$*" > {folder}/requeued\n')
    srun = command(folder, "srun", 'while [[ $1 == -* ]]; do shift; done; "$@"\n')
    for ends, code, requeued in (("0", 0, True), ("done", 0, False), ("2", 2, False)):
        place = folder / ends
        place.mkdir()
        environment = stand_in(place, ends) | requeue | srun
        environment |= {"SLURM_NTASKS": 16, "SLURM_JOB_ID": 77, "SLURM_SUBMIT_DIR": ROOT}
        result = run(launcher, RECIPES[0], "-o", place / "out", **environment)
        expect_equal(
            (ends, result.returncode, (folder / "requeued").exists()), (ends, code, requeued)
        )
        assert calls(place)[0].startswith("--plan --ranks 16 "), calls(place)
        if requeued:
            expect_equal((folder / "requeued").read_text(), "requeue 77\n")
            (folder / "requeued").unlink()


# ---- plot.py -------------------------------------------------------------------------------------


def log_of(folder, stage, losses):
    folder.mkdir()
    start = {
        "event": "start",
        "precision": "fp32",
        "ranks": 4,
        "zero_stage": stage,
        "num_parameters": 1000,
        "total_batch_tokens": 256,
        "plan_bytes": {"weights": 2**30, "grads": 2**29},
    }
    events = [start, {"event": "val", "step": 0, "loss": 5.5, "tokens": 10}]
    for step, loss in enumerate(losses, 1):
        events.append(
            {
                "event": "step",
                "step": step,
                "loss": loss,
                "grad_norm": 1.0,
                "lr": 1e-3,
                "ms": 100.0,
                "comm_wait_ms": 10.0,
                "tokens": 256 * step,
                "tokens_per_s": 2560.0,
                "mfu": None,
            }
        )
    events += [
        {
            "event": "eval",
            "step": len(losses),
            "name": "hellaswag",
            "correct": 1,
            "total": 4,
            "accuracy": 0.25,
        },
        {"event": "val", "step": len(losses), "loss": 4.25, "tokens": 10},
    ]
    lines = [json.dumps(event) + "\n" for event in events]
    (folder / "log.jsonl").write_text("".join(lines) + '{"event": "st')  # torn, as after a crash
    return folder


@case()
def test_plot_table(folder):
    one = log_of(folder / "one", 1, [5.0, None, 4.5])
    two = log_of(folder / "two", 3, [5.0, 4.75])
    plot = (sys.executable, ROOT / "scripts" / "plot.py", "--table-only")
    lines = expect_works(run(*plot, one, two / "log.jsonl")).stdout.splitlines()
    expect_equal(len(lines), 3)
    for words in (
        ("1,000", "4", "1", "4.5000", "4.2500", "25.00%", "100.0", "2,560", "10.0%", "1.50"),
    ):
        for word in words:
            assert word in lines[1].split(), (word, lines[1])
    (folder / "bad.jsonl").write_text('{"event": "step"}\nnot json\n')
    result = run(*plot, folder / "bad.jsonl")
    assert result.returncode == 1 and "bad.jsonl:2" in result.stderr, result.stderr
    assert run(*plot, folder / "none").returncode == 1
    (folder / "matplotlib.py").write_text("raise ModuleNotFoundError")
    result = run(*plot[:2], one, folder=folder, PYTHONPATH=folder)
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    assert "--table-only" in result.stderr, result.stderr


@case("matplotlib")
def test_plot_picture(folder):
    for name in "ab":
        (folder / name).mkdir()
    runs = [log_of(folder / name / "out", 2, [5.0, None, 4.0]) for name in "ab"]
    sys.path.insert(0, str(ROOT / "scripts"))
    import plot

    expect_equal(plot.labels([plot.Run(path) for path in runs]), ["a/out", "b/out"])
    picture = folder / "out.png"
    expect_works(
        run(
            sys.executable,
            ROOT / "scripts" / "plot.py",
            *runs,
            "-o",
            picture,
            "--x",
            "tokens",
            "--smooth",
            2,
            MPLCONFIGDIR=folder,
        )
    )
    header = picture.read_bytes()[:24]
    expect_equal(header[:8], b"\x89PNG\r\n\x1a\n")
    expect_equal(int.from_bytes(header[16:20], "big"), 1800)


# ---- with the trainer ----------------------------------------------------------------------------


@case(trainer)
def test_recipes_dry_run(folder):
    for recipe in RECIPES:
        for ranks in (1, 8):
            expect_works(run(recipe, "-o", folder / "out", "--dry-run", TRAINER=TRAINER, NP=ranks))
    assert not (folder / "out").exists(), "a dry run wrote something"


def cuda_program():
    """The program the recipes are for, in bf16: of nvcc, or of the CUDA sources on the CPU."""
    programs = (ROOT / "build" / "cuda_on_cpu-bf16" / "train_gpt2cu", ROOT / "train_gpt2cu")
    return next((program for program in programs if program.exists()), None)


@case(lambda: None if cuda_program() else "no train_gpt2cu")
def test_recipes_memory(folder):
    """The heads' figures are the plan's."""
    for recipe in RECIPES:
        place = folder / recipe.stem
        place.mkdir()
        expect_works(run(recipe, "--dry-run", **stand_in(place, "done")))
        options = calls(place)[1].split(" --ranks 1 ")[1].split()
        plan = expect_works(run(cuda_program(), "--plan", "--json", "--ranks", 8, *options)).stdout
        peak = json.loads(plan)["stages"][0]["peak"] / 2**30
        head = re.search(r"--plan says (\d+) GiB", recipe.read_text())[1]
        expect_equal((recipe.name, int(head)), (recipe.name, round(peak)))


@case(trainer)
def test_llmc_command_lines(folder):
    for data, lines in LLMC.items():
        for line in lines:
            files = ("-i", f"dev/data/{data}_train_*.bin", "-j", f"dev/data/{data}_val_*.bin")
            words = (*files, "-o", folder / "out", *line.split(), *LLMC_COMMON.split())
            expect_works(run(TRAINER, *words, "--dry-run", "--ranks", 8, folder=folder))


TINY = ("-e", "L=1,NH=2,C=16,V=257,T=32", "-b", 2, "-x", 5, "-v", 0, "-s", 0, "-l", 1e-2)


def on_ranks(ranks, *words, folder):
    launch = ("mpirun", "-np", ranks, "--oversubscribe", "--mca", "mpi_yield_when_idle", 1)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
    limit = ("timeout", "-k", 5, 300)
    return run(*limit, *launch, TRAINER, *words, folder=folder, timeout=310, **root)


def events(folder, kind):
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@case(*MODULES, trainer)
def test_text_file_and_byte_shard_are_one(folder):
    """The trainer's own reading of a text file, and the shards that text.py makes of it."""
    (folder / "a.txt").write_text("To be, or not to be, that is the question.\n" * 40)
    common = (folder / "a.txt", "--output", folder / "set", "--tokenizer", "bytes")
    advice = expect_works(script("text", *common)).stdout.split("train on it: ./train_gpt2 ")[1]
    expect_works(run(TRAINER, *shlex.split(advice), "-b", 1, "-t", 8, "-x", 1, "-s", 0))
    data = {"txt": folder / "a.txt", "bin": folder / "set" / "set_train_*.bin"}
    losses = {}
    for kind, path in data.items():
        expect_works(run(TRAINER, "-i", path, "-o", folder / kind, *TINY, "-n", -1, folder=folder))
        losses[kind] = [event["loss"] for event in events(folder / kind, "step")]
    expect_equal(len(losses["txt"]), 5)
    expect_equal(losses["txt"], losses["bin"])


@case(*MODULES, trainer)
def test_sample_is_decoded(folder):
    """Samples are text with the vocabulary file beside the shards, and ids without it."""
    from samples import write_vocabulary

    (folder / "a.txt").write_text("hello hell " * 400)
    expect_works(
        script(
            "text",
            folder / "a.txt",
            "--output",
            folder / "set",
            "--vocab",
            write_vocabulary(folder / "v"),
        )
    )
    model = (
        "-e",
        "L=1,NH=2,C=16,V=261,T=32",
        "-b",
        2,
        "-x",
        3,
        "-v",
        0,
        "-s",
        3,
        "-g",
        8,
        "-n",
        -1,
    )
    for kind, field in (("with", "text"), ("without", "ids")):
        result = expect_works(
            run(
                TRAINER,
                "-i",
                folder / "set" / "set_train_*.bin",
                "-o",
                folder / kind,
                *model,
                folder=folder,
            )
        )
        assert field in events(folder / kind, "sample")[0], events(folder / kind, "sample")
        expect_equal("gpt2_tokenizer.bin" in result.stderr, kind == "without")
        (folder / "set" / "gpt2_tokenizer.bin").unlink(missing_ok=True)


@case(*MODULES, trainer, mpirun)
def test_hellaswag_on_any_ranks(folder):
    """Five examples on 1, 2, 3 and 4 ranks, at stages 0 and 3: one accuracy."""
    items = [
        {
            "ctx": f"context {i}",
            "endings": ["one", "two three", "f" * (i + 1), "five"],
            "label": i % 4,
        }
        for i in range(5)
    ]
    with Hub(
        {"/hellaswag_val.jsonl": "".join(json.dumps(item) + "\n" for item in items).encode()}
    ) as hub:
        expect_works(
            script(
                "hellaswag",
                "--source",
                hub.url,
                "--tokenizer",
                "bytes",
                "--no-checksum",
                "--output",
                folder / "data" / "hellaswag",
            )
        )
    (folder / "a.bin").write_bytes(shard_16([*b"some text " * 200]))
    results = set()
    for ranks in (1, 2, 3, 4):
        for stage in (0, 3):
            out = folder / f"out{ranks}{stage}"
            words = ("-i", folder / "a.bin", "-o", out, *TINY, "-x", 0, "-h", 1, "-z", stage)
            expect_works(on_ranks(ranks, *words, folder=folder))
            (event,) = events(out, "eval")
            expect_equal((event["name"], event["total"]), ("hellaswag", 5))
            results.add((event["correct"], event["accuracy"]))
    expect_equal(len(results), 1)
    return f"{results.pop()[0]} of 5"


@case(trainer)
def test_largest_model_plan(folder):
    """What of the 1558M model fits into 80 GB on 8 ranks."""
    command = (TRAINER, "--plan", "-e", "d48", "-z", "all", "--ranks", 8, "--memory-gb", 80)
    stages = json.loads(expect_works(run(*command, "--json")).stdout)["stages"]
    peaks = [stage["peak"] for stage in stages]
    expect_equal([stage["stage"] for stage in stages], [0, 1, 2, 3])
    expect_equal(peaks, sorted(peaks, reverse=True))
    fitting = [str(stage["stage"]) for stage in stages if stage["peak"] <= 80e9]
    assert f"{', '.join(fitting)} fit into 80 GB" in run(*command).stdout, fitting


@case(ci_tier, trainer, mpirun)
def test_largest_model_rehearsal(folder):
    """The 1558M model's C, V and T with two layers at stage 3 on 8 ranks."""
    (folder / "a.bin").write_bytes(shard_16([i * 7919 % 50257 for i in range(2000)]))
    words = ("-i", folder / "a.bin", "-o", folder / "out", "-b", 1, "-t", 128, "-x", 1, "-z", 3)
    model = ("-e", "L=2,NH=25,C=1600,V=50257,T=1024", "-v", 0, "-s", 0, "-n", -1)
    expect_works(on_ranks(8, *words, *model, folder=folder))
    (step,), (end,) = events(folder / "out", "step"), events(folder / "out", "end")
    assert 10 < step["loss"] < 12, step
    assert end["peak_bytes"] * 8 < 16e9, end
    return f"{end['peak_bytes'] / 2**30:.1f} GiB a rank"


if __name__ == "__main__":
    cases.main()
