"""The log of a daemon as tests read and forge it; `daemon/store/seal.rs` describes it."""

from collections.abc import Iterable
from pathlib import Path

BASIS, PRIME, MASK = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


def words(values: Iterable[int]) -> int:
    found = BASIS
    for value in values:
        found = ((found ^ value) * PRIME) & MASK
    return found


def read(path: Path) -> list[tuple[str, bytes]]:
    """The lines of a log: `j` or `r`, and the text."""
    fields = (line.split(b" ", 5) for line in path.read_bytes().splitlines())
    return [(mark.decode()[0], text) for _, _, _, _, mark, text in fields]


def write(path: Path, lines: list[tuple[str, bytes]]) -> None:
    """Writes a log with these lines as one transaction."""
    chain, journaled, out = 0, 0, []
    for number, (kind, text) in enumerate(lines):
        hashed, is_last = words(text), number + 1 == len(lines)
        total = words([number, journaled, chain, 2 * (kind == "j") + is_last, hashed])
        mark = kind + ("." if is_last else ",")
        out.append(f"{number} {journaled} {chain:016x} {total:016x} {mark} ".encode() + text)
        if kind == "j" or number == 0:
            chain = words([chain, hashed])
        journaled += kind == "j"
    path.write_bytes(b"".join(line + b"\n" for line in out))
