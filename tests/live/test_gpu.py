"""The cuda device without a GPU: NVIDIA's libraries and programs are invented, the daemon is not."""

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
SHOW = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if 'CUDA' in k}), flush=True)"
# A tenant with the SDK; there is no GPU, so it can only say that it stays where it is.
TENANT = """
import roommate, time
for _ in roommate.steps(lambda size: size, batch_size=8):
    time.sleep(0.01)
"""
# The same, as one with a GPU would answer.
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
            ours = entry.name.isdigit() and str(room.state).encode() in (entry / "environ").read_bytes()
            if ours and b"mps-control" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_the_tier_in_force_is_found_by_trying_and_told(gpus: Room) -> None:
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
def test_what_does_not_hold_is_not_claimed(gpus: Room, how: str) -> None:
    gpus.env["FAKE_CUDA"] = how
    if how == "broken":
        done = gpus.tool("up", "--device", "cuda", timeout=60)
        assert done.returncode != 0 and "cannot be used" in done.stderr, done.stderr
        return
    gpus.up("--device", "cuda", "--devices", "1")
    assert machine(gpus)["enforcement"]["tier"] == "time-slicing"


def test_a_machine_without_gpus_says_so(room: Room) -> None:
    room.env["ROOMMATE_NVML_LIBRARY"] = "/nonexistent/libnvidia-ml.so.1"
    done = room.tool("up", "--device", "cuda", timeout=60)
    assert done.returncode != 0
    assert "without --device cuda the devices are CPU cores" in done.stderr, done.stderr


def test_processes_find_their_gpu_and_their_limits(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps")
    gpus.python("opaque", SHOW, share=0.5, gpu_mib=4096)
    gpus.until(lambda: gpus.state_of("opaque") == "finished")
    shown = json.loads(gpus.ok("logs", "opaque"))
    assert shown["CUDA_VISIBLE_DEVICES"].startswith("GPU-")
    assert shown["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=5120M"
    assert Path(shown["CUDA_MPS_PIPE_DIRECTORY"], "control").exists()
    # Under this policy everybody may use the whole GPU, and no policy can hold an opaque job to less later.
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in shown


def test_a_policy_of_turns_starts_processes_outside_mps(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "time-slicing")
    gpus.python("opaque", SHOW)
    gpus.until(lambda: gpus.state_of("opaque") == "finished")
    assert json.loads(gpus.ok("logs", "opaque"))["CUDA_MPS_PIPE_DIRECTORY"] == "/nonexistent"


def test_shares_are_percentages_for_the_opaque_and_seats_for_those_who_speak(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps-split")
    gpus.python("opaque", SHOW + "\nimport time; time.sleep(30)")
    gpus.python("speaks", SEATED, sdk=True)
    gpus.until(lambda: seats(gpus)["speaks"] == "SMs 64-131")
    shown = json.loads(gpus.ok("logs", "opaque"))
    assert shown["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50.0"


def test_a_job_that_cannot_be_moved_says_so(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "fifo")
    gpus.python("plain", TENANT, sdk=True, share=0.5)
    gpus.until(lambda: gpus.jobs()["plain"]["done"] > 20)
    assert gpus.jobs()["plain"]["seat"] is None


def test_who_shrinks_goes_first_and_who_grows_waits(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "antman")
    gpus.python("promised", SEATED, sdk=True, share=0.75)
    gpus.until(lambda: seats(gpus)["promised"] == "SMs 0-87")
    gpus.python("guest", SEATED, sdk=True, **{"class": "best-effort"})
    gpus.until(lambda: seats(gpus).get("guest") == "SMs 88-131")
    gpus.ok("resize", "promised", "--share", "0.25")
    gpus.until(lambda: seats(gpus) == {"promised": "SMs 0-31", "guest": "SMs 32-131"})
    gpus.ok("resize", "promised", "--share", "0")
    gpus.until(lambda: seats(gpus) == {"promised": "SMs 0-87", "guest": "SMs 88-131"})


def test_a_guest_that_sits_apart_is_let_in_at_once(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "antman")
    gpus.python("promised", SEATED, sdk=True, share=0.5)
    gpus.until(lambda: gpus.jobs()["promised"]["done"] > 30)
    gpus.python("guest", SEATED, sdk=True, **{"class": "best-effort"})
    gpus.until(lambda: seats(gpus).get("guest") == "SMs 64-131")
    # By 2 % every three seconds it would do 30 steps in the time.
    gpus.until(lambda: gpus.jobs()["guest"]["done"] > 150, 10)


def test_roommates_of_one_that_is_killed_start_again_and_are_not_charged(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps", "--backoff", "0.2")
    dies = "import os, pathlib, sys, time\nmark = pathlib.Path(os.environ['ROOMMATE_JOB'] + '.pid')\n"
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


def test_suspects_start_apart_and_are_cleared_or_charged(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps", "--backoff", "0.2")
    code = "import os, pathlib, sys, time\nname = os.environ['ROOMMATE_JOB']\n"
    code += "n = len(list(pathlib.Path('.').glob(name + '.run*')))\npathlib.Path(f'{name}.run{n}').touch()\n"
    code += "print(os.environ['CUDA_MPS_PIPE_DIRECTORY'], flush=True)\n"
    code += "while n == 0: time.sleep(0.05) if not pathlib.Path('die').exists() else sys.exit(1)\n"
    code += "sys.exit(1 if name == 'guilty' else 0)\n"
    for name in ("guilty", "innocent"):
        gpus.python(name, code, retries=0)
    gpus.until(lambda: (gpus.folder / "guilty.run0").exists() and (gpus.folder / "innocent.run0").exists())
    (gpus.folder / "die").touch()
    gpus.until(lambda: gpus.state_of("innocent") == "finished", 60)
    gpus.until(lambda: gpus.state_of("guilty").startswith("failed"), 60)
    for name in ("guilty", "innocent"):
        inside, outside = gpus.ok("logs", name).split()
        assert inside != outside == "/nonexistent"


def test_an_mps_daemon_that_dies_is_started_again_and_ends_after_the_last_job(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps")
    gpus.until(lambda: len(mps_processes(gpus)) > 0)
    for pid in mps_processes(gpus):
        os.kill(pid, signal.SIGKILL)
    gpus.until(lambda: machine(gpus)["gpus"][0]["mps_restarts"] == 1, 30)
    assert machine(gpus)["gpus"][0]["mps"] == "well"
    gpus.ok("down", "--stop-jobs")
    gpus.until(lambda: not mps_processes(gpus))


def test_mps_outlives_a_daemon_whose_jobs_go_on(gpus: Room) -> None:
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
