"""A short run of the fuzzer; `make fuzz` is the long one."""

from __future__ import annotations

import subprocess
import sys

from conftest import ROOT


def test_a_short_run_of_the_fuzzer() -> None:
    words = [sys.executable, str(ROOT / "tests/live/fuzz.py"), "--seed", "7", "--seconds", "15"]
    words += ["--policy", "gandiva,muri-s", "--kill-every", "3"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
