"""A real node: containerd and the kubelet of this version, with containers of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from .api import Object
from .images import write_busybox, write_image, write_pause
from .keeper import CGROUPS, link_prefix
from .kwok import GPU, is_usable
from .plane import REAL_NODES, ControlPlane
from .programs import TestbedError, free_port, program_folder

PAUSE = "localhost/pause:1"
BUSYBOX = "localhost/busybox:1"


class RealNode:
    """A node of a control plane, in namespaces of its own: PIDs, mounts with its own /var and /run, and
    stand-ins for the kernel's settings that a kubelet changes. Pods use images that are on the node:
    `BUSYBOX`, and what `add_image` adds. Pods have addresses of their own but no route to this machine;
    those with `hostNetwork` share its network. The kubelet and containerd start again when they end.
    """

    def __init__(
        self,
        plane: ControlPlane,
        name: str = REAL_NODES[0],
        labels: dict[str, str] | None = None,
        gpus: int = 0,
    ) -> None:
        if name not in REAL_NODES:
            raise TestbedError(f"a real node's name is one of {', '.join(REAL_NODES)}, not {name}")
        if os.geteuid() != 0:
            raise TestbedError("a real node needs root for its namespaces and cgroups: run this as root")
        self.plane, self.name = plane, name
        self.folder = plane.folder / name
        self.var, self.run = self.folder / "var", self.folder / "run"
        self._start(labels or {})
        if gpus:
            self.advertise(GPU, gpus)

    @property
    def device_plugins(self) -> Path:
        """The folder in which the kubelet finds device plugins, as this machine sees it."""
        return self.var / "lib/kubelet/device-plugins"

    def _start(self, labels: dict[str, str]) -> None:
        for name in ("var/lib", "var/log", "run", "cni", "images", "programs"):
            (self.folder / name).mkdir(parents=True)
        (self.var / "run").symlink_to("/run")
        (self.var / "tmp").mkdir(mode=0o1777)
        busybox = program_folder() / "bin/busybox"
        write_pause(self.folder / "images/pause.tar", PAUSE, busybox)
        write_busybox(self.folder / "images/busybox.tar", BUSYBOX, busybox)
        self._write_network()
        (self.folder / "containerd.toml").write_text(self._containerd())
        (self.folder / "kubelet.json").write_text(json.dumps(self._kubelet(), indent=1))
        setup = {
            "folder": str(self.folder),
            "programs": str(program_folder()),
            "kubelet": [
                f"--config={self.folder / 'kubelet.json'}",
                f"--kubeconfig={self.plane.kubeconfig(node=self.name)}",
                "--root-dir=/var/lib/kubelet",
                f"--cert-dir={self.folder / 'pki'}",
                f"--hostname-override={self.name}",
                f"--node-ip={own_address()}",
                f"--node-labels={','.join(f'{k}={v}' for k, v in labels.items())}",
            ],
        }
        (self.folder / "setup.json").write_text(json.dumps(setup))
        for cgroup in cgroup_roots():
            make_cgroup(cgroup / self.plane.folder.name / self.name)
        self.plane.programs.start(
            self.name,
            [
                *("unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child"),
                "--mount-proc",
                *(sys.executable, "-I", Path(__file__).parent / "inside.py", self.folder / "setup.json"),
            ],
            is_init=True,
        )
        self.plane.programs.until(self.name, "registers and becomes Ready", self._is_ready)

    def _is_ready(self) -> bool:
        listed = self.plane.api.get("/api/v1/nodes", fieldSelector=f"metadata.name={self.name}")["items"]
        return any(is_usable(node) for node in listed)

    def _write_network(self) -> None:
        index = REAL_NODES.index(self.name)
        bridge = {
            "type": "bridge",
            "bridge": f"{link_prefix(self.plane.folder)}n{index}",
            # With a gateway it would turn on forwarding for the whole machine.
            "isGateway": False,
            "ipMasq": False,
            "ipam": {
                "type": "host-local",
                "dataDir": str(self.folder / "addresses"),
                "ranges": [[{"subnet": f"10.88.{index}.0/24"}]],
            },
        }
        chain = {"cniVersion": "0.4.0", "name": "testbed", "plugins": [bridge]}
        (self.folder / "cni/10-testbed.conflist").write_text(json.dumps(chain))

    def _containerd(self) -> str:
        return f"""\
version = 2
root = "{self.folder}/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd.sock"
[ttrpc]
  address = "/run/containerd.sock.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  # A container without CAP_SYS_RESOURCE cannot lower it.
  restrict_oom_score_adj = true
  disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{self.folder}/programs/cni"
  conf_dir = "{self.folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  BinaryName = "{self.folder}/programs/bin/runc"
  SystemdCgroup = false
"""

    def _kubelet(self) -> Object:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": free_port(),
            "healthzBindAddress": "127.0.0.1",
            "healthzPort": free_port(),
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}},
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": "unix:///run/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.plane.folder.name}/{self.name}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "evictionHard": {
                "nodefs.available": "1%",
                "imagefs.available": "1%",
                "memory.available": "50Mi",
            },
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "makeIPTablesUtilChains": False,
            "oomScoreAdj": 0,
            "resolvConf": "",
        }

    def add_image(self, name: str, files: dict[str, Path], command: list[str]) -> str:
        """Puts an image on the node, made of busybox and these files (place in the image: file here), with
        the shared libraries that they need. Returns its name for pods, which need `imagePullPolicy: Never`.
        """
        full = name if "/" in name else f"localhost/{name}"
        full = full if ":" in full.rsplit("/", 1)[1] else f"{full}:1"
        busybox = program_folder() / "bin/busybox"
        archive = self.folder / "images" / f"{re.sub(r'[^A-Za-z0-9.]', '-', full)}.tar"
        links = {f"/bin/{command}": "busybox" for command in ("sh", "cat", "echo", "env", "ls", "sleep")}
        write_image(archive, full, {"/bin/busybox": busybox, **files}, command, links)
        self.ctr("images", "import", str(archive))
        archive.unlink()
        return full

    def ctr(self, *words: str) -> str:
        """A command of containerd's own client, in the namespace of the kubelet's containers."""
        client = [str(program_folder() / "bin/ctr"), "-a", str(self.run / "containerd.sock")]
        done = subprocess.run([*client, "-n", "k8s.io", *words], capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(f"ctr {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def advertise(self, resource: str, count: int) -> None:
        """Gives the node an extended resource without a device plugin; pods get no device with it."""
        path = f"/api/v1/nodes/{self.name}"
        has = {resource: str(count)}
        # The kubelet copies the capacity into what can be allocated at its next report.
        self.plane.api.patch(f"{path}/status", {"status": {"capacity": has, "allocatable": has}})

    def pod_log(self, pod: Object, container: str = "main") -> str:
        """What a container printed, without times; over all its starts."""
        meta = pod["metadata"]
        folder = self.var / "log/pods" / f"{meta['namespace']}_{meta['name']}_{meta['uid']}" / container
        lines = [line for path in sorted(folder.glob("*.log")) for line in path.read_text().splitlines()]
        return "".join(f"{line.split(' ', 3)[3]}\n" for line in lines)

    def pids_of(self, pod: Object) -> list[int]:
        """The processes of a pod's containers, as this machine numbers them."""
        mark = pod["metadata"]["uid"]
        found = []
        for path in Path("/proc").glob("[0-9]*/cgroup"):
            # Processes end while they are looked at.
            with contextlib.suppress(OSError):
                if mark in path.read_text():
                    found.append(int(path.parent.name))
        return sorted(found)

    def environment(self, pod: Object) -> dict[str, str]:
        """The variables of a process of the pod that has a token of Roommate's."""
        for pid in self.pids_of(pod):
            lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            found = dict(line.split("=", 1) for line in lines if "=" in line)
            if "ROOMMATE_TOKEN" in found:
                return found
        raise AssertionError("no process of the pod has a token")

    def kill_kubelet(self) -> None:
        """Ends the kubelet like a crash; it starts again after a second, and containers go on."""
        self._kill(self.kubelet_pid())

    def kill_containerd(self) -> None:
        """Ends containerd like a crash; it starts again after a second, and containers go on."""
        self._kill(self.containerd_pid())

    def kubelet_pid(self) -> int:
        """The kubelet, as the node numbers it."""
        return int((self.folder / "kubelet.pid").read_text())

    def containerd_pid(self) -> int:
        """containerd, as the node numbers it."""
        return int((self.folder / "containerd.pid").read_text())

    def _kill(self, pid: int) -> None:
        os.kill(host_pid(self._init(), pid), signal.SIGKILL)

    def _init(self) -> int:
        """The first process of the node's namespaces, as this machine numbers it."""
        starter = self.plane.programs.pid(self.name)
        return int(Path(f"/proc/{starter}/task/{starter}/children").read_text().split()[0])

    def close(self) -> None:
        """Ends the node like a power cut, with all its containers; its object stays in the API."""
        self.plane.programs.stop(self.name, signal.SIGKILL)


def host_pid(init: int, inner: int) -> int:
    """The number on this machine of a process that has another one in the namespace of `init`."""
    space = os.readlink(f"/proc/{init}/ns/pid")
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            pids = re.search(r"^NSpid:\s+(.*)$", status.read_text(), re.MULTILINE)
            is_same = pids and pids[1].split()[-1] == str(inner)
            if is_same and os.readlink(status.parent / "ns/pid") == space:
                return int(status.parent.name)
        except OSError:
            continue
    raise TestbedError(f"process {inner} of the node is gone")


def own_address() -> str:
    """An address of this machine that is not loopback. The kubelet insists on one; nothing connects to it."""
    show = ["ip", "-json", "-4", "address", "show", "scope", "global"]
    listed = subprocess.run(show, capture_output=True, text=True, check=True)
    found = [info["local"] for link in json.loads(listed.stdout) for info in link.get("addr_info", [])]
    if not found:
        raise TestbedError(
            "a real node needs an IPv4 address of this machine that is not loopback, and there is none: "
            "add one, for example with `ip link add name dummy0 type dummy` and `ip address add`"
        )
    return str(found[0])


def cgroup_roots() -> list[Path]:
    """Where cgroups are made: the one hierarchy of version 2, or each of version 1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in CGROUPS.iterdir() if (path / "cgroup.procs").exists()]


def make_cgroup(path: Path) -> None:
    for folder in (path.parent, path):
        folder.mkdir(exist_ok=True)
        # In version 1, nothing can be started in a cpuset before it has CPUs and memory.
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (folder / name).exists() and (folder.parent / name).exists():
                (folder / name).write_text((folder.parent / name).read_text())
        # In version 2, controllers are handed down step by step.
        if (folder / "cgroup.subtree_control").exists() and (CGROUPS / "cgroup.controllers").exists():
            for handing in (folder.parent, folder):
                offered = (handing / "cgroup.controllers").read_text().split()
                wanted = {"cpu", "cpuset", "hugetlb", "io", "memory", "pids"}
                orders = " ".join(f"+{name}" for name in offered if name in wanted)
                (handing / "cgroup.subtree_control").write_text(orders)
