"""A real vLLM engine, driven step by step and watched from outside."""

import contextlib
import dataclasses
import gc
import operator
import os
import re

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    OMP_NUM_THREADS="1",
    # The tiny model gains nothing from torch.compile, and every start would lose 20 s to it.
    TORCHDYNAMO_DISABLE="1",
    # No rank has a core of its own.
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)

import numpy as np
from vllm import LLM, RequestOutput, SamplingParams
from vllm.v1.core.sched.interface import PauseState

import adapters_on_cpu  # noqa: F401
import async_on_cpu  # noqa: F401
from in_worker import offload_worker
from preempt_offload import compat
from preempt_offload.observe import SchedulerObserver
from preempt_offload.stats import SchedulerStats

# Tokens; the CPU engines of newer vLLM take multiples of 32 only.
BLOCK = 32
VOCABULARY = 512
# Engine steps that no request in these tests comes near: what takes longer hangs.
MOST_STEPS = 20_000


@dataclasses.dataclass(frozen=True)
class Job:
    """A request: what it asks for, its priority (lower is better), the step it comes at."""

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    arrival: int = 0

    # The LoRA adapter to use, in vLLM's terms.
    adapter = None

    @property
    def turns(self):
        """How often tokens are generated; the last one of each turn is never fed to the model."""
        return 1

    def add_to(self, engine, request_id):
        """Hands the request to vLLM's ``LLMEngine``."""
        engine.add_request(
            request_id,
            self.inputs(),
            self.sampling_params(),
            lora_request=self.adapter,
            priority=self.priority,
        )

    def inputs(self):
        """The prompt, in vLLM's terms."""
        return {"prompt_token_ids": list(self.prompt)}

    def sampling_params(self, **options):
        """Greedy sampling to the last token, but for ``options`` of ``SamplingParams``."""
        defaults = {
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "detokenize": False,
        }
        return SamplingParams(**defaults | options)


def random_prompt(rng, length):
    return tuple(int(token) for token in rng.integers(3, VOCABULARY, length))


def jobs(seed, lengths, max_tokens, *, shared_prefix=0):
    """Jobs with random prompts of these lengths, the first tokens the same in all."""
    rng = np.random.default_rng(seed)
    prefix = random_prompt(rng, shared_prefix)
    return tuple(
        Job(prefix + random_prompt(rng, length - shared_prefix), max_tokens) for length in lengths
    )


@dataclasses.dataclass(frozen=True)
class Preemption:
    """A victim, and the tokens it had computed once the steps under way were through."""

    job: int
    num_computed: int
    step_under_way: bool


@dataclasses.dataclass(frozen=True)
class Restore:
    """A load: tokens ``start`` to ``end``, of which those before ``start`` were found locally."""

    job: int
    start: int
    end: int


@dataclasses.dataclass
class Outcome:
    """What came out, by job, and what happened on the way.

    ``outputs`` are vLLM's, and what follows is of the first completion of each.
    """

    outputs: dict[int, RequestOutput]
    tokens: dict[int, list[int]]
    finish_reasons: dict[int, str | None]
    stop_reasons: dict[int, str | int | None]
    preemptions: list[Preemption]
    restores: list[Restore]
    recomputed_tokens: int
    stats: SchedulerStats
    bytes_stored: int
    bytes_loaded: int

    @property
    def restored_tokens(self):
        return sum(restore.end - restore.start for restore in self.restores)


class Engine:
    """An in-process engine with a KV cache of ``num_blocks`` blocks of 32 tokens.

    Args:
        model: The checkpoint's folder.
        num_blocks: Device blocks, null block included.
        offload: Our ``kv_connector_extra_config``; ``None`` runs vLLM without us.
        transfer: Further keys of the transfer config.
        fence: Whether newer vLLM may wait for the steps of a victim before it preempts it.
        engine_args: Further arguments of ``vllm.LLM``.
    """

    def __init__(
        self, model, num_blocks, *, offload=None, transfer=None, fence=True, **engine_args
    ):
        if offload is not None:
            transfer = {
                "kv_connector": "PreemptOffloadConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": offload,
            } | (transfer or {})
            engine_args = {
                "scheduler_cls": "preempt_offload.RecomputeScheduler",
                "kv_transfer_config": transfer,
            } | engine_args
        defaults = {
            "dtype": "float32",
            "block_size": BLOCK,
            "async_scheduling": False,
            "enable_prefix_caching": False,
            "max_model_len": 512,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 32,
            "skip_tokenizer_init": True,
        }
        # vLLM collects garbage again and again while it starts. What has been imported is none,
        # and there is much of it.
        gc.freeze()
        self._llm = LLM(
            str(model),
            enforce_eager=True,
            num_gpu_blocks_override=num_blocks,
            disable_log_stats=True,
            worker_extension_cls="in_worker.InWorker",
            **(defaults | engine_args),
        )
        self.engine = self._llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        if not fence:
            self.scheduler.defer_block_free = False
        self.is_async = self.core.batch_queue is not None
        self.observer = SchedulerObserver(self.scheduler)
        connector = compat.find_offload_connector(self.scheduler.connector)
        self.offload = connector and connector.scheduler
        self.device_blocks = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self._outputs = {}
        self._watch()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.engine.engine_core.shutdown()

    @property
    def worker(self):
        """The worker role of an engine with one worker, which is in this process."""
        return offload_worker()

    @property
    def preempts_in_flight(self):
        """Whether a request may be preempted while a step of it is under way.

        Newer vLLM first waits for that step where a connector loads KV, which might go into
        blocks that the step still writes.
        """
        return self.is_async and not getattr(self.scheduler, "defer_block_free", False)

    def in_workers(self, method, *args):
        """Calls a method of ``InWorker`` in every worker; returns their answers by rank."""
        return self.core.model_executor.collective_rpc(method, args=args)

    def _watch(self):
        """Records every preemption and every restore as it is decided."""
        self.preemptions, self.restores, self._aborted_within_step = [], [], []
        preempt = self.scheduler._preempt_request

        def preempt_request(request, *args, **kwargs):
            under_way = compat.outputs_under_way(request)
            self.preemptions.append(
                Preemption(job_of(request.request_id), request.num_computed_tokens, under_way)
            )
            return preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = preempt_request
        if self.offload is None:
            return
        after_alloc = self.offload.update_state_after_alloc

        def update_state_after_alloc(request, block_ids, num_external_tokens):
            status = self.offload.table.status(request.request_id)
            if num_external_tokens > 0:
                end = min(status[1], request.num_tokens - 1)
                restore = Restore(job_of(request.request_id), end - num_external_tokens, end)
                self.restores.append(restore)
            after_alloc(request, block_ids, num_external_tokens)

        self.offload.update_state_after_alloc = update_state_after_alloc

    def request_id(self, job):
        """The engine's own id of a job, while it has one."""
        return next((i for i in self.scheduler.requests if job_of(i) == job), None)

    def state(self, job):
        """Where the job's KV is, by our table: a state's name or ``None``."""
        request_id = self.request_id(job)
        status = request_id and self.offload.table.status(request_id)
        return status and status[0]

    def abort(self, job):
        """A client goes away between two steps."""
        self.engine.abort_request([str(job)])

    def abort_within_step(self, job):
        """A client goes away while a step runs: the engine hears of it before its output."""
        self.core.aborts_queue.put([self.request_id(job)])
        self._aborted_within_step.append(str(job))

    def run(self, all_jobs, *, before_step=None, after_schedule=None):
        """Runs jobs to their end, then checks that nothing is left of them.

        Args:
            all_jobs: Jobs, known by their place in this list.
            before_step: Called before every step.
            after_schedule: Called in every step between ``schedule()`` and the forward.
        """
        self._outputs.clear()
        self.preemptions.clear()
        self.restores.clear()
        self.observer.clear()
        bytes_before, stats_before = self._bytes(), self._stats()
        to_come = sorted(enumerate(all_jobs), key=lambda entry: entry[1].arrival)
        with self._after_schedule(after_schedule):
            for step in range(MOST_STEPS):
                while to_come and to_come[0][1].arrival <= step:
                    i, job = to_come.pop(0)
                    job.add_to(self.engine, str(i))
                if not to_come and not self.engine.has_unfinished_requests():
                    break
                if before_step:
                    before_step()
                self._step()
                self.engine.abort_request(self._aborted_within_step)
                self._aborted_within_step.clear()
            else:
                raise AssertionError(f"jobs hang: {self._whereabouts()}")
        self.settle()
        self.check_nothing_left()
        stored, loaded = self._bytes()
        completions = {i: out.outputs[0] for i, out in self._outputs.items()}
        num_tokens = sum(
            len(out.prompt_token_ids) + len(completion.token_ids) - all_jobs[i].turns
            for i, out in self._outputs.items()
            for completion in out.outputs
        )
        return Outcome(
            outputs=dict(self._outputs),
            tokens={i: list(out.token_ids) for i, out in completions.items()},
            finish_reasons={i: out.finish_reason for i, out in completions.items()},
            stop_reasons={i: out.stop_reason for i, out in completions.items()},
            preemptions=list(self.preemptions),
            restores=list(self.restores),
            recomputed_tokens=self.observer.recomputed_tokens(num_tokens),
            stats=SchedulerStats(*map(operator.sub, self._stats(), stats_before)),
            bytes_stored=stored - bytes_before[0],
            bytes_loaded=loaded - bytes_before[1],
        )

    def _step(self):
        self._outputs |= {int(out.request_id): out for out in self.engine.step()}

    def pause(self, state=PauseState.PAUSED_ALL):
        """Pauses the engine, and goes on when it has come to rest."""
        self.scheduler.set_pause_state(state)
        self.settle()
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def settle(self):
        """Steps until the engine has nothing to do at all."""
        for _ in range(MOST_STEPS):
            if not self.scheduler.has_requests() and not self.core.batch_queue:
                return
            self._step()
        raise AssertionError(f"the engine never comes to rest: {self._whereabouts()}")

    def check_nothing_left(self):
        """Every block is back, on both sides, and no state outlives its request."""
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.device_blocks
        assert not self.scheduler.requests
        if self.offload is not None:
            host = self.offload.pool
            assert host.num_free + host.num_evictable == host.capacity
            assert not any(self.offload.table.counts().values())
            assert not self.offload.has_pending_transfers()

    def _stats(self):
        return dataclasses.astuple(self.offload.stats if self.offload else SchedulerStats())

    def _bytes(self):
        return tuple(map(sum, zip(*self.in_workers("bytes_copied"), strict=True)))

    @contextlib.contextmanager
    def _after_schedule(self, hook):
        schedule = self.scheduler.schedule

        def hooked(*args):
            output = schedule(*args)
            hook()
            return output

        if hook:
            self.scheduler.schedule = hooked
        yield
        self.scheduler.schedule = schedule

    def _whereabouts(self):
        return {
            job_of(i): (
                request.status.name,
                request.num_computed_tokens,
                self.offload and self.state(job_of(i)),
            )
            for i, request in self.scheduler.requests.items()
        }


def job_of(request_id):
    """The job behind an engine's request id.

    That is its number and a random suffix; if the job wants several completions, the
    completion's number comes first.
    """
    return int(re.match(r"(?:\d+_)?(\d+)-", request_id)[1])
