from __future__ import annotations

from pathlib import Path

import pytest

from roommate import protocol
from roommate.protocol import FROM_MACHINE, FROM_TENANT, ProtocolError

GOLDEN = (Path(__file__).parent / "protocol.jsonl").read_bytes().splitlines(keepends=True)
ALL = FROM_TENANT | FROM_MACHINE


@pytest.mark.parametrize("line", GOLDEN)
def test_golden_messages_round_trip(line: bytes) -> None:
    assert protocol.encode(protocol.decode(line, ALL)) == line


def test_every_message_is_in_the_golden_file() -> None:
    assert {protocol.decode(line, ALL).kind for line in GOLDEN} == set(ALL)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"hello\n", "not JSON"),
        (b"[1]\n", "one member"),
        (b'{"suspend":{},"stop":{}}\n', "one member"),
        (b'{"explode":{}}\n', "unknown message 'explode'"),
        (b'{"suspend":[]}\n', "not an object"),
        (b'{"suspend":{"now":true}}\n', "unknown field 'now'"),
        (b'{"go":{}}\n', "'stage' is missing"),
        (b'{"tune":{"batch":"big","pace_permille":1}}\n', "'batch' cannot be 'big'"),
        (b'{"tune":{"batch":true,"pace_permille":1}}\n', "'batch' cannot be True"),
    ],
)
def test_invalid_messages_are_named(line: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        protocol.decode(line, FROM_MACHINE)


def test_a_tenant_rejects_messages_of_tenants() -> None:
    with pytest.raises(ProtocolError, match="unknown message 'hello'"):
        protocol.decode(GOLDEN[0], FROM_MACHINE)
