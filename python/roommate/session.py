"""The connection of a process to the daemon of its machine.

Everything happens between two steps, in the training thread: there is no second thread, and a
running step is never disturbed. After a lost connection the session reconnects, for ever; until
then the job runs on unchanged. Only the first connection is waited for. Without a daemon nothing
here has any effect.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from . import protocol
from .device import Device
from .protocol import BatchRange, Message, ProtocolError

REPORT_EVERY_S = 0.5
"""Seconds between two reports."""

RETRY_EVERY_S = 0.5
"""Seconds between two attempts to reconnect."""

RETRY_MOST_S = 8.0
"""The same after several attempts that the daemon did not welcome: each doubles the time."""

LATER_MOST_S = 60.0
"""Longest time for which the daemon can put off a job, in seconds."""

ANSWER_WITHIN_S = 5.0
"""Seconds within which the daemon must answer a hello."""

GO_WITHIN_S = 120.0
"""Seconds within which the daemon must let the job into a stage; partners may stay for 30."""

LEAVES = 75
"""Exit status of a job that ended on the daemon's request: "try again later" (sysexits)."""

Hook = Callable[[], object]

LATER = object()
"""Returned by a hook of ``on_checkpoint`` that saves later, and then calls ``Session.saved``."""


class Stopped(SystemExit):
    """Raised between two steps when the daemon stops the job. The hooks have saved a checkpoint; a
    ``finally`` still runs.
    """

    def __init__(self) -> None:
        super().__init__(LEAVES)


class Loop(Protocol):
    """A loop that takes steps."""

    def retune(self, still: bool) -> bool:
        """Applies the daemon's request. Returns whether it is applied; if not, it is called again
        after the next step.
        """


class Session:
    """The connection, and the daemon's requests."""

    def __init__(self, path: str | None, token: str) -> None:
        self._path = path
        self._token = token
        self._pid = os.getpid()
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._retry_at = 0.0
        self._unwelcome = 0
        """Attempts since the last welcome."""
        self._welcomed = False
        self._answer_by = 0.0
        self._version = protocol.VERSION
        self._batches: BatchRange | None = None
        self._granted: str | None = None
        self._checkpoint_wanted = False
        self._stop_wanted = False
        self._suspend_wanted = False
        self._tune_wanted = False
        self.on_suspend: list[Hook] = []
        self.on_resume: list[Hook] = []
        self.on_checkpoint: list[Hook] = []
        self.job: str | None = None
        self.start_done = 0.0
        """Work kept from earlier attempts, in steps, as the daemon knows it."""
        self.batch = 0
        """The batch size that the daemon requests; 0 = the job's own."""
        self.pace_permille = 1000
        self.interleaved = False
        self.done = 0.0
        self.device = Device(path is not None)
        self.loop: Loop | None = None

    @property
    def connected(self) -> bool:
        """Whether the daemon is connected and has welcomed the job."""
        return self._welcomed

    @property
    def managed(self) -> bool:
        """Whether a daemon started this process and manages it."""
        return self._path is not None and os.getpid() == self._pid

    def open(self, batches: BatchRange | None) -> None:
        """Connects to the daemon, sends a hello and waits for the welcome, if the process is
        managed.
        """
        news = batches is not None and batches != self._batches
        if batches is not None:
            self._batches = batches
        if not self.managed:
            return
        if self._socket is None:
            self._connect()
        elif news:
            self._greet()
        # One that puts the job off is asked again later.
        while self.managed and not self._welcomed and not self._must_wait():
            self._receive(0.1)

    def boundary(self) -> None:
        """Handles the daemon's requests between two steps. Returns when the job may take the next
        step.
        """
        if self._path is None:
            return
        self._receive(0.0)
        if self._tune_wanted or self._checkpoint_wanted or self._stop_wanted:
            self._obey()
        if self._suspend_wanted:
            self._wait_suspended()

    def pause(self, seconds: float) -> None:
        """Pauses for ``seconds``, or until the daemon changes the pace. At pace 0 it pauses until
        the daemon raises the pace.
        """
        end = time.monotonic() + seconds
        while self.managed:
            left = end - time.monotonic()
            if left <= 0.0 and self.pace_permille > 0:
                return
            before = self.pace_permille
            self._receive(min(max(left, 0.0), 1.0) if self.pace_permille > 0 else 0.2)
            self._obey()
            if self._suspend_wanted:
                self._wait_suspended()
            if self.pace_permille != before and self.pace_permille > 0:
                return

    def send(self, message: Message) -> None:
        """Sends a message, if the daemon is connected."""
        if self._socket is None:
            return
        try:
            self._socket.sendall(protocol.encode(message))
        except OSError:
            self._lose()

    def enter(self, stage: str) -> None:
        """Waits for permission to enter a stage, where jobs interleave their stages. Without a
        daemon that answers the job enters without it.
        """
        if not self.interleaved or not self._welcomed:
            return
        self._granted = None
        self.send(protocol.Enter(stage))
        deadline = time.monotonic() + GO_WITHIN_S
        while self._granted != stage and self.interleaved and self._welcomed:
            left = deadline - time.monotonic()
            if left <= 0.0:
                self._lose()
                return
            self._receive(min(left, 1.0))

    def leave(self, stage: str) -> None:
        """Leaves a stage, so that the next job can enter it."""
        if self._granted == stage:
            self._granted = None
            self.send(protocol.Leave(stage))

    def stop(self) -> None:
        """Has the job save a checkpoint and end before its next step."""
        self._stop_wanted = True

    def checkpoint(self) -> None:
        """Saves a checkpoint through the hooks and reports it."""
        self.device.drain()
        results = [hook() for hook in self.on_checkpoint]
        if results and LATER not in results:
            self.saved()

    def saved(self) -> None:
        """Reports that a checkpoint of the present progress is saved."""
        self.send(protocol.Checkpointed(self.done))

    def _connect(self) -> None:
        assert self._path is not None
        self._retry_at = time.monotonic() + RETRY_EVERY_S
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A daemon that does not read must not block a step forever.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
        try:
            # Nor one that does not accept.
            connection.setblocking(False)
            connection.connect(self._path)
            connection.setblocking(True)
        except OSError:
            connection.close()
            return
        self._socket, self._buffer = connection, b""
        self._greet()

    def _greet(self) -> None:
        """Sends a hello."""
        self._welcomed = False
        self._answer_by = time.monotonic() + ANSWER_WITHIN_S
        self.send(protocol.Hello(self._version, self._token, self._pid, self._batches))

    def _must_wait(self) -> bool:
        """Whether there is no connection, and the next attempt is not due yet."""
        return self._socket is None and time.monotonic() < self._retry_at

    def _lose(self, after_s: float = 0.0) -> None:
        """Closes the connection; the next attempt is made after ``after_s`` or later."""
        if self._socket is not None:
            self._socket.close()
        self._unwelcome = 0 if self._welcomed else self._unwelcome + 1
        self._socket, self._welcomed, self._granted = None, False, None
        backoff = min(RETRY_EVERY_S * 2.0 ** min(self._unwelcome, 10), RETRY_MOST_S)
        self._retry_at = time.monotonic() + max(backoff, min(after_s, LATER_MOST_S))

    def _receive(self, wait_s: float) -> None:
        """Handles received messages, waiting at most ``wait_s`` seconds for one."""
        if self._socket is None:
            if time.monotonic() >= self._retry_at and self.managed:
                self._connect()
            elif wait_s > 0.0:
                time.sleep(min(wait_s, RETRY_EVERY_S))
            return
        if not self._welcomed and time.monotonic() >= self._answer_by:
            self._lose()
            return
        if wait_s > 0.0:
            select.select([self._socket], [], [], wait_s)
        try:
            data = self._socket.recv(protocol.LONGEST_LINE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            try:
                self._take(protocol.decode(line, protocol.FROM_MACHINE))
            except ProtocolError as error:
                self._give_up(f"invalid message from the machine: {error}")
            if self._socket is None:
                return
        if len(self._buffer) > protocol.LONGEST_LINE:
            self._give_up("a message from the machine is too long")

    def _give_up(self, reason: str) -> None:
        """Disconnects for good; the job runs on without the daemon."""
        print(f"roommate: {reason}; continuing without it", file=sys.stderr)
        self._lose()
        self._path = None
        self.batch, self.pace_permille, self.interleaved = 0, 1000, False
        self.device.wants(None, None)
        self.device.plans_for(None)
        self._suspend_wanted = self._stop_wanted = self._checkpoint_wanted = False

    def _take(self, message: Message) -> None:
        if isinstance(message, protocol.Welcome):
            if not protocol.OLDEST <= message.version <= self._version:
                self._give_up(f"the machine answers in protocol version {message.version}")
                return
            self._welcomed = True
            self.job, self.start_done = message.job, message.done
            self._wants(message)
            self.device.plans_for(message.plan_sms or None)
            # The daemon must learn whether its partition can be used.
            self._tune_wanted = message.seat is not None
            self._suspend_wanted = message.suspended
        elif isinstance(message, protocol.Tune):
            self._wants(message)
            self._tune_wanted = True
        elif isinstance(message, protocol.Suspend):
            self._suspend_wanted = True
        elif isinstance(message, protocol.Resume):
            self._suspend_wanted = False
        elif isinstance(message, protocol.Checkpoint):
            self._checkpoint_wanted = True
        elif isinstance(message, protocol.Stop):
            self._stop_wanted = True
        elif isinstance(message, protocol.Go):
            self._granted = message.stage
        elif isinstance(message, protocol.Refused):
            self._take_refusal(message)

    def _take_refusal(self, refused: protocol.Refused) -> None:
        if refused.later_s is not None:
            self._lose(refused.later_s)
        elif not self._welcomed and self._version > protocol.OLDEST:
            # The machine may be older than this SDK.
            self._version -= 1
            self._lose()
            self._retry_at = 0.0
        else:
            self._give_up(f"the machine refused: {refused.reason}")

    def _wants(self, how: protocol.Welcome | protocol.Tune) -> None:
        self.batch = self._within(how.batch, self._batches) if self._batches else 0
        self.pace_permille = min(max(how.pace_permille, 0), 1000)
        self.interleaved = how.interleaved
        self.device.wants(how.seat, how.gpu_mib or None, how.priority)

    @staticmethod
    def _within(batch: int, batches: BatchRange) -> int:
        return min(max(batch or batches.size, batches.min), batches.max)

    def _obey(self) -> None:
        if self._tune_wanted:
            still = self._suspend_wanted or self.pace_permille == 0
            if self.loop is None or self.loop.retune(still):
                self._tune_wanted = False
                self.send(protocol.Tuned(self.batch, self.pace_permille, self.device.place))
        if self._checkpoint_wanted:
            self._checkpoint_wanted = False
            self.checkpoint()
        if self._stop_wanted:
            self.checkpoint()
            raise Stopped

    def _wait_suspended(self) -> None:
        self.device.drain()
        for hook in self.on_suspend:
            hook()
        release_memory()
        informed: socket.socket | None = None
        while self._suspend_wanted and self._path is not None:
            # A reconnected daemon must be informed again.
            if self._socket is not None and self._socket is not informed:
                informed = self._socket
                self.send(protocol.Suspended(self.done))
            self._receive(1.0)
            self._obey()
        for hook in self.on_resume:
            hook()
        self.send(protocol.Resumed())


def release_memory() -> None:
    """Returns unused memory to the operating system and to the device."""
    gc.collect()
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_available():
        cuda.empty_cache()
    # malloc_trim exists only in the GNU C library.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_mib() -> int | None:
    """Resident memory of the process in MiB; ``None`` where the system does not report it."""
    try:
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


_current: Session | None = None


def current() -> Session:
    """The session of this process. A forked child is not managed."""
    global _current
    if _current is None:
        path = os.environ.get("ROOMMATE_SOCKET") or None
        _current = Session(path, os.environ.get("ROOMMATE_TOKEN", ""))
        _obey_term(_current)
    return _current


def _obey_term(session: Session) -> None:
    """Has the first process of a container save a checkpoint and end on SIGTERM, as on the machine's
    request: without a handler the kernel ignores the signal there.
    """
    is_first = session.managed and os.getpid() == 1
    is_main = threading.current_thread() is threading.main_thread()
    if is_first and is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: session.stop())


def follow() -> None:
    """This process follows another one of its job, which alone talks to the daemon."""
    global _current
    forget()
    _current = Session(None, "")


def forget() -> None:
    """Closes the session; the next use creates a new one."""
    global _current
    if _current is not None:
        _current._lose()
    _current = None
