from types import SimpleNamespace

import pytest

from preempt_offload.transfer_config import (
    check_ascend_switch,
    check_transfer_config,
    doubtful_children,
)

OURS = {"kv_connector": "PreemptOffloadConnector", "kv_role": "kv_consumer"}
MOONCAKE = {
    "kv_connector": "MooncakeConnectorV1",
    "kv_role": "kv_consumer",
    "kv_port": "28000",
    "kv_connector_extra_config": {
        "prefill": {"dp_size": 1, "tp_size": 1},
        "decode": {"dp_size": 1, "tp_size": 1},
    },
}
STORE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_consumer"}


def combined(*children, role="kv_consumer", name="MultiConnector"):
    return SimpleNamespace(
        kv_connector=name, kv_role=role, kv_connector_extra_config={"connectors": list(children)}
    )


def alone(role):
    return SimpleNamespace(
        kv_connector=OURS["kv_connector"], kv_role=role, kv_connector_extra_config={}
    )


@pytest.mark.parametrize(
    "transfer",
    [
        None,
        alone("kv_consumer"),
        alone("kv_both"),
        combined(MOONCAKE, OURS),
        combined(OURS, MOONCAKE),
        combined(OURS | {"kv_role": "kv_both"}),
        combined(MOONCAKE | {"kv_role": "kv_producer"}, role="kv_producer"),
        combined(combined(OURS).__dict__, MOONCAKE),
    ],
)
def test_what_can_work_is_not_refused(transfer):
    check_transfer_config(transfer)


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        (
            combined(MOONCAKE | {"kv_load_failure_policy": "fail"}, OURS),
            r"kv_load_failure_policy of MooncakeConnectorV1 .* top level",
        ),
        (
            combined(combined(OURS | {"kv_load_failure_policy": "fail"}).__dict__),
            r"kv_load_failure_policy of PreemptOffloadConnector .* top level",
        ),
        (
            combined(MOONCAKE | {"kv_role": "kv_producer"}, OURS),
            r'"kv_producer" of MooncakeConnectorV1 contradicts "kv_consumer"',
        ),
        (
            combined(OURS, role="kv_producer"),
            r'"kv_consumer" of PreemptOffloadConnector contradicts "kv_producer"',
        ),
        (combined(OURS, MOONCAKE, OURS), r"PreemptOffloadConnector 2 times"),
        (alone("kv_producer"), r"decode nodes.*remove it"),
        (
            combined(OURS | {"kv_role": "kv_producer"}, role="kv_producer"),
            r"decode nodes.*remove it",
        ),
    ],
)
def test_what_cannot_work_is_refused(transfer, message):
    with pytest.raises(ValueError, match=message):
        check_transfer_config(transfer)


@pytest.mark.parametrize(
    ("transfer", "doubtful"),
    [
        (None, []),
        (alone("kv_both"), []),
        (combined(MOONCAKE, OURS), []),
        (combined(OURS, STORE), []),
        (combined(STORE), []),
        (combined(MOONCAKE, STORE, OURS, STORE), ["LMCacheConnectorV1"]),
        (combined(combined(STORE).__dict__, OURS), ["LMCacheConnectorV1"]),
    ],
)
def test_prefix_caches_that_are_asked_first_are_doubtful(transfer, doubtful):
    assert doubtful_children(transfer) == doubtful


@pytest.mark.parametrize(
    "switch",
    [
        {"recompute_scheduler_enable": True},
        {"scheduler_config": {"recompute_scheduler_enable": True}},
    ],
)
def test_the_images_scheduler_is_for_decode_nodes_only(monkeypatch, switch):
    check_ascend_switch(alone("kv_both"), switch)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "vllm_ascend")
    with pytest.raises(ValueError, match=r"kv_consumer.*--scheduler-cls"):
        check_ascend_switch(alone("kv_both"), switch)
    check_ascend_switch(alone("kv_consumer"), switch)
    check_ascend_switch(None, switch)
    check_ascend_switch(alone("kv_both"), {"scheduler_config": {}})
    check_ascend_switch(alone("kv_both"), None)
