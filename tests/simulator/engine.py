"""The loop of vLLM's engine core, over a real scheduler and simulated workers."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import tempfile
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from preempt_offload import compat, plugin, tiny_model
from preempt_offload.recompute_scheduler import STOP_REASON, RecomputeScheduler

from .accounts import check_device, check_host, check_nothing_left, check_restored
from .language import Sentence
from .plan import MAX_LENGTH, Abort, Add, Pause, Reset, Resume, Steps
from .pull import PARAMS, Pull
from .worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from .plan import Event, Group, Plan, Setup

    Trace = Callable[[str], None]

# Steps without a single token, beyond those that copies take, that mean nothing moves.
PATIENCE = 60
# Steps after the last event that no plan comes near.
MOST_STEPS = 20_000


class Wrong(AssertionError):
    """A request did not get what it must get."""


def simulate(plan: Plan, trace: Trace | None = None) -> Counter[str]:
    """Runs a plan to its end and counts what happened on the way.

    Args:
        plan: What happens.
        trace: Gets a line for everything that is decided about KV.

    Raises:
        Exception: Something is wrong, with the package or with the simulator.
    """
    simulation = Simulation(plan, trace)
    for event in plan.events:
        simulation.apply(event)
    simulation.drain()
    return simulation.happened


class Simulation:
    """One engine, from its start to its end."""

    def __init__(self, plan: Plan, trace: Trace | None) -> None:
        self._trace = trace
        self._setup = setup = plan.setup
        self.happened = Counter[str]()
        self._weights = 0
        self._sentences: dict[str, Sentence] = {}
        self._requests: dict[str, Request] = {}
        self._adds: dict[str, Add] = {}
        self._delivered: dict[str, list[int]] = {}
        self._same_weights: set[str] = set()
        config = _vllm_config(setup)
        # The scheduler asks for it; the workers here run on anything.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(setup.second_runner))
        cache_config = _kv_cache_config(setup, config)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(cache_config, config)
        self.scheduler = RecomputeScheduler(
            vllm_config=config,
            kv_cache_config=cache_config,
            structured_output_manager=_structured_output_manager(),
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        if setup.unfenced:
            # vLLM 0.32 waits for those steps where a connector may load into the victim's blocks.
            self.scheduler.defer_block_free = False
        self.offload = compat.find_offload_connector(self.scheduler.connector).scheduler
        self._workers = []
        for rank in range(setup.world_size):
            config = copy.copy(config)
            config.parallel_config = copy.copy(config.parallel_config)
            config.parallel_config.rank = rank
            made = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config)
            self._workers.append(Worker(rank, setup, made, self._sentences, plan.seed))
        self._aggregator = KVOutputAggregator.from_connector(
            self.scheduler.connector, setup.world_size
        )
        self._hasher = get_request_block_hasher(hash_block_size, sha256)
        # Tokens that were to be preserved, by request, until it runs again.
        self._promises: dict[str, int] = {}
        self._resetting = False
        self._under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._aborts: list[str] = []
        self._idle_steps = 0
        self._watch()

    # ---- events ----

    def apply(self, event: Event) -> None:
        """Lets an event happen."""
        if self._trace:
            self._trace(str(event))
        match event:
            case Add():
                self._add(event)
            case Abort():
                self._abort(event)
            case Reset():
                self._reset(event)
            case Pause():
                self._pause(event)
            case Resume():
                self.scheduler.set_pause_state(PauseState.UNPAUSED)
            case Steps():
                for _ in range(event.count):
                    self.step()

    def _add(self, add: Add) -> None:
        request_id = f"r{add.request}"
        params = SamplingParams(
            max_tokens=add.max_tokens,
            ignore_eos=True,
            stop_token_ids=[] if add.stop_token is None else [add.stop_token],
            extra_args={"kv_transfer_params": dict(PARAMS)} if add.remote else None,
        )
        request = Request(
            request_id,
            list(add.prompt),
            params,
            None,
            arrival_time=float(add.request),
            priority=add.priority,
            lora_request=_adapter(add.adapter),
            block_hasher=self._hasher,
        )
        self._adds[request_id] = add
        self._requests[request_id] = request
        self._sentences[request_id] = Sentence(add.prompt, add.adapter, self._weights)
        self._delivered[request_id] = []
        self._same_weights.add(request_id)
        self.scheduler.add_request(request)

    def _abort(self, abort: Abort) -> None:
        request_id = f"r{abort.request}"
        if request_id not in self.scheduler.requests:
            return
        if abort.within_step:
            self._aborts.append(request_id)
        else:
            self._carry_out_aborts([request_id])

    def _carry_out_aborts(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            request = self.scheduler.requests.get(request_id)
            if request is not None:
                status = self.offload.table.status(request_id)
                state = status[0] if status else request.status.name
                self.happened[f"aborts in state {state}"] += 1
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def _reset(self, reset: Reset) -> None:
        if reset.running and self._setup.drafts:
            # vLLM 0.23 would take drafts that the step under way rejects off the tokens that
            # a request has computed since the reset.
            while self._under_way:
                self._update()
        running = {r.request_id for r in self.scheduler.running}
        # Newer vLLM refuses while a step is under way, too.
        hindered = bool(self._under_way) or self._is_receiving()
        self._resetting = True
        try:
            done = self.scheduler.reset_prefix_cache(reset.running, reset.connector)
        except RuntimeError:
            if not hindered:
                raise
            # vLLM could not; but what is being received is dropped, and all is valid but what
            # vLLM's own prefix cache has.
            done = not self._setup.prefix_caching
        self._resetting = False
        if reset.running and not hindered and not done:
            raise Wrong(f"nothing stands in the way of a reset: {self._whereabouts()}")
        self.happened["resets done" if done else "resets refused"] += 1
        if reset.running or reset.connector or done:
            self._promises.clear()
        if done:
            self._replace_weights(running)

    def _pause(self, pause: Pause) -> None:
        self.happened["pauses"] += 1
        state = PauseState.PAUSED_NEW if pause.wait else PauseState.PAUSED_ALL
        self.scheduler.set_pause_state(state)
        self._come_to_rest()
        if pause.clear:
            # Nothing can stand in its way now.
            self._reset(Reset(running=True, connector=True))

    def _replace_weights(self, running: set[str]) -> None:
        self._weights += 1
        self._same_weights.clear()
        for request_id, request in self.scheduler.requests.items():
            if request.is_finished():
                # Its blocks are held until its load has ended.
                continue
            tokens = list(request.all_token_ids)
            row = self._workers[0].rows.get(request_id)
            if request_id not in running and row is not None and row.known > len(tokens):
                # What the step under way has sampled for it is kept.
                tokens = self._sentences[request_id].said(0, row.known)
            self._sentences[request_id].become(tokens, self._weights)

    # ---- steps ----

    def step(self) -> None:
        """One step of the engine core."""
        self.happened["steps"] += 1
        if self._setup.asynchronous:
            self._step_with_queue()
        elif self.scheduler.has_requests():
            self._schedule()
            self._update()
        live = set(self.scheduler.requests)
        check_device(self.scheduler)
        check_host(self.offload, live, share=self._setup.share)
        check_restored(self.scheduler, self.offload)
        self._aborts.clear()

    def _step_with_queue(self) -> None:
        scheduler, queue = self.scheduler, self._under_way
        if scheduler.has_requests():
            executed = self._schedule()
            if len(queue) < 2 and (executed or scheduler.has_requests()):
                return
        if queue:
            self._update()

    def _schedule(self) -> bool:
        output = self.scheduler.schedule()
        if self._trace:
            scheduled = output.num_scheduled_tokens
            self._trace(
                f"step: {scheduled}, drafts {output.scheduled_spec_decode_tokens}, "
                f"ended {output.finished_req_ids}"
            )
        self._check_promises(output)
        outputs = [worker.execute(output) for worker in self._workers]
        self._under_way.append((output, self._aggregator.aggregate(outputs)))
        executed = output.total_num_scheduled_tokens > 0
        self._idle_steps = 0 if executed else self._idle_steps + 1
        if self._idle_steps > PATIENCE + 2 * self._setup.delay:
            raise Wrong(f"nothing moves: {self._whereabouts()}")
        return executed

    def _update(self) -> None:
        output, report = self._under_way.popleft()
        for worker in self._workers:
            worker.outputs_are_seen()
        self._carry_out_aborts(self._aborts)
        outputs = self.scheduler.update_from_output(output, report)
        if self._setup.drafts and not self._setup.asynchronous and report.req_ids:
            self.scheduler.update_draft_token_ids(self._workers[0].drafts(output))
        for of_client in outputs.values():
            for out in of_client.outputs:
                self._delivered[out.request_id] += out.new_token_ids
        for request_id in [r for r, request in self._requests.items() if request.is_finished()]:
            self._finish(self._requests.pop(request_id))

    def _finish(self, request: Request) -> None:
        request_id, add = request.request_id, self._adds.pop(request.request_id)
        reason = request.status
        self.happened[f"{reason.name.lower()}"] += 1
        tokens = list(request.output_token_ids)
        delivered = self._delivered.pop(request_id)
        if delivered != tokens and reason != RequestStatus.FINISHED_ABORTED:
            raise Wrong(f"{request_id} has {tokens}, but delivered was {delivered}")
        start = len(add.prompt)
        if request_id in self._same_weights:
            right = self._sentences[request_id].said(start, start + len(tokens))
            if right != tokens:
                raise Wrong(f"{request_id} says {tokens} instead of {right}")
        if reason == RequestStatus.FINISHED_STOPPED:
            returned = request.stop_reason == STOP_REASON
            assert returned <= (self._setup.role == "kv_consumer")
            assert returned or tokens[-1] == add.stop_token
            self.happened["returned to the proxy"] += returned
        elif reason == RequestStatus.FINISHED_LENGTH_CAPPED:
            assert len(tokens) == add.max_tokens
        else:
            assert reason == RequestStatus.FINISHED_ABORTED, reason
        del self._sentences[request_id]

    def drain(self) -> None:
        """Steps until nothing is left to do, then checks that nothing is left."""
        self.apply(Resume())
        self._come_to_rest()
        check_device(self.scheduler)
        check_nothing_left(self.scheduler, self.offload)
        for worker in self._workers:
            self.happened.update({f"on streams: {k}": n for k, n in worker.device_calls().items()})
        self.happened["pulls"] += self._workers[0].num_pulls
        if self._requests:
            raise Wrong(f"requests were lost: {sorted(self._requests)}")
        stats = dataclasses.asdict(self.offload.stats)
        self.happened.update({name.replace("_", " "): n for name, n in stats.items()})

    # ---- inside ----

    def _is_receiving(self) -> bool:
        received = self.scheduler.finished_recving_kv_req_ids
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        return any(
            request.is_finished() or (request.status == waiting and request_id not in received)
            for request_id, request in self.scheduler.requests.items()
        )

    def _come_to_rest(self) -> None:
        for _ in range(MOST_STEPS):
            if not self.scheduler.has_requests() and not self._under_way:
                return
            self.step()
        raise Wrong(f"the engine never comes to rest: {self._whereabouts()}")

    def _watch(self) -> None:
        preempt = self.scheduler._preempt_request
        before_preempt = self.offload.update_state_before_preempt
        after_alloc = self.offload.update_state_after_alloc

        def preempt_request(request: Request, *args: object, **kwargs: object) -> None:
            self.happened["preemptions"] += 1
            request_id, num_tokens = request.request_id, request.num_computed_tokens
            tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            self._tell("preempts", request, tables)
            in_doubt = self._states_in_doubt(request)
            preempt(request, *args, **kwargs)
            if request_id not in self._promises and not self._resetting and not in_doubt:
                self._check_refusal(request, tables, num_tokens)

        def update_state_before_preempt(
            request: Request, blocks: tuple[list[int], ...], num_tokens: int
        ) -> bool:
            preserved = before_preempt(request, blocks, num_tokens)
            if preserved:
                self._promises[request.request_id] = num_tokens
            return preserved

        def update_state_after_alloc(request: Request, blocks: object, num_tokens: int) -> None:
            after_alloc(request, blocks, num_tokens)
            if num_tokens:
                self._tell(f"restores {num_tokens} tokens of", request, blocks)

        self.scheduler._preempt_request = preempt_request
        self.offload.update_state_before_preempt = update_state_before_preempt
        self.offload.update_state_after_alloc = update_state_after_alloc

    def _check_promises(self, output: SchedulerOutput) -> None:
        """What was preserved is not computed again."""
        cached = output.scheduled_cached_reqs
        started = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        started |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for request_id in self._promises.keys() & started.keys():
            preserved = self._promises.pop(request_id)
            known = self.scheduler.requests[request_id].num_tokens - 1
            # A state may be the one before the last step's drafts.
            least = min(preserved, known) - self._setup.drafts * self._setup.has_states
            if started[request_id] < least and not self._setup.failures:
                raise Wrong(
                    f"{request_id} starts with {started[request_id]} tokens of {preserved} that "
                    f"were preserved and {known} that can be"
                )

    def _states_in_doubt(self, request: Request) -> bool:
        """Whether nothing may be preserved, because nobody can tell which state is right."""
        setup = self._setup
        if not setup.has_states:
            return False
        if setup.second_runner or (setup.drafts and setup.state_mode == "all"):
            return True
        if not request.num_output_placeholders or setup.state_mode != "align":
            return False
        return any(
            request.num_computed_tokens % group.block_tokens == 0
            for group in setup.groups
            if group.kind == "state"
        )

    def _check_refusal(
        self, request: Request, blocks: tuple[list[int], ...], num_tokens: int
    ) -> None:
        """What can be preserved is."""
        groups = self._setup.groups
        if not num_tokens:
            return
        needed = sum(
            1
            if group.kind == "state"
            else sum(
                block > 0
                for block in table[
                    : -(-num_tokens // (group.block_tokens * self._setup.ranks_of(group)))
                ]
            )
            for group, table in zip(groups, blocks, strict=True)
        )
        entries = self.offload.table.entries()
        under_copy = ("Storing", "Loading")
        if any(id_ == request.request_id and state in under_copy for id_, state, _ in entries):
            # A copy from before a reset is still under way.
            return
        held = {b for _, state, owned in entries if state != "Mirrored" for b in owned}
        if needed <= self.offload.pool.capacity - len(held):
            raise Wrong(f"{request.request_id} was refused {needed} blocks; held are {len(held)}")

    def _tell(self, what: str, request: Request, blocks: object) -> None:
        if self._trace:
            status = self.offload.table.status(request.request_id)
            self._trace(
                f"{what} {request.request_id}, {request.num_computed_tokens} of "
                f"{request.num_tokens} tokens computed, {status}, blocks {blocks}"
            )

    def _whereabouts(self) -> dict[str, tuple[str, int, object]]:
        return {
            request_id: (
                request.status.name,
                request.num_computed_tokens,
                self.offload.table.status(request_id),
            )
            for request_id, request in self.scheduler.requests.items()
        }


# ---- what is made once ----


@functools.cache
def _base_config() -> VllmConfig:
    init_none_hash(sha256)
    plugin.register()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        return EngineArgs(
            model=str(tiny_model.write(Path(folder))),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2 * MAX_LENGTH,
            kv_transfer_config=KVTransferConfig(kv_connector=plugin.NAME, kv_role="kv_both"),
        ).create_engine_config()


@functools.cache
def _structured_output_manager() -> StructuredOutputManager:
    return StructuredOutputManager(_base_config())


@functools.cache
def _adapter(number: int) -> LoRARequest | None:
    return LoRARequest(f"adapter{number}", number, "nowhere") if number else None


def _vllm_config(setup: Setup) -> VllmConfig:
    config = copy.copy(_base_config())
    config.scheduler_config = scheduler = copy.copy(config.scheduler_config)
    scheduler.async_scheduling = setup.asynchronous
    scheduler.policy = "priority" if setup.priorities else "fcfs"
    scheduler.max_num_seqs = setup.max_seqs
    scheduler.max_num_batched_tokens = setup.max_tokens
    scheduler.max_num_scheduled_tokens = None
    scheduler.long_prefill_token_threshold = setup.long_prefill
    config.cache_config = cache = copy.copy(config.cache_config)
    cache.block_size = min(_spec(group, setup).block_size for group in setup.groups)
    cache.num_gpu_blocks = cache.num_gpu_blocks_override = setup.num_blocks
    cache.kv_cache_layout = "LBNHC"
    cache.enable_prefix_caching = setup.prefix_caching
    cache.mamba_cache_mode = setup.state_mode
    config.parallel_config = parallel = copy.copy(config.parallel_config)
    parallel.world_size = setup.world_size
    parallel.decode_context_parallel_size = setup.context_parallel
    config.kv_transfer_config = _transfer_config(setup)
    if setup.drafts:
        # Its checks need a model to draft with.
        config.speculative_config = speculative = object.__new__(SpeculativeConfig)
        speculative.method = "draft_model" if setup.lookahead else "ngram"
        speculative.num_speculative_tokens = setup.drafts
    return config


def _transfer_config(setup: Setup) -> KVTransferConfig:
    ours = {
        "kv_connector": plugin.NAME,
        "kv_role": setup.role,
        "kv_connector_extra_config": {
            "offload_host_memory_ratio": setup.host_ratio,
            "enable_offload_prefix_caching": setup.share,
            "host_copy_threads": 1,
        },
    }
    if not setup.pulls:
        return KVTransferConfig(**ours, kv_load_failure_policy="recompute")
    pull = {
        "kv_connector": Pull.__name__,
        "kv_connector_module_path": Pull.__module__,
        "kv_role": setup.role,
    }
    return KVTransferConfig(
        kv_connector="PreemptOffloadMultiConnector" if setup.pulls == "ours" else "MultiConnector",
        kv_role=setup.role,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "connectors": [ours, pull] if setup.pulls == "after" else [pull, ours]
        },
    )


def _kv_cache_config(setup: Setup, config: VllmConfig) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec(names, _spec(group, setup))
        for names, group in zip(setup.layer_names, setup.groups, strict=True)
    ]
    return get_kv_cache_config_from_groups(config, groups, available_memory=0)


def _spec(group: Group, setup: Setup) -> KVCacheSpec:
    if group.kind == "state":
        none = setup.state_mode == "none"
        return MambaSpec(
            shapes=((1,),),
            dtypes=(torch.int64,),
            block_size=2 * MAX_LENGTH if none else group.block_tokens,
            page_size_padded=setup.page_bytes,
            mamba_cache_mode=setup.state_mode,
            num_speculative_blocks=setup.drafts,
        )
    attention = {
        "block_size": group.block_tokens,
        "num_kv_heads": 1,
        "head_size": setup.page_bytes // group.block_tokens // 2,
        "dtype": torch.int8,
    }
    if group.kind == "window":
        return SlidingWindowSpec(**attention, sliding_window=group.reach)
    if group.kind == "chunked":
        return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=group.reach)
    return FullAttentionSpec(**attention)
