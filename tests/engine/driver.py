"""vLLM's real scheduler in the loop of an engine, with a model and workers that are made up."""

from __future__ import annotations

import itertools

from engine_support import SPEC, kv_cache_config
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from preempt_offload import compat
from preempt_offload.metadata import OffloadWorkerMetadata


class Driver:
    """A scheduler in the loop of an engine whose model samples the step's number.

    Args:
        config: The engine's config.
        num_blocks: Device blocks, null block included.
        scheduler_cls: The class to make; what the config says if not given.
        specs: The kind of each KV cache group, of one layer each.
    """

    def __init__(self, config, num_blocks, scheduler_cls=None, specs=(SPEC,)):
        init_none_hash(sha256)
        groups = [[f"layer.{i}"] for i in range(len(specs))]
        kv_cache = kv_cache_config(*groups, num_blocks=num_blocks, spec=list(specs))
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache, config)
        self.scheduler = (scheduler_cls or config.scheduler_config.get_scheduler_cls())(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        self.num_ranks = config.parallel_config.world_size
        self.manager = self.scheduler.kv_cache_manager
        self.connector = self.scheduler.connector
        self.hasher = get_request_block_hasher(hash_block_size, sha256)
        self.outputs = {}
        self.stores_ok = True
        self.hold_loads = False
        self.loads_ok = True
        self._held = set()
        self._steps = itertools.count(100)

    def add(
        self, request_id, num_tokens, *, first=0, tail=(), priority=0, max_tokens=60, **options
    ):
        request = Request(
            request_id,
            [first] * num_tokens + [*tail],
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            priority=priority,
            block_hasher=self.hasher,
            **options,
        )
        self.scheduler.add_request(request)
        return request

    def lift_fence(self):
        """Lets requests be preempted while steps of theirs are under way.

        vLLM 0.32 waits for those steps where a connector may load into the victim's blocks.
        """
        self.scheduler.defer_block_free = False

    def passed_over(self, request):
        """Whether a waiting request was not ready in the last step."""
        return request in getattr(self.scheduler, "deferred_waiting", ()) or (
            request in compat.waiting_queues(self.scheduler)[1]
        )

    def schedule(self):
        return self.scheduler.schedule()

    def execute(self, output):
        """The workers and the model carry out ``output``; returns what they report."""
        meta, stores = output.kv_connector_metadata, {}
        if meta is not None and meta.store_event is not None:
            stores = {meta.store_event: dict.fromkeys(range(self.num_ranks), self.stores_ok)}
        self._held |= set(meta.load_requests) if meta is not None else set()
        loaded = set() if self.hold_loads else self._held.copy()
        self._held -= loaded
        failed = frozenset() if self.loads_ok else frozenset(loaded)
        return self._sample(
            output,
            KVConnectorOutput(
                finished_recving=loaded,
                kv_connector_worker_meta=OffloadWorkerMetadata(stores, failed),
                **({"failed_recving": failed} if compat.loads_fail_by_request() else {}),
            ),
        )

    def _sample(self, output, report):
        """What the model makes of ``output``, with what the workers report of copies."""
        token, ids = next(self._steps), list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[request_id] for request_id in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[
                [token] if self._samples(request, output) else [] for request in requests
            ],
            kv_connector_output=report,
        )

    @staticmethod
    def _samples(request, output):
        """Whether the step reaches the request's last known token."""
        start = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        start.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        end = start[request.request_id] + output.num_scheduled_tokens[request.request_id]
        return end >= request.num_tokens

    def update(self, output, report):
        for batch in self.scheduler.update_from_output(output, report).values():
            for one in batch.outputs:
                self.outputs.setdefault(one.request_id, []).append(one)

    def step(self):
        output = self.schedule()
        self.update(output, self.execute(output))
        return output

    def step_until(self, reached, at_most=200):
        for _ in range(at_most):
            if reached():
                return
            self.step()
        raise AssertionError(f"not reached in {at_most} steps")

    @property
    def offload(self):
        return compat.find_offload_connector(self.connector).scheduler

    def assert_all_back(self):
        """Nothing runs or waits, and every device and host block is free."""
        scheduler = self.scheduler
        assert not any((scheduler.running, *compat.waiting_queues(scheduler)))
        assert not scheduler.requests
        pool = self.manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert sum(self.offload.table.counts().values()) == 0
        assert self.offload.pool.num_free + self.offload.pool.num_evictable == (
            self.offload.pool.capacity
        )
