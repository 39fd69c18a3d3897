"""The cuda device with a real daemon and fakes of NVIDIA's libraries and programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import BINARY, ROOT, Room

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


# A process that removes its limits and then tries what it can use; it prints a report.
LIFTS = f"env -u CUDA_MPS_ACTIVE_THREAD_PERCENTAGE -u CUDA_MPS_PINNED_DEVICE_MEM_LIMIT {BINARY}"
LIFTS += " gpu-test --device 0 --over-mib"


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
    # Claims of its own: tests of other checkouts have the same GPUs.
    room.env |= {**libraries, "PATH": path, "ROOMMATE_CLAIMS": str(room.folder), "FAKE_MPS": "scan"}
    room.passed = [*libraries, "FAKE_*"]
    yield room
    Path(libraries["ROOMMATE_NVML_LIBRARY"] + ".state").unlink(missing_ok=True)


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
            # Without this flag it is a client of the control daemon.
            if ours and b"-d" in (entry / "cmdline").read_bytes().split(b"\0"):
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


def events(room: Room) -> list[str]:
    return [f"{line['job']}: {line['what']}" for line in machine(room)["recent"]]


def control_log(room: Room) -> str:
    return next(room.state.glob("devices/mps-*/log/control.log")).read_text()


def limits_now(room: Room) -> str:
    """What a process that connects now would get: percent of the SMs, and MiB."""
    return next(room.state.glob("devices/mps-*/pipe/fake-limits")).read_text().strip()


def test_a_process_cannot_lift_its_limits(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps-split")
    assert "both limits were set at the MPS control" in machine(gpus)["enforcement"]["what"]
    gpus.submit("cheat", f"{LIFTS} 3000; sleep 60", gpu_mib=1000)
    gpus.submit("other", "sleep 60", gpu_mib=1000)
    gpus.until(lambda: gpus.ok("logs", "cheat"))
    found = json.loads(gpus.ok("logs", "cheat"))
    assert (found["kernel"]["on_sms"], found["total_mib"]) == (66, 2024), found
    assert found["over"]["refused"], found


def test_limits_that_a_process_can_lift_are_said_to_be_so(gpus: Room) -> None:
    gpus.env["FAKE_CUDA"] = "deaf"
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps")
    found = machine(gpus)
    assert found["enforcement"]["tier"] == "mps-v2"
    assert "only for processes that keep their variables" in found["enforcement"]["what"]
    assert "limits are not set" in found["gpus"][0]["mps"]
    gpus.submit("runs", "true", gpu_mib=1000)
    gpus.until(lambda: gpus.state_of("runs") == "finished")


def test_processes_with_other_limits_connect_one_by_one(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps")
    for name, mib in (("small", 1000), ("large", 4000)):
        gpus.submit(name, f"{LIFTS} 3000; sleep 60", gpu_mib=mib)
    totals = {}
    for name in ("small", "large"):
        gpus.until(lambda name=name: gpus.ok("logs", name))
        totals[name] = json.loads(gpus.ok("logs", name))["total_mib"]
    assert totals == {"small": 2024, "large": 5024}
    # Afterwards nobody gets more than the smallest, and who was late is told of.
    gpus.until(lambda: limits_now(gpus) == "100.0 2024")
    gpus.ok("cancel", "small")
    gpus.until(lambda: limits_now(gpus) == "100.0 5024", 20)


def test_a_job_whose_start_waits_can_be_cancelled(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps")
    log = next(gpus.state.glob("devices/mps-*/log"))
    (log / "fake-late").touch()
    gpus.submit("first", "sleep 60", gpu_mib=1000)
    gpus.until(lambda: gpus.state_of("first") == "running")
    gpus.submit("second", "sleep 60", gpu_mib=4000)
    gpus.until(lambda: gpus.state_of("second") == "starting")
    gpus.ok("cancel", "second")
    gpus.until(lambda: gpus.state_of("second") == "cancelled")
    assert not gpus.ok("logs", "second")


def test_a_child_in_another_session_is_let_go_before_a_signal(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps")
    gpus.submit("parent", "setsid sh -c 'echo $$; exec sleep 60' & wait")
    gpus.until(lambda: gpus.ok("logs", "parent"))
    child = int(gpus.ok("logs", "parent"))
    assert os.getpgid(child) == child
    gpus.ok("cancel", "parent")
    gpus.until(lambda: f"Command terminate_client 4242 {child}\n" in control_log(gpus))
    os.kill(child, signal.SIGKILL)


def test_a_gpu_belongs_to_one_daemon(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps")
    pid = machine(gpus)["pid"]
    beside = {**gpus.env, "ROOMMATE_STATE": str(gpus.folder / "t")}
    words = [BINARY, "up", "--device", "cuda", "--devices", "2"]
    done = subprocess.run(words, env=beside, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"GPU 0 (NVIDIA H200) is claimed by process {pid} of " in done.stderr, done.stderr
    assert "end that daemon" in done.stderr


def test_a_process_that_is_no_tenant_is_reported(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--policy", "mps")
    gpus.submit("tenant", "echo $$; exec sleep 60")
    gpus.until(lambda: gpus.ok("logs", "tenant"))
    with subprocess.Popen(["sleep", "60"]) as stranger:
        state = Path(gpus.env["ROOMMATE_NVML_LIBRARY"] + ".state")
        tenant = int(gpus.ok("logs", "tenant"))
        state.write_text(f"0 process {stranger.pid} 700\n0 client {tenant} 300\n")
        gpus.until(lambda: machine(gpus)["gpus"][0].get("strays"))
        found = machine(gpus)["gpus"][0]["strays"]
        stranger.kill()
    assert [(s["pid"], s["name"], s["used_mib"]) for s in found] == [(stranger.pid, "sleep", 700)]
    assert len([e for e in events(gpus) if "is used by a stranger: process" in e]) == 1
    state.unlink()
    gpus.until(lambda: not machine(gpus)["gpus"][0].get("strays"))


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
    gpus.until(lambda: any("MPS daemon ended without being asked" in e for e in events(gpus)))
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


def fake_state(libraries: dict[str, str], *lines: str) -> None:
    Path(libraries["ROOMMATE_NVML_LIBRARY"] + ".state").write_text("\n".join(lines) + "\n")


def test_a_job_waits_for_gpu_memory(gpus: Room, libraries: dict[str, str]) -> None:
    gpus.up("--device", "cuda", "--devices", "1")
    gpus.submit("large", "sleep 60")
    gpus.submit("beside", "sleep 60")
    gpus.until(lambda: gpus.state_of("beside") == "running")
    # Nothing was known of them, so both began; now little is left.
    pids = {name: gpus.pid_of(name) for name in ("large", "beside")}
    fake_state(libraries, f"0 process {pids['large']} 139000", f"0 process {pids['beside']} 1000")
    time.sleep(3.5)  # the processes on a GPU are looked at every 3 s
    gpus.submit("third", "sleep 0.1", profile="small")
    gpus.until(lambda: any("third" in e and "waits for GPU memory" in e for e in events(gpus)))
    assert gpus.state_of("third") == "starting"
    fake_state(libraries, f"0 process {pids['beside']} 1000")
    gpus.ok("cancel", "large")
    gpus.until(lambda: gpus.state_of("third") == "finished")
    gpus.ok("down", "--stop-jobs")
    assert gpus.daemon is not None
    gpus.daemon.wait()
    kinds = {k["name"]: k for k in json.loads(gpus.ok("learned", "-o", "json"))["kinds"]}
    assert kinds["sleep 60"]["mem_mib"] == 139000


def test_a_job_that_ran_out_of_memory_starts_alone_once(gpus: Room) -> None:
    gpus.up("--device", "cuda", "--devices", "1", "--backoff", "0.1")
    gpus.submit("first", "sleep 60")
    gpus.until(lambda: gpus.state_of("first") == "running")
    code = "[ -e mark ] || { touch mark; echo 'torch.OutOfMemoryError: CUDA out of memory.'; exit 1; }"
    gpus.submit("short", code, retries=0)
    gpus.until(lambda: any("ran out of GPU memory beside others" in e for e in events(gpus)))
    gpus.until(lambda: any("its GPU for itself" in e and "waits" in e for e in events(gpus)))
    assert not gpus.jobs()["short"]["ended"]
    gpus.ok("cancel", "first")
    gpus.until(lambda: gpus.state_of("short") == "finished")
    # Alone it is its own fault.
    gpus.submit("hungry", "echo 'RESOURCE_EXHAUSTED: out of memory'; exit 1", retries=0)
    gpus.until_ended("hungry")
    assert gpus.state_of("hungry").startswith("failed")
