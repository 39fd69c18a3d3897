"""A control plane for each file of tests; each test makes its own namespace."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import ControlPlane, KwokNodes, RealNode

ROOT = Path(__file__).resolve().parent.parent.parent
LOGS = ROOT / "out/kube-logs"
"""Where the logs of the testbed's programs are after a run that failed."""


@pytest.fixture(autouse=True, scope="session")
def quiet() -> None:
    """Raises the priority of the tests where permitted, against other load on the machine."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)


@pytest.fixture(scope="module")
def plane(quiet: None, request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    name = Path(str(request.fspath)).stem
    shutil.rmtree(LOGS / name, ignore_errors=True)
    before = request.session.testsfailed
    with ControlPlane() as it:
        yield it
        if request.session.testsfailed > before:
            it.keep_logs(LOGS / name)


@pytest.fixture(scope="module")
def kwok(plane: ControlPlane) -> KwokNodes:
    return KwokNodes(plane)


@pytest.fixture(scope="module")
def scheduler(plane: ControlPlane) -> None:
    """The scheduler of Kubernetes, for pods that name no other."""
    plane.start_scheduler()


@pytest.fixture(scope="module")
def node(plane: ControlPlane) -> RealNode:
    return RealNode(plane, labels={"roommate.dev/test": "real"})


@pytest.fixture
def namespace(plane: ControlPlane) -> str:
    return plane.namespace()


def pytest_unconfigure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    counts = {kind: len(reporter.stats.get(kind, [])) for kind in ("passed", "failed", "error")}
    failed = counts["failed"] + counts["error"]
    if failed and LOGS.is_dir():
        print(f"logs of the cluster's programs: {LOGS}")
    print(f"{counts['passed']} passed, {failed} failed")
