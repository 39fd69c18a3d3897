"""A daemon for tests: answers a hello, sends the test's messages, and records received ones."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from fake_torch import library, torch

from roommate import protocol, session
from roommate.protocol import Message

__all__ = ["library", "torch"]

M = TypeVar("M", bound=Message)


class Machine:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard: list[Message] = []
        self.welcome: Message | None = protocol.Welcome(1, "test", 0.0, 0, 1000)
        self.react: Callable[[Message], list[Message]] = lambda message: []
        self._changed = threading.Condition()
        self._peers: list[socket.socket] = []
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            self._peers.append(peer)
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()

    def _listen(self, peer: socket.socket) -> None:
        try:
            for line in peer.makefile("rb"):
                message = protocol.decode(line, protocol.FROM_TENANT)
                with self._changed:
                    self.heard.append(message)
                    self._changed.notify_all()
                greets = isinstance(message, protocol.Hello) and self.welcome is not None
                answers = [self.welcome] if greets else []
                for answer in answers + self.react(message):
                    peer.sendall(protocol.encode(answer))
        except OSError:
            pass

    def say(self, message: Message) -> None:
        self._peers[-1].sendall(protocol.encode(message))

    def say_raw(self, line: bytes) -> None:
        self._peers[-1].sendall(line)

    def hang_up(self) -> None:
        for peer in self._peers:
            peer.shutdown(socket.SHUT_RDWR)
            peer.close()
        self._peers.clear()

    def close(self) -> None:
        self._server.close()
        self.hang_up()

    def all(self, kind: type[M]) -> list[M]:
        with self._changed:
            return [m for m in self.heard if isinstance(m, kind)]

    def wait_for(self, kind: type[M], count: int = 1, within_s: float = 10.0) -> list[M]:
        end = time.monotonic() + within_s
        with self._changed:
            while len(found := [m for m in self.heard if isinstance(m, kind)]) < count:
                if not self._changed.wait(end - time.monotonic()):
                    raise AssertionError(f"no {kind.__name__} among {self.heard}")
        return found


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(session, "REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(session, "RETRY_EVERY_S", 0.01)
    it = Machine(tmp_path / "m.sock")
    monkeypatch.setenv("ROOMMATE_SOCKET", str(it.path))
    monkeypatch.setenv("ROOMMATE_TOKEN", "7")
    session.forget()
    yield it
    session.forget()
    it.close()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ROOMMATE_SOCKET", raising=False)
    session.forget()
    yield
    session.forget()
