#!/usr/bin/env python3
"""Tests on a real GPU which limits of MPS hold against a process that does not want them, and who
may command its control. Prints PASS and FAIL lines, then all measurements as JSON, in 3 minutes.

usage: limits.py [--out FILE]

The clients are `roommate gpu-test`, and PyTorch where a process has to stay (`sleep` where there is
no PyTorch, for a rehearsal with tests/fake-gpu and FAKE_MPS=scan). As root it also tries what
another user can do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from room import Room, binary

NOBODY = 65534
VARIABLES = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
HAS_TORCH = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True,
                           check=False).returncode == 0
STAYS = [sys.executable, "-c", "import time, torch; x = torch.ones(1, device='cuda'); "
         "print('here', flush=True); time.sleep(600)"]
if not HAS_TORCH:
    STAYS = ["sh", "-c", "echo here; exec sleep 600"]

FOUND: dict[str, Any] = {}
FAILED: list[str] = []


def check(name: str, holds: bool, **seen: Any) -> None:
    print(f"{'PASS' if holds else 'FAIL'} {name} {json.dumps(seen)}", flush=True)
    FOUND[name] = {"holds": holds, **seen}
    if not holds:
        FAILED.append(name)


def until(holds: Callable[[], Any], within_s: float = 60.0) -> Any:
    end = time.monotonic() + within_s
    while not (seen := holds()):
        if time.monotonic() > end:
            return seen
        time.sleep(0.1)
    return seen


class Control:
    """An MPS daemon of its own, which other users can reach."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
        for name in ("pipe", "log"):
            (folder / name).mkdir(mode=0o755)
            self.env[f"CUDA_MPS_{name.upper()}_DIRECTORY"] = str(folder / name)
        self.pipe = folder / "pipe"
        # Other users cannot reach a program in somebody's home.
        self.program = folder / "roommate"
        shutil.copy(binary(), self.program)
        self.program.chmod(0o755)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=self.env, check=True)

    def ask(self, what: str, uid: int | None = None) -> str:
        try:
            done = subprocess.run(["nvidia-cuda-mps-control"], input=what + "\n", text=True,
                                  capture_output=True, env=self.env, timeout=15, check=False,
                                  user=uid, group=uid)
        except subprocess.TimeoutExpired:
            return "no answer"
        return (done.stdout + done.stderr).strip()

    def server(self) -> str:
        return (self.ask("get_server_list").split() or ["0"])[0]

    def limit(self, percent: float, mib: int) -> None:
        for server in self.ask("get_server_list").split():
            self.ask(f"set_active_thread_percentage {server} {percent}")
            self.ask(f"set_device_pinned_mem_limit {server} 0 {mib}M")
        self.ask(f"set_default_active_thread_percentage {percent}")
        self.ask(f"set_default_device_pinned_mem_limit 0 {mib}M")

    def test(self, over_mib: int = 2048, uid: int | None = None, timeout: float = 60,
             **env: str) -> dict[str, Any]:
        """What a client can use: SMs that a kernel ran on, and whether much memory was refused."""
        return brief(*self.begin(over_mib, uid, **env).communicate(timeout=timeout))

    def begin(self, over_mib: int = 2048, uid: int | None = None,
              **env: str) -> subprocess.Popen[str]:
        words = [str(self.program), "gpu-test", "--device", "0", "--over-mib", str(over_mib)]
        return subprocess.Popen(words, env=self.env | env, stdout=subprocess.PIPE, text=True,
                                stderr=subprocess.PIPE, user=uid, group=uid)

    def quit(self) -> None:
        """Ends it with its servers, so that nobody meets them."""
        self.ask("quit -t 5")
        until(lambda: not mps_processes(), 20)
        for pid in mps_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def mps_processes() -> list[int]:
    found = subprocess.run(["pgrep", "-f", "nvidia-cuda-mps"], capture_output=True, text=True,
                           check=False)
    return [int(pid) for pid in found.stdout.split()]


def brief(out: str, err: str = "") -> dict[str, Any]:
    try:
        report = json.loads(out)
    except ValueError:
        return {"sms": 0, "refused": None, "error": (out + err)[-300:]}
    return {"sms": (report.get("kernel") or {}).get("on_sms", 0),
            "refused": (report.get("over") or {}).get("refused"),
            "total_mib": report.get("total_mib"), "error": report.get("error")}


@contextlib.contextmanager
def staying(env: dict[str, str], uid: int | None = None) -> Iterator[int]:
    """A process that uses the GPU until the end of the block."""
    with subprocess.Popen(STAYS, env=env, stdout=subprocess.PIPE, text=True, user=uid,
                          group=uid) as it:
        assert it.stdout is not None
        it.stdout.readline()
        try:
            yield it.pid
        finally:
            it.terminate()


# ---- the control of MPS, without Roommate --------------------------------------------


def control(folder: Path) -> None:
    mps = Control(folder)
    try:
        limits_of(mps)
        if HAS_TORCH:
            remains(mps)
        if os.geteuid() == 0:
            other_users(mps)
        else:
            print("SKIP other users: only root can become one", flush=True)
    finally:
        mps.quit()


def limits_of(mps: Control) -> None:
    whole = mps.test(CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    sms, mib = whole["sms"], whole["total_mib"]
    check("without MPS all SMs and 2 GiB", sms > 0 and whole["refused"] is None, **whole)
    mps.limit(50, 1024)
    half = mps.test()
    check("a default binds the first client of a new server",
          0 < half["sms"] <= 0.6 * sms and bool(half["refused"]), **half)
    mps.limit(100, mib)
    raised = mps.test()
    check("a limit of a running server can be raised",
          raised["sms"] == sms and raised["refused"] is None, **raised)
    mps.limit(25, 1024)
    lowered = mps.test()
    check("and lowered", 0 < lowered["sms"] <= 0.35 * sms and bool(lowered["refused"]), **lowered)
    more = mps.test(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="100",
                    CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=8192M")
    check("a variable cannot raise it", 0 < more["sms"] <= 0.35 * sms and bool(more["refused"]),
          **more)
    less = mps.test(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="10")
    check("a variable can lower it", 0 < less["sms"] < lowered["sms"], **less)
    server = mps.server()
    answers = {what: mps.ask(what) for what in (
        "get_default_active_thread_percentage", f"get_active_thread_percentage {server}",
        "get_default_device_pinned_mem_limit 0", f"get_device_pinned_mem_limit {server} 0",
        "set_default_active_thread_percentage 33.3", "get_default_active_thread_percentage ",
        "get_server_list\nget_default_active_thread_percentage", "nonsense", "ps")}
    check("the control shows its limits as numbers",
          answers["get_default_active_thread_percentage"].rstrip("%").startswith("25"), **answers)
    began = time.monotonic()
    for _ in range(10):
        mps.ask("get_server_list")
    took = (time.monotonic() - began) / 10
    check("a command takes less than 0.2 s", took < 0.2, seconds=round(took, 4))
    mps.limit(100, mib)
    with staying(mps.env) as pid:
        clients = until(lambda: mps.ask(f"get_client_list {mps.server()}").split(), 20)
        check("a client is listed by its pid", str(pid) in clients, pid=pid, clients=clients)
        listed = nvml_pids()
        check("NVML lists the client by its pid", pid in listed, pid=pid, listed=listed,
              server=mps.server())
        mps.limit(50, 1024)
        second = mps.test()
        check("a limit set beside a client binds the next one",
              0 < second["sms"] <= 0.6 * sms and bool(second["refused"]), **second)
        mps.limit(100, mib)


FILL = "import torch; x = torch.full((1 << 30,), 0x5A5A5A5A, dtype=torch.int32, device='cuda'); "
FILL += "torch.cuda.synchronize()"
LOOK = "import torch; x = torch.empty((1 << 30,), dtype=torch.int32, device='cuda'); "
LOOK += "print(int((x == 0x5A5A5A5A).sum()))"


def remains(mps: Control) -> None:
    """Whether memory that an ended process left is read by the next one."""
    for where, env in (("under MPS", mps.env),
                       ("without", mps.env | {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"})):
        subprocess.run([sys.executable, "-c", FILL], env=env, check=True, timeout=60)
        done = subprocess.run([sys.executable, "-c", LOOK], env=env, capture_output=True, text=True,
                              check=True, timeout=60)
        check(f"memory of an ended process is cleared, {where}", int(done.stdout) == 0,
              words_of_another=int(done.stdout))


def nvml_pids() -> list[int]:
    ask = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, check=False)
    except OSError:
        return []
    return [int(w) for w in done.stdout.split() if w.isdigit()]


def other_users(mps: Control) -> None:
    modes = {p.name: oct(p.lstat().st_mode & 0o777) for p in mps.pipe.iterdir()}
    before = mps.ask("get_default_active_thread_percentage")
    said = {what: mps.ask(what, NOBODY)
            for what in ("get_server_list", "set_default_active_thread_percentage 10", "quit")}
    after = mps.ask("get_default_active_thread_percentage")
    check("another user cannot command the control", before == after and before[:1].isdigit(),
          modes=modes, said=said, before=before, after=after)
    with staying(mps.env):
        server, client = mps.server(), mps.ask(f"get_client_list {mps.server()}").split()
        ended = mps.ask(f"terminate_client {server} {client[0]}", NOBODY) if client else "none"
        still = mps.ask(f"get_client_list {server}").split()
        check("another user cannot end a client", still == client, said=ended)
        waiting = mps.begin(uid=NOBODY)
        time.sleep(12)
        check("a client of another user waits for the first one's", waiting.poll() is None,
              code=waiting.poll())
    began = time.monotonic()
    try:
        seen = brief(*waiting.communicate(timeout=60))
    except subprocess.TimeoutExpired:
        waiting.kill()
        seen = {"sms": 0}
    check("and gets its turn afterwards", seen["sms"] > 0,
          seconds=round(time.monotonic() - began, 1), **seen)


# ---- the daemon ----------------------------------------------------------------------


def submit(room: Room, name: str, command: str | list[str], **fields: Any) -> None:
    file = room.folder / f"{name}.yaml"
    file.write_text(json.dumps({"name": name, "command": command, "workdir": str(room.folder),
                                **fields}))
    room.ok("submit", str(file))


def log_of(room: Room, name: str) -> str:
    return room.tool("logs", name).stdout


def events(room: Room) -> list[str]:
    return [f"{e['job']}: {e['what']}" for e in room.machine()["recent"]]


def daemon(out: Path) -> None:
    lifts = " ".join(["env", *(f"-u {v}" for v in VARIABLES), binary(), "gpu-test --device 0"])
    with Room("limits-split", out, False) as room:
        began = time.monotonic()
        room.up("mps-split")
        machine = room.machine()
        enforced = machine["enforcement"]
        check("the self-test sets limits at the control",
              enforced["tier"] == "mps-v2" and "both limits were set" in enforced["what"],
              up_s=round(time.monotonic() - began, 1), what=enforced["what"])
        whole = machine["gpus"][0]["sms"]
        submit(room, "cheat", f"{lifts} --over-mib 4096; sleep 100", gpu_mib=1024)
        submit(room, "other", "sleep 100", gpu_mib=1024)
        until(lambda: log_of(room, "cheat"))
        seen = brief(log_of(room, "cheat"))
        check("a job cannot lift its limits",
              0 < seen["sms"] <= 0.6 * whole and bool(seen["refused"]), **seen)
    with Room("limits-mps", out, False) as room:
        room.up("mps")
        began = time.monotonic()
        submit(room, "large", STAYS, gpu_mib=8192)
        submit(room, "small", f"{lifts} --over-mib 4096; sleep 100", gpu_mib=1024)
        until(lambda: log_of(room, "large"), 90)
        first = time.monotonic() - began
        until(lambda: log_of(room, "small"), 90)
        seen = brief(log_of(room, "small"))
        check("jobs with other limits are let in one by one", bool(seen["refused"]),
              first_s=round(first, 1), second_s=round(time.monotonic() - began, 1), **seen)
        says = room.tool("up", "--state", str(room.folder / "t"), "--device", "cuda")
        check("a second daemon cannot have the GPU",
              says.returncode != 0 and "claimed by process" in says.stderr, said=says.stderr[-300:])
        strays(room)
        sessions(room)
        pipe = next(room.state.glob("devices/mps-*/pipe"))
        env = {**room.env, "CUDA_MPS_PIPE_DIRECTORY": str(pipe)}
        subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 1\n", text=True, env=env,
                       timeout=20, capture_output=True, check=False)
        told = until(lambda: [e for e in events(room) if "without being asked" in e], 30)
        check("an MPS daemon that was told to quit is started again and reported", bool(told),
              told=told, restarts=room.machine()["gpus"][0]["mps_restarts"])


def fake_nvml(*lines: str) -> None:
    """What tests/fake-gpu/nvml.c reports in a rehearsal: one GPU, and these lines."""
    if library := os.environ.get("ROOMMATE_NVML_LIBRARY"):
        Path(f"{library}.state").write_text("\n".join(["count 1", *lines, ""]))


def strays(room: Room) -> None:
    env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
    with staying(env) as pid:
        fake_nvml(f"0 process {pid} 700")
        def found() -> list[int]:
            return [s["pid"] for s in room.machine()["gpus"][0].get("strays", [])]

        until(lambda: found() == [pid], 15)
        check("a stranger on the GPU is reported, and no tenant", found() == [pid], pid=pid,
              strays=found(), nvml=nvml_pids(),
              told=[e for e in events(room) if "stranger" in e])


def sessions(room: Room) -> None:
    """A child in another session is detached before its tenant is ended."""
    hold = room.folder / "hold.py"
    hold.write_text("import os, time\nos.setsid()\n" + (
        "import torch\nx = torch.randn(4096, 4096, device='cuda')\nprint('here', flush=True)\n"
        "while True: x @ x\n" if HAS_TORCH else "print('here', flush=True)\ntime.sleep(600)\n"))
    submit(room, "parent", f"{sys.executable} {hold} & wait")
    until(lambda: "here" in log_of(room, "parent"), 60)
    room.ok("cancel", "parent")
    until(lambda: room.jobs()["parent"]["state"] == "cancelled", 30)
    control_log = next(room.state.glob("devices/mps-*/log/control.log")).read_text()
    time.sleep(2)
    jobs = room.jobs()
    check("a child in another session is let go, and its roommate lives on",
          "terminate_client" in control_log and jobs["large"]["state"] == "running",
          state=jobs["large"]["state"], failures=jobs["large"]["failures"])
    # What is left of it here; containment of processes is tested elsewhere.
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, ProcessLookupError):
            if str(hold).encode() in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)


def system(folder: Path) -> None:
    """Jobs of two users in system mode."""
    if os.geteuid() != 0:
        print("SKIP system mode: only root can serve others", flush=True)
        return
    with Room("limits-system", folder, False) as room:
        for public in (room.folder, folder):
            public.chmod(0o755)
        program = folder / "roommate"
        shutil.copy(binary(), program)
        program.chmod(0o755)
        room.up("mps", "--system", "--state", str(room.state), "--group", "nogroup")
        test = f"{program} gpu-test --device 0 --over-mib 4096; sleep 100"

        def theirs(name: str) -> dict[str, Any]:
            """What a job of another user sees."""
            file = folder / f"{name}.yaml"
            file.write_text(json.dumps({"name": name, "command": test, "workdir": "/tmp",
                                        "gpu_mib": 1024}))
            done = subprocess.run([str(program), "submit", str(file)], env=room.env, text=True,
                                  user=NOBODY, group=NOBODY, capture_output=True, check=False)
            if done.returncode != 0:
                return {"sms": 0, "refused": None, "error": done.stderr[-300:]}
            until(lambda: log_of(room, name), 60)
            return brief(log_of(room, name))

        seen = theirs("first")
        check("system mode: a user's job is a client of MPS, within its limits",
              seen["sms"] > 0 and bool(seen["refused"]), **seen)
        room.ok("cancel", "first")
        until(lambda: room.jobs()["first"]["state"] == "cancelled", 30)
        submit(room, "ours", STAYS, gpu_mib=1024)
        until(lambda: log_of(room, "ours"), 90)
        seen = theirs("second")
        check("system mode: beside a job of another user it runs at once, in turns, without MPS",
              seen["sms"] > 0 and not seen["refused"], **seen,
              state=room.jobs()["ours"]["state"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="where the measurements are written as well")
    args = parser.parse_args()
    began = time.monotonic()
    fake_nvml()
    with tempfile.TemporaryDirectory(prefix="rm-") as name:
        Path(name).chmod(0o755)
        for part in (control, daemon, system):
            folder = Path(name) / part.__name__
            folder.mkdir()
            try:
                part(folder)
            except Exception as e:  # the other part is worth its time
                check(f"{part.__name__} runs to its end", False, error=repr(e))
    print(f"{len(FOUND) - len(FAILED)} of {len(FOUND)} hold, {time.monotonic() - began:.0f} s")
    text = json.dumps({"seconds": round(time.monotonic() - began), "found": FOUND}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    raise SystemExit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
