"""Output and time limit of a part of run.sh."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from room import Room, rounded

MINUTES = 9.0
FOREVER = 1_000_000


class Bench:
    """Collects the rows of a part and limits its time."""

    def __init__(self, part: str, out: Path, rehearse: bool, anew: bool) -> None:
        self.part, self.out, self.rehearse = part, out, rehearse
        # Whether existing rows come from a complete earlier run, not from an interrupted one.
        self.anew = anew
        self.rows: list[dict[str, Any]] = []
        # What is left to measure when the part ends: it is complete with 0.
        self.left = 0
        self._file = out / f"{part}.new"
        self._file.unlink(missing_ok=True)
        self._ends = time.monotonic() + 60 * MINUTES

    def room(self, name: str = "") -> Room:
        return Room(f"{self.part}-{name}" if name else self.part, self.out, self.rehearse)

    def row(self, **found: Any) -> None:
        self.rows.append(rounded(found))
        with self._file.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")
        print(json.dumps(self.rows[-1]), flush=True)

    def seconds(self, real: float) -> float:
        """How long to measure; shorter in a rehearsal."""
        return real / 8 if self.rehearse else real

    def left_s(self) -> float:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{self.part} takes longer than {MINUTES:.0f} minutes")
        return left

    def keep(self) -> None:
        if self._file.exists():
            self._file.rename(self.out / f"{self.part}.jsonl")


OF_A_RUN = ("name", "state", "submitted_s", "age_s", "done", "steps", "step_s", "stages_s",
            "starts", "failures")


def run_mix(bench: Bench, room: Room, mix: dict[str, Any], *flags: str) -> list[dict[str, Any]]:
    """Runs a mix in the foreground; keeps the journal and the results."""
    file = room.folder / "mix.yaml"
    file.write_text(json.dumps(mix))
    journal = room.out / f"{room.name}.journal.jsonl"
    out = room.ok("run", str(file), *room.device(), *flags, "--journal", str(journal), "-o", "json")
    found = json.loads(out)
    runs = found if isinstance(found, list) else [found]
    for run in runs:
        run["jobs"] = [{k: v for k, v in job.items() if k in OF_A_RUN} for job in run["jobs"]]
        bench.row(**run)
    print(room.ok("replay", str(journal)).strip())
    return runs
