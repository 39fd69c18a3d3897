"""What a tenant and its machine say to each other: JSON lines over a Unix socket, one message each.

A message is an object with one member, its kind, whose value holds the fields. Nothing that is not
listed here is said: an unknown kind or field is an error on either side. The same messages are written
down in ``tests/protocol.jsonl`` and read by the daemon's tests as well.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar

VERSION = 1
"""Version of the protocol."""

LONGEST_LINE = 64 * 1024
"""Bytes; a longer line is nonsense."""

STAGES = ("load", "preprocess", "compute", "sync")
"""The stages of a step, by the resource that each uses: storage, CPU, device, network."""


class ProtocolError(Exception):
    """Something that is not a message."""


class Message:
    """A message of either side."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class BatchRange:
    """Batch sizes that a job can work with."""

    size: int
    min: int
    max: int


@dataclass(frozen=True)
class SeatRange:
    """A part of a GPU: so many of its multiprocessors (SMs), from one on."""

    first: int
    sms: int


# From the tenant.


@dataclass(frozen=True)
class Hello(Message):
    """Comes first: who is here."""

    kind = "hello"
    version: int
    token: str
    pid: int
    batch: BatchRange | None = None


@dataclass(frozen=True)
class Stepped(Message):
    """Steps were done since the last such message."""

    kind = "stepped"
    steps: int
    """Steps since then."""
    done: float
    """Work in all, counted in steps of the job's own batch size."""
    step_s: float
    """Mean seconds of a step, pauses left out."""
    batch: int
    """Batch size now."""
    load_s: float | None = None
    """Mean seconds of a step that the loop waited for its data."""
    noise_scale: float | None = None
    """Gradient noise scale, where the job measures it."""
    mem_mib: int | None = None
    """Memory of the process."""
    gpu_mib: int | None = None
    """GPU memory that it holds."""
    stages_s: list[float] | None = None
    """Mean seconds of a step in each stage, where the job marks them."""


@dataclass(frozen=True)
class Tuned(Message):
    """The job runs in the way it was asked to."""

    kind = "tuned"
    batch: int
    pace_permille: int
    seat: SeatRange | None = None
    """The part of the GPU that it runs in; None = the whole."""


@dataclass(frozen=True)
class Suspended(Message):
    """The job stands still between two steps and has let go of what it can."""

    kind = "suspended"
    done: float


@dataclass(frozen=True)
class Resumed(Message):
    """The job goes on."""

    kind = "resumed"


@dataclass(frozen=True)
class Checkpointed(Message):
    """So much work survives a restart."""

    kind = "checkpointed"
    done: float


@dataclass(frozen=True)
class Enter(Message):
    """The job waits to enter a stage."""

    kind = "enter"
    stage: str


@dataclass(frozen=True)
class Leave(Message):
    """The job left a stage."""

    kind = "leave"
    stage: str


# From the machine.


@dataclass(frozen=True)
class Welcome(Message):
    """Answers a hello: who you are and how you run."""

    kind = "welcome"
    version: int
    job: str
    done: float
    batch: int
    """Batch size to use; 0 = your own."""
    pace_permille: int
    interleaved: bool = False
    """Whether stages are entered one job at a time."""
    seat: SeatRange | None = None
    """The part of the GPU to run in; None = the whole."""
    gpu_mib: int | None = None
    """The most GPU memory to hold; None = no limit."""
    suspended: bool = False
    """Whether to stand still before the first step."""
    plan_sms: int | None = None
    """SMs of the smallest part that it may ever be given; None = it is never confined."""


@dataclass(frozen=True)
class Tune(Message):
    """Run in this way from the next step on."""

    kind = "tune"
    batch: int
    pace_permille: int
    interleaved: bool = False
    seat: SeatRange | None = None
    """The part of the GPU to run in; None = the whole."""
    gpu_mib: int | None = None
    """The most GPU memory to hold; None = no limit."""


@dataclass(frozen=True)
class Suspend(Message):
    """Stand still at the end of this step and let go of what you can."""

    kind = "suspend"


@dataclass(frozen=True)
class Resume(Message):
    """Go on."""

    kind = "resume"


@dataclass(frozen=True)
class Checkpoint(Message):
    """Save at the end of this step."""

    kind = "checkpoint"


@dataclass(frozen=True)
class Stop(Message):
    """Save at the end of this step and exit."""

    kind = "stop"


@dataclass(frozen=True)
class Go(Message):
    """Enter the stage."""

    kind = "go"
    stage: str


@dataclass(frozen=True)
class Refused(Message):
    """What you said makes no sense; this is the last word on this connection."""

    kind = "refused"
    reason: str


FROM_TENANT: dict[str, type[Message]] = {
    m.kind: m for m in (Hello, Stepped, Tuned, Suspended, Resumed, Checkpointed, Enter, Leave)
}
FROM_MACHINE: dict[str, type[Message]] = {
    m.kind: m for m in (Welcome, Tune, Suspend, Resume, Checkpoint, Stop, Go, Refused)
}


def encode(message: Message) -> bytes:
    """The message as a line. Fields that have nothing to say are left out."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(message):  # type: ignore[arg-type]
        value = getattr(message, field.name)
        if value is None or value is False:
            continue
        parts = isinstance(value, (BatchRange, SeatRange))
        fields[field.name] = dataclasses.asdict(value) if parts else value
    return json.dumps({message.kind: fields}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes, kinds: dict[str, type[Message]]) -> Message:
    """The message in a line; of these kinds only."""
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
