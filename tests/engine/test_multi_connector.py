"""Beside other connectors, which are stand-ins that follow the call pattern of real ones.

The P/D connector of the guide, MooncakeConnectorV1, cannot run without an NPU.
"""

import json

import pytest
import torch
from driver import Driver
from engine_support import BLOCK_SIZE, HEAD_SIZE, HEADS, kv_cache_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.plugins import load_general_plugins
from vllm.v1.outputs import KVConnectorOutput

from preempt_offload import compat
from preempt_offload.multi_connector import PreemptOffloadMultiConnector

# As in the guide of vllm-ascend for a decode node.
GUIDE = json.loads("""
{
  "kv_connector": "MultiConnector",
  "kv_role": "kv_consumer",
  "kv_connector_extra_config": {
    "connectors": [
      {
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": "kv_consumer",
        "kv_port": "28000",
        "kv_connector_extra_config": {
          "prefill": {"dp_size": 1, "tp_size": 1},
          "decode": {"dp_size": 1, "tp_size": 1}
        }
      },
      {
        "kv_connector": "PreemptOffloadConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"offload_host_memory_ratio": 4}
      }
    ]
  }
}
""")
MOONCAKE, OURS = GUIDE["kv_connector_extra_config"]["connectors"]
CACHE = {"kv_connector": "PrefixCacheConnector", "kv_role": "kv_consumer"}


class Announced(KVConnectorMetadata):
    def __init__(self, request_ids):
        self.request_ids = request_ids


class StandIn(KVConnectorBase_V1, SupportsHMA):
    """A connector that has nothing."""

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return Announced([])

    def request_finished_all_groups(self, request, block_ids):
        return False, None


class MooncakeConnector(StandIn):
    """Pulls the KV of a prompt from the prefill node that the request names, once."""

    def __init__(self, *args):
        super().__init__(*args)
        self.pulls = []
        self._to_pull, self._pulled = [], set()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return request.num_prompt_tokens - num_computed_tokens, True
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            assert num_external_tokens == request.num_prompt_tokens
            params["do_remote_prefill"] = False
            self.pulls.append(request.request_id)
            self._to_pull.append(request.request_id)

    def build_connector_meta(self, scheduler_output):
        to_pull, self._to_pull = self._to_pull, []
        return Announced(to_pull)

    def start_load_kv(self, forward_context, **kwargs):
        self._pulled.update(self._get_connector_metadata().request_ids)

    def get_finished(self, finished_req_ids):
        pulled, self._pulled = self._pulled, set()
        return None, pulled or None


class PrefixCacheConnector(StandIn):
    """Has the first block of every request, also of preempted ones."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return max(0, BLOCK_SIZE - num_computed_tokens), False


class ConnectedDriver(Driver):
    """With a real worker role, which carries out what the connectors say."""

    def __init__(self, config, num_blocks, *args):
        super().__init__(config, num_blocks, *args)
        caches = kv_cache_config(["layer.0"], num_blocks=num_blocks)
        self.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
        cache = torch.zeros(num_blocks, 2, BLOCK_SIZE, HEADS * HEAD_SIZE)
        self.worker.register_kv_caches({"layer.0": cache})
        self.child = {type(c).__name__: c for c in self.connector._connectors}

    def execute(self, output):
        worker, metadata, report = self.worker, output.kv_connector_metadata, KVConnectorOutput()
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        _, report.finished_recving = worker.get_finished(output.finished_req_ids)
        report.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return self._sample(output, report)


@pytest.fixture
def connect(vllm_config, monkeypatch):
    load_general_plugins()
    for name, standin in [
        ("MooncakeConnectorV1", MooncakeConnector),
        ("PrefixCacheConnector", PrefixCacheConnector),
    ]:
        monkeypatch.setitem(KVConnectorFactory._registry, name, lambda standin=standin: standin)

    def connect(*children, name, role="kv_consumer", num_blocks=8):
        transfer = {"kv_connector": name, "kv_role": role}
        config = vllm_config(
            {"connectors": list(children)},
            transfer=transfer,
            num_device_blocks=num_blocks,
            enable_prefix_caching=False,
        )
        return ConnectedDriver(config, num_blocks)

    return connect


@pytest.mark.parametrize("name", ["MultiConnector", "PreemptOffloadMultiConnector"])
@pytest.mark.parametrize("children", [(MOONCAKE, OURS), (OURS, MOONCAKE)], ids=["guide", "swapped"])
def test_a_decode_node_pulls_once_and_then_restores(connect, log, children, name):
    driver = connect(*children, name=name)
    assert not log.warnings
    computed = 0
    for request_id in ("first", "second"):
        request = driver.add(request_id, 40)
        request.kv_transfer_params = {"do_remote_prefill": True}
    for _ in range(400):
        if not driver.scheduler.requests:
            break
        output = driver.step()
        computed += output.total_num_scheduled_tokens
    pulls = driver.child["MooncakeConnector"].pulls
    assert sorted(pulls) == ["first", "second"]
    stats = driver.offload.stats
    assert stats.preserved == stats.restored > 0
    # The last token of a prompt that was pulled, and each token that was sampled, once.
    assert computed == 2 * 60
    assert {len(outputs) for outputs in driver.outputs.values()} == {60}
    driver.assert_all_back()


@pytest.mark.parametrize(
    ("children", "name", "whole"),
    [
        ((CACHE, OURS), "MultiConnector", False),
        ((OURS, CACHE), "MultiConnector", True),
        ((CACHE, OURS), "PreemptOffloadMultiConnector", True),
        ((OURS, CACHE), "PreemptOffloadMultiConnector", True),
    ],
)
def test_preserved_requests_come_before_a_prefix_cache(connect, log, children, name, whole):
    driver = connect(*children, name=name)
    doubts = [text for text in log.warnings if "PrefixCacheConnector comes before" in text]
    assert len(doubts) == (not whole)
    for request_id in ("first", "second"):
        driver.add(request_id, 40)
    driver.step_until(lambda: not driver.scheduler.requests)
    stats = driver.offload.stats
    assert stats.preserved > 0
    assert stats.restored == (stats.preserved if whole else 0)
    assert {len(outputs) for outputs in driver.outputs.values()} == {60}
    driver.assert_all_back()


def test_a_foreign_scheduler_finds_the_hooks_at_the_top(connect):
    driver = connect(MOONCAKE, OURS, name="PreemptOffloadMultiConnector")
    multi, ours = driver.connector, driver.child["PreemptOffloadConnector"]
    assert compat.find_offload_connector(multi) is ours
    request = driver.add("a", 20)
    driver.step()
    blocks = driver.manager.get_block_ids("a")
    assert not multi.has_preempted_request("a")
    assert multi.update_state_before_preempt(request, blocks, 20)
    assert multi.has_preempted_request("a")
    assert multi.has_pending_transfers()


def test_without_us_there_is_no_priority_to_give(connect):
    with pytest.raises(ValueError, match="no PreemptOffloadConnector among its connectors"):
        connect(MOONCAKE, name="PreemptOffloadMultiConnector")


def test_a_child_without_hybrid_support_needs_a_flag(connect, monkeypatch):
    class Plain(KVConnectorBase_V1):
        __init__ = None

    monkeypatch.setitem(KVConnectorFactory._registry, "PlainConnector", lambda: Plain)
    plain = {"kv_connector": "PlainConnector", "kv_role": "kv_consumer"}
    with pytest.raises(ValueError, match="--disable-hybrid-kv-cache-manager"):
        connect(plain, OURS, name="PreemptOffloadMultiConnector")


@pytest.mark.parametrize("name", ["MultiConnector", "PreemptOffloadMultiConnector"])
def test_a_prefill_node_does_not_start_with_us_among_its_connectors(connect, name):
    children = [child | {"kv_role": "kv_producer"} for child in (MOONCAKE, OURS)]
    with pytest.raises(ValueError, match=r"is for decode nodes.*remove it"):
        connect(*children, name=name, role="kv_producer")


@pytest.mark.parametrize("role", KVConnectorRole)
def test_a_prefill_node_does_not_start_with_us_alone(vllm_config, role):
    config = vllm_config(transfer={"kv_role": "kv_producer"})
    with pytest.raises(ValueError, match=r"is for decode nodes.*remove it"):
        KVConnectorFactory.create_connector(config, role, kv_cache_config(["layer.0"]))


def test_our_multi_connector_is_loaded_by_path_too():
    import preempt_offload

    assert preempt_offload.PreemptOffloadMultiConnector is PreemptOffloadMultiConnector
