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


def check_fits(num_bytes: int, source: str, *, num_ranks: int = 1, root: Path = Path("/")) -> None:
    """Refuses host pools that would get these processes killed.

    Args:
        num_bytes: What each rank is to allocate.
        source: The config key to lower if it does not fit.
        num_ranks: Ranks of this engine on this machine, which all allocate as much.
        root: As for ``available_bytes``.

    Raises:
        ValueError: There is less memory than ``num_bytes``.
    """
    available = available_bytes(root)
    needed = num_bytes * num_ranks
    if available is not None and needed > available:
        raise ValueError(
            f"the host KV pools need {needed} bytes ({needed / 2**30:.2f} GiB) for {num_ranks} "
            f"rank(s), but only {available} ({available / 2**30:.2f} GiB) are available; "
            f"lower {source}"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
