"""What is wrong with a --kv-transfer-config, told before anything starts."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from preempt_offload import plugin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import KVTransferConfig

# They load what a prefill node has announced for a request, once, and nothing else.
_FROM_PREFILL_NODES = frozenset(
    {
        "MoRIIOConnector",
        "MooncakeConnector",
        "MooncakeConnectorV1",
        "MooncakeHybridConnector",
        "MooncakeLayerwiseConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "P2pNcclConnector",
    }
)
_OPPOSITE = {"kv_producer": "kv_consumer", "kv_consumer": "kv_producer"}


def check_transfer_config(transfer: KVTransferConfig | None) -> None:
    """Refuses combinations of connectors that have no effect or cannot work.

    Args:
        transfer: The whole config, as the user gave it.

    Raises:
        ValueError: What is wrong, and where it belongs.
    """
    if transfer is None:
        return
    opposite = _OPPOSITE.get(transfer.kv_role or "")
    children = list(_descendants(transfer.kv_connector_extra_config))
    for child in children:
        name = child.get("kv_connector", "")
        if "kv_load_failure_policy" in child:
            raise ValueError(
                f"kv_load_failure_policy of {name} has no effect inside a child of MultiConnector: "
                "put it at the top level of --kv-transfer-config"
            )
        if opposite and child.get("kv_role") == opposite:
            raise ValueError(
                f'"kv_role": "{opposite}" of {name} contradicts "{transfer.kv_role}" at the top '
                "level of --kv-transfer-config: give both the same"
            )
    names = [transfer.kv_connector, *(child.get("kv_connector", "") for child in children)]
    if names.count(plugin.NAME) > 1:
        raise ValueError(
            f"--kv-transfer-config has {plugin.NAME} {names.count(plugin.NAME)} times: each would "
            "store every preempted request; leave one"
        )
    if plugin.NAME in names and transfer.kv_role == "kv_producer":
        raise ValueError(
            f'{plugin.NAME} is for decode nodes, and "kv_role" is "kv_producer": remove it from '
            "the --kv-transfer-config of prefill nodes"
        )


def check_ascend_switch(transfer: KVTransferConfig | None, additional_config: Any) -> None:
    """Refuses vllm-ascend's recompute scheduler on a node that also prefills.

    Args:
        transfer: The whole config, as the user gave it.
        additional_config: What ``--additional-config`` says.

    Raises:
        ValueError: The switch is on, and the role is ``kv_both``.
    """
    if transfer is None or transfer.kv_role != "kv_both" or not isinstance(additional_config, dict):
        return
    if importlib.util.find_spec("vllm_ascend") is None:
        return
    nested = additional_config.get("scheduler_config")
    switches = [additional_config, nested if isinstance(nested, dict) else {}]
    if any(switch.get("recompute_scheduler_enable") for switch in switches):
        raise ValueError(
            'recompute_scheduler_enable in --additional-config needs "kv_role": "kv_consumer", '
            'and it is "kv_both": turn it off and use '
            "--scheduler-cls preempt_offload.RecomputeScheduler"
        )


def doubtful_children(transfer: KVTransferConfig | None) -> list[str]:
    """Connectors that vLLM's ``MultiConnector`` asks before ours, and that may have an answer."""
    if transfer is None:
        return []
    names = [
        child.get("kv_connector", "") for child in _descendants(transfer.kv_connector_extra_config)
    ]
    if plugin.NAME not in names:
        return []
    before = names[: names.index(plugin.NAME)]
    return [name for name in before if name not in _FROM_PREFILL_NODES and name != "MultiConnector"]


def _descendants(extra_config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The configs of children, and of theirs."""
    for child in extra_config.get("connectors") or ():
        yield child
        yield from _descendants(child.get("kv_connector_extra_config") or {})
