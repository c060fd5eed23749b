"""Speculative decoding: preempted between proposal and verification, and nothing is lost by it."""

import contextlib
import dataclasses
import functools
import importlib
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import vllm

import drafts
import speculation_on_cpu  # noqa: F401
from checkpoints import KINDS
from harness import BLOCK, Engine, Job, random_prompt
from preempt_offload import compat
from preempt_offload.draft_states import CertainState
from reference import failure

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
IS_0_23 = vllm.__version__.startswith("0.23.")
# For readers of the table.
MODE = "speculative decoding: {}"


def repetitive_jobs():
    """Prompts that repeat themselves, so that n-grams of them are found again."""
    rng = np.random.default_rng(5)
    for i, period in enumerate([1, 2, 3, 4, 5, 7, 9, 11]):
        length = 40 + 7 * i
        pattern = random_prompt(rng, period)
        yield Job((pattern * length)[:length], 70)


JOBS = tuple(repetitive_jobs())


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to speculate.

    Attributes:
        mode: For readers of the table.
        target: The checkpoint that decides, of ``KINDS_OF_TARGETS``.
        method: vLLM's speculative config, but for the draft's checkpoint.
        num_blocks: Device blocks that are too few for the jobs, null block included.
        schedulings: With and without async scheduling.
        draft: The checkpoint that proposes, if it is one of its own.
        drafted: Tokens that are proposed at a time.
        args: Further arguments of the engine.
    """

    mode: str
    target: str
    method: Mapping[str, Any]
    num_blocks: int
    schedulings: tuple[str, ...]
    draft: str | None = None
    drafted: int = 3
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def engine(self, checkpoints, scheduling="sync"):
        """An engine as on a decode node: its steps have tokens for one proposal per request."""
        speculation = self.method | {"num_speculative_tokens": self.drafted}
        if self.draft:
            speculation["model"] = str(checkpoints(self.draft))
        decode_node = {
            "max_num_seqs": len(JOBS),
            "max_num_batched_tokens": len(JOBS) * (1 + self.drafted),
            "scheduler_reserve_full_isl": False,
        }
        args = COMMON | decode_node | self.args
        return Engine(
            checkpoints(self.target),
            self.num_blocks,
            offload={"offload_host_memory_ratio": 4},
            speculative_config=speculation,
            **args | SCHEDULINGS[scheduling],
        )


COMMON = {"max_model_len": 256}
WHOLE_PROMPTS = {"max_num_batched_tokens": 1024}
# For readers of the table.
KINDS_OF_TARGETS = {
    "dense": "dense",
    "window": "sliding window",
    "mtp": "dense",
    "mamba2": "Mamba2 hybrid",
}
SCHEDULINGS = {
    "sync": {},
    "async": {"async_scheduling": True},
    # So that any vLLM preempts requests with a step under way.
    "in-flight": {"async_scheduling": True, "fence": False},
}
# What EAGLE and MTP propose depends on where a prompt was cut, with or without a connector, so
# theirs are not cut, or runs could not be compared.
CASES = {
    "ngram": Case("n-grams", "dense", NGRAM, 15, ("sync",)),
    "draft-model": Case(
        "draft model", "dense", {"method": "draft_model"}, 15, ("sync", "async"), "dense"
    ),
    "eagle": Case(
        "EAGLE",
        "dense",
        {"method": "eagle"},
        17,
        ("sync", "in-flight"),
        "eagle",
        args=WHOLE_PROMPTS,
    ),
    "ngram-window": Case("n-grams", "window", NGRAM, 29, ("sync",)),
    "draft-model-window": Case(
        "draft model",
        "window",
        {"method": "draft_model"},
        22,
        ("sync", "in-flight"),
        "first-layer",
    ),
    "mtp": Case(
        "MTP",
        "mtp",
        {"method": "mtp"},
        15,
        ("sync", "async"),
        drafted=1,
        args=WHOLE_PROMPTS,
    ),
}
if not IS_0_23:
    # There, its kernels for Mamba2 are for GPUs only.
    CASES["ngram-mamba2"] = Case("n-grams", "mamba2", NGRAM, 24, ("sync",))


@pytest.fixture(scope="module")
def checkpoints(model, tmp_path_factory):
    """Makes checkpoints, by name."""
    folder = tmp_path_factory.mktemp("drafts")

    @functools.cache
    def checkpoint(name):
        match name:
            case "dense":
                return model
            case "window":
                return drafts.window(model, folder / name)
            case "first-layer":
                return drafts.first_layer(checkpoint("window"), folder / name)
            case "eagle":
                return drafts.eagle(model, folder / name)
            case "mtp":
                return drafts.mtp(model, folder / name)
            case "mamba2":
                return KINDS[name].write(folder / name)

    return checkpoint


@pytest.fixture(scope="module")
def undisturbed(checkpoints):
    """The tokens of the jobs with room for all of them, without us and without drafts."""

    @functools.cache
    def tokens(target):
        with Engine(checkpoints(target), 300, **COMMON) as engine:
            outcome = engine.run(JOBS)
        assert not outcome.preemptions
        return outcome.tokens

    return tokens


class Speculation:
    """What became of the drafts on one engine.

    Attributes:
        verified: Drafts proposed and accepted, by prompt and the number of tokens known then.
        accepted: Output tokens that were drafts.
        thrown_away: Proposals that were not verified, because the request was preempted.
        passed_over: Proposals that were not verified, because a step left the request out.
        ahead: Preempted requests that had blocks for no token that was computed.
        recomputed: Tokens of preempted requests that were computed again.
    """

    def __init__(self, scheduler):
        self.verified = {}
        self.accepted = self.thrown_away = self.passed_over = self.ahead = self.recomputed = 0
        self._scheduler = scheduler
        # Tokens that preempted requests had computed; requests whose next drafts are none.
        self._computed, self._padded, self._step_before = {}, set(), ()

    @property
    def proposed(self):
        return sum(proposed for proposed, _ in self.verified.values())

    def preempts(self, request):
        num_computed = self._computed[request.request_id] = request.num_computed_tokens
        self.thrown_away += bool(request.spec_token_ids)
        blocks, *_ = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        self.ahead += len(blocks) > -(-num_computed // BLOCK)

    def schedules(self, output):
        cached = output.scheduled_cached_reqs
        for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            resumed = request_id in self._computed
            if resumed:
                known = self._scheduler.requests[request_id].num_tokens - 1
                assert start <= known
                self.recomputed += max(min(self._computed.pop(request_id), known) - start, 0)
            given = output.scheduled_spec_decode_tokens.get(request_id, ())
            if -1 in given and request_id not in self._step_before:
                self._padded.add(request_id)
                self.passed_over += not resumed
        self._step_before = output.num_scheduled_tokens.keys()

    def verifies(self, *, num_draft_tokens, num_accepted_tokens, request_id, **_):
        if request_id in self._padded:
            # No tokens at all, though vLLM counts them as proposed. 0.32 fills up the first step
            # of a restored request with them; and with async scheduling, the workers have
            # drafts only for requests of the step before.
            self._padded.discard(request_id)
            assert num_accepted_tokens == 0
            return
        request = self._scheduler.requests[request_id]
        key = tuple(request.prompt_token_ids), request.num_tokens
        self.verified[key] = num_draft_tokens, num_accepted_tokens
        wanted = request.max_tokens - request.num_output_tokens - 1
        self.accepted += min(num_accepted_tokens, wanted)


@contextlib.contextmanager
def watched(engine):
    """Yields what becomes of the drafts inside of this context."""
    scheduler = engine.scheduler
    found = Speculation(scheduler)
    preempt, schedule = scheduler._preempt_request, scheduler.schedule
    make_stats = scheduler.make_spec_decoding_stats

    def preempt_request(request, *args, **kwargs):
        found.preempts(request)
        return preempt(request, *args, **kwargs)

    def watched_schedule(*args):
        output = schedule(*args)
        found.schedules(output)
        return output

    def make_spec_decoding_stats(*args, **kwargs):
        found.verifies(**kwargs)
        return make_stats(*args, **kwargs)

    scheduler._preempt_request, scheduler.schedule = preempt_request, watched_schedule
    scheduler.make_spec_decoding_stats = make_spec_decoding_stats
    yield found
    scheduler._preempt_request, scheduler.schedule = preempt, schedule
    scheduler.make_spec_decoding_stats = make_stats


def disagreements(one, other):
    """Where equal prefixes were followed by drafts of which not as many were accepted.

    A step that has too few tokens left cuts proposals short.
    """
    common = one.verified.keys() & other.verified.keys()
    assert len(common) > min(len(one.verified), len(other.verified)) / 2
    found = []
    for key in common:
        (proposed, accepted), (also_proposed, also_accepted) = (
            one.verified[key],
            other.verified[key],
        )
        most = min(proposed, also_proposed)
        if min(accepted, most) != min(also_accepted, most):
            found.append(key)
    return found


def run_in_pairs(engine):
    """Two jobs at a time, which is no pressure; returns their tokens."""
    tokens = {}
    for first in range(0, len(JOBS), 2):
        outcome = engine.run(JOBS[first : first + 2])
        assert not outcome.preemptions
        tokens |= {first + i: found for i, found in outcome.tokens.items()}
    return tokens


@pytest.mark.parametrize(
    ("target", "reference"), [("window", "MinistralForCausalLM"), ("mtp", "Qwen2ForCausalLM")]
)
def test_undisturbed_tokens_are_those_of_transformers(checkpoints, undisturbed, target, reference):
    """The dense model is compared in test_reference.py."""
    model = getattr(transformers, reference).from_pretrained(checkpoints(target))
    for job, tokens in zip(JOBS, undisturbed(target).values(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*job.prompt, *tokens[:-1]]])).logits[0]
        logits = logits[len(job.prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen).max() < 0.001


@pytest.mark.parametrize(
    ("case", "scheduling"),
    [(name, scheduling) for name, case in CASES.items() for scheduling in case.schedulings],
)
def test_preempted_between_proposal_and_verification(
    checkpoints, undisturbed, record, case, scheduling
):
    case = CASES[case]
    # Before ours starts: vLLM has one KV connector per process.
    right = undisturbed(case.target)
    with case.engine(checkpoints, scheduling) as engine:
        in_flight = engine.preempts_in_flight
        block_bytes = compat.block_bytes(engine.scheduler.kv_cache_config)
        with watched(engine) as calm:
            assert run_in_pairs(engine) == right
        with watched(engine) as speculation:
            outcome = engine.run(JOBS)
    record(
        dataclasses.replace(outcome, recomputed_tokens=speculation.recomputed),
        JOBS,
        kind=KINDS_OF_TARGETS[case.target],
        mode=MODE.format(case.mode),
        async_scheduling=engine.is_async,
    )
    assert outcome.tokens == right
    assert len(outcome.preemptions) >= 3
    assert outcome.stats.preserved == len(outcome.preemptions)
    assert outcome.restored_tokens > 0
    # A state is that before the drafts of the last step.
    most_recomputed = case.drafted * len(outcome.restores) if case.target == "mamba2" else 0
    assert speculation.recomputed <= most_recomputed
    assert speculation.thrown_away > 0
    assert any(p.step_under_way for p in outcome.preemptions) == in_flight

    if case.target not in ("window", "mamba2"):
        # What was allocated for tokens that may yet come is neither stored nor restored.
        assert speculation.ahead > 0 or case.draft != "eagle"
        computed = sum(-(-p.num_computed // BLOCK) for p in outcome.preemptions)
        stored = computed - outcome.stats.mirrored_blocks
        assert outcome.bytes_stored == stored * block_bytes
        restored = sum(-(-r.end // BLOCK) - r.start // BLOCK for r in outcome.restores)
        assert outcome.bytes_loaded == restored * block_bytes

    assert 0 < speculation.accepted < speculation.proposed or case.draft == case.target
    assert not disagreements(calm, speculation)
    # A proposal thrown away costs a step, which yields a token that is no draft.
    lost = len(outcome.preemptions) + speculation.passed_over
    assert calm.accepted - speculation.accepted <= lost
    if case.draft == case.target:
        assert all(proposed == accepted for proposed, accepted in speculation.verified.values())


def wipe_drafts(begin, layers):
    """A device's ``begin`` after which loaded blocks are empty in some layers.

    Args:
        begin: What it does otherwise.
        layers: KV caches of these layers, block by block.
    """

    def wiping(direction, pairs):
        transfer = begin(direction, pairs)
        if direction == "h2d":
            for layer in layers:
                layer[pairs[:, 1]] = 0
        return transfer

    return wiping


def test_wrong_kv_of_drafts_would_be_noticed(checkpoints, undisturbed, monkeypatch):
    """Nothing but the drafts tells whether the draft model's KV is right."""
    case = CASES["draft-model"]
    right = undisturbed(case.target)
    with case.engine(checkpoints) as engine:
        with watched(engine) as calm:
            run_in_pairs(engine)
        runner = engine.core.model_executor.driver_worker.worker.model_runner
        context = runner.compilation_config.static_forward_context
        layers = [layer for name, layer in context.items() if name.startswith("draft_model.")]
        assert layers
        device = engine.worker._device
        wiping = wipe_drafts(device.begin, [layer.kv_cache for layer in layers])
        monkeypatch.setattr(device, "begin", wiping)
        with watched(engine) as speculation:
            outcome = engine.run(JOBS)
    assert outcome.restores
    assert outcome.tokens == right
    assert disagreements(calm, speculation)


def some_right(right):
    """A proposer whose drafts are right up to one that depends on the number of tokens known.

    It has none where other tokens have come out.

    Args:
        right: The tokens of each of the jobs.
    """
    said = [[*job.prompt, *right[i]] for i, job in enumerate(JOBS)]

    def propose(count, sampled, num_tokens, token_ids, **_):
        proposals = []
        for new, known, row in zip(sampled, num_tokens, token_ids, strict=False):
            tokens = row[:known].tolist()
            whole = next((whole for whole in said if whole[:known] == tokens), [])
            drafts = whole[known : known + count] if new else []
            wrong = known // 3 % (count + 1)
            drafts[wrong : wrong + 1] = [3] * len(drafts[wrong : wrong + 1])
            proposals.append(drafts)
        return proposals

    return propose


@pytest.mark.skipif(IS_0_23, reason="its kernels for Mamba2 are for GPUs only")
def test_states_are_those_before_drafts_that_were_accepted(
    checkpoints, undisturbed, record, monkeypatch
):
    case = CASES["ngram-mamba2"]
    right = undisturbed(case.target)
    with case.engine(checkpoints) as engine:
        runner = engine.core.model_executor.driver_worker.worker.model_runner
        monkeypatch.setattr(runner.drafter, "propose", some_right(right))
        with watched(engine) as speculation:
            outcome = engine.run(JOBS)

        # Were they taken for those after these drafts, one would notice.
        def find(request, num_computed_tokens):
            return CertainState(num_computed_tokens, num_computed_tokens)

        monkeypatch.setattr(engine.offload.draft_states, "find", find)
        wrong = engine.run(JOBS)
    record(
        dataclasses.replace(outcome, recomputed_tokens=speculation.recomputed),
        JOBS,
        kind=KINDS_OF_TARGETS[case.target],
        mode=MODE.format("some drafts right"),
        async_scheduling=engine.is_async,
    )
    assert outcome.tokens == right
    assert outcome.stats.preserved == len(outcome.preemptions) >= 3
    assert len(outcome.restores) == len(outcome.preemptions)
    assert 0 < speculation.recomputed <= case.drafted * len(outcome.restores)
    assert 0.2 < speculation.accepted / speculation.proposed < 0.8
    assert wrong.restores
    assert wrong.tokens != right


# What vLLM does not run on CPUs, with or without a connector, and what it says to that.
NOT_RUN = {
    "async": (
        ("dense", "n-grams, async scheduling"),
        NGRAM,
        {"async_scheduling": True},
        "async scheduling is only supported with EAGLE/MTP/Draft Model/NGram GPU",
    ),
    "gated-delta-net": (
        ("gated delta net", "n-grams"),
        NGRAM,
        {"dtype": "bfloat16", "block_size": 128, "mamba_ssm_cache_dtype": "float32"},
        "tensormust be contiguous at last dimension"
        if IS_0_23
        else "must match the size of tensor",
    ),
    "gpu": (
        ("dense", "n-grams on a GPU"),
        {"method": "ngram_gpu"},
        {},
        "Found no NVIDIA driver on your system",
    ),
}


@pytest.fixture(scope="module")
def elsewhere():
    """A process for engines that leave it in disorder."""
    with ProcessPoolExecutor(
        1,
        multiprocessing.get_context("spawn"),
        initializer=importlib.import_module,
        initargs=("speculation_on_cpu",),
    ) as process:
        yield process


@pytest.mark.parametrize(("where", "method", "args", "words"), NOT_RUN.values(), ids=NOT_RUN)
def test_vllm_does_not_run(model, tmp_path, elsewhere, record_refusal, where, method, args, words):
    kind, mode = where
    checkpoint = model if kind == "dense" else KINDS["gated-delta-net"].write(tmp_path)
    asked = COMMON | args | {"speculative_config": method | {"num_speculative_tokens": 3}}
    said = elsewhere.submit(failure, checkpoint, JOBS, asked).result()
    assert words in said
    record_refusal(kind, MODE.format(mode), f"refused by vLLM: `{words}`")
