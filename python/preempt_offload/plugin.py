"""Makes the connector known to vLLM by name; vLLM calls ``register`` in every process."""

from __future__ import annotations

import inspect
from typing import Any

from preempt_offload import host_memory
from preempt_offload.log import get_logger

logger = get_logger(__name__)

NAME = "PreemptOffloadConnector"
HOME = "preempt_offload.connector"
MULTI_NAME = "PreemptOffloadMultiConnector"
MULTI_HOME = "preempt_offload.multi_connector"


_our_loader: object = None


def register() -> None:
    """Registers the connectors of this package with vLLM's connector factory.

    vLLM may call this several times in one process, and before or after the plugins of
    others. If another one wants the name of ours, as newer vllm-ascend does, it gets it in either
    order, and the log says so.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # While no rank has allocated anything.
    host_memory.available_at_start()
    global _our_loader
    if MULTI_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(MULTI_NAME, MULTI_HOME, MULTI_NAME)
    loader = KVConnectorFactory._registry.get(NAME)
    if loader is None:
        KVConnectorFactory.register_connector(NAME, HOME, NAME)
        _our_loader = KVConnectorFactory._registry[NAME]
        _yield_name_to_others(KVConnectorFactory)
    elif loader is not _our_loader:
        # The class itself is not asked: loading it could fail, or take long.
        owner = inspect.getclosurevars(loader).nonlocals.get("module_path", "another plugin")
        _say_who_serves_the_name(owner)


def _yield_name_to_others(factory: Any) -> None:
    """Has the factory give our name to whoever registers it after us.

    It refuses a name that is taken, and an error in a plugin would end the engine.
    """
    register_connector = factory.register_connector

    def register_or_replace(name: str, module_path: str, class_name: str) -> None:
        if name == NAME and factory._registry.get(NAME) is _our_loader:
            del factory._registry[NAME]
            _say_who_serves_the_name(module_path)
        register_connector(name, module_path, class_name)

    factory.register_connector = register_or_replace


def _say_who_serves_the_name(owner: str) -> None:
    logger.warning(
        "%s is registered by %s, which serves the name; to use preempt-offload's, "
        'add "kv_connector_module_path": "preempt_offload" to --kv-transfer-config',
        NAME,
        owner,
    )
