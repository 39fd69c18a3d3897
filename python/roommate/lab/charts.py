"""Charts of runs, with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .journal import Account
from .program import optional

# The colours of the program's own reports, for light paper.
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")

MOST_NAMED = 40
"""Stays beyond which a chart does not write names into them."""


def gantt(account: Account, title: str, ax: Any = None) -> Any:
    """A row for each GPU, a bar for each stay of a job; jobs that share a GPU share its row."""
    ax = ax or _axes(height=1.2 + 0.28 * max(account.gpus, 4))
    rows = {job.name: i for i, job in enumerate(account.jobs)}
    names = sum(len(stay.gpus) for stay in account.stays) <= MOST_NAMED
    for gpu, stays in _by_gpu(account).items():
        lanes = _lanes(stays)
        height = 0.86 / (1 + max(lane for _, lane in lanes))
        for stay, lane in lanes:
            bottom, length = gpu - 0.43 + lane * height, stay.to_s - stay.from_s
            colour = COLOURS[rows[stay.job] % len(COLOURS)]
            bar = (stay.from_s / 3600, bottom), length / 3600, height
            ax.add_patch(_rectangle(*bar, facecolor=colour, edgecolor="white", linewidth=0.6))
            if names:
                middle = (stay.from_s + length / 2) / 3600, bottom + height / 2
                ax.text(*middle, stay.job, ha="center", va="center", fontsize=7, clip_on=True)
    end = max((stay.to_s for stay in account.stays), default=0.0)
    ax.set(xlim=(0, end / 3600 or 1), ylim=(account.gpus - 0.5, -0.5), title=title)
    ax.set(xlabel="time in hours", ylabel="GPU")
    ax.yaxis.get_major_locator().set_params(integer=True)
    return ax


def cdf(times: Mapping[str, list[float]], title: str, ax: Any = None) -> Any:
    """The share of jobs that were completed within a time, a line for each policy."""
    ax = ax or _axes(height=3.6)
    for i, (name, values) in enumerate(times.items()):
        ordered = sorted(values)
        shares = [(k + 1) / len(ordered) for k in range(len(ordered))]
        hours = [value / 3600 for value in ordered]
        ax.step(hours, shares, where="post", label=name, color=COLOURS[i % len(COLOURS)])
    ax.set(xscale="log", ylim=(0, 1), title=title)
    ax.set(xlabel="completion time in hours", ylabel="share of jobs")
    if len(times) > 1:
        ax.legend(frameon=False)
    return ax


def _by_gpu(account: Account) -> dict[int, list[Any]]:
    on: dict[int, list[Any]] = {}
    for stay in sorted(account.stays, key=lambda stay: stay.from_s):
        for gpu in stay.gpus:
            on.setdefault(gpu, []).append(stay)
    return on


def _lanes(stays: list[Any]) -> list[tuple[Any, int]]:
    """Each stay of a GPU with a lane that no other uses at the same time."""
    ends: list[float] = []
    found = []
    for stay in stays:
        free = (lane for lane, end in enumerate(ends) if end <= stay.from_s)
        lane = next(free, len(ends))
        ends[lane : lane + 1] = [stay.to_s]
        found.append((stay, lane))
    return found


def _axes(height: float) -> Any:
    _, ax = optional("matplotlib.pyplot").subplots(figsize=(9, height), layout="constrained")
    return ax


def _rectangle(at: tuple[float, float], width: float, height: float, **style: Any) -> Any:
    return optional("matplotlib.patches").Rectangle(at, width, height, **style)
