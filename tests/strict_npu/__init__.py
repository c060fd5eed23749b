"""A stand-in for torch.npu, over host memory: honest about being one, and stricter.

A ``StrictNpu`` is used in place of the device's module by one ``StreamDevice``. What was put on
a stream is carried out late, in an order that a seed decides; only events and synchronisation
force it. Independently of that order, every access to memory is checked with vector clocks, as a
race detector does it: two accesses to the same word, at least one of them writing, must be
ordered by events, by a stream, or by the host having seen an event done. If they are not, that is
an error at once, on any seed.

What computes runs on the host (the tests' engines do), so the stream that computes has its work
done when it is launched; ``compute`` tells the stand-in of it, and ``read`` and ``write`` what it
touches. The operator ``torch.ops._C_ascend.swap_blocks_batch`` is registered with the schema that
vllm-ascend has, and enqueues on the stand-in's current stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import weakref
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

WORD = 8
MOST_STREAMS = 4
MOST_COPIES = 4096
# The stream that computes; the host has a clock of its own, too.
COMPUTE, HOST = 0, MOST_STREAMS


class Race(AssertionError):
    """Two accesses to the same memory are not ordered, or an event is used while it is in use."""


class _Mark:
    """A place in a stream that an event was recorded at."""

    def __init__(self, clock: npt.NDArray[np.int64]) -> None:
        self.clock = clock
        self.done = False
        self.waiting = 0


class Stream:
    """Operations that are carried out one after the other, some time."""

    def __init__(self, npu: StrictNpu) -> None:
        self.index = len(npu.streams)
        assert self.index < MOST_STREAMS
        self.clock = np.zeros(MOST_STREAMS + 1, np.int64)
        self.queue: deque[Any] = deque()
        self._npu = npu
        npu.streams.append(self)

    def wait_event(self, event: Event) -> None:
        """What comes after waits for what came before ``event`` was recorded."""
        self._npu.calls["waits of a stream"] += 1
        if event.mark is None:
            self._npu.fail("a stream waits for an event that was never recorded")
        self.clock = np.maximum(self.clock, event.mark.clock)
        event.mark.waiting += 1
        self.queue.append(event.mark)
        if self._npu.eager and self.index == COMPUTE:
            self._npu.force(event.mark)

    def synchronize(self) -> None:
        """Blocks the host."""
        self._npu.calls["waits of the host"] += 1
        self.run()
        self._npu.host_clock = np.maximum(self._npu.host_clock, self.clock)

    def launch(self) -> npt.NDArray[np.int64]:
        """The clock of an operation that is enqueued now."""
        self.clock = np.maximum(self.clock, self._npu.host_clock)
        self.clock[self.index] += 1
        return self.clock.copy()

    def run(self, until: _Mark | None = None) -> None:
        """Carries out what is enqueued, up to a mark or to the end."""
        while self.queue and not (until and until.done):
            self.run_one()

    def run_one(self) -> None:
        """Carries out the next operation."""
        what = self.queue.popleft()
        if callable(what):
            what()
        elif isinstance(what, tuple):
            what[0].done = True
        else:
            what.waiting -= 1
            self._npu.force(what)


class Event:
    """Is done when the stream has come to where it was recorded."""

    def __init__(self, npu: StrictNpu) -> None:
        self._npu = npu
        self.mark: _Mark | None = None
        npu.calls["events made"] += 1

    def record(self, stream: Stream) -> None:
        """Marks the end of what is on ``stream`` now."""
        if self.mark is not None and (self.mark.waiting or not self.mark.done):
            self._npu.fail(
                "an event is recorded anew while a stream waits for it, or before it is done"
            )
        self._npu.calls["events recorded"] += 1
        self.mark = _Mark(stream.launch())
        stream.queue.append((self.mark,))

    def query(self) -> bool:
        """Whether it is done; the host does not wait."""
        self._npu.calls["events asked"] += 1
        self._npu.let_time_pass()
        if self.mark is None:
            self._npu.fail("the host asks for an event that was never recorded")
        if self.mark.done:
            self._npu.host_clock = np.maximum(self._npu.host_clock, self.mark.clock)
        return self.mark.done


class StrictNpu:
    """The module of a device. Each has memory and streams of its own.

    Args:
        seed: Decides when what is enqueued is carried out.
        failures: Batch copies out of a thousand that fail when a part of them is enqueued.
        eager: Whether a wait of the stream that computes is carried out at once, for engines
            that tell what they have touched only after they have.
    """

    def __init__(self, seed: int, *, failures: int = 0, eager: bool = False) -> None:
        self.streams: list[Stream] = []
        self.host_clock = np.zeros(MOST_STREAMS + 1, np.int64)
        # What the host has asked for, and what was checked of it.
        self.calls = Counter[str]()
        self._rng = random.Random(seed)
        self._failures = failures
        self.eager = eager
        self._compute = Stream(self)
        self._current = self._compute
        self._compute_clock = self._compute.launch()
        # What has computed by the time that its outputs were seen.
        self._computed_clock = self.host_clock
        self._regions: list[_Region] = []
        self._race: Race | None = None
        _register_operator()

    # ---- what a device's module has ----

    def Stream(self) -> Stream:
        """A new stream."""
        return Stream(self)

    def Event(self) -> Event:
        """A new event."""
        return Event(self)

    def current_stream(self) -> Stream:
        """The stream that the host enqueues on."""
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Enqueues on ``stream`` meanwhile."""
        global _current_npu
        before, self._current = self._current, stream
        npu_before, _current_npu = _current_npu, self
        try:
            yield
        finally:
            self._current, _current_npu = before, npu_before

    # ---- what tests tell it ----

    def fail(self, text: str) -> NoReturn:
        """Raises a race, now and, should somebody take it for a copy that failed, again."""
        self._race = Race(text)
        raise self._race

    def watch(self, memory: torch.Tensor, kind: str) -> None:
        """Takes the memory behind a tensor, once: ``device`` or ``host``."""
        storage = memory.untyped_storage()
        if all(region.address != storage.data_ptr() for region in self._regions):
            self._regions.append(_Region(storage.data_ptr(), storage.nbytes(), kind, self.fail))

    def compute(self) -> None:
        """The stream that computes is launched, and has done its work when this returns."""
        if self._race is not None:
            raise self._race
        self._compute_clock = self._compute.launch()
        # What it waits for is through; that it has been waited for shows later, because the host
        # runs ahead of a device.
        for item in list(self._compute.queue):
            if isinstance(item, _Mark):
                self.force(item)

    def read(self, address: int, words: npt.NDArray[np.int64]) -> None:
        """What computes reads words, counted from ``address`` on."""
        self.calls["accesses of what computes"] += 1
        region = self._region(address)
        region.read(self._compute_clock, COMPUTE, words + region.word_at(address))

    def write(self, address: int, words: npt.NDArray[np.int64]) -> None:
        """What computes writes them."""
        self.calls["accesses of what computes"] += 1
        region = self._region(address)
        region.write(self._compute_clock, COMPUTE, words + region.word_at(address))

    def computed(self) -> Callable[[], None]:
        """To be called when the outputs of what computes now are seen."""
        clock = self._compute_clock

        def seen() -> None:
            self._computed_clock = np.maximum(self._computed_clock, clock)

        return seen

    def write_from_outside(self, address: int, words: npt.NDArray[np.int64]) -> None:
        """Another machine writes them, in no order with any stream.

        Whether what computes still uses them is the matter of whoever gives away the memory.
        """
        region = self._region(address)
        clock = np.maximum(self.host_clock, self._computed_clock)
        clock[COMPUTE] = self._compute.clock[COMPUTE]
        region.write(clock, HOST, words + region.word_at(address))

    def force(self, mark: _Mark) -> None:
        """Carries out all that comes before a mark."""
        for stream in self.streams:
            if not mark.done and (mark,) in stream.queue:
                stream.run(mark)

    def let_time_pass(self) -> None:
        """The device carries out some of what is enqueued, or nothing."""
        while self._rng.random() < 0.5:
            busy = [stream for stream in self.streams if stream.queue]
            if not busy:
                break
            self._rng.choice(busy).run_one()

    # ---- the operator ----

    def copy_batch(
        self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, direction: int
    ) -> None:
        """Enqueues copies on the current stream."""
        self.calls["calls of the operator"] += 1
        self.calls["copies"] += len(sizes)
        if not 0 < len(sizes) <= MOST_COPIES:
            self.fail(f"{len(sizes)} copies in one call, of which there may be 1 to {MOST_COPIES}")
        kinds = ("host", "device") if direction == 0 else ("device", "host")
        fails = self._rng.randrange(1000) < self._failures
        count = len(sizes) // 2 if fails else len(sizes)
        # As on a device, they are read when the copies are carried out.
        given = [weakref.ref(tensor) for tensor in (sources, targets, sizes)]
        self._enqueue(sources[:count], targets[:count], sizes[:count], kinds, given)
        if fails:
            raise RuntimeError("the driver refuses a copy")

    def _enqueue(
        self,
        sources: torch.Tensor,
        targets: torch.Tensor,
        sizes: torch.Tensor,
        kinds: tuple[str, str],
        given: list[weakref.ref[torch.Tensor]],
    ) -> None:
        stream, clock = self._current, self._current.launch()
        ranges = [tensor.tolist() for tensor in (sources, targets, sizes)]
        for source, target, size in zip(*ranges, strict=True):
            for address, kind, access in (
                (source, kinds[0], _Region.read),
                (target, kinds[1], _Region.write),
            ):
                region = self._region(address)
                if region.kind != kind:
                    self.fail(f"a copy that expects {kind} memory gets {region.kind} memory")
                first = region.word_at(address)
                access(region, clock, stream.index, np.arange(first, first + size // WORD))

        def carry_out() -> None:
            now = [tensor() for tensor in given]
            if any(tensor is None for tensor in now):
                self.fail("the addresses of copies are gone before the copies are through")
            if [tensor[: len(ranges[0])].tolist() for tensor in now] != ranges:
                self.fail("the addresses of copies change before the copies are through")
            for source, target, size in zip(*ranges, strict=True):
                ctypes.memmove(target, source, size)

        stream.queue.append(carry_out)

    def _region(self, address: int) -> _Region:
        for region in self._regions:
            if region.address <= address < region.address + region.num_bytes:
                break
        else:
            self.fail(f"nothing is known of the memory at {address:#x}")
        return region


class _Region:
    """Memory, and for each word of it the last write and the last read of each stream."""

    def __init__(
        self, address: int, num_bytes: int, kind: str, fail: Callable[[str], NoReturn]
    ) -> None:
        self.address, self.num_bytes, self.kind = address, num_bytes, kind
        self._fail = fail
        words = -(-num_bytes // WORD)
        self._writer = np.zeros(words, np.int64)
        self._written = np.zeros(words, np.int64)
        self._reads = np.zeros((MOST_STREAMS, words), np.int64)

    def word_at(self, address: int) -> int:
        """The word that an address is in."""
        return (address - self.address) // WORD

    def read(self, clock: npt.NDArray[np.int64], stream: int, words: npt.NDArray[np.int64]) -> None:
        if (self._written[words] > clock[self._writer[words]]).any():
            self._fail(f"stream {stream} reads {self.kind} memory that is being written")
        self._reads[stream, words] = clock[stream]

    def write(
        self, clock: npt.NDArray[np.int64], stream: int, words: npt.NDArray[np.int64]
    ) -> None:
        if (self._written[words] > clock[self._writer[words]]).any():
            self._fail(f"stream {stream} writes {self.kind} memory that is being written")
        if (self._reads[:, words] > clock[:MOST_STREAMS, None]).any():
            self._fail(f"stream {stream} writes {self.kind} memory that is being read")
        self._writer[words], self._written[words] = stream, clock[stream]


_current_npu: StrictNpu | None = None
_library: torch.library.Library | None = None


def _register_operator() -> None:
    global _library
    if _library is None:
        _library = torch.library.Library("_C_ascend", "FRAGMENT")
        _library.define(
            "swap_blocks_batch(Tensor src, Tensor dst, Tensor sizes, int direction) -> ()"
        )
        _library.impl("swap_blocks_batch", _swap_blocks_batch, "CPU")


def _swap_blocks_batch(
    sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, direction: int
) -> None:
    assert _current_npu is not None, "no stand-in's stream is current"
    _current_npu.copy_batch(sources, targets, sizes, direction)
