#!/usr/bin/env python3
"""Captures a model as a CUDA graph again and again, and compares its results with the model's own.

usage: captures.py [--rounds 20]. Prints how often they were equal; for the part `gate` of run.sh.
"""

from __future__ import annotations

import argparse

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.manual_seed(7)
    layers = [torch.nn.Linear(1024, 1024), torch.nn.ReLU()] * 8
    model = torch.nn.Sequential(*layers).cuda().eval()
    given = torch.randn(64, 1024, device="cuda")
    equal = 0
    with torch.no_grad():
        wanted = model(given)
        torch.cuda.synchronize()
        for _ in range(rounds):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = model(given)
            for _ in range(20):
                graph.replay()
            torch.cuda.synchronize()
            equal += bool(torch.allclose(found, wanted, rtol=1e-4, atol=1e-5))
    print(f"{equal} of {rounds} equal")
    if equal < rounds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
