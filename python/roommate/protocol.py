"""The protocol between a tenant and the daemon of its machine: JSON lines over a Unix socket.

Each line is one message: an object with one member, its kind, whose value holds the fields. An
unknown kind or field is an error on either side. The golden file ``tests/protocol.jsonl`` has the
same messages and is read by the daemon's tests as well.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar

VERSION = 1
"""Version of the protocol."""

OLDEST = 1
"""The oldest version that is still spoken, with machines that know no newer one."""

LONGEST_LINE = 64 * 1024
"""Longest valid line in bytes."""

STAGES = ("load", "preprocess", "compute", "sync")
"""The stages of a step, by the resource that each uses: storage, CPU, device, network."""


class ProtocolError(Exception):
    """An invalid message."""


class Message:
    """A message of either side."""

    kind: ClassVar[str]
    ignores_unknown: ClassVar[bool] = False
    """Whether unknown fields are ignored instead of being errors."""


@dataclass(frozen=True)
class BatchRange:
    """Batch sizes that a job supports."""

    size: int
    min: int
    max: int


@dataclass(frozen=True)
class SeatRange:
    """A partition of a GPU: ``sms`` multiprocessors (SMs) from number ``first`` on."""

    first: int
    sms: int


# From the tenant.


@dataclass(frozen=True)
class Hello(Message):
    """The first message: identifies the process."""

    kind = "hello"
    version: int
    token: str
    pid: int
    batch: BatchRange | None = None


@dataclass(frozen=True)
class Stepped(Message):
    """A report of the steps since the last such message."""

    kind = "stepped"
    steps: int
    """Number of steps since the last report."""
    done: float
    """Total work, in steps of the job's own batch size."""
    step_s: float
    """Mean step time in seconds, without pauses."""
    batch: int
    """Present batch size."""
    load_s: float | None = None
    """Mean time per step that the loop waited for its data, in seconds."""
    noise_scale: float | None = None
    """Gradient noise scale, where the job measures it."""
    mem_mib: int | None = None
    """Resident memory of the process in MiB."""
    gpu_mib: int | None = None
    """GPU memory that it holds in MiB."""
    stages_s: list[float] | None = None
    """Mean time per step in each stage in seconds, where the job marks them."""


@dataclass(frozen=True)
class Tuned(Message):
    """The job applied the last ``Tune``."""

    kind = "tuned"
    batch: int
    pace_permille: int
    seat: SeatRange | None = None
    """The partition in which it runs; None = the whole GPU."""


@dataclass(frozen=True)
class Suspended(Message):
    """The job is paused between two steps and has freed what memory it can."""

    kind = "suspended"
    done: float


@dataclass(frozen=True)
class Resumed(Message):
    """The job takes steps again."""

    kind = "resumed"


@dataclass(frozen=True)
class Checkpointed(Message):
    """The job has saved a checkpoint of this much work."""

    kind = "checkpointed"
    done: float


@dataclass(frozen=True)
class Enter(Message):
    """The job requests to enter a stage."""

    kind = "enter"
    stage: str


@dataclass(frozen=True)
class Leave(Message):
    """The job left a stage."""

    kind = "leave"
    stage: str


@dataclass(frozen=True)
class Served(Message):
    """What the front of a service measured over a window; other tenants never send it."""

    kind = "served"
    window_us: int
    requests: int
    """Requests that were answered or given up."""
    late: int
    """Those answered later than the objective, or not at all."""
    refused: int
    """Those refused for want of room."""
    failed: int
    """Those that the worker failed to answer."""
    p50_us: int
    p99_us: int
    worst_us: int
    pressure_permille: int
    """How much of the objective the most urgent request has used up or will have."""
    queued: int
    """Requests that wait now."""
    batch: float
    """Mean number of requests in a batch."""
    busy_permille: int
    """Part of the window in which the worker was busy."""
    held_permille: int
    """Part of the window in which it held back its roommates' kernel launches."""
    ready: bool
    """Whether the worker answers."""


# From the machine.


@dataclass(frozen=True)
class Welcome(Message):
    """The answer to a hello: the job's name, its progress and how it runs."""

    kind = "welcome"
    version: int
    job: str
    done: float
    batch: int
    """Batch size to use; 0 = the job's own."""
    pace_permille: int
    interleaved: bool = False
    """Whether stages are entered one job at a time."""
    seat: SeatRange | None = None
    """The partition to run in; None = the whole GPU."""
    gpu_mib: int | None = None
    """Limit of GPU memory in MiB; None = no limit."""
    priority: bool = False
    """Whether kernels of the job go before those of roommates."""
    suspended: bool = False
    """Whether to wait before the first step."""
    plan_sms: int | None = None
    """SMs of the smallest partition that the job may ever get; None = it is never confined."""


@dataclass(frozen=True)
class Tune(Message):
    """How to run from the next step on."""

    kind = "tune"
    batch: int
    pace_permille: int
    interleaved: bool = False
    seat: SeatRange | None = None
    """The partition to run in; None = the whole GPU."""
    gpu_mib: int | None = None
    """Limit of GPU memory in MiB; None = no limit."""
    priority: bool = False
    """Whether kernels of the job go before those of roommates."""


@dataclass(frozen=True)
class Suspend(Message):
    """Pause at the end of this step and free what memory you can."""

    kind = "suspend"


@dataclass(frozen=True)
class Resume(Message):
    """Take steps again."""

    kind = "resume"


@dataclass(frozen=True)
class Checkpoint(Message):
    """Save a checkpoint at the end of this step."""

    kind = "checkpoint"


@dataclass(frozen=True)
class Stop(Message):
    """Save a checkpoint at the end of this step and exit."""

    kind = "stop"


@dataclass(frozen=True)
class Go(Message):
    """Permission to enter the stage."""

    kind = "go"
    stage: str


@dataclass(frozen=True)
class Refused(Message):
    """The tenant's message is invalid, or there is no room; the daemon closes the connection. Newer
    machines may say more in it.
    """

    kind = "refused"
    ignores_unknown = True
    reason: str
    later_s: float | None = None
    """The job may try again after this many seconds; None = never."""


FROM_TENANT: dict[str, type[Message]] = {
    m.kind: m
    for m in (Hello, Stepped, Tuned, Suspended, Resumed, Checkpointed, Enter, Leave, Served)
}
FROM_MACHINE: dict[str, type[Message]] = {
    m.kind: m for m in (Welcome, Tune, Suspend, Resume, Checkpoint, Stop, Go, Refused)
}


def encode(message: Message) -> bytes:
    """Encodes a message as a line. Fields that are ``None``, or ``False`` by default, are left out."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(message):  # type: ignore[arg-type]
        value = getattr(message, field.name)
        if value is None or (value is False and field.default is False):
            continue
        parts = isinstance(value, (BatchRange, SeatRange))
        fields[field.name] = dataclasses.asdict(value) if parts else value
    return json.dumps({message.kind: fields}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes, kinds: dict[str, type[Message]]) -> Message:
    """Decodes a line into a message of one of these kinds."""
    try:
        parsed = json.loads(line)
    except ValueError as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(parsed, dict) or len(parsed) != 1:
        raise ProtocolError("a message is an object with one member")
    ((kind, fields),) = parsed.items()
    if kind not in kinds:
        raise ProtocolError(f"unknown message {kind!r}")
    return _build(kinds[kind], kind, fields)


def _build(cls: type[Message], kind: str, fields: object) -> Message:
    if not isinstance(fields, dict):
        raise ProtocolError(f"{kind}: the fields are not an object")
    values: dict[str, Any] = {}
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name, value in fields.items():
        if name not in known and cls.ignores_unknown:
            continue
        if name not in known:
            raise ProtocolError(f"{kind}: unknown field {name!r}")
        values[name] = _checked(kind, name, str(known[name].type), value)
    missing = [n for n, f in known.items() if n not in values and f.default is dataclasses.MISSING]
    if missing:
        raise ProtocolError(f"{kind}: {missing[0]!r} is missing")
    return cls(**values)


def _checked(kind: str, name: str, wanted: str, value: object) -> object:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    good = False
    if wanted.startswith("BatchRange"):
        if isinstance(value, dict) and set(value) == {"size", "min", "max"}:
            return BatchRange(**value)
    elif wanted.startswith("SeatRange"):
        if isinstance(value, dict) and set(value) == {"first", "sms"}:
            return SeatRange(**value)
    elif wanted.startswith("list"):
        good = isinstance(value, list) and all(isinstance(v, (int, float)) for v in value)
    elif wanted.startswith("int"):
        good = is_whole
    elif wanted.startswith("float"):
        good = is_number
    elif wanted == "bool":
        good = isinstance(value, bool)
    else:
        good = isinstance(value, str)
    if not good:
        raise ProtocolError(f"{kind}: {name!r} cannot be {value!r}")
    return float(value) if wanted.startswith("float") else value  # type: ignore[arg-type]
