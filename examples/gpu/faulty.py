#!/usr/bin/env python3
"""Trains like train.py, but fails in its first attempts after a number of steps. Later attempts
continue from the checkpoint.

usage: faulty.py oom|illegal|none [--after 100] [--times 1] --task resnet18-imagenet [OPTIONS]

OPTIONS are those of train.py.

oom allocates all of the GPU's memory; illegal writes to an invalid address, which under MPS also
ends the co-located jobs.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from pathlib import Path

import train

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry wild()
{
    .reg .b64 %at;
    .reg .b32 %value;
    mov.u64 %at, 16;
    mov.u32 %value, 1;
    st.global.u32 [%at], %value;
    ret;
}
\0"""


def out_of_memory() -> None:
    import torch

    kept = []
    while True:
        kept.append(torch.empty(4 << 30, dtype=torch.uint8, device="cuda"))


def illegal_access() -> None:
    """Runs a kernel that writes to address 16; the driver compiles it."""
    import torch

    torch.cuda.synchronize()
    cuda = ctypes.CDLL("libcuda.so.1")
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    if status := cuda.cuModuleLoadData(ctypes.byref(module), PTX):
        raise SystemExit(f"faulty: the driver does not compile the kernel: error {status}")
    if status := cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"wild"):
        raise SystemExit(f"faulty: the kernel is not found: error {status}")
    cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    torch.cuda.synchronize()
    raise SystemExit("faulty: the illegal access went through")


DEEDS = {"oom": out_of_memory, "illegal": illegal_access, "none": lambda: None}


def arguments() -> argparse.ArgumentParser:
    parser = train.arguments()
    parser.add_argument("deed", choices=list(DEEDS))
    parser.add_argument("--after", type=float, default=100, help="steps before the failure")
    parser.add_argument("--times", type=int, default=1, help="number of attempts that fail")
    return parser


def main() -> None:
    args = arguments().parse_args()
    mark = Path(os.environ.get("ROOMMATE_CHECKPOINT", ".")) / f"went-wrong-{args.deed}"
    times = len(mark.read_text()) if mark.exists() else 0

    def during(done: float) -> None:
        if done >= args.after and times < args.times:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text("x" * (times + 1))
            print(f"{args.deed} after {done:.0f} steps", flush=True)
            DEEDS[args.deed]()

    train.train(args, during)


if __name__ == "__main__":
    main()
