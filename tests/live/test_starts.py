"""The pages of docs/start, followed word by word; what they need to build is there already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BINARY, ROOT

BUILT = ["--skip", "make ", "--skip", "python3 -m venv", "--limit", "90"]


@pytest.mark.parametrize("page", ["cluster", "researcher", "ml-engineer"])
def test_a_start_prints_what_it_says(page: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    env = {
        **os.environ,
        "PATH": f"{Path(BINARY).resolve().parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "python"),
    }
    try:
        done = subprocess.run(
            [sys.executable, ROOT / "scripts/follow.py", ROOT / f"docs/start/{page}.md", *BUILT],
            cwd=tmp_path, env=env, capture_output=True, text=True,
        )  # fmt: skip
    finally:
        # A page that fails half-way leaves its daemon behind.
        down = [BINARY, "down", "--stop-jobs", "--state", tmp_path / "out/state"]
        subprocess.run(down, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("says", "status"),
    [("0 jobs, 1.5 s", 0), ("...\n0 jobs, 2 s", 0), ("1 job, 2 s", 1), ("0 jobs", 1)],
)
def test_a_page_that_says_something_else_fails(says: str, status: int, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n```sh\necho 3 jobs, 27.25 s\n```\n\n```text\n{says}\n```\n")
    done = subprocess.run([sys.executable, ROOT / "scripts/follow.py", page], capture_output=True)
    assert done.returncode == status


def test_a_command_that_fails_fails_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```sh\nfalse\n```\n")
    done = subprocess.run([sys.executable, ROOT / "scripts/follow.py", page], capture_output=True)
    assert done.returncode == 1


def test_a_page_that_does_not_end_is_ended(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```sh\nsleep 60\n```\n\n```sh\necho next\n```\n")
    follow = [sys.executable, ROOT / "scripts/follow.py", page, "--limit", "0.5"]
    done = subprocess.run(follow, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "the time was over" in done.stdout
