"""A control plane of Kubernetes on loopback: etcd, API server, controller manager, on request a scheduler."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from .api import Api, ApiError, Object
from .programs import Programs, TestbedError, free_port, program_folder

REAL_NODES = [f"real-{n}" for n in range(4)]
"""The names that kubelets can register: each has a token of its own."""


class ControlPlane:
    """An empty cluster, with Node and RBAC authorization. Everything of it ends with this object, and
    also when this process dies in whatever way.
    """

    def __init__(self, api_flags: list[str] | None = None) -> None:
        self.bin = program_folder() / "bin"
        self.programs = Programs()
        self.folder = self.programs.folder
        try:
            self._start(api_flags or [])
        except BaseException:
            self.programs.close()
            raise

    def __enter__(self) -> ControlPlane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.programs.close()

    def _start(self, api_flags: list[str]) -> None:
        key, public = self.folder / "accounts.key", self.folder / "accounts.pub"
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key))
        openssl("ec", "-in", str(key), "-pubout", "-out", str(public))
        self._tokens = {user: secrets.token_hex(16) for user in ["admin", *REAL_NODES]}
        users = [f'{self._tokens["admin"]},admin,admin,"system:masters"']
        users += [f'{self._tokens[n]},system:node:{n},{n},"system:nodes"' for n in REAL_NODES]
        tokens = self.folder / "tokens.csv"
        tokens.write_text("\n".join(users) + "\n")

        store, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self.programs.start(
            "etcd",
            [
                self.bin / "etcd",
                f"--data-dir={self.folder / 'etcd'}",
                f"--listen-client-urls={store}",
                f"--advertise-client-urls={store}",
                f"--listen-peer-urls={peers}",
                f"--initial-advertise-peer-urls={peers}",
                f"--initial-cluster=default={peers}",
                "--log-level=warn",
            ],
        )
        port = free_port()
        self.server = f"https://127.0.0.1:{port}"
        certificates = self.folder / "certificates"
        self.programs.start(
            "kube-apiserver",
            [
                self.bin / "kube-apiserver",
                f"--etcd-servers={store}",
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                f"--secure-port={port}",
                f"--cert-dir={certificates}",
                "--service-cluster-ip-range=10.96.0.0/24",
                "--endpoint-reconciler-type=none",
                f"--service-account-issuer={self.server}",
                f"--service-account-key-file={public}",
                f"--service-account-signing-key-file={key}",
                f"--token-auth-file={tokens}",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                "--allow-privileged=true",
                *api_flags,
            ],
        )
        # The server makes its own certificate, with the authority that signed it in the same file.
        self.ca = certificates / "apiserver.crt"
        self.programs.until("kube-apiserver", "writes its certificate", self.ca.exists)
        self.programs.until("kube-apiserver", "accepts its certificate", self._loads_ca)
        self.admin_token = self._tokens["admin"]
        self.api = self.api_of(self.admin_token)
        self.until_ready()
        admin = self.kubeconfig()
        self.programs.start(
            "kube-controller-manager",
            [
                self.bin / "kube-controller-manager",
                f"--kubeconfig={admin}",
                f"--authentication-kubeconfig={admin}",
                f"--authorization-kubeconfig={admin}",
                f"--service-account-private-key-file={key}",
                # Goes into each namespace, for pods that talk to the API server.
                f"--root-ca-file={self.ca}",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                "--secure-port=0",
                "--node-monitor-grace-period=20s",
                "--kube-api-qps=300",
                "--kube-api-burst=600",
            ],
        )
        self._until_accounts("default")

    def _loads_ca(self) -> bool:
        return "END CERTIFICATE" in self.ca.read_text()

    def until_ready(self, within_s: float = 60.0) -> None:
        self.programs.until("kube-apiserver", "is ready", self._is_ready, within_s)

    def _is_ready(self) -> bool:
        try:
            return self.api.text("/readyz") == "ok"
        except (OSError, ApiError):
            return False

    def _until_accounts(self, namespace: str) -> None:
        """Pods are refused until the controller manager has made the namespace's service account."""

        def made() -> bool:
            try:
                self.api.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/default")
            except ApiError as error:
                if error.status != 404:
                    raise
                return False
            return True

        self.programs.until(
            "kube-controller-manager", f"makes the service account of namespace {namespace}", made
        )

    def api_of(self, token: str) -> Api:
        return Api(self.server, token, self.ca)

    def token(self, account: str) -> str:
        """A token of a service account NAMESPACE/NAME, valid for a day."""
        namespace, name = account.split("/")
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 86400},
        }
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        return str(self.api.post(path, asked)["status"]["token"])

    def node_token(self, node: str) -> str:
        """The token with which a real node's kubelet registers."""
        return self._tokens[node]

    def kubeconfig(self, account: str | None = None, node: str | None = None) -> Path:
        """A kubeconfig file of the administrator, of a service account NAMESPACE/NAME or of a real node."""
        if account:
            name, token = account.replace("/", "-"), self.token(account)
        else:
            name = node or "admin"
            token = self._tokens[name]
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(kubeconfig(self.server, self.ca.read_bytes(), name, token), indent=1))
        path.chmod(0o600)
        return path

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        command = [str(self.bin / "kubectl"), f"--kubeconfig={self.kubeconfig()}", *words]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def namespace(self, name: str | None = None) -> str:
        """Makes a namespace in which pods can be made at once."""
        name = name or f"test-{secrets.token_hex(4)}"
        self.api.post("/api/v1/namespaces", {"metadata": {"name": name}})
        self._until_accounts(name)
        return name

    def pod(self, namespace: str, name: str, spec: Object, **metadata: Any) -> Object:
        """Makes a pod."""
        body = {"metadata": {"name": name, "namespace": namespace, **metadata}, "spec": spec}
        return self.api.post(f"/api/v1/namespaces/{namespace}/pods", body)

    def start_scheduler(self, qps: int = 5000) -> None:
        """Starts the default scheduler of Kubernetes; its own limit is 50 requests per second."""
        admin = self.kubeconfig()
        self.programs.start(
            "kube-scheduler",
            [
                self.bin / "kube-scheduler",
                f"--kubeconfig={admin}",
                f"--authentication-kubeconfig={admin}",
                f"--authorization-kubeconfig={admin}",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                "--secure-port=0",
                f"--kube-api-qps={qps}",
                f"--kube-api-burst={qps}",
            ],
        )

    def stop_api_server(self) -> None:
        """Ends the API server like a crash, for tests of what its clients do then."""
        self.programs.stop("kube-apiserver", signal.SIGKILL)

    def start_api_server(self) -> None:
        self.programs.start_again("kube-apiserver")
        self.until_ready()

    def keep_logs(self, folder: Path) -> None:
        """Copies the logs of all programs, which go away with the testbed."""
        shutil.copytree(self.folder / "logs", folder, dirs_exist_ok=True)


def kubeconfig(server: str, ca: bytes, user: str, token: str) -> Object:
    authority = base64.b64encode(ca).decode()
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "testbed", "cluster": {"server": server, "certificate-authority-data": authority}}
        ],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": user}}],
        "current-context": "testbed",
    }


def openssl(*words: str) -> None:
    if not shutil.which("openssl"):
        raise TestbedError("the control plane's keys are made with openssl: install it (not on the PATH)")
    subprocess.run(["openssl", *words], check=True, capture_output=True)
