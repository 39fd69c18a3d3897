#!/usr/bin/env python3
"""A service on a GPU: one of the models of examples/gpu/zoo.py, captured as CUDA graphs.

usage: a job with `class: service`: gpu_model.py --model resnet50 [--max-batch 32]

A request is any JSON object and stands for one input, which is made on the GPU: what is measured is the
model, not the transport of pictures. An answer is {"rows": N}, the size of the batch it was in.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import torch
import zoo

import roommate
from roommate import gpu


class Features(torch.nn.Module):
    """A model whose result is one tensor."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        out = self.model(x)
        return out.last_hidden_state[:, 0] if hasattr(out, "last_hidden_state") else out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, choices=list(zoo.SERVE))
    parser.add_argument("--max-batch", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(7)
    model, make = zoo.build("serve", args.model)
    model = Features(model.cuda().half())
    inputs = make(args.max_batch)[0]
    inputs = inputs.half() if inputs.is_floating_point() else inputs
    sizes = [s for s in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64) if s < args.max_batch] + [args.max_batch]
    run = gpu.graphs(model, [(size, *inputs.shape[1:]) for size in sizes], dtype=inputs.dtype)

    def predict(batch: list[Any]) -> list[Any]:
        rows = len(batch)
        run(inputs[:rows]).sum().item()  # waits for the GPU
        return [{"rows": rows}] * rows

    roommate.serve(predict, max_batch=args.max_batch, warm=lambda: predict([{}]))


if __name__ == "__main__":
    main()
