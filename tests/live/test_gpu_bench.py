"""The parts of bench/gpu, as far as they can be tested without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import BINARY, ROOT

GPU = ROOT / "bench" / "gpu"


def test_a_complete_part_is_not_run_again(tmp_path: Path) -> None:
    def play(*words: str) -> str:
        command = [str(GPU / "run.sh"), "selftest", "--rehearse", "--out", str(tmp_path), *words]
        env = {**os.environ, "ROOMMATE": BINARY}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout

    assert '"policy": "mps"' in play()
    assert play() == "== selftest is complete\n"
    assert '"policy": "mps"' in play("--again")
    index = [json.loads(line) for line in (tmp_path / "parts.jsonl").read_text().splitlines()]
    assert [one["part"] for one in index] == ["selftest", "selftest"]
    ask = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12"]
    head = subprocess.run(ask, capture_output=True, text=True)
    assert all(one["commit"].startswith(head.stdout.strip() or "unknown") for one in index)
    assert len((tmp_path / "selftest.jsonl").read_text().splitlines()) == 1


def test_a_loop_follows_the_orders_of_a_machine_on_a_gpu() -> None:
    words = ["--rehearse", "--task", "gpt2-lm", "--moves", "5"]
    command = [sys.executable, str(GPU / "obeys.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 8, done.stderr
    # Times depend on other load on the machine; what was done does not.
    timed = ("steps as long as the GPU takes", "half the pace")
    assert [row for row in rows if not row["obeyed"] and row["what"] not in timed] == []
