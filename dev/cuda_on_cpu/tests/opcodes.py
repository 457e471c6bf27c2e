#!/usr/bin/env python3
"""Checks that a cubin of tensor_core.cu really uses the tensor cores.

    opcodes.py FILE.cubin

Counts machine instructions without a disassembler: from sm_70 on an instruction has 16 bytes, and
the lowest 12 bits are the opcode. Fails if the GEMM kernels have no HMMA (matrix product), LDSM
(ldmatrix), LDGSTS (cp.async) or BAR (barrier).
"""
import collections
import struct
import sys

OPCODES = {0x23C: "HMMA", 0x83B: "LDSM", 0xFAE: "LDGSTS", 0xB1D: "BAR"}


def sections(elf):
    """Yields (name, bytes) of an ELF64 file."""
    offset, = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * size) for i in range(count)]
    for header in headers:
        begin = headers[names][4] + header[0]
        name = elf[begin : elf.index(b"\0", begin)].decode()
        yield name, elf[header[4] : header[4] + header[5]]


def main():
    with open(sys.argv[1], "rb") as file:
        elf = file.read()
    checked = 0
    for name, code in sections(elf):
        if not (name.startswith(".text.") and "gemm_kernel" in name):
            continue
        words = (struct.unpack_from("<Q", code, i)[0] & 0xFFF for i in range(0, len(code), 16))
        counts = collections.Counter(OPCODES[w] for w in words if w in OPCODES)
        missing = [op for op in OPCODES.values() if not counts[op]]
        if missing:
            sys.exit(f"{name[6:]}: no {', '.join(missing)}")
        checked += 1
    if checked != 2:
        sys.exit(f"{checked} GEMM kernels, expected 2")


if __name__ == "__main__":
    main()
