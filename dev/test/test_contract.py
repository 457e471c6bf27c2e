#!/usr/bin/env python3
# dev/test/test_contract.py [NAME...] - the trainer from outside: what it prints, writes, refuses.
#
# Log events field by field, the plan against the run, the checkpoint's files byte by byte, the hash
# and the learning rates recomputed here, every exit code, bad input. TRAINER names the program
# (./train_gpt2). Standard library only.

import json
import math
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import tempfile
import time
import zlib
from pathlib import Path

import cases
import make_data
from cases import TRAINER, case, expect_equal, mpirun, trainer

os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
os.environ |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
os.environ.setdefault("OMP_NUM_THREADS", "1")

_scratch = tempfile.TemporaryDirectory()
DATA = Path(_scratch.name)
make_data.make(DATA)
TINY = "L=2,NH=4,C=64,V=256,T=64"
TRAIN, VAL, TEXT = f"{DATA}/even_train_*.bin", f"{DATA}/even_val.bin", DATA / "text.txt"
IS_CUDA = TRAINER.name == "train_gpt2cu"  # whose default is --reduce fast, and whose peak is known
STEP_KEYS = (
    "event step loss grad_norm lr ms forward_ms backward_ms update_ms comm_wait_ms tokens "
    "tokens_per_s mfu elements_sent bytes_sent"
)


class Result:
    """One run: rc, out, err; log and events where it has an output folder."""

    def __init__(self, arguments, ranks, timeout, environment, setup):
        command = [str(TRAINER), *map(str, arguments)]
        if ranks > 1:
            command = ["mpirun", "-np", str(ranks)] + command
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | environment,
            preexec_fn=setup,
            cwd=DATA,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        self.rc, self.out, self.err = process.returncode, out.decode(errors="replace"), err.decode()
        self.raw = out

    def ours(self):
        """stderr without the launcher's lines."""
        return [
            line for line in self.err.splitlines() if re.match(r"(error|warning): |\[rank ", line)
        ]


def run(*arguments, ranks=1, timeout=60, setup=None, **environment):
    if IS_CUDA:
        arguments = ("--reduce", "exact", *arguments)
    return Result(arguments, ranks, timeout, {k: str(v) for k, v in environment.items()}, setup)


def train(out, *arguments, **options):
    """A short run on the even shards; later options override these."""
    base = [
        "-e",
        TINY,
        "-i",
        TRAIN,
        "-t",
        32,
        "-b",
        2,
        "-d",
        384,
        "-x",
        4,
        "-v",
        0,
        "-s",
        0,
        "-o",
        out,
    ]
    return run(*base, *arguments, **options)


def works(result):
    assert result.rc == 0, (result.rc, result.out[-500:], result.err)
    return result


def refused(result, code, *words):
    """Ended with this code, one line of ours that holds all words, and no step."""
    lines = result.ours()
    assert result.rc == code, (result.rc, result.out[-300:], result.err)
    assert len([line for line in lines if not line.startswith("warning")]) == 1, result.err
    for word in words:
        assert str(word) in lines[-1], (word, lines)
    assert "step 1/" not in result.out, result.out


def log(out):
    return [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]


def events(out, name):
    return [event for event in log(out) if event["event"] == name]


def steps_of(out, name):
    return [event["step"] for event in events(out, name)]


def curve(out):
    """What must not depend on ranks, stage, threads."""
    end = events(out, "end")[0]
    steps = [(e["step"], e["loss"], e["grad_norm"], e["lr"]) for e in events(out, "step")]
    return steps, [(e["step"], e["loss"]) for e in events(out, "val")], end["params_hash"]


def safetensors(path):
    """(header as ordered dict, raw header text, payload)"""
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text = data[8 : 8 + length].decode()
    return json.loads(text), text, data[8 + length :]


def tensor_names(layers):
    names = ["wte.weight", "wpe.weight"]
    for layer in range(layers):
        for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
            names += [f"h.{layer}.{part}.weight", f"h.{layer}.{part}.bias"]
    return names + ["ln_f.weight", "ln_f.bias"]


def hash_of(path, layers):
    header, _, payload = safetensors(path)
    mask, total, i = 2**64 - 1, 0, 0
    for name in tensor_names(layers):
        begin, end = header[name]["data_offsets"]
        for (bits,) in struct.iter_unpack("<I", payload[begin:end]):
            x = (i * 0x9E3779B97F4A7C15 + bits) & mask
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
            total += x ^ (x >> 31)
            i += 1
    return f"{total & mask:016x}"


# ---- steps and events ----------------------------------------------------------------------------


@case(trainer)
def log_events(folder):
    works(train(folder, "-j", VAL, "-x", 5, "-v", 2, "-s", 2, "-g", 8, "-n", 2))
    lines = (folder / "log.jsonl").read_text().splitlines()
    start = log(folder)[0]
    expect_equal(
        " ".join(start),
        "event version precision backend ranks threads zero_stage reduce model num_parameters "
        "batch seq_len grad_accum_steps total_batch_tokens max_steps start_step seed plan_bytes "
        "time",
    )
    expect_equal(start["model"], {"L": 2, "NH": 4, "C": 64, "V": 256, "T": 64})
    expect_equal(start["num_parameters"], 120576)
    fields = "ranks zero_stage batch seq_len grad_accum_steps total_batch_tokens max_steps seed"
    expect_equal([start[name] for name in fields.split()], [1, 0, 2, 32, 6, 384, 5, 1337])
    scale = "lr loss_scale" if start["precision"] == "fp16" else "lr"
    keys = {
        "step": STEP_KEYS.replace("lr", scale),
        "val": "event step loss tokens",
        "sample": "event step ids" if "ids" in lines[-1] else "event step text",
        "checkpoint": "event step dir bytes ms",
        "end": "event step reason params_hash peak_bytes seconds",
    }
    for event in log(folder)[1:]:
        expect_equal(" ".join(event), keys[event["event"]])
    expect_equal(steps_of(folder, "step"), [1, 2, 3, 4, 5])
    expect_equal(steps_of(folder, "val"), [0, 2, 4, 5])
    expect_equal(steps_of(folder, "sample"), [2, 4, 5])
    expect_equal(steps_of(folder, "checkpoint"), [2, 4, 5])
    expect_equal([e["tokens"] for e in events(folder, "step")], [384 * k for k in range(1, 6)])
    expect_equal({e["tokens"] for e in events(folder, "val")}, {4096})
    end = events(folder, "end")[0]
    expect_equal((end["step"], end["reason"]), (5, "finished"))
    for line in lines:
        for text in re.findall(r"[:\[{,](-?\d[0-9.e+-]*)", re.sub(r'"[^"]*"', '""', line)):
            assert len(text) <= len(repr(float(text))), text
    for event in events(folder, "step"):
        assert (event["mfu"] is None) != IS_CUDA and event["ms"] > 0, event


@case(trainer)
def first_loss_and_entropy(folder):
    works(train(folder, "-x", 60, "-l", "3e-3"))
    losses = [event["loss"] for event in events(folder, "step")]
    assert abs(losses[0] - math.log(256)) < 0.1, losses[0]
    assert losses[-1] < losses[0] - 0.5, losses[-1]


@case(trainer)
def absolute_last_step(folder):
    works(train(folder, "-x", 6, "--stop-at", 3, "-j", VAL, "-v", 2, "-k", "linear", "-q", 0))
    expect_equal(events(folder, "end")[0]["reason"], "stopped")
    expect_equal((steps_of(folder, "val"), steps_of(folder, "checkpoint")), ([0, 2], [3]))
    assert not list(folder.glob("DONE_*"))
    again = works(run("-i", TRAIN, "-o", folder, "-y", 1, "-b", 2, "--stop-at", 3))
    assert "already at step 3" in again.out and len(again.out.splitlines()) == 1, again.out
    works(run("-i", TRAIN, "-j", VAL, "-o", folder, "-y", 1, "-b", 2, "-v", 2, "-s", 0))
    expect_equal(steps_of(folder, "step"), [1, 2, 3, 4, 5, 6])
    expect_equal(steps_of(folder, "val"), [0, 2, 4, 6])
    assert (folder / "DONE_00000006").exists()
    again = works(run("-i", TRAIN, "-o", folder, "-y", 1, "-b", 2, "-s", 0))
    assert len(again.out.splitlines()) == 1 and "step" not in again.ours(), again.out
    works(train(folder / "whole", "-x", 6, "-j", VAL, "-v", 2, "-k", "linear", "-q", 0))
    expect_equal(curve(folder)[0], curve(folder / "whole")[0])
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        resumed = (folder / "step_00000006" / name).read_bytes()
        expect_equal(resumed == (folder / "whole/step_00000006" / name).read_bytes(), True)


@case(trainer)
def stop_on_a_validation_step(folder):
    works(train(folder, "-x", 6, "--stop-at", 4, "-j", VAL, "-v", 2))
    works(run("-i", TRAIN, "-j", VAL, "-o", folder, "-y", 1, "-b", 2, "-v", 2, "-s", 0))
    expect_equal(steps_of(folder, "val"), [0, 2, 4, 6])


@case(trainer)
def zero_steps_and_one_epoch(folder):
    works(train(folder / "zero", "-x", 0, "-j", VAL, "-v", 3))
    expect_equal([event["event"] for event in log(folder / "zero")], ["start", "val", "end"])
    assert not list((folder / "zero").glob("step_*"))
    works(train(folder / "off", "-x", 2, "-j", VAL, "-v", 0))
    expect_equal(steps_of(folder / "off", "val"), [])
    works(train(folder / "none", "-x", 2, "-j", VAL, "-v", 1, "-m", 0))
    expect_equal(steps_of(folder / "none", "val"), [])
    works(train(folder / "epoch", "-x", -1, "-d", 8192, "-b", 32))
    expect_equal(len(events(folder / "epoch", "step")), 3 * 256 * 32 // 8192)


@case(trainer)
def schedules(folder):
    u, x, frac, peak = 2, 10, 0.1, 3e-4
    decay = {
        "cosine": lambda i: 0.5 * (1 + math.cos(math.pi * (i - u) / (x - u))),
        "linear": lambda i: 1 - (i - u) / (x - u),
        "constant": lambda i: 1,
        "wsd": lambda i: 1 if i < 8 else 1 - math.sqrt((i - 8) / 2),
    }
    for name, height in decay.items():
        out = folder / name
        works(train(out, "-x", x, "-k", name, "-u", u, "-q", frac, "-n", -1))
        for event in events(out, "step"):
            k = event["step"]
            expected = peak * (k / u if k <= u else frac + (1 - frac) * height(k - 1))
            assert math.isclose(event["lr"], expected, rel_tol=1e-12), (
                name,
                k,
                event["lr"],
                expected,
            )


@case(trainer)
def streams(folder):
    result = works(train(folder, "-h", 1))
    assert "step 1/4 | loss" in result.out and "step" not in result.err, result.err
    assert [line[:9] for line in result.ours()] == ["warning: "], result.err  # no HellaSwag file
    assert ("% peak" in result.out) == IS_CUDA
    assert "% peak" in works(train(folder / "p", "--peak-tflops", 1)).out
    assert events(folder / "p", "step")[0]["mfu"] > 0
    nothing = works(run("-e", TINY, "-i", TRAIN, "-t", 32, "-x", 1, "-s", 0))
    assert "nothing is written" in nothing.out, nothing.out


@case(trainer)
def learning_rate_for_a_batch(folder):
    result = works(train(folder, "-x", 1, "--lr-batch", 96, "--lr-scale", "sqrt"))
    assert math.isclose(events(folder, "step")[0]["lr"], 6e-4), events(folder, "step")
    assert re.search(r"0\.0006 .*0\.0003 for 96 tokens", result.out), result.out


# ---- the same bits -------------------------------------------------------------------------------


@case(trainer, mpirun)
def ranks_stages_threads(folder):
    works(train(folder / "one", "-j", VAL, "-v", 2))
    expected = curve(folder / "one")
    for n, stage, threads in ((2, 1, 1), (3, 2, 1), (3, 3, 1), (2, 0, 1), (1, 3, 2)):
        out = folder / f"{n}{stage}{threads}"
        arguments = ["-j", VAL, "-v", 2, "-z", stage, "--threads", threads]
        works(train(out, *arguments, ranks=n, ZERO_DEBUG="poison" if n == 3 else ""))
        expect_equal(curve(out), expected)
        expect_equal(events(out, "start")[0]["zero_stage"], stage)
        files = ["model.safetensors", "optimizer.safetensors", "config.json", "state.json"]
        for name in files:
            one, other = (f / "step_00000004" / name for f in (folder / "one", out))
            assert one.read_bytes() == other.read_bytes(), (out.name, name)


@case(trainer, mpirun)
def elastic_resume(folder):
    works(train(folder / "whole", "-x", 6))
    works(train(folder / "cut", "-x", 6, "--stop-at", 3, "-z", 3, ranks=3))
    works(
        run("-i", TRAIN, "-o", folder / "cut", "-y", 1, "-b", 2, "-s", 0, "-v", 0, "-z", 1, ranks=2)
    )
    expect_equal(curve(folder / "cut")[0], curve(folder / "whole")[0])
    model = "step_00000006/model.safetensors"
    assert (folder / "whole" / model).read_bytes() == (folder / "cut" / model).read_bytes()


# ---- plan and counters ---------------------------------------------------------------------------


@case(trainer, mpirun)
def plan_is_the_run(folder):
    for n, stage, more in ((1, 0, []), (2, 1, []), (3, 2, ["-s", 2]), (2, 3, ["-r", 3])):
        out = folder / f"{n}{stage}"
        works(train(out, "-z", stage, *more, ranks=n))
        plan = works(train(folder / "none", "-z", stage, *more, "--plan", "--ranks", n, "--json"))
        plan = json.loads(plan.out)
        expect_equal(" ".join(plan), "ranks num_parameters padded_parameters threads stages")
        expect_equal((plan["ranks"], plan["num_parameters"]), (n, 120576))
        only = plan["stages"][0]
        expect_equal(" ".join(only), "stage state transient peak elements_per_step bytes_per_step")
        lines = only["state"] | only["transient"]
        expect_equal(lines, events(out, "start")[0]["plan_bytes"])
        expect_equal(only["peak"], sum(lines.values()))
        expect_equal(only["peak"], events(out, "end")[0]["peak_bytes"])
        for event in events(out, "step"):
            expect_equal(event["elements_sent"], only["elements_per_step"])
            expect_equal(event["bytes_sent"], only["bytes_per_step"])
        psi, padded = plan["num_parameters"], plan["padded_parameters"]
        weight, optimizer = (4, 8) if events(out, "start")[0]["precision"] == "fp32" else (2, 12)
        expected = {
            "weights": weight * padded // (n if stage == 3 else 1),
            "grads": 4 * padded // (n if stage >= 2 else 1),
            "optimizer": optimizer * padded // (n if stage >= 1 else 1),
        }
        expect_equal(only["state"], expected)
        assert psi <= padded < psi + 64 * 64 + 3 * 1024 * n, padded
    assert not (folder / "none").exists()


@case(trainer)
def plan_of_the_paper(folder):
    plan = json.loads(works(run("--plan", "-e", "7.5B", "--ranks", 64, "-z", "all", "--json")).out)
    peaks = [stage["peak"] / 1e9 for stage in plan["stages"]]
    expect_equal([f"{peak:.1f}" for peak in peaks], ["120.0", "31.4", "16.6", "1.9"])
    for stage in plan["stages"]:
        expect_equal((stage["transient"], stage["peak"]), ({}, sum(stage["state"].values())))
    for text, gigabytes in (("1.5B", "24.0"), ("8B", "128.0"), ("175B", "2800.0")):
        assert gigabytes in works(run("--plan", "-e", text)).out
    table = works(run("--plan", "-e", "gpt2", "--ranks", 4, "-z", "all", "--memory-gb", 4)).out
    assert "124439808" in table and "mpirun -np 4" in table, table
    table = works(run("--plan", "-e", "gpt2", "--ranks", 4, "-z", "all", "--link-gb-s", 1)).out
    assert "1 GB/s" in table, table


@case(trainer)
def dry_run(folder):
    result = works(train(folder / "out", "--dry-run", "--ranks", 8, "-d", 512, "-z", 2))
    assert "ranks" in result.out and not (folder / "out").exists(), result.out
    works(train(folder / "stopped", "--stop-at", 2))
    rehearsal = ["-i", TRAIN, "-o", folder / "stopped", "-y", 1, "-b", 2]
    assert "steps            2 to 4" in works(run(*rehearsal, "--dry-run")).out
    plan = works(run(*rehearsal, "--plan", "--json"))
    expect_equal(json.loads(plan.out)["num_parameters"], 120576)
    json.loads(works(train(folder / "absent", "-y", 1, "--plan", "--json")).out)
    works(train(folder / "absent", "--check-data"))
    assert not (folder / "absent").exists()
    result = works(run("--dry-run", "-e", TINY, "-i", "/none/train.bin"))
    assert len(result.ours()) == 1 and "/none/train.bin" in result.ours()[0], result.err
    result = works(run("--dry-run", "-e", TINY, "-x", -1, "--ranks", 4))
    assert len(result.ours()) == 1 and "tiny_shakespeare_train" in result.ours()[0], result.err
    for words in ("0 to one epoch", "4 over mpi (dry run)"):
        assert words in result.out, result.out
    refused(run("--plan", "-e", "7.5X"), 2, "7.5X", "parameter count such as 7.5B")


# ---- checkpoint ----------------------------------------------------------------------------------


@case(trainer)
def checkpoint_files(folder):
    works(train(folder, "-x", 3))
    step = folder / "step_00000003"
    names = "config.json generation_config.json model.safetensors optimizer.safetensors state.json"
    expect_equal(" ".join(sorted(path.name for path in step.iterdir())), names)
    expect_equal(os.readlink(folder / "latest"), "step_00000003")
    assert (folder / "DONE_00000003").exists()

    header, text, payload = safetensors(step / "model.safetensors")
    assert text.startswith('{"__metadata__":') and (8 + len(text)) % 8 == 0, text[:80]
    expect_equal(header.pop("__metadata__"), {"format": "pt"})
    expect_equal(list(header), tensor_names(2))
    at = 0
    for entry in header.values():
        size = 4 * math.prod(entry["shape"])
        expect_equal((entry["dtype"], entry["data_offsets"]), ("F32", [at, at + size]))
        at += size
    expect_equal((at, header["wte.weight"]["shape"]), (len(payload), [256, 64]))
    expect_equal(header["h.1.attn.c_attn.weight"]["shape"], [64, 192])
    optimizer, _, _ = safetensors(step / "optimizer.safetensors")
    optimizer.pop("__metadata__", None)
    expect_equal(list(optimizer), [f"{k}.{name}" for name in tensor_names(2) for k in "mv"])

    digest = events(folder, "end")[0]["params_hash"]
    expect_equal(hash_of(step / "model.safetensors", 2), digest)
    for path in (folder / "latest", step / "model.safetensors"):
        expect_equal(works(run("--hash", path)).out.split()[0], digest)
    expect_equal(events(folder, "checkpoint")[0]["dir"].split("/")[-1], "step_00000003")
    sizes = sum(path.stat().st_size for path in step.iterdir())
    expect_equal(events(folder, "checkpoint")[0]["bytes"], sizes)


@case(trainer)
def checkpoint_settings(folder):
    works(train(folder, "-x", 3, "-c", 0.1, "-u", 1, "-q", 0.5, "-k", "wsd"))
    step = folder / "step_00000003"
    config = json.loads((step / "config.json").read_text())
    expected = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 256,
        "n_positions": 64, "n_ctx": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": None,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "initializer_range": 0.02,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "scale_attn_weights": True,
        "tie_word_embeddings": True, "use_cache": True, "bos_token_id": 255, "eos_token_id": 255,
        "torch_dtype": "float32",
    }  # fmt: skip
    expect_equal(config, expected)
    state = json.loads((step / "state.json").read_text())
    files = state.pop("files")
    for name, entry in files.items():
        data = (step / name).read_bytes()
        expect_equal(entry, {"bytes": len(data), "crc32": zlib.crc32(data)})
    shards = []
    for name in ("even_train_0.bin", "even_train_1.bin", "even_train_2.bin"):
        data = (DATA / name).read_bytes()
        crc = zlib.crc32(data[-65536:], zlib.crc32(data[:65536]))
        shards.append({"name": name, "bytes": len(data), "crc32": crc})
    expect_equal(state.pop("data"), {"files": shards})
    expect_equal(state.pop("schedule"), {"name": "wsd", "lr": 3e-4, "warmup": 1, "final_frac": 0.5})
    expect_equal(state.pop("model"), {"L": 2, "NH": 4, "C": 64, "V": 256, "T": 64})
    assert set(state.pop("loss_scale")) == {"scale", "good_steps"}
    assert set(state.pop("outlier")) == {"loss", "norm"}
    expect_equal(
        state,
        {"format": 1, "step": 3, "adam_t": 3, "samples": 36, "seed": 1337,
         "total_batch_tokens": 384, "seq_len": 32, "max_steps": 3, "weight_decay": 0.1, "betas": [0.9, 0.95]},
    )  # fmt: skip


@case(trainer)
def which_checkpoints_stay(folder):
    kept = lambda out: sorted(int(path.name[5:]) for path in out.glob("step_*"))
    works(train(folder / "k", "-x", 9, "-n", 1, "-nk", 2, "-nm", 3))
    expect_equal(kept(folder / "k"), [3, 6, 8, 9])
    works(train(folder / "never", "-n", -1))
    expect_equal(kept(folder / "never"), [])
    (folder / "k" / ".step_00000010.tmp").mkdir()
    refused(train(folder / "k", "-x", 2), 2, folder / "k", "--overwrite")
    refused(train(folder / "k", "-x", 2, "-nk", 1), 2, "-nk")
    refused(run("-y", 1, "-e", TINY, "-i", TRAIN), 2, "-o")
    works(train(folder / "k", "-x", 2, "--overwrite"))
    expect_equal(kept(folder / "k"), [2])
    assert not list((folder / "k").glob(".step_*.tmp"))
    scratch = works(train(folder / "new", "-y", 1))
    assert "scratch" in scratch.out + scratch.err, scratch.out


@case(trainer)
def resuming_with_other_options(folder):
    works(train(folder, "-x", 4, "--stop-at", 2))
    base = ["-i", TRAIN, "-o", folder, "-y", 1, "-b", 2, "-v", 0, "-s", 0]
    refused(run(*base, "-t", 16), 2, "16", "32")
    refused(run(*base, "-d", 768), 2, "768", "384")
    refused(run(*base, "-e", "L=3,NH=4,C=64,V=256,T=64"), 2, "L=3")
    refused(run(*base, "-i", f"{DATA}/uneq_train_*.bin"), 2, "uneq_train")
    result = works(run(*base, "-l", "1e-3", "-x", 6))
    text = result.out + result.err
    assert "0.001" in text or "1e-3" in text or "1e-03" in text, text
    expect_equal(steps_of(folder, "step"), [1, 2, 3, 4, 5, 6])
    expect_equal(events(folder, "step")[-1]["lr"], 1e-3)
    works(run(*base, "-x", 7, "-i", f"{DATA}/uneq_train_*.bin", "--allow-new-data"))


@case(trainer)
def damaged_checkpoints(folder):
    works(train(folder, "-x", 4, "-n", 2))
    newest = folder / "step_00000004"
    data = bytearray((newest / "optimizer.safetensors").read_bytes())
    data[-9] ^= 1
    (newest / "optimizer.safetensors").write_bytes(data)
    result = works(run("-i", TRAIN, "-o", folder, "-y", 1, "-b", 2, "-v", 0, "-s", 0))
    assert "step_00000004" in result.err and "optimizer.safetensors" in result.err, result.err
    expect_equal(steps_of(folder, "step"), [1, 2, 3, 4])
    expect_equal(events(folder, "start")[-1]["start_step"], 2)


# ---- generation ----------------------------------------------------------------------------------


@case(trainer, mpirun)
def prompts(folder):
    works(
        run(
            "-i",
            TEXT,
            "-e",
            "L=2,NH=4,C=64,T=64",
            "-x",
            150,
            "-b",
            8,
            "-l",
            "3e-3",
            "-o",
            folder,
            "-s",
            0,
        )
    )
    model = folder / "latest"
    one = works(run("-e", model, "--prompt", "the quick", "-g", 20))
    assert one.raw.startswith(b"the quick") and len(one.raw) in (29, 30), one.raw
    for n, stage in ((2, 0), (3, 3)):
        more = works(run("-e", model, "--prompt", "the quick", "-g", 20, "-z", stage, ranks=n))
        expect_equal(more.raw, one.raw)
    best = works(run("-e", model, "--prompt", "the quick", "-g", 20, "--temperature", 0))
    assert best.raw.startswith(b"the quick brown fox"), best.raw
    other = works(
        run("-e", model, "--prompt", "the quick", "-g", 20, "--seed", 2, "--temperature", 3)
    )
    assert other.raw != one.raw
    tokens = works(run("-e", model, "--prompt-tokens", "116,104,101", "-g", 5, "--temperature", 0))
    assert tokens.raw.startswith(b"the"), tokens.raw
    refused(run("-e", model, "--prompt", "the quick", "-g", 60), 2, 9, 60, 64)
    refused(run("-e", model, "--prompt", "the quick", "-g", 2**31 - 1), 2, 9, 2**31 - 1, 64)
    refused(run("-o", folder, "-y", 1, "--prompt", "the quick"), 2, "-y 1", "-e DIR")
    big = "L=1,NH=1,C=8,V=300,T=16"
    alone = run("-e", big, "--prompt", "a", "-g", 2)
    refused(alone, 2, "--prompt-tokens")
    assert "warning" not in alone.err, alone.err
    assert "  model  " in one.err and "tokens a step" not in one.err, one.err
    works(run("-e", big, "--prompt-tokens", "1,299", "-g", 2))
    refused(run("-e", big, "--prompt-tokens", "300", "-g", 2), 2, "300")


@case(trainer, mpirun)
def samples_and_hellaswag(folder):
    where = folder / "data" / "hellaswag"
    where.mkdir(parents=True)
    (where / "hellaswag_val.bin").write_bytes((DATA / "hellaswag.bin").read_bytes())
    alone = ["-e", TINY, "-t", "32", "-x", "0", "-h", "1", "-o", str(folder / "0")]
    done = subprocess.run(
        [str(TRAINER), *alone], cwd=folder, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    expect_equal([event["event"] for event in log(folder / "0")], ["start", "eval", "end"])
    results = []
    for n, stage in ((1, 0), (3, 3)):
        out = folder / str(n)
        arguments = [
            "-e",
            TINY,
            "-i",
            TRAIN,
            "-t",
            32,
            "-b",
            2,
            "-d",
            192,
            "-x",
            3,
            "-v",
            2,
            "-s",
            3,
            "-h",
            1,
        ]
        command = [str(TRAINER), *map(str, arguments), "-o", str(out), "-z", str(stage)]
        command = ["mpirun", "-np", str(n), *command] if n > 1 else command
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        expect_equal(steps_of(out, "eval"), [2, 3])
        for event in events(out, "eval"):
            expect_equal(" ".join(event), "event step name correct total accuracy")
            expect_equal((event["total"], event["accuracy"]), (13, event["correct"] / 13))
        results.append([events(out, "eval"), events(out, "sample")])
    expect_equal(results[0], results[1])
    (where / "hellaswag_val.bin").write_bytes((DATA / "hellaswag.bin").read_bytes()[:-2])
    done = subprocess.run(
        [*command, "--overwrite"], cwd=folder, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 2 and b"hellaswag_val.bin" in done.stderr, done.stderr


# ---- refusals and exit codes ---------------------------------------------------------------------


@case(trainer)
def bad_options(folder):
    refused(run("--nonsense", 1), 2, "--nonsense")
    refused(run("-b", "x"), 2, "-b")
    refused(run("--micro-batc", 2), 2, "--micro-batch")
    refused(run("-pn", 8, "-i", TRAIN), 2, "-pn", "mpirun")
    refused(run("-pi", "tcp", "-i", TRAIN), 2, "mpirun")
    refused(run("-w", 0, "-i", TRAIN), 2, "fp32")
    refused(run("-i", TRAIN, "-e", "L=2,NH=3,C=64"), 2, "NH", 64)
    refused(run("-i", TRAIN, "-e", TINY, "-t", 65), 2, 65, 64)
    refused(run("-i", TRAIN, "-e", TINY, "-t", 32, "-b", 4, "-d", 1000), 2, 896, 1024)
    refused(run("-i", TRAIN, "-e", "L=2,NH=4"), 2, "C")
    refused(run("-i", TRAIN, "-e", "nothing-like-it"), 2, "nothing-like-it")
    refused(run("-e", TINY), 2, "python3 data/tinyshakespeare.py", "-i FILE")
    expect_equal(run("-e", TINY, "-i", "two\nlines").err, "error: -i two?lines: no such file\n")
    refused(train("/proc/nowhere"), 2, "/proc/nowhere")
    with open("/dev/full", "w") as full:
        for question in (["--version"], ["--plan", "-e", "d6", "--json"]):
            command = [str(TRAINER), *question]
            lost = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
            expect_equal((lost.returncode, lost.stderr), (4, b"error: stdout: cannot be written\n"))
    os.mkfifo(DATA / "fifo.bin")
    big = "L=1,NH=1,C=8,V=300,T=16"
    refused(run("-i", TRAIN, "-e", big, "--tokenizer", DATA / "fifo.bin"), 2, "fifo.bin", "regular")
    for flag in ("--help", "--version"):
        result = works(run(flag))
        assert result.out and not result.err, result.err
    assert "--micro-batch" in run("--help").out
    (DATA / "gpt2").mkdir()
    refused(run("-i", TRAIN, "-e", "gpt2"), 2, "./gpt2")
    works(run("-i", TRAIN, "-e", TINY, "-t", 32, "-x", 1, "-s", 0, "-pi", "mpi", "-w", 1, "-f", 1))


@case(trainer, mpirun)
def bad_data(folder):
    says = {
        "trunc": ("size", 17310, 17410),
        "badmagic": ("magic", 20240521, 20240520),
        "badver": ("version", 9, 1),
        "hdrbig": ("size", 17410, 19024),
        "hdrneg": (-8193,),
        "empty": ("size", 0, 1024),
        "text": ("magic", 20240520),
        "html": ("magic", 20240520),
        "oov": (5000, 60000, 256),
        "missing": ("no such file",),
    }
    for name, words in says.items():
        path = DATA / f"{name}.bin"
        refused(train(folder, "-i", path), 2, path, *words)
        refused(train(folder, "-j", path, "-v", 1), 2, path, *words)
    for name in ("trunc", "oov"):
        refused(train(folder, "-i", DATA / f"{name}.bin", ranks=3), 2, name)
    begin = time.monotonic()
    refused(
        train(folder, "-i", DATA / "short.bin", "-b", 4, "-d", 512, ranks=4),
        2,
        "short.bin",
        60,
        513,
    )
    assert time.monotonic() - begin < 10
    (DATA / "exact.bin").write_bytes(make_data.shard(make_data.tokens(513, 1)))
    works(
        train(folder, "-i", DATA / "exact.bin", "-b", 4, "-d", 512, "-x", 1, "--overwrite", ranks=4)
    )
    works(run("--check-data", "-e", TINY, "-i", TRAIN, "-j", VAL))
    refused(run("--check-data", "-e", TINY, "-i", DATA / "oov.bin"), 2, 5000, 60000)


@case(trainer, mpirun)
def numbers_that_are_not_finite(folder):
    if "fp16" in run("--version").out:
        overflow = works(train(folder, "-x", 3, ZERO_FAULT="nan:step=2"))  # skipped, scale halved
        assert any("step 2" in line for line in overflow.ours()), overflow.err
        steps = events(folder, "step")
        expect_equal([e.get("skipped") for e in steps], [None, "overflow", None])
        expect_equal(steps[2]["loss_scale"], steps[1]["loss_scale"] / 2)
        return
    fault = {"ZERO_FAULT": "nan:rank=1:step=3:tensor=h.1.mlp.c_fc.weight"}
    stop = train(folder / "stop", "-x", 5, "-n", 2, ranks=2, **fault)
    expect_equal(stop.rc, 3)
    named = re.compile(r"step 3\b.*h\.1\.mlp\.c_fc\.weight.*rank \d")
    assert any(named.search(line) for line in stop.ours()), stop.err
    expect_equal(events(folder / "stop", "end")[0]["reason"], "nonfinite")
    expect_equal(os.readlink(folder / "stop" / "latest"), "step_00000002")
    works(train(folder / "two", "-x", 5, "--stop-at", 2))
    works(train(folder / "skip", "-x", 3, "--on-nan", "skip", ranks=2, **fault))
    skipped = events(folder / "skip", "step")[2]
    expect_equal((skipped["skipped"], skipped["step"]), ("nonfinite", 3))
    expect_equal(
        events(folder / "skip", "end")[0]["params_hash"],
        events(folder / "two", "end")[0]["params_hash"],
    )
    state = json.loads((folder / "skip" / "step_00000003" / "state.json").read_text())
    expect_equal((state["step"], state["adam_t"]), (3, 2))
    many = train(folder / "many", "-x", 9, "--on-nan", "skip", "--max-skips", 3, ZERO_FAULT="nan")
    expect_equal(many.rc, 3)


@case(trainer, mpirun)
def communication_failures(folder):
    result = train(folder / "skip", ranks=3, ZERO_FAULT="skip:rank=1:seq=40")
    expect_equal(result.rc, 5)
    result = train(
        folder / "stop", "--comm-timeout", 2, ranks=3, ZERO_FAULT="stop:rank=1:step=2", timeout=40
    )
    expect_equal(result.rc, 5)
    assert any("rank 1" in line for line in result.ours()), result.err


@case(trainer, mpirun)
def ranks_of_different_runs(folder):
    options = f"-e {TINY} -i {DATA}/even_train_0.bin -t 32 -b 1 -d 128 -x 2 -s 0"
    options = f"{options} --reduce exact".split()
    for more in (["-z", "1"], ["-l", "1e-3"], ["-s", "1"], ["--reduce", "fast"]):
        command = ["mpirun", "-np", "1", TRAINER, *options, ":", "-np", "1", TRAINER, *options]
        done = cases.run(*command, *more)
        assert done.returncode == 2 and "on rank 1 differ from" in done.stderr, (more, done.stderr)
    # Which rank has what the others do not.
    done = cases.run(*command, "-i", "nosuch.bin")
    where = f"(on rank 1, host {socket.gethostname()})"
    assert f"error: -i nosuch.bin: no such file {where}\n" in done.stderr, done.stderr
    done = cases.run("mpirun", "-np", 2, TRAINER, *options, "-i", "nosuch.bin")
    assert "error: -i nosuch.bin: no such file\n" in done.stderr, done.stderr


@case(trainer)
def full_disks(folder):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200000, 200000))

    works(train(folder, "-x", 2))
    arguments = ["-i", TRAIN, "-o", folder, "-y", 1, "-b", 2, "-x", 4, "-v", 0, "-s", 0]
    result = run(*arguments, setup=limit)
    expect_equal(result.rc, 4)
    assert any(
        "step_00000004" in line or "model.safetensors" in line for line in result.ours()
    ), result.err
    expect_equal(len(events(folder, "checkpoint_failed")), 1)
    works(run(*arguments))
    expect_equal(events(folder, "start")[-1]["start_step"], 2)


@case(trainer)
def killed_while_saving(folder):
    killed = train(folder, "-x", 6, "-n", 2, ZERO_FAULT="killsave:step=4")
    assert killed.rc in (-9, 137) and "killsave" in killed.out, (killed.rc, killed.out)
    expect_equal(sorted(path.name for path in folder.glob("step_*")), ["step_00000002"])
    works(run("-i", TRAIN, "-o", folder, "-y", 1, "-b", 2, "-v", 0, "-s", 0))
    expect_equal(steps_of(folder, "step"), [1, 2, 3, 4, 5, 6])
    expect_equal([event["start_step"] for event in events(folder, "start")], [0, 2])


@case(trainer)
def signals(folder):
    command = [
        str(TRAINER),
        "-e",
        TINY,
        "-i",
        TRAIN,
        "-t",
        "32",
        "-b",
        "2",
        "-x",
        "100000",
        "-v",
        "0",
    ]
    process = subprocess.Popen(
        [*command, "-s", "0", "-o", str(folder)], stdout=subprocess.PIPE, cwd=DATA
    )
    for line in process.stdout:
        if line.startswith(b"step 5/"):
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    expect_equal(process.returncode, 0)
    end = events(folder, "end")[0]
    expect_equal((end["reason"], steps_of(folder, "checkpoint")), ("signal", [end["step"]]))
    assert not list(folder.glob("DONE_*"))


if __name__ == "__main__":
    cases.main()
