"""Pauses of a job at changes of its SM range, from the times of its steps."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

from room import Tick, median


def pauses(ticks: list[Tick]) -> dict[str, Any]:
    """Per change: time from the end of the last step in the old SM range to the end of the first
    step in the new one, minus the usual step time there.
    """
    stays = [list(stay) for _, stay in groupby(ticks, key=lambda t: (t.first, t.sms))]
    where = lambda stay: (stay[0].first, stay[0].sms)
    gaps: dict[tuple[int, int], list[float]] = {}
    for stay in stays:
        gaps.setdefault(where(stay), []).extend(b.at - a.at for a, b in pairwise(stay[1:]))
    usual = {part: median(found) for part, found in gaps.items()}
    moves = [(a, b) for a, b in pairwise(stays) if len(b) >= 3]
    found = sorted(1e3 * (b[0].at - a[-1].at - usual[where(b)]) for a, b in moves)
    at = lambda part: found[min(len(found) - 1, int(part * len(found)))] if found else None
    return {"moves": len(stays) - 1, "measured": len(found), "pause_p50_ms": at(0.5),
            "pause_p99_ms": at(0.99), "pause_longest_ms": at(1.0),
            "step_ms": {f"{sms} from {first}": 1e3 * g for (first, sms),
                        g in sorted(usual.items())}}
