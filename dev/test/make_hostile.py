#!/usr/bin/env python3
# dev/test/make_hostile.py FOLDER - model files and folders that must be refused: one line, exit 2.
#
# Files named *.safetensors, *.bin, and folders with config.json. Standard library only.

import json
import os
import struct
import sys
from pathlib import Path

CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 16,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "activation_function": "gelu_new",
}


def tensor_shapes(L=2, C=32, V=256, T=16):
    shapes = {"wte.weight": [V, C], "wpe.weight": [T, C]}
    for layer in range(L):
        for name, shape in {
            "ln_1": [C], "attn.c_attn": [C, 3 * C], "attn.c_proj": [C, C],
            "ln_2": [C], "mlp.c_fc": [C, 4 * C], "mlp.c_proj": [4 * C, C],
        }.items():  # fmt: skip
            shapes[f"h.{layer}.{name}.weight"] = shape
            shapes[f"h.{layer}.{name}.bias"] = shape[-1:]
    return shapes | {"ln_f.weight": [C], "ln_f.bias": [C]}


def elements(shape):
    count = 1
    for size in shape:
        count *= size
    return count


def header_of(shapes, dtype="F32", width=4):
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + width * elements(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    return header, at


def file_of(header, data_bytes, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    return struct.pack("<Q", length % 2**64) + text + bytes(data_bytes)


def edited(name, **changes):
    """A good header with one entry changed."""
    header, size = header_of(tensor_shapes())
    header[name] = header[name] | changes
    return file_of(header, size)


def safetensors():
    good, size = header_of(tensor_shapes())
    text = json.dumps(good)
    yield "empty", b""
    yield "text", b"this is not a model at all, but long enough"
    yield "html", b"<!DOCTYPE html><html><body>404: Not Found</body></html>"
    yield "git_lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 548105171\n"
    yield "zeros", bytes(4096)
    yield "header_huge", file_of(good, size, 2**62)
    yield "header_negative", file_of(good, size, -1)
    yield "header_too_long", file_of(good, 0, len(text) + 1)
    yield "header_cut", file_of(text.encode()[:-10], size)
    yield "header_100MB", struct.pack("<Q", 100 << 20)
    yield "truncated", file_of(good, size - 1)
    yield "grown", file_of(good, size + 1)
    yield "offset_negative", edited("wte.weight", data_offsets=[-32768, 0])
    yield "offset_huge", edited("wte.weight", data_offsets=[0, 2**60])
    yield "offset_beyond_double", edited("wte.weight", data_offsets=[0, 10**400])
    yield "offset_fraction", edited("wte.weight", data_offsets=[0, 32768.5])
    yield "overlap", edited("wpe.weight", data_offsets=[0, 2048])
    yield "shape_negative", edited("wte.weight", shape=[-256, -32])
    yield "shape_overflow", edited("wte.weight", shape=[2**32, 2**32])
    yield "shape_swapped", edited("wte.weight", shape=[32, 256])
    yield "dtype_unknown", edited("wte.weight", dtype="F33")
    yield "dtype_int", edited("ln_f.bias", dtype="I32")
    yield "name_twice", file_of((text[:-1] + "," + text[1:]).encode(), size)
    yield "deep", file_of(b'{"a":' + b"[" * 200000 + b"]" * 200000 + b"}", 0)
    yield "wide", file_of(b'{"a":[' + b"0," * (12 << 20) + b"0]}", 0)
    for count in (100_000, 1_000_000):
        entry = '"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        yield f"{count}_tensors", file_of(f"{{{','.join(entry % i for i in range(count))}}}".encode(), 0)
    missing = {name: shape for name, shape in tensor_shapes().items() if name != "h.1.ln_2.bias"}
    yield "tensor_missing", file_of(*header_of(missing))
    yield "tensor_unknown", file_of(*header_of(tensor_shapes() | {"score.weight": [2, 2]}))
    yield "name_line_end", file_of(*header_of(tensor_shapes() | {"a\nb": [2]}))


def llmc():
    L, NH, C, V, T, padded = 2, 2, 32, 256, 16, 256
    count = sum(map(elements, tensor_shapes(L, C, V, T).values()))

    def file(body, magic=20240326, version=3, **changes):
        fields = dict(T=T, V=V, L=L, NH=NH, C=C, padded=padded) | changes
        head = [magic, version, *fields.values()] + [0] * 248
        return struct.pack("<256i", *head) + bytes(body)

    yield "magic", file(4 * count, magic=1)
    yield "version", file(4 * count, version=4)
    yield "version_short_body", file(4 * count, version=5)
    yield "truncated", file(4 * count - 1)
    yield "grown", file(4 * count + 1)
    yield "header_only", struct.pack("<2i", 20240326, 3)
    yield "layers_negative", file(4 * count, L=-2)
    yield "layers_huge", file(4 * count, L=2**31 - 1)
    yield "channels_huge", file(4 * count, C=2**31 - 2)
    yield "heads", file(4 * count, NH=5)
    yield "heads_zero", file(4 * count, NH=0)
    yield "padded_below", file(4 * count, padded=255)
    yield "padded_huge", file(4 * count, padded=2**31 - 1)


def configs():
    for name, changes in {
        "relu": {"activation_function": "relu"},
        "inner": {"n_inner": 100},
        "untied": {"tie_word_embeddings": False},
        "llama": {"model_type": "llama"},
        "scaled": {"scale_attn_by_inverse_layer_idx": True},
        "heads": {"n_head": 3},
        "negative": {"n_layer": -1},
        "huge": {"n_layer": 2**31 - 1},
        "beyond": {"n_embd": 10**300},
        "text": {"n_embd": "32"},
        "more_layers": {"n_layer": 3},
        "fewer_layers": {"n_layer": 1},
        "other_width": {"n_embd": 64},
    }.items():
        yield name, json.dumps(CONFIG | changes).encode()
    yield "empty", b""
    yield "array", b"[]"
    yield "deep", b'{"a":' * 100000 + b"1" + b"}" * 100000
    yield "twice", json.dumps(CONFIG).replace('"n_head": 2', '"n_head": 2, "n_head": 4').encode()
    yield "large", json.dumps(CONFIG | {"x": "y" * (2 << 20)}).encode()


def indices():
    names = list(tensor_shapes())
    yield "outside", {"weight_map": {name: "../config.safetensors" for name in names}}
    yield "absolute", {"weight_map": {name: "/etc/passwd" for name in names}}
    yield "missing_file", {"weight_map": {name: "nowhere.safetensors" for name in names}}
    yield "no_map", {"metadata": {}}
    yield "empty_map", {"weight_map": {}}
    yield "number", {"weight_map": {name: 7 for name in names}}


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    good = file_of(*header_of(tensor_shapes()))
    for name, data in safetensors():
        (folder / f"st_{name}").mkdir()
        (folder / f"st_{name}" / "config.json").write_text(json.dumps(CONFIG))
        (folder / f"st_{name}" / "model.safetensors").write_bytes(data)
    for name, data in llmc():
        (folder / f"llmc_{name}.bin").write_bytes(data)
    for name, data in configs():
        (folder / f"config_{name}").mkdir()
        (folder / f"config_{name}" / "config.json").write_bytes(data)
        (folder / f"config_{name}" / "model.safetensors").write_bytes(good)
    for name, index in indices():
        (folder / f"index_{name}").mkdir()
        (folder / f"index_{name}" / "config.json").write_text(json.dumps(CONFIG))
        (folder / f"index_{name}" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "only_config").mkdir()
    (folder / "only_config" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "empty_folder").mkdir()
    os.mkfifo(folder / "fifo.safetensors")


if __name__ == "__main__":
    main()
