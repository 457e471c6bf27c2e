#!/usr/bin/env python3
"""Golden values for test_gpt2.cu: a small GPT-2 written independently, in PyTorch and in double.

    python3 dev/golden/make_golden.py     (needs torch and numpy; writes gpt2_tiny.bin beside it)

The file was made with PyTorch 1.13 and NumPy 1.24; the program is deterministic, and other versions
give the same values up to rounding in double.

The model is GPT-2 as `transformers` computes it (GPT2LMHeadModel with its default configuration):
activation "gelu_new", layer_norm_epsilon 1e-5, Conv1D weights stored [in, out], scores scaled by
1/sqrt(head size), the head tied to wte and without bias, no dropout. Every size is awkward: nothing
but T is a power of two, the vocabulary is odd, the batch is shorter than T.

Initial weights are much larger than GPT-2's, so that every term counts, and rounded to bf16, so
that they are exact in every type the trainer is built for (fp16: but for the few below 6e-5).
AdamW's eps is of the size of the gradients, so that an update is a smooth function of them:
elements whose gradient is zero but for rounding (the bias of the keys, to which softmax is blind)
stay.

Layout of gpt2_tiny.bin, little-endian, without padding:
  int32    magic 0x6E6C6467 ("gdln"), version 1, L, NH, C, V, T, B, batch_T, steps, parameters, 0
  float64  lr, beta1, beta2, eps, weight_decay, clip
  int32    tokens   (steps, B, batch_T)
  int32    targets  (steps, B, batch_T)
  float32  weights  (parameters)          before step 1; tensors in the order of tensor_shapes()
  float32  logits   (B, batch_T, V)       of the first batch
  float32  gradients (parameters)         of the mean loss of the first batch, before clipping
  float64  losses   (steps)               each before its update
  float64  norms    (steps)               before clipping
  float32  weights  (parameters)          after the last step
"""
import math
import os
import struct

import numpy as np
import torch
import torch.nn.functional as F

L, NH, C, V, T = 3, 3, 36, 257, 32
B, BATCH_T, STEPS = 2, 24, 10
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP = 1e-2, 0.9, 0.95, 1e-3, 0.1, 0.5


def tensor_shapes():
    """Name and shape of each tensor, in the order of a checkpoint."""
    shapes = [("wte.weight", (V, C)), ("wpe.weight", (T, C))]
    for layer in range(L):
        for name, shape in [
            ("ln_1.weight", (C,)), ("ln_1.bias", (C,)),
            ("attn.c_attn.weight", (C, 3 * C)), ("attn.c_attn.bias", (3 * C,)),
            ("attn.c_proj.weight", (C, C)), ("attn.c_proj.bias", (C,)),
            ("ln_2.weight", (C,)), ("ln_2.bias", (C,)),
            ("mlp.c_fc.weight", (C, 4 * C)), ("mlp.c_fc.bias", (4 * C,)),
            ("mlp.c_proj.weight", (4 * C, C)), ("mlp.c_proj.bias", (C,)),
        ]:
            shapes.append((f"h.{layer}.{name}", shape))
    return shapes + [("ln_f.weight", (C,)), ("ln_f.bias", (C,))]


def initial_weights(random):
    weights = {}
    for name, shape in tensor_shapes():
        std = 1 / math.sqrt(shape[0]) if "c_" in name and len(shape) == 2 else 0.2
        mean = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
        values = random.normal(mean, std, shape)
        exact = torch.from_numpy(values).to(torch.bfloat16).to(torch.float64)
        weights[name] = exact.requires_grad_(True)
    return weights


def gelu_new(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def model(w, tokens):
    """Logits (B, t, V) of tokens (B, t)."""
    batch, t = tokens.shape
    x = w["wte.weight"][tokens] + w["wpe.weight"][:t]
    future = torch.ones(t, t, dtype=torch.bool).triu(1)

    def norm(x, name):
        return F.layer_norm(x, (C,), w[name + ".weight"], w[name + ".bias"], eps=1e-5)

    def conv1d(x, name):
        return x @ w[name + ".weight"] + w[name + ".bias"]

    for layer in range(L):
        h = f"h.{layer}."
        q, k, v = conv1d(norm(x, h + "ln_1"), h + "attn.c_attn").split(C, dim=2)
        q, k, v = (a.view(batch, t, NH, C // NH).transpose(1, 2) for a in (q, k, v))
        scores = (q @ k.transpose(2, 3) / math.sqrt(C // NH)).masked_fill(future, -math.inf)
        mixed = (scores.softmax(dim=3) @ v).transpose(1, 2).reshape(batch, t, C)
        x = x + conv1d(mixed, h + "attn.c_proj")
        hidden = gelu_new(conv1d(norm(x, h + "ln_2"), h + "mlp.c_fc"))
        x = x + conv1d(hidden, h + "mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def loss_of(logits, targets):
    return F.cross_entropy(logits.reshape(-1, V), targets.reshape(-1))


def flat(tensors):
    return torch.cat([a.detach().reshape(-1) for a in tensors]).numpy().astype("<f4")


def main():
    random = np.random.RandomState(1234)
    weights = initial_weights(random)
    tokens = random.randint(0, V, (STEPS, B, BATCH_T))
    targets = random.randint(0, V, (STEPS, B, BATCH_T))
    parameters = list(weights.values())
    initial = flat(parameters)

    decayed = [a for a in parameters if a.dim() == 2]
    others = [a for a in parameters if a.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY},
         {"params": others, "weight_decay": 0.0}],
        lr=LR, betas=(BETA1, BETA2), eps=EPS)

    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = model(weights, torch.from_numpy(tokens[step]))
        loss = loss_of(logits, torch.from_numpy(targets[step]))
        loss.backward()
        if step == 0:
            first_logits, gradients = flat([logits]), flat([a.grad for a in parameters])
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        assert norm > 1.2 * CLIP, "clipping must be active at every step"
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
        print(f"step {step + 1:2d}   loss {losses[-1]:.6f}   norm {norms[-1]:.6f}")

    header = (0x6E6C6467, 1, L, NH, C, V, T, B, BATCH_T, STEPS, len(initial), 0)
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gpt2_tiny.bin")
    with open(path, "wb") as file:
        file.write(struct.pack("<12i", *header))
        file.write(struct.pack("<6d", LR, BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP))
        for array, dtype in [(tokens, "<i4"), (targets, "<i4"), (initial, "<f4"),
                             (first_logits, "<f4"), (gradients, "<f4"), (losses, "<f8"),
                             (norms, "<f8"), (flat(parameters), "<f4")]:
            file.write(np.asarray(array).astype(dtype).tobytes())
    print(f"{path}: {os.path.getsize(path)} bytes, {len(initial)} parameters")


if __name__ == "__main__":
    main()
