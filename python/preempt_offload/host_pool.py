"""Allocates the host pool in pinned memory, which devices copy from and to at bus speed."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from preempt_offload import host_memory
from preempt_offload.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

logger = get_logger(__name__)

# Columns start at a page, so that copies are as aligned as the blocks are.
ALIGNMENT = 4096
# Seconds between two lines that tell how far a long allocation is.
SECONDS_BETWEEN_LINES = 5.0

_BUDGET = "the host budget (cpu_bytes_to_use_per_rank, cpu_bytes_to_use, offload_host_memory_ratio)"


def allocate_pinned(
    column_bytes: Sequence[int], device: torch.device, module: Any
) -> list[torch.Tensor]:
    """Memory for the columns of a host pool, on the NUMA node that the device is at.

    Args:
        column_bytes: Bytes of each column.
        device: The device that is to copy; nothing is pinned if it is the CPU.
        module: Its module.

    Returns:
        A tensor of bytes for each column.

    Raises:
        ValueError: There is too little memory.
        RuntimeError: The memory could not be pinned.
    """
    pinned, wanted = device.type != "cpu", sum(column_bytes)
    chunks = chunks_of(column_bytes)
    total = sum(capacity for capacity, _ in chunks)
    host_memory.check_fits(total, _BUDGET)
    columns: list[torch.Tensor] = []
    with _near(pci_address(device, module)), _Progress(total) as progress:
        for capacity, columns_inside in chunks:
            try:
                chunk = torch.empty(capacity, dtype=torch.uint8, pin_memory=pinned)
            except RuntimeError as error:
                raise RuntimeError(
                    f"could not pin {total} bytes of host memory, only {progress.done}; "
                    f"lower {_BUDGET}"
                ) from error
            progress.done += capacity
            start = 0
            for column in columns_inside:
                columns.append(chunk[start : start + column])
                start += _aligned(column)
    logger.info(
        "%s %.3f GiB of host memory for %.3f GiB in %.1f s",
        "Pinned" if pinned else "Allocated",
        total / host_memory.GIB,
        wanted / host_memory.GIB,
        progress.seconds,
    )
    return columns


def chunks_of(column_bytes: Sequence[int]) -> list[tuple[int, list[int]]]:
    """What to allocate at once: bytes, and the columns that are to be inside, in their order.

    Torch pins a power of two at a time and rounds up to it, which may be nearly twice of what was
    asked for. So these are powers of two, as large as the columns left can fill.
    """
    chunks = []
    left = list(column_bytes)
    while left:
        # All that is left, rounded down; or what the next column alone takes, rounded up.
        total = sum(map(_aligned, left))
        capacity = max(1 << (total.bit_length() - 1), 1 << (_aligned(left[0]) - 1).bit_length())
        inside: list[int] = []
        while left and sum(map(_aligned, inside)) + _aligned(left[0]) <= capacity:
            inside.append(left.pop(0))
        chunks.append((capacity, inside))
    return chunks


def _aligned(num_bytes: int) -> int:
    return max(-(-num_bytes // ALIGNMENT), 1) * ALIGNMENT


class _Progress:
    """Tells in the log how far an allocation is, every few seconds.

    Attributes:
        done: Bytes allocated so far.
        seconds: How long it took.
    """

    def __init__(self, total: int) -> None:
        self.done = 0
        self.seconds = 0.0
        self._total = total
        self._start = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="host-pool", daemon=True)

    def __enter__(self) -> _Progress:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()
        self.seconds = time.monotonic() - self._start

    def _tell(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LINES):
            logger.info(
                "Allocating the host pool: %.1f of %.1f GiB after %.0f s",
                self.done / host_memory.GIB,
                self._total / host_memory.GIB,
                time.monotonic() - self._start,
            )


# ---- NUMA ----


def pci_address(device: torch.device, module: Any) -> str | None:
    """Where the device is on the bus, as ``0000:81:00.0``; ``None`` if its module does not tell."""
    if device.type == "cpu":
        return None
    properties = module.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return None
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
    return f"{bus}:{properties.pci_device_id:02x}.0"


def cpus_near(address: str, root: Path = host_memory.ROOT) -> set[int]:
    """The CPUs on the NUMA node of a device, as the kernel tells; none if it does not."""
    try:
        text = (root / "sys/bus/pci/devices" / address / "local_cpulist").read_text()
    except OSError:
        return set()
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)}


@contextlib.contextmanager
def _near(address: str | None) -> Iterator[None]:
    """Runs this thread, whose memory the kernel takes from the node it runs on, near a device."""
    allowed = os.sched_getaffinity(0)
    near: Iterable[int] = allowed & cpus_near(address) if address else ()
    if near:
        os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        if near:
            os.sched_setaffinity(0, allowed)
