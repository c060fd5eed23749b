"""How much host memory there is to allocate."""

from __future__ import annotations

import re
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """What this process can still allocate: the kernel's estimate, within its cgroup.

    Args:
        root: Where ``proc`` and ``sys`` are mounted.

    Returns:
        Bytes, or ``None`` where the kernel does not tell.
    """
    found = []
    if match := re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.M):
        found.append(int(match[1]) * 1024)
    cgroup = root / "sys/fs/cgroup"
    limit, current = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if limit.isdigit() and current.isdigit():
        # File pages are counted as used, but the kernel drops the inactive ones first.
        inactive = re.search(r"^inactive_file (\d+)", _read(cgroup / "memory.stat"), re.M)
        found.append(int(limit) - int(current) + (int(inactive[1]) if inactive else 0))
    return min(found, default=None)


def check_fits(num_bytes: int, source: str, *, root: Path = Path("/")) -> None:
    """Refuses a host pool that would get this process killed.

    Args:
        num_bytes: What is to be allocated.
        source: The config key to lower if it does not fit.
        root: As for ``available_bytes``.

    Raises:
        ValueError: There is less memory than ``num_bytes``.
    """
    available = available_bytes(root)
    if available is not None and num_bytes > available:
        raise ValueError(
            f"the host KV pool needs {num_bytes} bytes ({num_bytes / 2**30:.2f} GiB) on this rank, "
            f"but only {available} ({available / 2**30:.2f} GiB) are available; lower {source}"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
