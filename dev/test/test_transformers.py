#!/usr/bin/env python3
# dev/test/test_transformers.py - models go to and fro between this trainer and `transformers`.
#
#   pip install torch transformers; python3 dev/test/test_transformers.py
#
# Run with versions 4.46 and (once, 2026-11-29) 5.24. Skips where the packages are missing. Logits of
# both programs for the same weights and tokens must agree within 1e-4; ours come from test_logits
# (make tests).

import os
import shutil
from pathlib import Path

import cases
import make_data
from cases import ROOT, TRAINER, case, expect_equal, expect_works, run, trainer

LOGITS = Path(os.environ.get("LOGITS", ROOT / "build/cpu-fp32/test_logits"))
TOLERANCE = 1e-4
TOKENS = [(7 * i * i + 3 * i + 1) % 256 for i in range(24)]
os.environ["HF_HUB_OFFLINE"] = "1"


def logits_program():
    return None if os.access(LOGITS, os.X_OK) else f"no {LOGITS}"


NEEDS = ("torch", "transformers", trainer, logits_program)


def our_logits(model, folder):
    import torch

    text = expect_works(run(LOGITS, model, *TOKENS, folder=folder)).stdout
    return torch.tensor([[float(word) for word in line.split()] for line in text.splitlines()])


def their_logits(model):
    import torch

    with torch.no_grad():
        return model.eval().float()(torch.tensor([TOKENS])).logits[0]


def difference(model, path, folder):
    ours, theirs = our_logits(path, folder), their_logits(model)
    expect_equal(ours.shape, theirs.shape)
    worst = (ours - theirs).abs().max().item()
    assert worst < TOLERANCE, f"logits differ by {worst}"
    assert ours.std() > 0.05, "logits all alike show nothing"
    return worst


def load(path):
    from transformers import GPT2LMHeadModel

    model, info = GPT2LMHeadModel.from_pretrained(path, output_loading_info=True)
    expect_equal({key: list(names) for key, names in info.items() if names}, {})
    return model


def train(folder, *options):
    (folder / "train.bin").write_bytes(make_data.shard(make_data.tokens(4000, 1)))
    return expect_works(run(TRAINER, "-i", "train.bin", "-b", 4, "-t", 24, "-s", 0, "-o", "out", *options,
                            folder=folder))  # fmt: skip


def random_model(**changes):
    """A model whose every tensor matters: biases and LayerNorms random too."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    shape = dict(vocab_size=257, n_positions=32, n_embd=48, n_layer=3, n_head=3)
    model = GPT2LMHeadModel(GPT2Config(**(shape | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@case(*NEEDS)
def ours_load_there(folder):
    train(folder, "-e", "L=2,NH=3,C=48,V=257,T=32", "-x", 30, "-l", 3e-3)
    model = load(folder / "out/latest")
    config = model.config
    expect_equal([config.n_layer, config.n_head, config.n_embd, config.vocab_size, config.n_positions],
                 [2, 3, 48, 257, 32])  # fmt: skip
    expect_equal(model.transformer.wte.weight.data_ptr(), model.lm_head.weight.data_ptr())
    return f"worst difference {difference(model, folder / 'out/latest', folder):.1e}"


@case(*NEEDS)
def theirs_load_here(folder):
    import torch

    notes = []
    for name, dtype, shards in (
        ("fp32", torch.float32, "5GB"),
        ("bf16", torch.bfloat16, "5GB"),
        ("fp16", torch.float16, "5GB"),
        ("sharded", torch.float32, "100KB"),
    ):
        model = random_model().to(dtype)
        model.save_pretrained(folder / name, max_shard_size=shards)
        files = sorted(path.name for path in (folder / name).glob("*.safetensors"))
        expect_equal(len(files) > 1, name == "sharded")
        notes.append(f"{name} {difference(model, folder / name, folder):.1e}")
    return ", ".join(notes)


@case(*NEEDS, "safetensors")
def every_tensor_counts(folder):
    """No tensor is so weak that reading it wrongly could hide below the tolerance."""
    import torch
    from safetensors.torch import load_file, save_file

    model = random_model()
    model.save_pretrained(folder / "model")
    path = folder / "model/model.safetensors"
    good, tensors = our_logits(folder / "model", folder), load_file(path)
    for name in tensors:
        # Noise and not a constant, which the next LayerNorm or softmax may take out again.
        noise = 0.5 * torch.randn_like(tensors[name])
        save_file(tensors | {name: tensors[name] + noise}, path, {"format": "pt"})
        change = (our_logits(folder / "model", folder) - good).abs().max().item()
        assert change > 10 * TOLERANCE, (name, change)
    return f"{len(tensors)} tensors"


@case(*NEEDS)
def there_and_back_again(folder):
    """From a model of theirs, a few steps here, back there; then saved there and hashed here."""
    random_model(vocab_size=300).save_pretrained(folder / "model")
    train(folder, "-e", "model", "-x", 3)
    model = load(folder / "out/latest")
    worst = difference(model, folder / "out/latest", folder)
    model.save_pretrained(folder / "again")
    expected = run(TRAINER, "--hash", "out/latest", folder=folder).stdout
    expect_equal(run(TRAINER, "--hash", "again", folder=folder).stdout, expected)
    return f"worst difference {worst:.1e}"


@case(*NEEDS)
def what_is_not_gpt2_is_refused(folder):
    for changes, word in (
        ({"activation_function": "relu"}, "activation_function"),
        ({"n_inner": 100}, "n_inner"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        ({"add_cross_attention": True}, "add_cross_attention"),
    ):
        random_model(**changes).save_pretrained(folder / "model")
        cases.expect_fails(run(TRAINER, "--hash", "model", folder=folder), 2, word)
        shutil.rmtree(folder / "model")


if __name__ == "__main__":
    cases.main()
