"""SDK for training loops and services that share a GPU with other jobs.

>>> import roommate
>>> for batch in roommate.steps([1.0, 2.0, 3.0], batch_size=2):
...     print(batch)
[1.0, 2.0]
[3.0]
"""

from __future__ import annotations

from typing import TypeVar

from . import noise
from .serve import serve
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
    "serve",
    "start_done",
    "steps",
]

H = TypeVar("H", bound=Hook)


def managed() -> bool:
    """Whether a Roommate daemon started this process and manages it."""
    return current().managed


def start_done() -> float:
    """Work kept from earlier attempts, in steps, as the daemon knows it; 0 without a daemon."""
    session = current()
    session.open(None)
    return session.start_done


def on_checkpoint(hook: H) -> H:
    """Registers a hook that saves the job; called between two steps. Usable as a decorator."""
    current().on_checkpoint.append(hook)
    return hook


def on_suspend(hook: H) -> H:
    """Registers a hook that frees memory before the job is suspended. Usable as a decorator."""
    current().on_suspend.append(hook)
    return hook


def on_resume(hook: H) -> H:
    """Registers a hook that restores the memory before the job resumes. Usable as a decorator."""
    current().on_resume.append(hook)
    return hook
