#!/usr/bin/env python3
# dev/bench/gpt2_torch.py - the same training step in PyTorch, to compare with.
#
#   gpt2_torch.py LAYERS HEADS CHANNELS BATCH [STEPS]     T = 1024, one GPU
#
# What a careful PyTorch user has: torch.compile, flash attention (scaled_dot_product_attention), bf16
# products under autocast with fp32 weights, fused AdamW, clipping of the norm, the vocabulary padded
# to a multiple of 128. The last line is "tokens_per_s X mib Y": the median step, the peak memory.

import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional

T, VOCABULARY, PADDED = 1024, 50257, 50304


class Block(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        self.fc = nn.Linear(channels, 4 * channels)
        self.fcproj = nn.Linear(4 * channels, channels)

    def forward(self, x):
        batch, length, channels = x.shape
        qkv = self.qkv(self.ln_1(x)).view(batch, length, 3, self.heads, channels // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(out.transpose(1, 2).reshape(batch, length, channels))
        return x + self.fcproj(functional.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers, heads, channels):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(PADDED, channels), nn.Embedding(T, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(channels)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return self.loss(x, targets)

    def loss(self, x, targets):
        logits = functional.linear(self.ln_f(x), self.wte.weight)
        return functional.cross_entropy(logits.view(-1, PADDED), targets.reshape(-1))


def compiled(model):
    """The whole as one graph; deep models block by block, since one graph would take minutes."""
    if len(model.blocks) <= 12:
        return torch.compile(model)
    for block in model.blocks:
        block.compile()
    model.loss = torch.compile(model.loss)
    return model


def main():
    layers, heads, channels, batch = map(int, sys.argv[1:5])
    steps = int(sys.argv[5]) if len(sys.argv) > 5 else 20
    torch.manual_seed(1337)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    model = GPT2(layers, heads, channels).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    step_loss = compiled(model)
    tokens = torch.randint(VOCABULARY, (steps, batch, T + 1), device=device)
    seconds = []
    for step in range(steps):
        begin = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = step_loss(tokens[step, :, :-1], tokens[step, :, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()  # waits for the step, as a trainer that prints the loss does
        seconds.append(time.perf_counter() - begin)
        if step in (0, steps - 1):
            print(f"step {step + 1} loss {value:.4f} {1e3 * seconds[-1]:.1f} ms", flush=True)
    median = statistics.median(seconds[steps // 2 :])
    mib = torch.cuda.max_memory_reserved() / 2**20
    print(f"torch {torch.__version__}: tokens_per_s {batch * T / median:.0f} mib {mib:.0f}")


if __name__ == "__main__":
    main()
