"""Keeps the KV cache of preempted vLLM requests in host memory and restores it.

vLLM finds the connector by name (``"kv_connector": "PreemptOffloadConnector"``, through
the entry point in ``plugin.py``) or by ``"kv_connector_module_path": "preempt_offload"``,
and the scheduler by ``--scheduler-cls preempt_offload.RecomputeScheduler``. They are
loaded on first use, so that this package can be imported where there is no vLLM.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preempt_offload.connector import PreemptOffloadConnector
    from preempt_offload.multi_connector import PreemptOffloadMultiConnector
    from preempt_offload.recompute_scheduler import AsyncRecomputeScheduler, RecomputeScheduler

__version__ = version("preempt-offload")

__all__ = [
    "AsyncRecomputeScheduler",
    "PreemptOffloadConnector",
    "PreemptOffloadMultiConnector",
    "RecomputeScheduler",
]

_HOMES = {
    "PreemptOffloadConnector": "preempt_offload.connector",
    "PreemptOffloadMultiConnector": "preempt_offload.multi_connector",
    "RecomputeScheduler": "preempt_offload.recompute_scheduler",
    "AsyncRecomputeScheduler": "preempt_offload.recompute_scheduler",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("vllm", "torch"):
            raise ImportError(
                f"preempt_offload.{name} needs {error.name!r}, which is not installed here; "
                "install preempt-offload into the environment that runs vLLM"
            ) from error
        raise
