"""The first process of a real node: prepares its mounts, then runs containerd and the kubelet.

Runs in new PID and mount namespaces. When it ends, the kernel ends everything on the node.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

SYSCTLS = {
    "kernel/keys/root_maxbytes": "25000000",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
}
"""Settings of the whole machine that a kubelet reads, and writes if they are not as it wants."""


def mount(what: Path, over: Path) -> None:
    subprocess.run(["mount", "--bind", str(what), str(over)], check=True)


def prepare(folder: Path, programs: Path) -> None:
    # The programs may lie in what the mounts below hide.
    mount(programs, folder / "programs")
    settings = folder / "sysctls"
    settings.mkdir()
    for name, value in SYSCTLS.items():
        real = Path("/proc/sys") / name
        if real.exists():
            stand_in = settings / name.replace("/", ".")
            stand_in.write_text(f"{value}\n")
            mount(stand_in, real)
    mount(folder / "var", Path("/var"))
    mount(folder / "run", Path("/run"))


class Service:
    """A program that starts again a second after it ends."""

    def __init__(self, name: str, argv: list[str], folder: Path) -> None:
        self.name, self.argv, self.folder = name, argv, folder
        self.due = 0.0
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL)
        beside = self.folder / f"{self.name}.pid.tmp"
        beside.write_text(str(self.process.pid))
        beside.rename(self.folder / f"{self.name}.pid")

    def ended(self, status: int) -> None:
        print(f"{self.name} ended with {os.waitstatus_to_exitcode(status)}; starts again", flush=True)
        self.due = time.monotonic() + 1.0

    def look(self) -> None:
        if self.due and time.monotonic() > self.due:
            self.due = 0.0
            self.start()


def main() -> None:
    setup = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(setup["folder"])
    programs = folder / "programs"
    prepare(folder, Path(setup["programs"]))
    # containerd looks for its shim here.
    os.environ["PATH"] = f"{programs}/bin:{os.environ['PATH']}:/usr/sbin:/sbin"
    containerd = Service(
        "containerd", [str(programs / "bin/containerd"), "--config", str(folder / "containerd.toml")], folder
    )
    ctr = [str(programs / "bin/ctr"), "-a", "/run/containerd.sock", "-n", "k8s.io"]
    end = time.monotonic() + 30.0
    while subprocess.run([*ctr, "version"], capture_output=True).returncode:
        if time.monotonic() > end or containerd.process.poll() is not None:
            sys.exit("containerd does not answer; see its messages above")
        time.sleep(0.05)
    for image in sorted((folder / "images").glob("*.tar")):
        subprocess.run([*ctr, "images", "import", str(image)], check=True, stdout=subprocess.DEVNULL)
        image.unlink()
    services = [containerd, Service("kubelet", [str(programs / "bin/kubelet"), *setup["kubelet"]], folder)]
    while True:
        # As the first process it inherits every orphan of the node.
        pid = status = 0
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
        for service in services:
            if pid and pid == service.process.pid:
                service.ended(status)
            service.look()
        if not pid:
            time.sleep(0.05)


if __name__ == "__main__":
    main()
