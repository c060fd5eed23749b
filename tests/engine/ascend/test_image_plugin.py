"""Beside the plugin of vllm-ascend, whichever is loaded first."""

import inspect

import pytest
from test_plugin import (
    OURS,
    OURS_BY_PATH,
    THEIRS,
    assert_tells_who_serves_the_name,
    load_plugins,
    register_theirs,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm_ascend.distributed.kv_transfer import register_connector

import ascend_image  # noqa: F401
from preempt_offload import PreemptOffloadConnector, plugin

MULTI = "vllm_ascend.distributed.kv_transfer.ascend_multi_connector"


@pytest.fixture(autouse=True)
def without_vllm_ascend(registry):
    """The registry as it is before vllm-ascend's plugin has run, too."""
    for name, loader in list(registry.items()):
        home = inspect.getclosurevars(loader).nonlocals["module_path"]
        if home.startswith("vllm_ascend."):
            del registry[name]


def register_theirs_too():
    """As a vllm-ascend that has a connector of our name."""
    register_connector()
    register_theirs()


@pytest.mark.parametrize("ours_first", [False, True])
def test_both_are_there_in_either_order(monkeypatch, log, ours_first):
    order = [register_connector, plugin.register]
    load_plugins(monkeypatch, *(reversed(order) if ours_first else order))
    assert not log.records
    found = KVConnectorFactory.get_connector_class_by_name
    assert found(plugin.NAME) is PreemptOffloadConnector
    assert found(plugin.MULTI_NAME).__module__ == plugin.MULTI_HOME
    assert found("MultiConnector").__module__ == MULTI
    assert found("MooncakeConnectorV1").__module__.startswith("vllm_ascend.")


@pytest.mark.parametrize("ours_first", [False, True])
def test_a_name_that_both_want_is_served_by_one_and_forced_by_our_path(
    monkeypatch, log, ours_first
):
    order = [register_theirs_too, plugin.register]
    load_plugins(monkeypatch, *(reversed(order) if ours_first else order))
    assert KVConnectorFactory.get_connector_class(OURS).__module__ == THEIRS[0]
    assert_tells_who_serves_the_name(log, THEIRS[0])
    assert KVConnectorFactory.get_connector_class(OURS_BY_PATH) is PreemptOffloadConnector
    assert KVConnectorFactory.get_connector_class_by_name("MultiConnector").__module__ == MULTI
