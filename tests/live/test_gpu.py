"""The cuda device with a real daemon and fakes of NVIDIA's libraries and programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Room

FAKE = ROOT / "tests/fake-gpu"
SHOW = (
    "import os, json; "
    "print(json.dumps({k: v for k, v in os.environ.items() if 'CUDA' in k}), flush=True)"
)
# A tenant with the SDK. It has no GPU, so it reports that it was not confined.
TENANT = """
import roommate, time
for _ in roommate.steps(lambda size: size, batch_size=8):
    time.sleep(0.01)
"""
# The same, but it reports to be confined as ordered.
SEATED = """
import roommate, time
from roommate import session
device = session.current().device
device.settle = lambda *_: setattr(device, 'place', device._wish) or True
for _ in roommate.steps(lambda size: size, batch_size=8):
    time.sleep(0.01)
"""


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("fake-gpu")
    found = {}
    for name, library in (("nvml", "libnvidia-ml.so.1"), ("cuda", "libcuda.so.1")):
        at = folder / library
        subprocess.run(["cc", "-shared", "-fPIC", "-o", at, FAKE / f"{name}.c"], check=True)
        found[f"ROOMMATE_{name.upper()}_LIBRARY"] = str(at)
    return found


@pytest.fixture
def gpus(room: Room, libraries: dict[str, str]) -> Iterator[Room]:
    path = f"{FAKE / 'bin'}:{os.environ['PATH']}"
    room.env |= {**libraries, "PATH": path}
    yield room


def machine(room: Room) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(room.ok("describe", "-o", "json"))
    return found


def seats(room: Room) -> dict[str, str | None]:
    return {name: job["seat"] for name, job in room.jobs().items()}


def mps_processes(room: Room) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environ = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            ours = str(room.state).encode() in environ
            if ours and b"mps-control" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_the_tier_in_force_is_tested_and_shown(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps")
    found = machine(gpus)
    assert found["cluster"].startswith("1x1:h200/")
    assert found["enforcement"]["tier"] == "mps-v2"
    assert "of 132" in found["enforcement"]["what"], found["enforcement"]
    gpu = found["gpus"][0]
    assert (gpu["name"], gpu["sms"], gpu["mps"]) == ("NVIDIA H200", 132, "well")
    assert "NVIDIA H200, 132 SMs" in gpus.ok("describe")
    assert "NVIDIA" not in gpus.tool("top", "--once").stderr


@pytest.mark.parametrize("how", ["lax", "broken"])
def test_limits_that_are_not_enforced_are_not_promised(gpus: Room, how: str) -> None:
    gpus.env["FAKE_CUDA"] = how
    if how == "broken":
        done = gpus.tool("up", "--device", "cuda", timeout=60)
        assert done.returncode != 0 and "cannot be used" in done.stderr, done.stderr
        return
    gpus.up("--device", "cuda", "--devices", "1")
    assert machine(gpus)["enforcement"]["tier"] == "time-slicing"


def test_a_machine_without_gpus_is_reported(room: Room) -> None:
    room.env["ROOMMATE_NVML_LIBRARY"] = "/nonexistent/libnvidia-ml.so.1"
    done = room.tool("up", "--device", "cuda", timeout=60)
    assert done.returncode != 0
    assert "without --device cuda the devices are CPU cores" in done.stderr, done.stderr


def test_processes_get_their_gpu_and_their_limits(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps")
    gpus.python("opaque", SHOW, share=0.5, gpu_mib=4096)
    gpus.until(lambda: gpus.state_of("opaque") == "finished")
    shown = json.loads(gpus.ok("logs", "opaque"))
    assert shown["CUDA_VISIBLE_DEVICES"].startswith("GPU-")
    assert shown["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=5120M"
    assert Path(shown["CUDA_MPS_PIPE_DIRECTORY"], "control").exists()
    # With this policy every job may use the whole GPU, and a job without the SDK cannot be confined
    # later.
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in shown


def test_time_slicing_starts_processes_outside_mps(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "time-slicing")
    gpus.python("opaque", SHOW)
    gpus.until(lambda: gpus.state_of("opaque") == "finished")
    assert json.loads(gpus.ok("logs", "opaque"))["CUDA_MPS_PIPE_DIRECTORY"] == "/nonexistent"


def test_shares_are_percentages_or_ranges_with_the_sdk(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps-split")
    gpus.python("opaque", SHOW + "\nimport time; time.sleep(30)")
    gpus.python("speaks", SEATED, sdk=True)
    gpus.until(lambda: seats(gpus)["speaks"] == "SMs 64-131")
    shown = json.loads(gpus.ok("logs", "opaque"))
    assert shown["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50.0"


def test_a_job_that_cannot_be_confined_is_not_shown_so(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "fifo")
    gpus.python("plain", TENANT, sdk=True, share=0.5)
    gpus.until(lambda: gpus.jobs()["plain"]["done"] > 20)
    assert gpus.jobs()["plain"]["seat"] is None


def test_ranges_shrink_before_others_grow(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "antman")
    gpus.python("promised", SEATED, sdk=True, share=0.75)
    gpus.until(lambda: seats(gpus)["promised"] == "SMs 0-87")
    gpus.python("guest", SEATED, sdk=True, **{"class": "best-effort"})
    gpus.until(lambda: seats(gpus).get("guest") == "SMs 88-131")
    gpus.ok("resize", "promised", "--share", "0.25")
    gpus.until(lambda: seats(gpus) == {"promised": "SMs 0-31", "guest": "SMs 32-131"})
    gpus.ok("resize", "promised", "--share", "0")
    gpus.until(lambda: seats(gpus) == {"promised": "SMs 0-87", "guest": "SMs 88-131"})


def test_a_best_effort_job_in_its_own_range_starts_at_once(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "antman")
    gpus.python("promised", SEATED, sdk=True, share=0.5)
    gpus.until(lambda: gpus.jobs()["promised"]["done"] > 30)
    gpus.python("guest", SEATED, sdk=True, **{"class": "best-effort"})
    gpus.until(lambda: seats(gpus).get("guest") == "SMs 64-131")
    # With the usual 2 % more every three seconds it would do 30 steps in this time.
    gpus.until(lambda: gpus.jobs()["guest"]["done"] > 150, 10)


def test_roommates_of_a_killed_job_restart_without_a_failure(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps", "--backoff", "0.2")
    dies = "import os, pathlib, sys, time\n"
    dies += "mark = pathlib.Path(os.environ['ROOMMATE_JOB'] + '.pid')\n"
    dies += "first = not mark.exists()\nmark.write_text(str(os.getpid()))\n"
    dies += "while first: time.sleep(0.05) if not pathlib.Path('die').exists() else sys.exit(1)\n"
    for name in ("killed", "beside"):
        gpus.python(name, dies, retries=0 if name == "beside" else 1)
    gpus.until(lambda: all((gpus.folder / f"{n}.pid").exists() for n in ("killed", "beside")))
    os.kill(int((gpus.folder / "killed.pid").read_text()), signal.SIGKILL)
    (gpus.folder / "die").touch()
    gpus.until(lambda: gpus.state_of("killed") == gpus.state_of("beside") == "finished", 60)
    jobs = gpus.jobs()
    assert (jobs["killed"]["failures"], jobs["beside"]["failures"]) == (1, 0)
    assert jobs["beside"]["starts"] == 2
    assert "failed together with a roommate on the same GPU" in gpus.ok("explain", "beside")


def test_suspects_start_isolated_and_are_cleared_or_charged(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps", "--backoff", "0.2")
    code = "import os, pathlib, sys, time\nname = os.environ['ROOMMATE_JOB']\n"
    code += "n = len(list(pathlib.Path('.').glob(name + '.run*')))\n"
    code += "pathlib.Path(f'{name}.run{n}').touch()\n"
    code += "print(os.environ['CUDA_MPS_PIPE_DIRECTORY'], flush=True)\n"
    code += "while n == 0: time.sleep(0.05) if not pathlib.Path('die').exists() else sys.exit(1)\n"
    code += "sys.exit(1 if name == 'guilty' else 0)\n"
    for name in ("guilty", "innocent"):
        gpus.python(name, code, retries=0)
    first = [gpus.folder / f"{name}.run0" for name in ("guilty", "innocent")]
    gpus.until(lambda: all(path.exists() for path in first))
    (gpus.folder / "die").touch()
    gpus.until(lambda: gpus.state_of("innocent") == "finished", 60)
    gpus.until(lambda: gpus.state_of("guilty").startswith("failed"), 60)
    for name in ("guilty", "innocent"):
        inside, outside = gpus.ok("logs", name).split()
        assert inside != outside == "/nonexistent"


def test_a_dead_mps_daemon_is_restarted(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps")
    gpus.until(lambda: len(mps_processes(gpus)) > 0)
    for pid in mps_processes(gpus):
        os.kill(pid, signal.SIGKILL)
    gpus.until(lambda: machine(gpus)["gpus"][0]["mps_restarts"] == 1, 30)
    assert machine(gpus)["gpus"][0]["mps"] == "well"
    gpus.ok("down", "--stop-jobs")
    gpus.until(lambda: not mps_processes(gpus))


def test_mps_outlives_a_daemon_whose_jobs_run_on(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps")
    gpus.python("long", TENANT, sdk=True)
    gpus.until(lambda: gpus.jobs()["long"]["done"] > 5)
    before = mps_processes(gpus)
    gpus.kill()
    gpus.up("--policy", "mps")
    found = machine(gpus)
    assert (found["enforcement"]["tier"], found["gpus"][0]["mps_restarts"]) == ("mps-v2", 0)
    assert mps_processes(gpus) == before
    gpus.until(lambda: gpus.jobs()["long"]["cooperative"])
