"""``kv_connector_extra_config``, checked, and the host budget that follows from it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal, get_args

from preempt_offload.log import get_logger

logger = get_logger(__name__)

CopyMethod = Literal["auto", "ascend", "cuda", "torch"]

# Blocks are numbered with 32 bits.
MAX_BLOCKS = 2**32 - 1

_BYTE_KEYS = ("cpu_bytes_to_use_per_rank", "cpu_bytes_to_use")


@dataclasses.dataclass(frozen=True)
class HostBudget:
    """What each rank may use of the host's memory.

    Attributes:
        num_blocks: Host blocks per rank.
        block_bytes: Bytes of one block on one rank, all its layers together.
        num_ranks: Ranks of the deployment: TP x PP x DP.
        source: The config key that decided.
    """

    num_blocks: int
    block_bytes: int
    num_ranks: int
    source: str

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that one rank allocates."""
        return self.num_blocks * self.block_bytes

    def __str__(self) -> str:
        gib = self.bytes_per_rank / 2**30
        return (
            f"{self.num_blocks} host blocks of {self.block_bytes} bytes per rank "
            f"({gib:.3f} GiB), {gib * self.num_ranks:.3f} GiB over {self.num_ranks} rank(s), "
            f"from {self.source}"
        )


@dataclasses.dataclass(frozen=True)
class OffloadConfig:
    """The keys of ``kv_connector_extra_config``.

    Attributes:
        cpu_bytes_to_use_per_rank: Host bytes of each rank. Wins over the next two.
        cpu_bytes_to_use: Host bytes of the whole deployment, divided by TP x PP x DP.
            Wins over the ratio.
        offload_host_memory_ratio: Host blocks per device block, if no bytes are given.
        enable_offload_prefix_caching: Share full blocks with equal hashes between
            preserved requests, and keep them until their memory is needed.
        host_copy_threads: Threads per copy where the KV cache is in host memory.
        copy_method: What copies where it is not; see ``stream_device.choose_copy``.
    """

    cpu_bytes_to_use_per_rank: int | None = None
    cpu_bytes_to_use: int | None = None
    offload_host_memory_ratio: float = 1.0
    enable_offload_prefix_caching: bool = False
    host_copy_threads: int = 2
    copy_method: CopyMethod = "auto"

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> OffloadConfig:
        """Checks the config as the user gave it.

        Raises:
            ValueError: An unknown key, or a value of the wrong type or not positive.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key, value in extra.items():
            if key == "kv_load_failure_policy":
                raise ValueError(
                    "kv_load_failure_policy does not belong in kv_connector_extra_config: "
                    "put it at the top level of --kv-transfer-config"
                )
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0)[0]
                raise ValueError(
                    f"unknown key {key!r} in kv_connector_extra_config of "
                    f"PreemptOffloadConnector; did you mean {near!r}? "
                    f"Valid keys: {', '.join(known)}"
                )
            _check(key, value)
        if all(extra.get(key) is not None for key in _BYTE_KEYS):
            logger.warning(
                "both cpu_bytes_to_use_per_rank=%s and cpu_bytes_to_use=%s set: the former wins",
                *(extra[key] for key in _BYTE_KEYS),
            )
        return cls(**extra)

    def budget(self, *, block_bytes: int, num_device_blocks: int, num_ranks: int) -> HostBudget:
        """The host blocks of one rank.

        Args:
            block_bytes: Bytes of one block on one rank, all its layers together.
            num_device_blocks: Blocks in one rank's KV cache.
            num_ranks: TP x PP x DP.

        Raises:
            ValueError: The budget is less than one block.
        """
        if self.cpu_bytes_to_use_per_rank is not None:
            source = "cpu_bytes_to_use_per_rank"
            given = f"{self.cpu_bytes_to_use_per_rank} bytes"
            num_blocks = self.cpu_bytes_to_use_per_rank // block_bytes
        elif self.cpu_bytes_to_use is not None:
            source = "cpu_bytes_to_use"
            given = f"{self.cpu_bytes_to_use} bytes over {num_ranks} rank(s)"
            num_blocks = self.cpu_bytes_to_use // num_ranks // block_bytes
        else:
            source = "offload_host_memory_ratio"
            given = f"{self.offload_host_memory_ratio} of {num_device_blocks} device blocks"
            num_blocks = int(min(self.offload_host_memory_ratio, MAX_BLOCKS) * num_device_blocks)
        if num_blocks > MAX_BLOCKS:
            raise ValueError(
                f"{source} ({given}) is more than {MAX_BLOCKS} KV blocks of {block_bytes} bytes "
                "per rank; lower it"
            )
        if num_blocks < 1:
            raise ValueError(
                f"{source} ({given}) is less than one KV block per rank, which takes "
                f"{block_bytes} bytes; raise it"
            )
        return HostBudget(num_blocks, block_bytes, num_ranks, source)


def _check(key: str, value: Any) -> None:
    if key in _BYTE_KEYS and value is None:
        return
    if key == "enable_offload_prefix_caching":
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, not {value!r}")
        return
    if key == "copy_method":
        if value not in get_args(CopyMethod):
            raise ValueError(f"{key} must be one of {get_args(CopyMethod)}, not {value!r}")
        return
    wanted = "a number" if key == "offload_host_memory_ratio" else "a whole number"
    kinds = (int, float) if key == "offload_host_memory_ratio" else int
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"{key} must be {wanted}, not {value!r}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{key} must be {wanted} above zero, not {value!r}")
