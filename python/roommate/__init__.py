"""Training loops that share a device.

>>> import roommate
>>> for batch in roommate.steps([1.0, 2.0, 3.0], batch_size=2):
...     print(batch)
[1.0, 2.0]
[3.0]
"""

from __future__ import annotations

from typing import TypeVar

from . import noise
from .session import Hook, Stopped, current
from .steps import Stage, Steps, steps

__all__ = [
    "Stage",
    "Steps",
    "Stopped",
    "managed",
    "noise",
    "on_checkpoint",
    "on_resume",
    "on_suspend",
    "start_done",
    "steps",
]

H = TypeVar("H", bound=Hook)


def managed() -> bool:
    """Whether a machine started this process and looks after it."""
    return current().managed


def start_done() -> float:
    """Work that survived from earlier attempts, as the machine knows it; 0 without a machine."""
    session = current()
    session.open(None)
    return session.start_done


def on_checkpoint(hook: H) -> H:
    """Calls this between two steps when the job has to be saved. Usable as a decorator."""
    current().on_checkpoint.append(hook)
    return hook


def on_suspend(hook: H) -> H:
    """Calls this before the job stands still, to let go of memory. Usable as a decorator."""
    current().on_suspend.append(hook)
    return hook


def on_resume(hook: H) -> H:
    """Calls this before the job goes on, to take back what it let go. Usable as a decorator."""
    current().on_resume.append(hook)
    return hook
