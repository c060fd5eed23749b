"""Every kind of model: preempted, restored, and the outputs of an undisturbed run."""

import dataclasses
import functools
import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import vllm
from transformers import AutoModelForCausalLM, DynamicCache
from vllm.engine.arg_utils import EngineArgs

import recurrent_on_cpu  # noqa: F401
from checkpoints import KINDS
from harness import BLOCK, Engine, Job, jobs
from reference import failure

VERSION = vllm.__version__.split("+")[0]
CROWD = jobs(seed=7, lengths=[60 + 9 * i % 140 for i in range(20)], max_tokens=80, shared_prefix=40)
# The same with more in common than a block of 128 tokens.
LONG_CROWD = jobs(
    seed=7, lengths=[150 + 9 * i % 60 for i in range(20)], max_tokens=70, shared_prefix=130
)
# On a decode node: more prompt than its steps have tokens for.
LONG = jobs(seed=3, lengths=[40, 50, 60, 150, 140, 160, 45, 170, 150, 130], max_tokens=60)
SAMPLE = jobs(seed=31, lengths=[40, 77, 120, 160], max_tokens=24)
COMMON = {"offload": {"offload_host_memory_ratio": 4}, "max_model_len": 288}
SHARED = {"offload": COMMON["offload"] | {"enable_offload_prefix_caching": True}}


@dataclasses.dataclass(frozen=True)
class Mode:
    """How the engine is used.

    Attributes:
        title: For readers of the table.
        args: Arguments of the engine.
        unshared: The mode that differs only in that requests share no host blocks.
    """

    title: str
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unshared: str | None = None


PREFIX = {"enable_prefix_caching": True}
MODES = {
    "plain": Mode("no prefix caching"),
    "prefix": Mode("prefix caching", PREFIX),
    "shared": Mode("shared host blocks", SHARED, unshared="plain"),
    "prefix-shared": Mode("prefix caching, shared host blocks", PREFIX | SHARED, unshared="prefix"),
    "decode-node": Mode(
        "decode node, preempted in the prompt",
        # No more tokens in a step than requests.
        {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 8,
            "enable_chunked_prefill": True,
            "scheduler_reserve_full_isl": False,
        },
    ),
}


class Float8Cache(DynamicCache):
    """A KV cache of ``transformers`` that rounds like vLLM's kernel for CPUs: towards zero."""

    def update(self, keys, values, *args, **kwargs):
        return super().update(self._rounded(keys), self._rounded(values), *args, **kwargs)

    @staticmethod
    def _rounded(tensor):
        nearest = tensor.to(torch.float8_e4m3fn)
        is_beyond = nearest.to(tensor.dtype).abs() > tensor.abs()
        # One less is the next number towards zero, whatever the sign.
        bits = nearest.view(torch.uint8) - is_beyond.to(torch.uint8)
        return bits.view(torch.float8_e4m3fn).to(tensor.dtype)


@dataclasses.dataclass(frozen=True)
class Setup:
    """How the engine runs a kind of model.

    Attributes:
        title: For readers of the table.
        num_blocks: Device blocks that are too few for the jobs, by mode.
        args: Arguments of the engine, in all modes and in single ones.
        crowd: The jobs of all modes but that of a decode node.
        noise: How far below the best logit of the reference, which is computed in float32,
            that of a generated token may be. The logits' standard deviation is about 2.
        cache: Makes the reference's KV cache, where that is not an ordinary one.
    """

    title: str
    num_blocks: Mapping[str, int]
    args: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    crowd: tuple[Job, ...] = CROWD
    noise: float = 0.001
    cache: Callable[[], DynamicCache | None] = lambda: None

    def args_in(self, mode):
        return COMMON | self.args.get("all", {}) | MODES[mode].args | self.args.get(mode, {})

    def jobs_in(self, mode):
        return LONG if mode == "decode-node" else self.crowd


# A step that goes on past the end of a block must keep the state that was there, which vLLM's
# kernel for CPUs cannot do.
TO_THE_END_OF_A_BLOCK = {"long_prefill_token_threshold": BLOCK}
SETUPS = {
    "fp8": Setup(
        "dense, FP8 KV cache",
        {"plain": 30},
        {"all": {"kv_cache_dtype": "fp8"}},
        cache=Float8Cache,
    ),
    "shared-layers": Setup("layers that share KV", {"prefix": 40}),
    "sliding-window": Setup(
        "sliding window", {"plain": 40, "prefix": 40, "shared": 40, "decode-node": 40}
    ),
    "mla": Setup(
        "MLA",
        {"plain": 37, "shared": 37},
        {
            "all": {
                "attention_backend": "CPU_MLA",
                "block_size": 16,
                # With its own rotary operator for CPUs, vLLM's outputs depend on the batch.
                "compilation_config": {"custom_ops": ["none"]},
            }
        },
    ),
    "mamba2": Setup(
        "Mamba2 hybrid",
        {"plain": 25, "prefix": 25, "prefix-shared": 25, "decode-node": 20},
        {"prefix": TO_THE_END_OF_A_BLOCK, "prefix-shared": TO_THE_END_OF_A_BLOCK},
    ),
    "gated-delta-net": Setup(
        "gated delta net",
        {"plain": 25, "prefix": 18, "prefix-shared": 18, "decode-node": 13},
        # How its kernel rounds depends on where a prompt is cut, unless that is a multiple of
        # 64 tokens, or each token is a step.
        {
            "all": {
                "dtype": "bfloat16",
                "block_size": 128,
                "mamba_ssm_cache_dtype": "float32",
                "max_num_batched_tokens": 4096,
                "long_prefill_token_threshold": 128,
            },
            "decode-node": {"long_prefill_token_threshold": 1},
        },
        crowd=LONG_CROWD,
        noise=0.2,
    ),
}

# What each vLLM runs on CPUs, with or without a connector.
RUNS = {
    "0.23.0": {
        "fp8": ("plain",),
        "shared-layers": ("prefix",),
        "sliding-window": ("plain", "prefix", "shared", "decode-node"),
        "gated-delta-net": ("plain", "prefix", "prefix-shared", "decode-node"),
    },
    "0.32.0": {
        "fp8": ("plain",),
        "shared-layers": ("prefix",),
        "sliding-window": ("plain", "prefix", "shared", "decode-node"),
        "mla": ("plain", "shared"),
        "mamba2": ("plain", "prefix", "prefix-shared", "decode-node"),
        "gated-delta-net": ("plain", "prefix", "prefix-shared", "decode-node"),
    },
}[VERSION]
if not torch.cpu._is_avx512_supported():
    # "FP8 KV cache on CPU requires x86 with AVX-512 or AMX."
    del RUNS["fp8"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A mode of one kind of model.

    Pytest runs tests with equal parameters next to each other, and those of a kind have
    more in common than those of a mode.
    """

    kind: str
    mode: str


@pytest.fixture(scope="module", params=RUNS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def setup(kind):
    return SETUPS[kind]


@pytest.fixture(scope="module")
def checkpoint(kind, tmp_path_factory):
    return KINDS[kind].write(tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def undisturbed(undisturbed_engine, checkpoint, setup):
    """The tokens of jobs on an engine with room for all of them, without us.

    Prompts are cut into pieces where they are in the mode that is to be compared, if their
    kind minds.
    """

    @functools.cache
    def engine(piece):
        args = setup.args.get("all", {}) | {"long_prefill_token_threshold": piece}
        return undisturbed_engine(checkpoint, **args)

    def tokens_of(all_jobs, mode="plain"):
        minds = "long_prefill_token_threshold" in setup.args.get("all", {})
        piece = setup.args_in(mode)["long_prefill_token_threshold"] if minds else 0
        return engine(piece)(all_jobs)

    return tokens_of


@pytest.fixture(scope="module")
def outcome_of(checkpoint, setup):
    """What happens in a mode, with or without async scheduling."""

    @functools.cache
    def run(mode, async_scheduling):
        with Engine(
            checkpoint,
            setup.num_blocks[mode],
            async_scheduling=async_scheduling,
            **setup.args_in(mode),
        ) as engine:
            return engine.run(setup.jobs_in(mode))

    return run


def test_undisturbed_tokens_are_those_of_transformers(checkpoint, undisturbed, setup):
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for job, tokens in zip(SAMPLE, undisturbed(SAMPLE).values(), strict=True):
        known = torch.tensor([[*job.prompt, *tokens[:-1]]])
        with torch.no_grad():
            logits = reference(known, past_key_values=setup.cache()).logits[0]
        logits = logits[len(job.prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen).max() < setup.noise
        assert logits.std() > 1


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("kind", "cell"),
    [
        pytest.param(kind, Cell(kind, mode), id=f"{kind}-{mode}")
        for kind, modes in RUNS.items()
        for mode in modes
    ],
    indirect=["kind"],
    scope="module",
)
def test_preempted_requests_are_restored(
    undisturbed, outcome_of, setup, record, cell, async_scheduling
):
    mode, all_jobs = MODES[cell.mode], setup.jobs_in(cell.mode)
    outcome = outcome_of(cell.mode, async_scheduling)
    record(outcome, all_jobs, kind=setup.title, mode=mode.title, async_scheduling=async_scheduling)
    assert outcome.tokens == undisturbed(all_jobs, cell.mode)
    assert outcome.restored_tokens > 0
    assert outcome.recomputed_tokens == 0
    if cell.mode == "decode-node":
        assert any(p.num_computed < len(LONG[p.job].prompt) for p in outcome.preemptions)
    else:
        assert len(outcome.preemptions) >= 3
    if mode.unshared:
        unshared = outcome_of(mode.unshared, async_scheduling)
        assert outcome.stats.shared_blocks > 0
        assert outcome.preemptions == unshared.preemptions
        assert outcome.bytes_stored < unshared.bytes_stored


def without_group(begin, group):
    """A device's ``begin`` that leaves the blocks of one KV cache group out of every load."""

    def faulty(direction, pairs):
        return begin(direction, pairs[pairs[:, 0] != group] if direction == "h2d" else pairs)

    return faulty


def test_each_group_matters(kind, checkpoint, undisturbed, setup, monkeypatch):
    mode = RUNS[kind][0]
    with Engine(checkpoint, setup.num_blocks[mode], **setup.args_in(mode)) as engine:
        device = engine.worker._device
        begin = device.begin
        for group in range(len(engine.scheduler.kv_cache_config.kv_cache_groups)):
            monkeypatch.setattr(device, "begin", without_group(begin, group))
            outcome = engine.run(setup.crowd)
            assert outcome.restores
            assert outcome.tokens != undisturbed(setup.crowd, mode)


# What each vLLM does not run on CPUs, with or without a connector: a mode or the whole kind, and
# what it says to that or makes of it.
ALL = Mode("cache mode `all`", PREFIX | {"mamba_cache_mode": "all"})
NOT_RUN = {
    "0.23.0": [
        ("mla", None, "NotImplementedError: MLA is not supported on CPU"),
        ("mamba2", None, "RuntimeError: Found no NVIDIA driver on your system"),
        ("gated-delta-net", ALL, "mamba_cache_mode=align"),
    ],
    "0.32.0": [
        ("mla", MODES["prefix"], "enable_prefix_caching=False"),
        ("mla", MODES["decode-node"], "enable_chunked_prefill=False"),
        ("mamba2", ALL, "Input should be 'align' or 'none'"),
        ("gated-delta-net", ALL, "Input should be 'align' or 'none'"),
    ],
}[VERSION]


@pytest.fixture(scope="module")
def elsewhere():
    """A process for engines that leave it in disorder."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


def fate_of(model, asked, elsewhere):
    """What becomes of an engine with these arguments: in general, and in vLLM's words."""
    try:
        config = EngineArgs(str(model), skip_tokenizer_init=True, **asked).create_engine_config()
    except ValueError as error:
        return "refused by vLLM", str(error)
    changed = [
        f"{name}={getattr(part, name)}"
        for part in (config.cache_config, config.scheduler_config)
        for name, value in asked.items()
        if getattr(part, name, value) != value
    ]
    if changed:
        return "vLLM runs it with", ", ".join(changed)
    return "refused by vLLM", elsewhere.submit(failure, model, SAMPLE, asked).result()


@pytest.mark.parametrize(
    ("kind", "mode", "words"),
    NOT_RUN,
    ids=[f"{kind}-{mode.title if mode else 'any'}" for kind, mode, _ in NOT_RUN],
)
def test_vllm_does_not_run(tmp_path, elsewhere, record_refusal, kind, mode, words):
    fate, said = fate_of(KINDS[kind].write(tmp_path), mode.args if mode else {}, elsewhere)
    assert words in said
    record_refusal(SETUPS[kind].title, mode and mode.title, f"{fate}: `{words}`")
