"""The program ``roommate``: where it is, and how it is called."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

VARIABLE = "ROOMMATE"


class LabError(Exception):
    """What the program could not do, in its own words, or what is missing here."""


def program() -> str:
    """Path of the program: the variable ``ROOMMATE``, beside Python (where pip puts it), ``PATH``."""
    given = os.environ.get(VARIABLE)
    if given:
        if not os.access(given, os.X_OK):
            raise LabError(f"{VARIABLE}={given}: there is no such program")
        return given
    beside = Path(sys.executable).parent / "roommate"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("roommate")
    if found is None:
        raise LabError(
            "the program roommate is neither beside Python nor in PATH\n"
            f"hint: pip install roommate-gpu, or name it in the variable {VARIABLE}"
        )
    return found


def flags(settings: dict[str, object]) -> list[str]:
    """Settings as flags: ``restart_cost=30`` is ``--restart-cost=30``; true is a flag alone."""
    words = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words.append(f"{flag}={value}")
    return words


def start(words: list[str]) -> subprocess.Popen[str]:
    """Starts the program."""
    pipe = subprocess.PIPE
    return subprocess.Popen([program(), *words], stdout=pipe, stderr=pipe, text=True)


def output(child: subprocess.Popen[str]) -> str:
    """What the program prints, once it has ended."""
    try:
        out, err = child.communicate()
    except BaseException:
        child.kill()
        child.communicate()
        raise
    if child.returncode != 0:
        raise LabError(err.strip().removeprefix("error: ") or f"exit status {child.returncode}")
    return out


def optional(name: str) -> ModuleType:
    """A package that only the laboratory needs."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise LabError(
            f"{package} is not installed\nhint: pip install 'roommate-gpu[lab]'"
        ) from error
