#!/usr/bin/env python3
"""A service on CPU cores: recognises digits in images of 8 x 8 pixels.

usage: a job with `class: service`, or `digits.py --time` for the CPU time of batches

A request is {"pixels": [64 numbers from 0 to 1, row by row]}, an answer {"digit": 7, "score": 0.93}.

The model compares an image with every digit, blurred and moved by up to two pixels. It makes these
templates anew for each batch, as a large model reads its weights anew for each batch: so a batch
costs about 3 ms, and each image in it 0.3 ms more (3.3 and 0.24 where it was written). Larger
batches are cheaper per image, and later.
"""

from __future__ import annotations

import math
import sys
import time
from operator import mul
from typing import Any

SIDE = 8

DIGITS = """
..####.. ...##... ..####.. ..####.. ....##.. .######. ..####.. .######. ..####.. ..####..
.##..##. ..###... .##..##. .##..##. ...###.. .##..... .##..... .....##. .##..##. .##..##.
.##..##. ...##... .....##. .....##. ..####.. .##..... .##..... ....##.. .##..##. .##..##.
.##..##. ...##... ....##.. ...###.. .##.##.. .#####.. .#####.. ....##.. ..####.. ..#####.
.##..##. ...##... ...##... .....##. .######. .....##. .##..##. ...##... .##..##. .....##.
.##..##. ...##... ..##.... .....##. ....##.. .....##. .##..##. ...##... .##..##. .....##.
.##..##. ...##... .##..... .##..##. ....##.. .##..##. .##..##. ..##.... .##..##. ....##..
..####.. ..####.. .######. ..####.. ....##.. ..####.. ..####.. ..##.... ..####.. ..###...
"""


def image(digit: int) -> list[float]:
    """The pixels of a digit."""
    lines = [line.split()[digit] for line in DIGITS.strip().splitlines()]
    return [1.0 if dot == "#" else 0.0 for line in lines for dot in line]


def unit(pixels: list[float]) -> list[float]:
    """The pixels less their mean, with length 1, so that products do not depend on brightness."""
    mean = sum(pixels) / len(pixels)
    length = math.sqrt(sum((p - mean) ** 2 for p in pixels)) or 1.0
    return [(p - mean) / length for p in pixels]


def moved(pixels: list[float], down: int, right: int) -> list[float]:
    near = range(SIDE)
    return [
        pixels[(y - down) * SIDE + x - right] if y - down in near and x - right in near else 0.0
        for y in near
        for x in near
    ]


def blurred(pixels: list[float]) -> list[float]:
    """Each pixel with a part of the neighbours left and right."""
    sides = zip([0.0, *pixels], pixels, [*pixels[1:], 0.0], strict=False)
    return [0.25 * left + 0.5 * here + 0.25 * right for left, here, right in sides]


def templates() -> list[tuple[int, list[float]]]:
    near = range(-2, 3)
    moves = [(down, right) for down in near for right in near if abs(down) + abs(right) <= 2]
    digits = [(digit, image(digit)) for digit in range(10)]
    return [(d, unit(blurred(moved(p, *move)))) for d, p in digits for move in moves]


def recognise(request: Any, known: list[tuple[int, list[float]]]) -> dict[str, Any]:
    pixels = request.get("pixels") if isinstance(request, dict) else None
    if not isinstance(pixels, list) or len(pixels) != SIDE * SIDE:
        # Not an exception, which would fail the other requests of the batch as well.
        return {"error": f"pixels must be a list of {SIDE * SIDE} numbers"}
    try:
        seen = unit([float(p) for p in pixels])
    except (TypeError, ValueError):
        return {"error": "pixels must be numbers"}
    score, digit = max((sum(map(mul, seen, template)), digit) for digit, template in known)
    return {"digit": digit, "score": round(score, 3)}


def predict(requests: list[Any]) -> list[Any]:
    known = templates()
    return [recognise(request, known) for request in requests]


def report_times() -> None:
    for size in (1, 8, 32):
        batch = [{"pixels": image(n % 10)} for n in range(size)]
        took = []
        for _ in range(30):
            began = time.process_time()
            predict(batch)
            took.append(time.process_time() - began)
        print(f"batch {size}: {1e3 * sorted(took)[len(took) // 2]:.2f} ms")


if __name__ == "__main__":
    if "--time" in sys.argv[1:]:
        report_times()
    else:
        import roommate

        roommate.serve(predict, warm=lambda: predict([{"pixels": image(0)}]))
