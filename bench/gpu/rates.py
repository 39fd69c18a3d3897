#!/usr/bin/env python3
"""A bursty request trace as factors on a mean rate: rates.py TRACE.csv[.gz] > rates.txt

TRACE has a time stamp in its first column (Azure LLM inference 2023, `code`). Its first half an hour
becomes 160 parts; a factor is the requests in a part over the mean, at most 2.4, so that a mean of 35 %
of a service's capacity stays below 85 %.
"""

from __future__ import annotations

import csv
import gzip
import sys
from datetime import datetime

PARTS, SPAN_S, MOST = 160, 1800.0, 2.4


def main() -> None:
    opened = gzip.open(sys.argv[1], "rt") if sys.argv[1].endswith(".gz") else open(sys.argv[1])
    with opened as file:
        rows = csv.reader(file)
        next(rows)
        at = [datetime.fromisoformat(row[0][:26]).timestamp() for row in rows]
    counts = [0] * PARTS
    for t in at:
        part = int((t - at[0]) / SPAN_S * PARTS)
        if part < PARTS:
            counts[part] += 1
    mean = sum(counts) / PARTS
    for count in counts:
        print(f"{min(count / mean, MOST):.3f}")


if __name__ == "__main__":
    main()
