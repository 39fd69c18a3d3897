"""A daemon of root's for several users, with real users: they are created here and removed after.

Who asks is known from the socket. The jobs of a user run as that user, and other users can neither
see, read, stop nor impersonate them.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import BINARY, Room
from peers import processes_of_user
from test_gpu import FAKE, libraries  # noqa: F401 - a fixture

if os.getuid() != 0 or shutil.which("useradd") is None:
    pytest.skip("system mode is tested by root, with useradd", allow_module_level=True)

GROUP = f"rmtest{os.getpid() % 10_000}"


class User:
    """A user of the machine, with a home in the room."""

    def __init__(self, name: str, home: Path, member: bool) -> None:
        self.name, self.home = name, home
        groups = ["-G", GROUP] if member else []
        words = ["useradd", "--no-log-init", "-M", "-d", str(home), "-s", "/bin/sh", *groups, name]
        subprocess.run(words, check=True, capture_output=True)
        entry = pwd.getpwnam(name)
        self.uid, self.gid = entry.pw_uid, entry.pw_gid
        self.groups = [grp.getgrnam(GROUP).gr_gid] if member else []
        home.mkdir(mode=0o700)
        os.chown(home, self.uid, self.gid)

    def run(self, *words: str, **run: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command as this user."""
        run = {"capture_output": True, "text": True, "timeout": 60, "cwd": self.home, **run}
        return subprocess.run(words, user=self.uid, group=self.gid, extra_groups=self.groups, **run)

    def remove(self) -> None:
        for pid in processes_of_user(self.uid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["userdel", "-f", self.name], capture_output=True)


class System(Room):
    """A daemon in system mode, and users a, b (of its group) and c (of none)."""

    def __init__(self) -> None:
        super().__init__()
        # Users must be able to reach the program and the socket, as in an installation.
        self.folder.chmod(0o755)
        self.program = self.folder / "roommate"
        shutil.copy(BINARY, self.program)
        self.program.chmod(0o755)
        subprocess.run(["groupadd", GROUP], check=True, capture_output=True)
        names = [(f"{GROUP}{letter}", letter != "c") for letter in "abc"]
        self.a, self.b, self.c = (User(n, self.folder / n, member) for n, member in names)

    def start(self, *flags: str) -> None:
        usual = [("--policy", "fifo"), ("--devices", "4")]
        words = [word for pair in usual if pair[0] not in flags for word in pair]
        self.up("--system", "--state", str(self.state), "--group", GROUP, *words, *flags)

    def by(self, user: User, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs the program as a user."""
        usual = {"PATH": os.environ["PATH"], "HOME": str(user.home), "USER": user.name}
        env = {**usual, "ROOMMATE_STATE": str(self.state), "LANG": "C.UTF-8", **env}
        return user.run(str(self.program), *words, env=env)

    def sent(self, user: User, name: str, command: str, **fields: Any) -> str:
        """Submits a job as a user."""
        file = user.home / f"{name}.yaml"
        file.write_text(json.dumps({"command": command, **fields}))
        os.chown(file, user.uid, user.gid)
        done = self.by(user, "submit", str(file))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def began(self, name: str) -> dict[str, Any]:
        self.until(lambda: self.state_of(name) == "running")
        return self.jobs()[name]

    def wait_log(self, name: str, text: str) -> str:
        self.until(lambda: text in self.ok("logs", name), 20)
        return self.ok("logs", name)

    def close(self) -> None:
        super().close()
        for user in (self.a, self.b, self.c):
            user.remove()
        subprocess.run(["groupdel", GROUP], capture_output=True)


@pytest.fixture
def system() -> Iterator[System]:
    it = System()
    try:
        it.start()
        yield it
    finally:
        it.close()


SECRET = "hidden-0123456789abcdef"
TALKS = f"id -u; id -G; echo {SECRET}; grep NoNewPrivs /proc/self/status; sleep 60"


def processes_of(system: System, name: str) -> list[int]:
    """The pids of a job's keeper and of everything below it."""
    found = [system.began(name)["keeper_pid"]]
    for pid in found:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            found += [int(child) for child in children]
    return found


def test_a_job_runs_as_its_user_without_privileges(system: System) -> None:
    """G1: uid and groups of the submitter, an own session, no_new_privs."""
    system.sent(system.a, "mine", TALKS)
    said = system.wait_log("mine", "NoNewPrivs").split()
    assert said[0] == str(system.a.uid)
    assert "0" not in said[1 : said.index(SECRET)], "a job has root's group"
    assert said[said.index("NoNewPrivs:") + 1] == "1"
    for pid in processes_of(system, "mine")[1:]:
        assert os.stat(f"/proc/{pid}").st_uid == system.a.uid
        assert os.getsid(pid) != os.getsid(system.jobs()["mine"]["keeper_pid"]) or (
            os.getsid(pid) != os.getsid(os.getpid())
        )
    # A set-uid program gains nothing.
    sudo = f"cp /usr/bin/id {system.folder}/{system.a.name}/id"
    subprocess.run(sudo, shell=True, check=True)
    os.chmod(system.a.home / "id", 0o4755)
    system.sent(system.a, "gains", "./id -u; echo end")
    assert system.wait_log("gains", "end").split()[0] == str(system.a.uid)


def test_a_user_sees_only_own_jobs(system: System) -> None:
    """G1: `ps`, `describe`, `logs`, `events` and `explain` of another's job."""
    system.sent(system.a, "mine", TALKS)
    system.wait_log("mine", SECRET)
    assert "mine" in system.by(system.a, "ps").stdout
    assert SECRET in system.by(system.a, "logs", "mine").stdout
    assert "mine" not in system.by(system.b, "ps", "-o", "json").stdout
    for verb in ("describe", "logs", "explain"):
        done = system.by(system.b, verb, "mine")
        assert done.returncode != 0 and SECRET not in done.stdout, verb
    for words in (["events"], ["top"], ["describe"]):
        done = system.by(system.b, *words)
        assert SECRET not in done.stdout and "mine" not in done.stdout, words
    # Names are each user's own, or unlike; neither tells one user about the other.
    assert system.sent(system.b, "mine", "sleep 60")
    # Root administers.
    assert SECRET in system.ok("logs", "mine") and "mine" in system.ok("ps")


def test_a_user_cannot_stop_or_change_anothers_job(system: System) -> None:
    """G1: every verb is for the owner or an administrator."""
    system.sent(system.a, "mine", "sleep 60")
    before = system.began("mine")
    tries = [["cancel"], ["suspend"], ["resume"], ["resize", "--share", "0.1"]]
    for verb, *flags in tries:
        done = system.by(system.b, verb, "mine", *flags)
        assert done.returncode == 2, verb
    assert system.by(system.b, "down").returncode == 2
    assert system.by(system.b, "down", "--stop-jobs").returncode == 2
    after = system.jobs()["mine"]
    for field in ("state", "share", "keeper_pid", "starts"):
        assert after[field] == before[field]
    # By the kernel as well.
    for pid in processes_of(system, "mine"):
        assert system.b.run("kill", "-9", str(pid)).returncode != 0
    assert system.by(system.a, "suspend", "mine").returncode == 0
    assert system.state_of("mine") == "suspended"
    assert system.ok("cancel", "mine") is not None
    system.until_ended("mine")


def test_files_of_a_job_are_unreadable_for_others(system: System) -> None:
    """G1, D23: logs, environments, tokens and the store."""
    system.sent(system.a, "mine", TALKS, env={"KEY": SECRET})
    system.wait_log("mine", SECRET)
    for user in (system.b, system.c):
        found = user.run("grep", "-rsl", SECRET, str(system.state))
        assert found.stdout == ""
        for pid in processes_of(system, "mine"):
            for name in ("environ", "mem", "cwd/x", "root/x"):
                assert user.run("cat", f"/proc/{pid}/{name}").returncode != 0
        for file in [p for p in system.state.rglob("*") if p.is_file() and p.stat().st_size]:
            if user.run("test", "-r", str(file)).returncode == 0:
                assert b"token" not in file.read_bytes().lower(), file
    # Not even the owner reads the store or the journal of all.
    for name in ("store.db", "journal.jsonl"):
        assert system.a.run("cat", str(system.state / name)).returncode != 0


SPEAKS = """
import json, socket, sys
peer = socket.socket(socket.AF_UNIX); peer.settimeout(5)
try:
    peer.connect(sys.argv[1])
    hello = {"hello": {"version": 1, "token": sys.argv[2], "pid": int(sys.argv[3])}}
    peer.sendall(json.dumps(hello).encode() + b"\\n")
    print(peer.recv(65536).decode())
    peer.sendall(b'{"stepped":{"steps":1,"done":12345.0,"step_s":0.1,"batch":1}}\\n')
    print(peer.recv(65536).decode())
except OSError as error:
    print(error)
"""


def test_a_user_cannot_speak_in_the_name_of_anothers_job(system: System) -> None:
    """G1: even with the token of a job, only its user is its tenant."""
    speaks = system.folder / "speaks.py"
    speaks.write_text(SPEAKS)
    system.sent(system.a, "mine", "env > env; sleep 60")
    at = system.a.home / "env"
    system.until(lambda: at.exists() and "ROOMMATE_TOKEN" in at.read_text())
    env = dict(line.split("=", 1) for line in at.read_text().splitlines() if "=" in line)
    keeper = str(system.jobs()["mine"]["keeper_pid"])
    words = ["python3", str(speaks), env["ROOMMATE_SOCKET"], env["ROOMMATE_TOKEN"], keeper]
    for user in (system.b, system.c):
        assert "welcome" not in user.run(*words, cwd="/").stdout
    time.sleep(0.5)
    job = system.jobs()["mine"]
    assert job["done"] != 12345.0 and not job["cooperative"]
    # As its user it is listened to: the others were refused for who they are.
    assert "welcome" in system.a.run(*words).stdout


def test_outside_of_the_group_nothing_is_reached(system: System) -> None:
    """G1: the control socket is for the group."""
    done = system.by(system.c, "ps")
    assert done.returncode == 2 and "Permission denied" in done.stderr
    file = system.c.home / "x.yaml"
    file.write_text("command: id")
    file.chmod(0o644)
    assert system.by(system.c, "submit", str(file)).returncode == 2
    assert system.jobs() == {}


def test_nobody_submits_in_the_name_of_another(system: System) -> None:
    """G2: the owner is who asks, whatever the request says."""
    connect = (
        "import socket,sys; p=socket.socket(socket.AF_UNIX); p.connect(sys.argv[1]);"
        "p.sendall(sys.argv[2].encode()+b'\\n'); print(p.recv(65536).decode())"
    )
    file = {"command": "id -u", "workdir": "/", "name": "whose"}
    names = ["user", "owner", "uid"]
    env = {"USER": system.a.name, "LOGNAME": system.a.name, "PATH": os.environ["PATH"]}
    plain = {"submit": {"file": file, "env": env, "key": "k"}}
    forged = [{"submit": {**plain["submit"], name: system.a.uid}} for name in names]
    socket = str(system.state / "control.sock")
    for request in [*forged, plain]:
        system.b.run("python3", "-c", connect, socket, json.dumps(request), cwd="/")
    system.until(lambda: system.jobs() and all(j["ended"] for j in system.jobs().values()))
    for name in system.jobs():
        assert system.ok("logs", name).split() == [str(system.b.uid)]


def test_the_journal_says_who_did_what(system: System) -> None:
    """G2: owner and actor are in the journal and in `events`."""
    system.sent(system.a, "mine", "sleep 60")
    system.began("mine")
    assert system.by(system.a, "suspend", "mine").returncode == 0
    system.ok("cancel", "mine")
    system.until_ended("mine")
    journal = (system.state / "journal.jsonl").read_text()
    assert str(system.a.uid) in journal or system.a.name in journal
    told = system.ok("events")
    assert system.a.name in told or str(system.a.uid) in told
    assert "root" in told or "uid 0" in told
    # Its owner learns it too.
    for words in (["events"], ["explain", "mine"]):
        own = system.by(system.a, *words)
        assert "cancelled by root" in own.stdout, own
    assert system.replays()


def anew(system: System, *flags: str) -> None:
    """Another daemon, with a state of its own."""
    system.ok("down")
    assert system.daemon is not None
    system.daemon.wait(20)
    shutil.rmtree(system.state)
    system.start(*flags)


def test_a_history_does_not_name_the_jobs_of_others(system: System) -> None:
    anew(system, "--devices", "1", "--policy", "gandiva")
    system.sent(system.a, "theirs", "sleep 60")
    system.began("theirs")
    system.sent(system.b, "mine", "sleep 60")
    system.until(lambda: system.jobs()["mine"]["state"] != "starting")
    seen = system.by(system.b, "explain", "mine")
    assert seen.returncode == 0 and "submitted by" in seen.stdout, seen
    assert "theirs" not in seen.stdout
    # What root reads has the same moments, with names.
    assert len(system.ok("explain", "mine").splitlines()) >= len(seen.stdout.splitlines())


def test_users_reach_mps_and_root_commands_it(system: System, libraries: dict[str, str]) -> None:  # noqa: F811
    """G4: the pipe is outside of what only root reads, the log is not."""
    for library in libraries.values():
        for folder in (Path(library), Path(library).parent, *Path(library).parents[1:3]):
            folder.chmod(0o755)
    claims = {"ROOMMATE_CLAIMS": str(system.folder), "FAKE_MPS": "scan"}
    system.env |= {**libraries, **claims, "PATH": f"{FAKE / 'bin'}:{os.environ['PATH']}"}
    anew(system, "--device", "cuda", "--devices", "1", "--policy", "mps")
    look = "ls -ld $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY; "
    look += "touch $CUDA_MPS_PIPE_DIRECTORY/mine; sleep 60"
    system.sent(system.a, "mine", look)
    told = system.wait_log("mine", "touch: ")
    pipe = next(line.split() for line in told.splitlines() if line.startswith("d"))
    refused = told.count("Permission denied")
    # It can be entered, and neither the log be read nor anything be put beside the pipe.
    assert pipe[0] == "drwxr-xr-x" and pipe[-1].startswith(str(system.state / "run")), told
    assert refused == 2, told


def test_a_user_has_a_quota(system: System) -> None:
    """G6: jobs per user are limited; one user's many jobs do not keep another out."""
    system.ok("down")
    assert system.daemon is not None
    system.daemon.wait(20)
    system.start("--quota", "jobs=3")
    for i in range(3):
        system.sent(system.a, f"j{i}", "sleep 60")
    file = system.a.home / "j0.yaml"
    done = system.by(system.a, "submit", str(file))
    assert done.returncode == 2 and "3" in done.stderr
    assert system.sent(system.b, "fits", "sleep 60") == "fits"
    assert system.by(system.a, "cancel", "j0").returncode == 0
    system.until_ended("j0")
    system.sent(system.a, "again", "sleep 60")


def test_files_in_reach_of_a_job_cannot_lead_the_daemon(system: System) -> None:
    """D6, D20: a job's folder belongs to its user; root's daemon follows nothing in it."""
    target = system.folder / "target"
    target.write_text(f"{SECRET}\n")
    target.chmod(0o600)
    system.sent(system.a, "mine", "echo hello; sleep 1")
    system.until_ended("mine")
    log = Path(system.jobs()["mine"]["log"])
    plant = f"ln -sf {target} {log.parent}/log.1; rm -f {log}; ln -s {target} {log}"
    system.a.run("sh", "-c", plant)
    assert SECRET not in system.by(system.a, "logs", "mine").stdout
    assert target.read_text() == f"{SECRET}\n"
    # Nor does a checkpoint folder or a workdir open what its user cannot open.
    system.sent(system.a, "reads", f"cat {target}; echo end", checkpoint=str(target))
    assert SECRET not in system.wait_log("reads", "end")


def test_jobs_of_users_survive_the_daemon(system: System) -> None:
    """Adopted after a kill, still as their user, still nobody else's."""
    system.sent(system.a, "mine", "sleep 60")
    keeper = system.began("mine")["keeper_pid"]
    system.kill()
    system.start()
    assert system.jobs()["mine"]["keeper_pid"] == keeper
    assert "mine" not in system.by(system.b, "ps").stdout
    assert system.by(system.b, "cancel", "mine").returncode == 2
    assert system.by(system.a, "cancel", "mine").returncode == 0
    system.until_ended("mine")


def test_system_mode_is_for_root(system: System) -> None:
    """G1: an ordinary user is told to use the mode of one user."""
    done = system.by(system.a, "up", "--system", "--group", GROUP, "--state", str(system.a.home / "s"))
    assert done.returncode == 2 and "root" in done.stderr


def test_one_daemon_claims_the_devices(system: System) -> None:
    """G3: beside the machine's daemon no user owns the same devices with another."""
    done = system.by(system.a, "up", "--state", str(system.a.home / "s"), "--devices", "4")
    assert done.returncode == 2 and "daemon" in done.stderr


def test_the_front_of_a_service_runs_as_its_owner(system: System) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    system.start()
    service = {"slo": {"p99": "1s"}, "port": port, "server": "http", "health": "/"}
    command = "exec python3 -m http.server --bind 127.0.0.1 $PORT"
    system.sent(system.a, "web", command, **{"class": "service", "service": service})
    system.until(lambda: system.jobs()["web"]["service"]["ready"])
    front = Path(f"/proc/{system.jobs()['web']['pid']}")
    assert b"front" in (front / "cmdline").read_bytes()
    assert front.stat().st_uid == system.a.uid
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
        assert answer.status == 200
    assert system.by(system.a, "cancel", "web").returncode == 0
    system.until(lambda: system.jobs()["web"]["keeper_pid"] is None)
