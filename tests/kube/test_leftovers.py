"""Nothing of a testbed stays on the machine, however the tests end."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from testbed import BUSYBOX, Api, Programs, condition, pod_path
from testbed.keeper import cgroups, links

ROOT = Path(__file__).resolve().parent.parent.parent
MACHINE_SETTINGS = [
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "net/ipv4/ip_forward",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
]
FOLDERS = ["/etc/cni", "/run/containerd", "/run/netns", "/var/lib/cni", "/var/lib/kubelet", "/var/log/pods"]


def machine() -> dict[str, Any]:
    """What a kubelet or containerd would change of this machine."""
    return {
        "settings": {name: (Path("/proc/sys") / name).read_text() for name in MACHINE_SETTINGS},
        "mounts": Path("/proc/self/mounts").read_text(),
        "folders": [folder for folder in FOLDERS if Path(folder).exists()],
    }


def until(what: str, holds: Callable[[], Any], within_s: float = 60.0) -> Any:
    end = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < end, f"{what}: not within {within_s:.0f} s"
        time.sleep(0.05)
    return found


@dataclass
class Testbed:
    """A testbed in a process of its own, with a pod that runs on its real node."""

    __test__ = False
    process: subprocess.Popen[str]
    mark: str
    folder: Path

    def processes(self) -> list[int]:
        """All processes: those that inherited the mark, and those in its containers."""
        return [
            int(place.name)
            for place in Path("/proc").glob("[0-9]*")
            if self.mark.encode() in read(place / "environ")
            or self.folder.name.encode() in read(place / "cgroup")
        ]

    def bridged(self) -> list[str]:
        """The ends of the pods' network links on this machine."""
        ends = Path("/sys/class/net").glob("*/master")
        return [end.parent.name for end in ends if os.readlink(end).rsplit("/", 1)[1] in links(self.folder)]

    def keeper(self) -> int:
        return next(pid for pid in self.processes() if b"keeper.py" in read(Path(f"/proc/{pid}/cmdline")))


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def start_testbed() -> Testbed:
    mark = f"ROOMMATE_TESTBED_MARK={secrets.token_hex(8)}"
    process = subprocess.Popen(
        [str(ROOT / "scripts/kube-testbed"), "--real-nodes", "1"],
        env={**os.environ, **dict([mark.split("=")])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    line = process.stdout.readline()
    assert line, "the testbed does not start; its message is above"
    ready = json.loads(line)
    testbed = Testbed(process, mark, Path(ready["folder"]))
    api = Api(ready["server"], ready["token"], Path(ready["ca"]))
    loop = {
        "name": "main",
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"],
    }
    body = {"metadata": {"name": "p", "namespace": "default"}, "spec": {"containers": [loop]}}
    body["spec"]["nodeName"] = "real-0"
    pod = api.post("/api/v1/namespaces/default/pods", body)
    api.until(pod_path(pod), lambda p: condition(p, "Ready") == "True", within_s=60)
    return testbed


def assert_is_there(testbed: Testbed) -> list[str]:
    """Without this, the checks afterwards would pass for a testbed that never made anything."""
    names = {read(Path(f"/proc/{pid}/comm")).strip() for pid in testbed.processes()}
    wanted = {b"etcd", b"kube-apiserver", b"kubelet", b"containerd", b"containerd-shim", b"sh"}
    assert wanted <= names
    assert testbed.folder.is_dir()
    assert len(links(testbed.folder)) == 1
    assert cgroups(testbed.folder)
    ends = testbed.bridged()
    assert ends
    return ends


def assert_nothing_left(testbed: Testbed, ends: list[str], before: dict[str, Any]) -> None:
    until("its processes end", lambda: not testbed.processes())
    until("its folder goes", lambda: not testbed.folder.exists())
    assert cgroups(testbed.folder) == []
    assert links(testbed.folder) == []
    until("its pods' links go", lambda: not any(Path(f"/sys/class/net/{end}").exists() for end in ends))
    assert machine() == before


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_nothing_is_left_when_its_user_ends(how: str) -> None:
    before = machine()
    testbed = start_testbed()
    ends = assert_is_there(testbed)
    assert machine() == before, "the machine's own settings and mounts never change"
    if how == "killed":
        testbed.process.send_signal(signal.SIGKILL)
    testbed.process.communicate("")
    assert testbed.process.returncode == (-signal.SIGKILL if how == "killed" else 0)
    assert_nothing_left(testbed, ends, before)


def test_the_next_testbed_removes_what_a_killed_keeper_left() -> None:
    before = machine()
    testbed = start_testbed()
    ends = assert_is_there(testbed)
    keeper = testbed.keeper()
    testbed.process.kill()
    os.kill(keeper, signal.SIGKILL)
    testbed.process.communicate()
    until("its processes end with the keeper", lambda: not testbed.processes())
    assert testbed.folder.exists(), "nobody was left to remove it"
    Programs().close()
    assert_nothing_left(testbed, ends, before)


def test_a_testbed_leaves_those_of_others_alone() -> None:
    one, other = Programs(), Programs()
    assert one.folder != other.folder
    assert one.folder.is_dir()
    other.close()
    assert one.folder.is_dir()
    one.start("waits", ["sleep", "1000"])
    assert one.pid("waits")
    one.close()
    assert not one.folder.exists()
