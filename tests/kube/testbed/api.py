"""A client of the API server, with the standard library only."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

Object = dict[str, Any]
PATCHES = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, request: str, status: int, message: str) -> None:
        super().__init__(f"{request}: {status}: {message}")
        self.status = status
        self.message = message


class Api:
    """Requests as one user. Paths are those of the API: /api/v1/namespaces/NS/pods/NAME."""

    def __init__(self, server: str, token: str, ca: Path) -> None:
        where = urlsplit(server)
        assert where.hostname and where.port
        self._host, self._port, self._token = where.hostname, where.port, token
        self._tls = ssl.create_default_context(cafile=str(ca))
        self._kept = threading.local()

    def get(self, path: str, **query: Any) -> Object:
        return self._json("GET", path, query=query)

    def post(self, path: str, body: Object) -> Object:
        return self._json("POST", path, body)

    def put(self, path: str, body: Object) -> Object:
        return self._json("PUT", path, body)

    def patch(self, path: str, body: Any, kind: str = "merge", **query: Any) -> Object:
        return self._json("PATCH", path, body, PATCHES[kind], query)

    def apply_yaml(self, path: str, text: str, **query: Any) -> Object:
        """Applies an object as `kubectl apply --server-side` does."""
        return self._json("PATCH", path, text.encode(), PATCHES["apply"], query)

    def table(self, path: str) -> Object:
        """What `kubectl get` prints."""
        accept = "application/json;as=Table;v=v1;g=meta.k8s.io"
        found: Object = json.loads(self._request("GET", path, None, "", None, accept))
        return found

    def delete(self, path: str, **options: Any) -> Object:
        """Options are those of the API, such as gracePeriodSeconds."""
        return self._json("DELETE", path, options or None)

    def text(self, path: str, **query: Any) -> str:
        return self._request("GET", path, None, "", query).decode()

    def bind(
        self, pod: Object, node: str, annotations: dict[str, str] | None = None, uid: str | None = None
    ) -> Object:
        """Binds a pod to a node as a scheduler does; fails with 409 if it is bound already."""
        meta = pod["metadata"]
        own = {"name": meta["name"], "namespace": meta["namespace"], "uid": uid or meta["uid"]}
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {**own, "annotations": annotations or {}},
            "target": target,
        }
        return self.post(f"{pod_path(pod)}/binding", binding)

    def until(self, path: str, holds: Callable[[Object], Any], within_s: float = 30.0) -> Object:
        """Waits until what is at a path fulfils a condition; returns it."""
        end = time.monotonic() + within_s
        while True:
            found = self.get(path)
            if holds(found):
                return found
            if time.monotonic() > end:
                brief = json.dumps({k: found.get(k) for k in ("metadata", "status") if k in found})
                raise AssertionError(f"{path} is not as expected after {within_s:.0f} s: {brief[:3000]}")
            time.sleep(0.05)

    def until_gone(self, path: str, within_s: float = 30.0) -> None:
        end = time.monotonic() + within_s
        while True:
            try:
                self.get(path)
            except ApiError as error:
                if error.status == 404:
                    return
                raise
            assert time.monotonic() < end, f"{path} still exists after {within_s:.0f} s"
            time.sleep(0.05)

    def watch(self, path: str, within_s: int = 60, **query: Any) -> Iterator[tuple[str, Object]]:
        """Changes below a path as (ADDED, MODIFIED or DELETED, object), from this call on."""
        listed = self.get(path, **query)
        query |= {"watch": 1, "resourceVersion": listed["metadata"]["resourceVersion"]}
        line = self._new_connection(timeout=within_s + 5)
        asked = urlencode({**query, "timeoutSeconds": within_s})
        line.request("GET", f"{path}?{asked}", headers=self._headers())

        def changes() -> Iterator[tuple[str, Object]]:
            try:
                for event in line.getresponse():
                    change = json.loads(event)
                    yield change["type"], change["object"]
            finally:
                line.close()

        return changes()

    def _json(self, method: str, path: str, body: Any = None, kind: str = "", query: Any = None) -> Object:
        answer: Object = json.loads(self._request(method, path, body, kind, query))
        return answer

    def _request(
        self, method: str, path: str, body: Any, kind: str, query: Any, accept: str = "application/json"
    ) -> bytes:
        target = quote(path) + (f"?{urlencode(query)}" if query else "")
        headers = self._headers() | {"Content-Type": kind or "application/json", "Accept": accept}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        for is_again in (False, True):
            line = self._connection(is_again)
            try:
                line.request(method, target, data, headers)
                answer = line.getresponse()
                content = answer.read()
                break
            except (ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected):
                # The server closed an idle connection before this request reached it.
                line.close()
                if is_again:
                    raise
            except BaseException:
                self._kept.line = None
                raise
        if answer.status >= 400:
            try:
                message = json.loads(content)["message"]
            except (ValueError, KeyError):
                message = content.decode(errors="replace")
            raise ApiError(f"{method} {path}", answer.status, message)
        return content

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}

    def _connection(self, is_new: bool) -> http.client.HTTPSConnection:
        line: http.client.HTTPSConnection | None = getattr(self._kept, "line", None)
        if line is None or is_new:
            line = self._kept.line = self._new_connection(timeout=60)
        return line

    def _new_connection(self, timeout: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._host, self._port, context=self._tls, timeout=timeout)


def pod_path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def condition(found: Object, kind: str) -> str | None:
    """The status of one of an object's conditions: True, False or Unknown."""
    conditions = found.get("status", {}).get("conditions", [])
    return next((c["status"] for c in conditions if c["type"] == kind), None)
