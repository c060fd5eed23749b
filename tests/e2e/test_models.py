"""Every kind of model: preempted, restored, and the outputs of an undisturbed run."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import vllm
from transformers import AutoModelForCausalLM

import recurrent_on_cpu  # noqa: F401
from checkpoints import KINDS
from harness import BLOCK, Engine, jobs
from reference import undisturbed_engine

CROWD = jobs(seed=7, lengths=[60 + 9 * i % 140 for i in range(20)], max_tokens=80, shared_prefix=40)
# On a decode node: more prompt than its steps have tokens for.
LONG = jobs(seed=3, lengths=[40, 50, 60, 150, 140, 160, 45, 170, 150, 130], max_tokens=60)
SAMPLE = jobs(seed=31, lengths=[40, 77, 120, 160], max_tokens=24)
COMMON = {"offload": {"offload_host_memory_ratio": 4}, "max_model_len": 288}


@dataclasses.dataclass(frozen=True)
class Setup:
    """How the engine runs a kind of model.

    Attributes:
        num_blocks: Device blocks that are too few for the jobs, by mode.
        args: Arguments of the engine, in all modes and in single ones.
        noise: How far below the best logit of the reference, which is computed in float32,
            that of a generated token may be. The logits' standard deviation is about 2.
    """

    num_blocks: Mapping[str, int]
    args: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    noise: float = 0.001

    def args_in(self, mode):
        return self.args.get("all", {}) | MODES[mode] | self.args.get(mode, {})


MODES = {
    "plain": {},
    "prefix": {"enable_prefix_caching": True},
    # No more tokens in a step than requests.
    "decode-node": {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
        "scheduler_reserve_full_isl": False,
    },
}
SETUPS = {
    "sliding-window": Setup({"plain": 40, "prefix": 40, "decode-node": 40}),
    "mla": Setup(
        {"plain": 37},
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
        {"plain": 25, "prefix": 25, "decode-node": 20},
        # A step that goes on past the end of a block must keep the state that was there, which
        # vLLM's kernel for CPUs cannot do.
        {"prefix": {"long_prefill_token_threshold": BLOCK}},
    ),
    "gated-delta-net": Setup(
        {"plain": 25, "prefix": 25, "decode-node": 13},
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
        noise=0.2,
    ),
}

# What each vLLM runs on CPUs, with or without a connector. MLA has neither prefix caching nor
# chunked prefill there. 0.23.0 refuses MLA ("MLA is not supported on CPU."), and its Mamba2 kernels
# are for GPUs only; with prompts cut into single tokens its gated delta net gives other tokens when
# blocks are used for a second time.
RUNS = {
    "0.23.0": {
        "sliding-window": ("plain", "prefix", "decode-node"),
        "gated-delta-net": ("plain", "prefix"),
    },
    "0.32.0": {
        "sliding-window": ("plain", "prefix", "decode-node"),
        "mla": ("plain",),
        "mamba2": ("plain", "prefix", "decode-node"),
        "gated-delta-net": ("plain", "prefix", "decode-node"),
    },
}[vllm.__version__.split("+")[0]]


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
def undisturbed(checkpoint, setup):
    """The tokens of jobs on an engine with room for all of them, without us.

    Prompts are cut into pieces where they are in the mode that is to be compared.
    """
    with contextlib.ExitStack() as engines:

        @functools.cache
        def engine(piece):
            args = setup.args.get("all", {}) | {"long_prefill_token_threshold": piece}
            return engines.enter_context(undisturbed_engine(checkpoint, **args))

        def tokens_of(all_jobs, mode="plain"):
            return engine(setup.args_in(mode).get("long_prefill_token_threshold", 0))(all_jobs)

        yield tokens_of


def test_undisturbed_tokens_are_those_of_transformers(checkpoint, undisturbed, setup):
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for job, tokens in zip(SAMPLE, undisturbed(SAMPLE).values(), strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([[*job.prompt, *tokens[:-1]]])).logits[0]
        logits = logits[len(job.prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen).max() < setup.noise
        assert logits.std() > 1


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("kind", "mode"),
    [(kind, mode) for kind, modes in RUNS.items() for mode in modes],
    indirect=["kind"],
    scope="module",
)
def test_preempted_requests_are_restored(
    checkpoint, undisturbed, setup, record, mode, async_scheduling
):
    all_jobs = LONG if mode == "decode-node" else CROWD
    with Engine(
        checkpoint,
        setup.num_blocks[mode],
        async_scheduling=async_scheduling,
        **COMMON | setup.args_in(mode),
    ) as engine:
        outcome = engine.run(all_jobs)
    record(outcome, all_jobs)
    assert outcome.tokens == undisturbed(all_jobs, mode)
    assert outcome.restored_tokens > 0
    assert outcome.recomputed_tokens == 0
    if mode == "decode-node":
        assert any(p.num_computed < len(LONG[p.job].prompt) for p in outcome.preemptions)
    else:
        assert len(outcome.preemptions) >= 3


def without_group(begin, group):
    """A device's ``begin`` that leaves the blocks of one KV cache group out of every load."""

    def faulty(direction, pairs):
        return begin(direction, pairs[pairs[:, 0] != group] if direction == "h2d" else pairs)

    return faulty


def test_each_group_matters(checkpoint, undisturbed, setup, monkeypatch):
    with Engine(checkpoint, setup.num_blocks["plain"], **COMMON | setup.args_in("plain")) as engine:
        device = engine.worker._device
        begin = device.begin
        for group in range(len(engine.scheduler.kv_cache_config.kv_cache_groups)):
            monkeypatch.setattr(device, "begin", without_group(begin, group))
            outcome = engine.run(CROWD)
            assert outcome.restores
            assert outcome.tokens != undisturbed(CROWD)
