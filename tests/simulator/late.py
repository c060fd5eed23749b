"""Copies that take their time, in an order nobody may rely on.

A D2H copy reads the device when it is begun, as a copy stream does that was ordered after
the compute stream's work; what it read arrives on the host when it ends, and until then
the host blocks hold nothing that makes sense. An H2D copy reads and writes when it is begun
or when it ends, whichever is worse. Copies end after any number of steps, each by itself.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from preempt_offload.devices import Ended, HostDevice, TransferResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from preempt_offload._core import BlockPairs, Direction
    from preempt_offload.devices import Transfer


class LateTransfer:
    """A copy that ends when it was asked ``delay`` times."""

    def __init__(self, delay: int, end: Callable[[], TransferResult]) -> None:
        self._delay = delay
        self._end = end

    def poll(self) -> TransferResult | None:
        """How it ended, or ``None`` while it is under way."""
        if self._delay:
            self._delay -= 1
            return None
        return self._end()


class LateDevice:
    """A ``HostDevice`` whose copies take up to ``most`` steps, some of which fail.

    Args:
        inner: Makes the copies.
        rng: Decides.
        most: The most steps that a copy takes.
        failures: Copies out of a thousand that fail, from the start or at the end.
    """

    def __init__(self, inner: HostDevice, rng: random.Random, *, most: int, failures: int) -> None:
        self._inner = inner
        self._rng = rng
        self._most = most
        self._failures = failures
        self._host = inner._pool.numpy()
        self._host_address = inner._pool.data_ptr()

    def begin(self, direction: Direction, pairs: BlockPairs) -> Transfer:
        """Begins a copy."""
        luck = self._rng.randrange(1000)
        if luck < self._failures // 2:
            raise OSError("the bus is on fire")
        fails = luck < self._failures
        delay = self._rng.randint(0, self._most)
        if direction == "d2h":
            end = self._store(pairs)
        elif self._rng.random() < 0.5:
            done = self._inner.begin("h2d", pairs).poll()
            end = lambda: done  # noqa: E731
        else:
            end = lambda: self._inner.begin("h2d", pairs).poll()  # noqa: E731

        def ended() -> TransferResult:
            result = TransferResult(ok=False, num_bytes=0) if fails else end()
            assert result is not None
            return result

        return Ended(ended()) if delay == 0 else LateTransfer(delay, ended)

    def _store(self, pairs: BlockPairs) -> Callable[[], TransferResult | None]:
        _, targets, sizes = self._inner._layout.descriptors("d2h", pairs)
        ranges = [
            self._host[target : target + size]
            for target, size in zip(targets - self._host_address, sizes, strict=True)
        ]
        result = self._inner.begin("d2h", pairs).poll()
        read = [part.copy() for part in ranges]
        for part in ranges:
            np.invert(part, out=part)

        def arrive() -> TransferResult | None:
            for part, content in zip(ranges, read, strict=True):
                part[:] = content
            return result

        return arrive
