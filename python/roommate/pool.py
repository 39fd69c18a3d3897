"""Memory that PyTorch's allocator keeps for later. It keeps it for each stream, so a job that goes to another
part of the GPU, which is another stream, takes none of it along.
"""

from __future__ import annotations

from typing import Any

WORTH = 64 << 20
"""Bytes below which it is left to the allocator to ask for them."""


def drop_spare(torch: Any) -> None:
    """Gives memory back that nobody looks into."""
    # Matrix products keep a workspace for each stream they ran in.
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()


class Pool:
    """What a job that moves gives back in one part is asked for at once in the next, as one block that the
    allocator then divides: it would ask for hundreds of pieces one by one, while the GPU stands still.

    What outlives a step and lies in such a block keeps all of it from being given back. Where that happens,
    blocks are not asked for any more.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._in_one = True
        # What was held when the job came, and how much of that was no use; the block that it was given then,
        # and the one it needs next.
        self._base = self._stuck = self._given = self._next = 0

    def leave(self) -> None:
        """The job stands still and goes to another part."""
        before, _ = self._large()
        drop_spare(self._torch)
        now, used = self._large()
        if self._given > 0 and now - used - self._stuck > max(WORTH, self._given // 8):
            self._in_one = False
        self._next = max(0, min(before - self._base, before - now))
        self._base, self._stuck, self._given = now, now - used, 0

    def arrive(self) -> None:
        """It is there: the current stream is that of the new part."""
        if not self._in_one or self._next < WORTH:
            return
        try:
            self._torch.empty(self._next, dtype=self._torch.uint8, device="cuda")
        except RuntimeError:
            # Somebody else has it by now. The allocator asks for what a step really needs.
            return
        self._given = self._next

    def drop_block(self) -> None:
        """What steps need changes: the block goes back, and the allocator asks for pieces."""
        if self._given > 0:
            drop_spare(self._torch)
            self._given, (self._base, _) = 0, self._large()

    def _large(self) -> tuple[int, int]:
        """Bytes of pieces over 1 MiB: held, and in use."""
        stats = self._torch.cuda.memory_stats()
        held, used = (stats.get(f"{what}_bytes.large_pool.current", 0) for what in ("reserved", "allocated"))
        return int(held), int(used)
