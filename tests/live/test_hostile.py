"""Hostile input and damaged state: what users send, and what becomes of the folder on disk.

Each test is named after a finding of the security review (D for defects, G for gaps) and says what
must hold. What processes and connections do is in `test_hostile_peers.py`, several users are in
`test_system.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import BINARY, Room
from peers import (
    Tenant,
    alive,
    ask,
    ask_bytes,
    clock_that_jumps,
    connect,
    cores_of,
    opaque,
    pid_of,
    status,
    submission,
)

LONG = "sleep 60"


def comes_back_with(room: Room, taken: list[str]) -> None:
    """Kills the daemon; the next one has all jobs that were acknowledged."""
    room.kill()
    room.up()
    assert set(taken) <= set(room.jobs())
    assert room.replays()


def taken_from(room: Room, *files: str) -> list[str]:
    """The names of the files that were accepted; a refusal has a reason."""
    names = []
    for file in files:
        done = room.tool("submit", file)
        assert done.returncode in (0, 2) and (done.stdout or "error" in done.stderr)
        names += done.stdout.split()
    return names


def extreme_stages(room: Room) -> list[str]:
    return taken_from(room, room.job("x", f"command: {LONG}\nstages_s: [1.0e308, 1.0e308, 0, 0]"))


def tiny_step_and_a_turn(room: Room) -> list[str]:
    first = room.job("x", f"command: {LONG}\nstep_s: 1.0e-320\nsteps: 10")
    names = taken_from(room, first, room.job("y", f"command: {LONG}"))
    time.sleep(2.0)  # several turns
    return names


def huge_step_and_a_small_share(room: Room) -> list[str]:
    names = taken_from(room, room.job("x", f"command: {LONG}\nstep_s: 1.0e308\nsteps: 10"))
    for name in names:
        room.until(lambda name=name: room.state_of(name) == "running")
        room.tool("resize", name, "--share", "0.001")
        time.sleep(0.5)
    return names


def steps_that_wrap(room: Room) -> list[str]:
    tenant = Tenant(room.state, opaque(room, "x", "sleep 60"))
    # As long as it is listened to: a daemon may hang up on such numbers.
    try:
        for steps, pause_s in ((1, 1.0), (2**63, 11.0), (2**63, 0.5)):
            tenant.stepped(steps, 1.0)
            time.sleep(pause_s)
    except OSError:
        pass
    tenant.close()
    return ["x"]


def negative_work(room: Room) -> list[str]:
    names = []
    for i, length in enumerate([{"steps": -5.0, "step_s": 1.0}, {"steps": 5.0, "step_s": 0.0}]):
        reply = ask(room.state, "submit", submission(room, f"k{i}", name=f"j{i}", **length))
        assert "submitted" in reply or "error" in reply
        names += [reply["submitted"]["name"]] if "submitted" in reply else []
        time.sleep(0.3)
    return names


WAYS = [
    extreme_stages,
    tiny_step_and_a_turn,
    huge_step_and_a_small_share,
    steps_that_wrap,
    negative_work,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_d01_whatever_is_accepted_can_be_read_again(
    room: Room, way: Callable[[Room], list[str]]
) -> None:
    """D1: no input makes the daemon write a journal that its successor cannot read."""
    room.up("--devices", "1", "-p", "gandiva", "--set", "slice_s=0.4", "--set", "pack=false")
    room.submit("innocent", "true")
    comes_back_with(room, ["innocent", *way(room)])


# --- D3: damage on disk


def flipped(path: Path, part: float) -> None:
    """Flips a bit at this part of a file."""
    data = bytearray(path.read_bytes())
    data[int(part * (len(data) - 1))] ^= 1 << (int(part * 1000) % 8)
    path.write_bytes(data)


def truncated(path: Path, part: float) -> None:
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])


def zeroed(path: Path, part: float) -> None:
    data = bytearray(path.read_bytes())
    at = int(part * len(data)) // 4096 * 4096
    data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    path.write_bytes(data)


def state_files(state: Path) -> list[Path]:
    """What the daemon keeps its decisions in: neither output of jobs, nor sockets, nor nothing."""
    files = [p for p in state.rglob("*") if p.is_file() and p.stat().st_size > 8]
    return sorted(p for p in files if p.parent == state or not p.name.startswith("log"))


class Damaged:
    """A state with six acknowledged jobs, of which copies are damaged."""

    def __init__(self, room: Room, ending: str) -> None:
        self.room, self.whole = room, room.folder / "whole"
        rolled = ending == "rolled"
        room.up("--policy", "fifo", "--devices", "1", *(["--journal-mib", "0.001"] if rolled else []))
        past = [room.submit(f"past{i}", "true") for i in range(8 if rolled else 1)]
        room.until_ended(*past)
        room.until(lambda: not rolled or list(room.state.glob("journal.jsonl.*")))
        for i in range(5):
            room.submit(f"job{i}", f"sleep 6{i}")
        room.until(lambda: room.state_of("job0") == "running")
        self.keeper = room.jobs()["job0"]["keeper_pid"]
        if ending == "down":
            room.ok("down")
            assert room.daemon is not None
            room.daemon.wait(20)
        else:
            room.kill()
        commands = {**dict.fromkeys(past, "true"), **{f"job{i}": f"sleep 6{i}" for i in range(5)}}
        self.jobs = {name: (i, f"sh -c {line}") for i, (name, line) in enumerate(commands.items())}
        os.killpg(self.keeper, signal.SIGKILL)
        shutil.copytree(room.state, self.whole, ignore=shutil.ignore_patterns("*.sock"))

    def check(self, file: Path, damage: Callable[[Path, float], None], part: float) -> str:
        """Damages a copy and starts a daemon on it. Returns what is wrong with what it says."""
        shutil.rmtree(self.room.state, ignore_errors=True)
        shutil.copytree(self.whole, self.room.state)
        damage(self.room.state / file, part)
        said, words = self.room.folder / "said", ""
        daemon = self.start(said)
        if daemon.poll() is not None:
            if daemon.returncode != 2 or "hint" not in said.read_text():
                return f"ended with {daemon.returncode}: {said.read_text()}"
            # Refused; what can be saved is saved.
            mended = self.room.tool("doctor", "--repair")
            words = said.read_text() + mended.stdout + mended.stderr
            daemon = self.start(said)
            if daemon.poll() is not None:
                return f"is refused after its repair: {words} {said.read_text()}"
        try:
            # What a bit can cost; of a file that lost a part, all in that part may be lost.
            return self.compared(words + said.read_text(), 1 if damage is flipped else 6)
        finally:
            pids = [j["keeper_pid"] for j in self.room.jobs().values() if j["keeper_pid"]]
            daemon.kill()
            daemon.wait()
            for pid in pids:
                if alive(pid):
                    os.killpg(pid, signal.SIGKILL)

    def start(self, said: Path) -> subprocess.Popen[str]:
        with said.open("w") as to:
            daemon = subprocess.Popen([BINARY, "up"], env=self.room.env, stderr=to, text=True)
        self.room.daemon = daemon
        answers = lambda: self.room.tool("describe").returncode == 0  # noqa: E731
        self.room.until(lambda: daemon.poll() is not None or answers())
        return daemon

    def compared(self, said: str, cost: int) -> str:
        room = self.room
        policy = json.loads(room.ok("describe", "-o", "json"))["policy"]
        if policy != "fifo":
            return f"policy {policy}"
        there = {name: (j["idx"], " ".join(j["command"])) for name, j in room.jobs().items()}
        events = room.tool("events")
        said += room.ok("describe") + events.stdout + events.stderr
        told = any(word in said for word in ("damage", "quarantine", "corrupt", "checksum"))
        if there != self.jobs and not told:
            return f"not a word about {sorted(self.jobs.items() ^ there.items())}"
        if len(self.jobs.keys() - there.keys()) > cost:
            return f"more than {cost} jobs gone: {sorted(there)}"
        room.submit("later", "true")
        if room.jobs()["later"]["idx"] < len(self.jobs):
            return "a number is used again"
        return ""


@pytest.mark.parametrize("ending", ["killed", "down", "rolled"])
def test_d03_damage_is_told_and_a_bit_costs_one_job(room: Room, ending: str) -> None:
    """D3: a damaged file is never a silently smaller state, nor another policy."""
    damaged = Damaged(room, ending)
    files = [p.relative_to(damaged.whole) for p in state_files(damaged.whole)]
    assert files
    large = [p for p in files if (damaged.whole / p).stat().st_size > 2000]
    cases = [(p, flipped, part) for p in large for part in (0.02, 0.5, 0.93)]
    small = [p for p in files if p not in large]
    cases += [(p, flipped, 0.5) for p in small[:: max(1, len(small) // 8)]]
    cases += [(p, what, 0.6) for p in large for what in (truncated, zeroed)]
    wrong = []
    for file, damage, part in cases:
        if found := damaged.check(file, damage, part):
            wrong.append(f"{file}, {damage.__name__} at {part}: {found}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)}:", *wrong])


def test_d03_an_empty_store_beside_jobs_is_an_alarm(room: Room) -> None:
    """D3: a store that is gone or empty beside existing jobs does not become a new state."""
    room.up("--policy", "fifo", "--devices", "1")
    room.submit("runs", f"echo $$ > pid; exec {LONG}")
    room.until(lambda: (room.folder / "pid").exists() and (room.folder / "pid").read_text())
    room.kill()
    for file in room.state.iterdir():
        if file.is_file():
            file.unlink()
    done = room.tool("up", timeout=20)
    os.kill(int((room.folder / "pid").read_text()), signal.SIGKILL)
    assert done.returncode == 2 and "doctor" in done.stderr


# --- D4: the API is checked like job files

WRONG = {
    "no command": {"command": []},
    "an empty word": {"command": [""]},
    "no devices": {"devices": 0},
    "a path as name": {"name": "../../x"},
    "ESC in the name": {"name": "a\x1b[2J"},
    "NUL in the name": {"name": "a\0b"},
    "a newline in the name": {"name": "a\nb"},
    "no name": {"name": ""},
    "a name of 1 MB": {"name": "x" * 1_000_000},
    "a negative share": {"share": -1.0},
    "a share above 1": {"share": 1e9},
    "no batch": {"batch": {"size": 0, "min": 0, "max": 0}},
    "a batch outside its range": {"batch": {"size": 5, "min": 8, "max": 4}},
    "negative steps": {"steps": -5.0, "step_s": 1.0},
    "steps of no time": {"steps": 5.0, "step_s": 0.0},
    "stages of 1e308 s": {"stages_s": [1e308, 1e308, 0.0, 0.0]},
    "NUL in the command": {"command": ["echo", "a\0b"]},
    "NUL in a variable": {"env": {"A": "a\0b"}},
    "= in a variable's name": {"env": {"A=B": "c"}},
    "ESC in the team": {"team": "\x1b[2J"},
    "negative cores": {"cpus": -1.0},
}


def test_d04_the_daemon_itself_checks_what_is_submitted(room: Room) -> None:
    """D4: what the client would refuse is refused by the daemon, which lives on."""
    room.up("--policy", "fifo", "--devices", "1")
    assert room.daemon is not None
    taken = []
    for what, file in WRONG.items():
        try:
            reply = ask(room.state, "submit", submission(room, what, **file))
        except (OSError, ValueError):
            reply = {}
        assert room.daemon.poll() is None, f"{what} ended the daemon"
        if "error" not in reply:
            taken.append(what)
    assert not taken and room.jobs() == {}
    good = submission(room, "good", name="good", steps=5.0, step_s=0.1, share=0.5)
    assert ask(room.state, "submit", good) == {"submitted": {"name": "good"}}


# --- D6: the state folder


def owned_by_another(room: Room) -> None:
    room.state.mkdir()
    os.chown(room.state, 65534, 65534)


def a_symlink(room: Room) -> None:
    target = room.folder / "target"
    target.mkdir(mode=0o755)
    room.state.symlink_to(target)


def with_a_folder_of_another(room: Room) -> None:
    (room.state / "jobs").mkdir(parents=True)
    os.chown(room.state / "jobs", 65534, 65534)


def open_to_all(room: Room) -> None:
    (room.state / "jobs").mkdir(parents=True)
    room.state.chmod(0o777)


FOLDERS = [owned_by_another, a_symlink, with_a_folder_of_another, open_to_all]


@pytest.mark.parametrize("made", FOLDERS, ids=lambda made: made.__name__)
def test_d06_a_state_in_the_hands_of_others_is_refused(
    room: Room, made: Callable[[Room], None]
) -> None:
    """D6: the state folder is checked for owner, mode and symlinks."""
    if made in (owned_by_another, with_a_folder_of_another) and os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    made(room)
    with subprocess.Popen(
        [BINARY, "up", "--devices", "1"], env=room.env, stderr=subprocess.PIPE, text=True
    ) as daemon:
        try:
            said = daemon.communicate(timeout=8)[1]
        except subprocess.TimeoutExpired:
            daemon.kill()
            pytest.fail("the daemon works in this folder")
    assert daemon.returncode == 2 and str(room.state) in said and "hint" in said
    if made is a_symlink:
        assert (room.folder / "target").stat().st_mode & 0o777 == 0o755


# --- D7: a full disk


@pytest.fixture
def small_disk(room: Room) -> Iterator[Room]:
    """A room whose state is on a disk of 16 MB."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a small disk")
    room.state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", str(room.state)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    yield room
    room.close()
    room.daemon = None
    subprocess.run(["umount", "-l", str(room.state)], check=True)


def test_d07_a_job_whose_exit_finds_no_room_runs_once(small_disk: Room) -> None:
    """D7: the exit of a job that ends while the disk is full is not lost."""
    room = small_disk
    room.up("--policy", "fifo", "--devices", "1", "--backoff", "0.1")
    room.submit("once", "echo x >> begun; sleep 1.5; echo x >> ended", retries=3)
    room.until(lambda: (room.folder / "begun").exists())
    full = room.state / "full"
    with full.open("wb", buffering=0) as to, pytest.raises(OSError, match="No space"):
        while True:
            to.write(bytes(1 << 16))
    with full.open("ab", buffering=0) as to, pytest.raises(OSError, match="No space"):
        while True:
            to.write(b"0")
    room.until(lambda: (room.folder / "ended").exists())
    time.sleep(1.5)
    full.unlink()
    time.sleep(1.0)  # the daemon may notice its disk only now
    assert room.daemon is not None
    if room.daemon.poll() is not None:
        room.up()
    room.until_ended("once")
    assert room.state_of("once") == "finished"
    assert (room.folder / "begun").read_text() == (room.folder / "ended").read_text() == "x\n"


# --- D12, D17: requests that cost others


def test_d12_a_long_unknown_name_costs_nobody_time(room: Room) -> None:
    """D12: a name of 2 MB is answered shortly, and nobody waits for it."""
    room.up("--policy", "fifo", "--devices", "1")
    room.ok("submit", *[room.job("a-name-of-usual-length", f"command: {LONG}")] * 30)
    answers: list[bytes] = []
    long = json.dumps({"describe": {"job": "x" * 2_000_000}}).encode()
    asks = threading.Thread(target=lambda: answers.append(ask_bytes(room.state, long, 120)))
    asks.start()
    longest, end = 0.0, time.monotonic() + 3.0
    while asks.is_alive() or time.monotonic() < end:
        began = time.monotonic()
        ask(room.state, "ps", timeout_s=120)
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.05)
    assert longest < 2.0
    assert b'"error"' in answers[0] and len(answers[0]) < 10_000


def test_d17_no_job_can_break_ps_for_everybody(room: Room) -> None:
    """D17: after a job of extreme length was cancelled, `ps` and `describe` work."""
    room.up("--devices", "1")
    extremes = ["step_s: 1.0e-320", "step_s: 1.0e-320\nsteps: 10", "step_s: 1.0e308\nsteps: 1.0e308"]
    for i, extreme in enumerate(extremes):
        for name in taken_from(room, room.job(f"x{i}", f"command: {LONG}\n{extreme}")):
            time.sleep(0.6)  # it runs for a moment
            room.ok("cancel", name)
            time.sleep(0.3)
    for words in (["ps"], ["ps", "-o", "json"], ["describe"], ["top"]):
        assert room.tool(*words).returncode == 0, words


# --- D19: clocks

def test_d19_a_clock_that_jumps_removes_nothing(room: Room) -> None:
    """D19: a clock that is 30 days ahead for a while costs no log."""
    usual, (jumped, clock) = room.env, clock_that_jumps(room.folder)
    room.env = {**usual, **clock}
    room.up("--policy", "fifo", "--devices", "2")
    room.env = usual
    names = [room.submit(f"j{i}", "echo kept") for i in range(3)]
    room.until_ended(*names)
    jumped.touch()
    # The daemon looks after its files every few seconds.
    time.sleep(12.0)
    jumped.unlink()
    assert [room.ok("logs", name) for name in names] == ["kept\n"] * 3
    assert sorted(room.jobs()) == names


# --- D20: logs that are no files


def log_of(room: Room, name: str) -> Path:
    return Path(room.jobs()[name]["log"])


def test_d20_a_log_that_is_no_file_costs_no_thread(room: Room) -> None:
    """D20: dangling links and pipes in a job's folder neither spin nor hang."""
    room.up("--policy", "fifo", "--devices", "1")
    room.submit("talks", "echo hello")
    room.until_ended("talks")
    part = log_of(room, "talks").with_name("log.1")
    pid, took = pid_of(room), []
    for plant in (lambda: part.symlink_to("/nonexistent"), lambda: os.mkfifo(part)):
        threads = status(pid, "Threads")
        plant()
        for _ in range(4):
            began = time.monotonic()
            with connect(room.state / "control.sock", 5.0) as peer:
                peer.sendall(b'{"logs":{"job":"talks"}}\n')
                try:
                    peer.recv(1 << 16)
                except TimeoutError:
                    took.append(time.monotonic() - began)
        cores = cores_of(pid)
        assert not took and cores < 0.3 and status(pid, "Threads") <= threads + 2, (took, cores)
        part.unlink()


def test_d20_a_log_that_is_a_symlink_is_not_followed(room: Room) -> None:
    """D20: `logs` shows what the job printed, never what a link in its folder points at."""
    room.up("--policy", "fifo", "--devices", "1")
    room.submit("talks", "echo hello")
    room.until_ended("talks")
    secret = room.folder / "secret"
    secret.write_text("the secret of another\n")
    log = log_of(room, "talks")
    log.with_name("log.1").symlink_to(secret)
    assert "secret" not in room.tool("logs", "talks").stdout
    log.unlink()
    log.symlink_to(secret)
    assert "secret" not in room.tool("logs", "talks").stdout


# --- D22: escape sequences


def test_d22_escape_sequences_do_not_reach_terminals(room: Room) -> None:
    """D22: whatever users put into job files, listings print no control characters."""
    room.up("--policy", "fifo", "--devices", "1", "--backoff", "0.1")
    texts = [
        'command: sleep 60\nteam: "\\e[2J\\e]0;x\\a"',
        'command: [sh, -c, "sleep 60 # \\e[2J"]',
        'command: "sleep 60 # \\e[2J"\nprofile: "\\e[2J"',
        'command: "sleep 60"\nworkdir: "."\ncheckpoint: "\\e[2J"',
    ]
    taken = []
    for i, text in enumerate(texts):
        taken += taken_from(room, room.job(f"x{i}", text))
    verbs = [["ps"], ["ps", "-o", "wide"], ["describe"], ["events"], ["top"]]
    verbs += [[verb, name] for name in taken for verb in ("describe", "explain")]
    for words in verbs:
        said = room.tool(*words)
        shown = said.stdout + said.stderr
        assert not [c for c in shown if ord(c) < 32 and c not in "\n\t"], words


# --- D23: secrets


def places_of(secret: str, state: Path) -> list[Path]:
    """Files of the state with the secret in them."""
    files = [p for p in state.rglob("*") if p.is_file()]
    return [p.relative_to(state) for p in files if secret.encode() in p.read_bytes()]


def test_d23_secrets_of_the_submitter_do_not_reach_jobs(room: Room) -> None:
    """D23: of the environment only what is on the list, or named, is passed on."""
    secret = "hidden-0123456789abcdef"
    room.env |= {"AWS_SECRET_ACCESS_KEY": secret, "HF_TOKEN": secret, "LC_TIME": "C.UTF-8"}
    room.up("--policy", "fifo", "--devices", "1")
    room.submit("usual", "env")
    room.until_ended("usual")
    seen = room.ok("logs", "usual")
    for name in ("PATH", "HOME", "PYTHONPATH", "LC_TIME", "ROOMMATE_TOKEN"):
        assert f"{name}=" in seen, name
    assert secret not in seen and places_of(secret, room.state) == []
    room.ok("submit", room.job("named", "command: env"), "--env", "HF_TOKEN")
    room.until_ended("named")
    assert room.ok("logs", "named").count(secret) == 1


def test_d23_no_secret_is_kept_after_the_end_of_a_job(room: Room) -> None:
    """D23: the environment of a job is gone from the state when the job has ended."""
    secret = "hidden-0123456789abcdef"
    room.up("--policy", "fifo", "--devices", "1")
    room.submit("uses", 'test -n "$KEY" && sleep 0.5', env={"KEY": secret})
    room.until(lambda: room.state_of("uses") == "running")
    for file in places_of(secret, room.state):
        assert (room.state / file).stat().st_mode & 0o077 == 0, file
    room.until_ended("uses")
    assert room.state_of("uses") == "finished"
    room.until(lambda: places_of(secret, room.state) == [], 15)
    room.kill()
    room.up()
    assert places_of(secret, room.state) == []


# --- D24: the folder goes away


def daemons_of(room: Room, *daemons: subprocess.Popen[str]) -> int:
    return sum(daemon.poll() is None for daemon in daemons)


@pytest.mark.parametrize("what", ["lock", "everything"])
def test_d24_there_is_never_a_second_daemon_on_a_state(room: Room, what: str) -> None:
    """D24: without its lock or its folder a daemon ends, or keeps others out."""
    room.up("--policy", "fifo", "--devices", "1")
    first = room.daemon
    assert first is not None
    if what == "lock":
        (room.state / "lock").unlink()
    else:
        shutil.rmtree(room.state)
    with subprocess.Popen(
        [BINARY, "up", "--policy", "fifo"], env=room.env, stderr=subprocess.DEVNULL, text=True
    ) as second:
        try:
            time.sleep(1.0)
            room.until(lambda: daemons_of(room, first, second) < 2, 15)
        finally:
            second.kill()


# --- D25: errors that say what is wrong


def test_d25_a_command_too_long_to_run_is_refused(room: Room) -> None:
    """D25: neither ten seconds of retries nor "command not found"."""
    room.up("--policy", "fifo", "--devices", "1", "--backoff", "0.1")
    for size in (200_000, 10_000_000):
        file = room.job("long", json.dumps({"command": ["echo", "x" * size]}))
        began = time.monotonic()
        done = room.tool("submit", file)
        took = time.monotonic() - began
        assert done.returncode == 2 and took < 8.0, (size, took, done.stderr[:200])
        assert "went away" not in done.stderr and "not found" not in done.stderr
    done = room.tool("submit", room.job("nul", 'command: [echo, "a\\0b"]'))
    assert done.returncode == 2 and "not found" not in done.stderr, done.stderr


def test_d25_deep_nesting_and_a_stopped_daemon_are_told(room: Room) -> None:
    """D25: deep YAML is refused at once; a stopped daemon "does not answer"."""
    room.up("--policy", "fifo", "--devices", "1")
    deep = room.job("deep", "command: " + "[" * 100_000 + "]" * 100_000)
    began = time.monotonic()
    done = room.tool("submit", deep, timeout=120)
    assert done.returncode == 2 and time.monotonic() - began < 5.0
    assert room.daemon is not None
    room.daemon.send_signal(signal.SIGSTOP)
    try:
        done = room.tool("ps", timeout=60)
    finally:
        room.daemon.send_signal(signal.SIGCONT)
    assert done.returncode == 2
    assert "temporarily unavailable" not in done.stderr and "went away" not in done.stderr


def test_d25_an_endless_answer_does_not_fill_the_client(room: Room) -> None:
    """D25: the client gives up on an answer without end before memory does."""
    room.state.mkdir(mode=0o700)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(room.state / "control.sock"))
    listener.listen()

    def talk() -> None:
        while True:
            try:
                peer, _ = listener.accept()
                while True:
                    peer.sendall(b"x" * (1 << 20))
            except (BrokenPipeError, ConnectionResetError):
                continue
            except OSError:
                return

    threading.Thread(target=talk, daemon=True).start()

    limited = ["prlimit", f"--as={2 << 30}", BINARY, "ps"]
    client = subprocess.Popen(limited, env=room.env, stderr=subprocess.PIPE)
    assert client.stderr is not None
    said = client.stderr.read().decode()
    _, code, used = os.wait4(client.pid, 0)
    client.returncode = os.waitstatus_to_exitcode(code)
    client.stderr.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    assert client.returncode == 2 and "error" in said, (client.returncode, said[-300:])
    assert used.ru_maxrss < 400 << 10, f"{used.ru_maxrss >> 10} MiB"
