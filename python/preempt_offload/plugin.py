"""Makes the connector known to vLLM by name; vLLM calls ``register`` in every process."""

from __future__ import annotations

from preempt_offload.log import get_logger

logger = get_logger(__name__)

NAME = "PreemptOffloadConnector"


def register() -> None:
    """Registers ``PreemptOffloadConnector`` with vLLM's connector factory.

    vLLM may call this several times in one process. If somebody else serves the name
    already (newer vllm-ascend ships a connector so called), theirs stays.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, "preempt_offload.connector", NAME)
    except ValueError:
        owner = KVConnectorFactory.get_connector_class_by_name(NAME).__module__
        if owner != "preempt_offload.connector":
            logger.warning(
                "%s is registered by %s already, which serves the name; to use preempt-offload's, "
                'add "kv_connector_module_path": "preempt_offload" to --kv-transfer-config',
                NAME,
                owner,
            )
