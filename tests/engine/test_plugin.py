import subprocess
import sys

import pytest
import vllm.plugins
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from preempt_offload import PreemptOffloadConnector, plugin

OURS = KVTransferConfig(kv_connector=plugin.NAME, kv_role="kv_both")
OURS_BY_PATH = KVTransferConfig(
    kv_connector=plugin.NAME, kv_role="kv_both", kv_connector_module_path="preempt_offload"
)
THEIRS = ("vllm.distributed.kv_transfer.kv_connector.v1.example_connector", "ExampleConnector")


def register_theirs(module=THEIRS[0]):
    """As newer releases of vllm-ascend do it."""
    KVConnectorFactory.register_connector(plugin.NAME, module, THEIRS[1])


def load_plugins(monkeypatch, *plugins):
    """vLLM loads these plugins in this order, as at the start of each of its processes."""
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    monkeypatch.setattr(
        vllm.plugins,
        "load_plugins_by_group",
        lambda group: {str(i): function for i, function in enumerate(plugins)},
    )
    vllm.plugins.load_general_plugins()


def assert_tells_who_serves_the_name(log, owner):
    (warning,) = log.warnings
    assert plugin.NAME in warning
    assert owner in warning
    assert '"kv_connector_module_path": "preempt_offload"' in warning


def test_vllm_finds_the_connector_by_name(registry, log):
    plugin.register()
    assert KVConnectorFactory.get_connector_class(OURS) is PreemptOffloadConnector
    assert KVConnectorFactory.get_connector_class_by_name(plugin.NAME) is PreemptOffloadConnector
    assert not log.records


def test_registering_twice_is_as_once(registry, log):
    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class(OURS) is PreemptOffloadConnector
    assert not log.records


def test_a_name_that_is_taken_stays_with_who_has_it(registry, monkeypatch, log):
    load_plugins(monkeypatch, register_theirs, plugin.register)
    assert KVConnectorFactory.get_connector_class(OURS).__module__ == THEIRS[0]
    assert_tells_who_serves_the_name(log, THEIRS[0])


def test_a_name_that_others_want_too_does_not_end_the_engine(registry, monkeypatch, log):
    load_plugins(monkeypatch, plugin.register, register_theirs)
    owner = KVConnectorFactory.get_connector_class(OURS).__module__
    assert owner in (THEIRS[0], PreemptOffloadConnector.__module__)
    assert_tells_who_serves_the_name(log, owner)


def test_a_name_taken_by_what_cannot_be_loaded_does_not_end_the_engine(registry, monkeypatch, log):
    load_plugins(monkeypatch, lambda: register_theirs("not_installed_here"), plugin.register)
    (warning,) = log.warnings
    assert '"kv_connector_module_path": "preempt_offload"' in warning


def test_our_module_path_finds_ours_whoever_has_the_name(registry):
    register_theirs()
    assert KVConnectorFactory.get_connector_class(OURS_BY_PATH) is PreemptOffloadConnector


def test_our_module_path_needs_no_plugin(registry):
    assert KVConnectorFactory.get_connector_class(OURS_BY_PATH) is PreemptOffloadConnector


@pytest.mark.parametrize("config", [OURS, OURS_BY_PATH], ids=["name", "module path"])
def test_the_hybrid_memory_interface_is_supported(registry, config):
    plugin.register()
    assert KVConnectorFactory.supports_hma_config(config)


def test_the_hybrid_memory_interface_is_supported_inside_multi_connector(registry):
    plugin.register()
    child = {"kv_connector": plugin.NAME, "kv_role": "kv_both"}
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [child]},
    )
    assert KVConnectorFactory.supports_hma_config(config)


def test_a_fresh_vllm_finds_us_through_our_entry_point_and_loads_us_on_demand():
    code = (
        "import sys\n"
        "from vllm.plugins import load_general_plugins\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory\n"
        "assert 'PreemptOffloadConnector' not in KVConnectorFactory._registry\n"
        "load_general_plugins()\n"
        "assert 'preempt_offload.connector' not in sys.modules\n"
        "found = KVConnectorFactory.get_connector_class_by_name('PreemptOffloadConnector')\n"
        "assert found.__module__ == 'preempt_offload.connector', found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
