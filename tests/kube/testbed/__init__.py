"""A real Kubernetes for tests, on this machine only: see CONTRIBUTING.md, "Tests on Kubernetes"."""

from .api import Api, ApiError, Object, condition, pod_path
from .kwok import GPU, KwokNodes
from .node import BUSYBOX, RealNode
from .plane import ControlPlane
from .programs import Programs, TestbedError, program_folder

__all__ = [
    "BUSYBOX",
    "GPU",
    "Api",
    "ApiError",
    "ControlPlane",
    "KwokNodes",
    "Object",
    "Programs",
    "RealNode",
    "TestbedError",
    "condition",
    "pod_path",
    "program_folder",
]
