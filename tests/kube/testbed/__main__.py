"""A testbed for a shell or for tests in another language: scripts/kube-testbed --help."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .kwok import KwokNodes
from .node import RealNode
from .plane import REAL_NODES, ControlPlane
from .programs import TestbedError


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="kube-testbed",
        description="Starts a Kubernetes on this machine, prints one line of JSON (kubeconfig, server, "
        "token, ca, folder, bin, nodes) when it is ready, and ends with all of it when its standard input "
        "closes.",
    )
    parser.add_argument(
        "--fake-nodes", type=int, default=0, metavar="N", help="nodes of KWOK, with no processes"
    )
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="roommate.dev/gpu of each fake node")
    parser.add_argument(
        "--real-nodes", type=int, default=0, metavar="N", choices=range(len(REAL_NODES) + 1),
        help=f"nodes with kubelet and containerd, at most {len(REAL_NODES)}; needs root",
    )  # fmt: skip
    parser.add_argument("--scheduler", action="store_true", help="start kube-scheduler too")
    args = parser.parse_args()
    try:
        with ControlPlane() as plane:
            ready = start(plane, args)
            print(json.dumps(ready), flush=True)
            sys.stdin.read()
    except TestbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


def start(plane: ControlPlane, args: argparse.Namespace) -> dict[str, Any]:
    names: list[str] = []
    if args.fake_nodes:
        kwok = KwokNodes(plane)
        names += kwok.add(args.fake_nodes, gpus=args.gpus)
        kwok.until_ready(names)
    names += [RealNode(plane, name).name for name in REAL_NODES[: args.real_nodes]]
    if args.scheduler:
        plane.start_scheduler()
    return {
        "kubeconfig": str(plane.kubeconfig()),
        "server": plane.server,
        "token": plane.admin_token,
        "ca": str(plane.ca),
        "folder": str(plane.folder),
        "bin": str(plane.bin),
        "nodes": names,
    }


if __name__ == "__main__":
    sys.exit(main())
