"""Whether the host pools fit into this machine's memory, to be known before they are allocated."""

from __future__ import annotations

import functools
import os
import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

GIB = 2**30
ROOT = Path("/")

# The files of a cgroup of version 2 and of version 1: limit, use, and what of the use the kernel
# drops first. Without a limit the first is "max" or a number that no machine comes near.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# The bit in the set of capabilities that lifts the limit on locked memory.
_CAP_IPC_LOCK = 14


def available_bytes(root: Path = ROOT) -> int | None:
    """What this process can still allocate: the kernel's estimate, within all of its cgroups.

    Args:
        root: Where ``proc`` and ``sys`` are mounted.

    Returns:
        Bytes, or ``None`` where the kernel does not tell.
    """
    found = [left for folder in _cgroups(root) for left in _left_in(folder)]
    if match := re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.M):
        found.append(int(match[1]) * 1024)
    return min(found, default=None)


@functools.cache
def available_at_start() -> int | None:
    """``available_bytes`` when this was first called: before any rank has allocated its pool."""
    return available_bytes()


def check_fits(
    num_bytes: int,
    source: str,
    *,
    num_ranks: int = 1,
    at_start: int | None = None,
    root: Path = ROOT,
) -> None:
    """Refuses host pools that would get these processes killed.

    Args:
        num_bytes: What each rank is to allocate.
        source: The config key to lower if it does not fit.
        num_ranks: Ranks of this engine on this machine, which all allocate as much.
        at_start: What was available when none of them had.
        root: As for ``available_bytes``.

    Raises:
        ValueError: There is less memory than ``num_bytes``.
    """
    now = available_bytes(root)
    for ranks, available in ((num_ranks, now if at_start is None else at_start), (1, now)):
        if available is not None and num_bytes * ranks > available:
            raise ValueError(
                f"the host KV pools need {_size(num_bytes * ranks)} for {ranks} rank(s), but only "
                f"{_size(available)} are available; lower {source}"
            )


def check_shared_memory(
    num_bytes: int, source: str, *, num_ranks: int = 1, root: Path = ROOT
) -> None:
    """Refuses pinned host pools for NPUs that are larger than ``/dev/shm``.

    An allocation that does not fit there may hang, or get its process killed.

    Args:
        num_bytes: What each rank is to allocate.
        source: The config key to lower if it does not fit.
        num_ranks: Ranks of this engine on this machine, which all allocate as much.
        root: Where ``dev`` is mounted.

    Raises:
        ValueError: ``/dev/shm`` is too small.
    """
    try:
        shared = os.statvfs(root / "dev/shm")
    except OSError:
        return
    needed, size = num_bytes * num_ranks, shared.f_blocks * shared.f_frsize
    if needed > size:
        raise ValueError(
            f"the pinned host KV pools need {_size(needed)} for {num_ranks} rank(s), but /dev/shm "
            f"has only {_size(size)}; start the container with --shm-size={-(-needed // GIB)}g or "
            f"more, or lower {source}"
        )


def check_locked_memory(num_bytes: int, source: str, *, root: Path = ROOT) -> None:
    """Refuses a pinned host pool for an NPU that is larger than what this process may lock.

    Args:
        num_bytes: What this rank is to allocate; the limit is one of each process.
        source: The config key to lower if it does not fit.
        root: Where ``proc`` is mounted.

    Raises:
        ValueError: ``RLIMIT_MEMLOCK`` is too low, and nothing lifts it.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    match = re.search(r"^CapEff:\s+(\w+)", _read(root / "proc/self/status"), re.M)
    unlimited = match is not None and int(match[1], 16) >> _CAP_IPC_LOCK & 1
    if not unlimited and limit != resource.RLIM_INFINITY and num_bytes > limit:
        raise ValueError(
            f"the pinned host KV pool of a rank needs {_size(num_bytes)}, but RLIMIT_MEMLOCK is "
            f"{_size(limit)}; start the container with --ulimit memlock=-1, or lower {source}"
        )


def _cgroups(root: Path) -> Iterator[Path]:
    """The folders of the cgroups that limit this process, innermost first, by version."""
    lines = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines()]
    for mount, controller in (("sys/fs/cgroup", ""), ("sys/fs/cgroup/memory", "memory")):
        # Where it is not told, or where another part of the tree is mounted: the root.
        path = next((path for _, names, path in lines if controller in names.split(",")), "/")
        folder = root / mount / path.lstrip("/")
        yield folder
        while folder != root / mount:
            folder = folder.parent
            yield folder


def _left_in(folder: Path) -> Iterator[int]:
    for limit_file, use_file, inactive in _CGROUP_FILES:
        limit, use = _read(folder / limit_file).strip(), _read(folder / use_file).strip()
        if limit.isdigit() and use.isdigit():
            # File pages are counted as used, but the kernel drops the inactive ones first.
            dropped = re.search(rf"^{inactive} (\d+)", _read(folder / "memory.stat"), re.M)
            yield int(limit) - int(use) + (int(dropped[1]) if dropped else 0)


def _size(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / GIB:.2f} GiB)"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
