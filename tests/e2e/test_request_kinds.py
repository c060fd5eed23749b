"""Requests of every kind, preempted and restored: they are given what they ask for all the same."""

import copy
import dataclasses
from collections import Counter

import pytest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

import tokenizer
from harness import BLOCK, Engine, Job, jobs
from preempt_offload import tiny_model

SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "minLength": 6}, "minItems": 9},
        "count": {"type": "integer"},
    },
    "required": ["names", "count"],
    "additionalProperties": False,
}
# What each kind asks of ``SamplingParams``, beside greedy sampling.
KINDS = {
    "greedy": {},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "repetition penalty": {"repetition_penalty": 1.4},
    "presence and frequency penalty": {"presence_penalty": 1.5, "frequency_penalty": 0.8},
    "stop strings": {"detokenize": True, "stop": ["q", "J", "Z", "!"]},
    "stop token ids": {"stop_token_ids": list(range(40, 46))},
    "min tokens": {"min_tokens": 50, "stop_token_ids": list(range(40, 90))},
    "bad words": {"detokenize": True, "bad_words": ["an", "et", "h", "y"]},
    "logit bias": {"logit_bias": {30: 4.0, 31: 4.0, 32: -50.0}},
    "JSON schema": {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "choice": {"structured_outputs": StructuredOutputsParams(choice=["no" * 30, "yes" * 20])},
    "regex": {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{70,}")},
}
# In requests of their own: on CPUs vLLM 0.23 ignores seeds, and samples greedy requests at random,
# where a step has both.
SEEDED_KINDS = {
    "seed": {"temperature": 1, "seed": 5},
    "top-k, top-p, min-p": {
        "temperature": 0.8,
        "seed": 6,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
    },
    "n": {"n": 2, "temperature": 1, "seed": 7, "output_kind": RequestOutputKind.FINAL_ONLY},
}
# In requests of their own, too: vLLM 0.23 may leave what one of them has ruled out to another one.
RESTRICTED_KINDS = {"allowed tokens": {"allowed_token_ids": list(range(60, 200))}}
STRUCTURED = {"ignore_eos": False, "detokenize": True}
# vLLM's own logprobs depend on the batch to some 0.00001.
NOISE = 1e-4


@dataclasses.dataclass(frozen=True)
class KindJob(Job):
    """A request of a kind, whose KV is nobody else's if it has a salt."""

    kind: str = "greedy"
    salt: str | None = None

    def inputs(self):
        return super().inputs() | ({"cache_salt": self.salt} if self.salt else {})

    def sampling_params(self):
        options = (KINDS | SEEDED_KINDS | RESTRICTED_KINDS)[self.kind]
        return super().sampling_params(
            **(STRUCTURED if "structured_outputs" in options else {}) | options
        )


@dataclasses.dataclass(frozen=True)
class Session(Job):
    """A request that gets more input after each of its turns."""

    more: tuple[tuple[int, ...], ...] = ()

    @property
    def turns(self):
        return 1 + len(self.more)

    def add_to(self, engine, request_id):
        # As ``AsyncLLM`` does it: every input is a request of the same id, then comes one that says
        # that there is no more.
        tasks = engine.get_supported_tasks()
        for tokens in (self.prompt, *self.more, None):
            request = engine.input_processor.process_inputs(
                f"{request_id}-session",
                {"prompt_token_ids": list(tokens or (0,))},
                self.sampling_params(),
                supported_tasks=tasks,
                resumable=tokens is not None,
            )
            request.external_req_id = request_id
            engine.output_processor.add_request(request, None, None, 0)
            # Both extend the prompt by what comes later; usually they are in two processes.
            engine.engine_core.add_request(copy.deepcopy(request))


def crowd(kinds, *, seed, times):
    """Requests of these kinds, by turns, that come one after the other."""
    lengths = [8 + 11 * i % 25 for i in range(times * len(kinds))]
    return tuple(
        KindJob(job.prompt, job.max_tokens, arrival=i, kind=kinds[i % len(kinds)])
        for i, job in enumerate(jobs(seed=seed, lengths=lengths, max_tokens=90))
    )


CROWDS = {
    "logprobs, penalties, stops, structured output": crowd(list(KINDS), seed=25, times=4),
    "seeds, n": crowd(list(SEEDED_KINDS), seed=24, times=6),
    "allowed tokens": crowd(list(RESTRICTED_KINDS), seed=29, times=10),
}
# Two prompts, twelve requests with each.
TWINS = jobs(seed=25, lengths=[2 * BLOCK + 7, 3 * BLOCK + 9] * 12, max_tokens=40)
TWINS = tuple(dataclasses.replace(job, prompt=TWINS[i % 2].prompt) for i, job in enumerate(TWINS))
LONG = tuple(
    KindJob(job.prompt, job.max_tokens, kind="prompt logprobs")
    for job in jobs(seed=26, lengths=[90, 100, 110, 330, 325, 315, 320], max_tokens=60)
)
# Sessions, whose KV stays on the device between their turns, and others that take what is left.
SESSIONS = (
    *(
        Session(job.prompt[:20], job.max_tokens, more=(job.prompt[20:50], job.prompt[50:]))
        for job in jobs(seed=27, lengths=[70, 77, 84], max_tokens=30)
    ),
    *jobs(seed=28, lengths=[40 + 13 * i % 50 for i in range(9)], max_tokens=60),
)


def what_is_visible(outcome):
    """What clients see: their completions, and the logprobs of prompts and completions, by job."""
    visible, logprobs = {}, {}
    for job, output in outcome.outputs.items():
        visible[job] = [
            (list(one.token_ids), one.text, one.finish_reason, one.stop_reason)
            for one in output.outputs
        ]
        logprobs[job] = [
            {(token, one.rank): one.logprob for token, one in (place or {}).items()}
            for places in (output.prompt_logprobs, *(one.logprobs for one in output.outputs))
            for place in places or ()
        ]
    return visible, logprobs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_model.write(tmp_path_factory.mktemp("tiny-model"))
    tokenizer.make().save_pretrained(folder)
    return folder


# On CPUs vLLM cannot cut the prompt of a seeded request into pieces ("CPU Generator does not use
# offset"): only longer ones are cut.
COMMON = {"skip_tokenizer_init": False, "max_num_batched_tokens": 8192}


@pytest.fixture(scope="module")
def undisturbed(undisturbed_engine, model):
    """All that clients see of jobs on an engine with room for all of them, without us."""
    return undisturbed_engine(model, observe=what_is_visible, **COMMON)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(model, request):
    with Engine(
        model,
        22,
        offload={"offload_host_memory_ratio": 4, "enable_offload_prefix_caching": True},
        async_scheduling=request.param,
        enable_prefix_caching=True,
        long_prefill_token_threshold=BLOCK,
        scheduler_reserve_full_isl=False,
        **COMMON,
    ) as engine:
        # Else it depends on the compiler's speed who is preempted.
        engine.scheduler.structured_output_manager._use_async_grammar_compilation = False
        yield engine


@pytest.fixture
def record_kind(record, engine):
    """Notes an outcome as a cell of the table of the documentation."""

    def row(outcome, everyone, kind):
        record(
            outcome,
            everyone,
            kind="kinds of requests",
            mode=kind,
            async_scheduling=engine.is_async,
        )

    return row


def check(outcome, expected):
    visible, logprobs = what_is_visible(outcome)
    assert visible == expected[0]
    for job, places in logprobs.items():
        assert places == [pytest.approx(place, abs=NOISE) for place in expected[1][job]]


@pytest.mark.parametrize("kinds", CROWDS)
def test_requests_of_every_kind(engine, undisturbed, record_kind, kinds):
    everyone = CROWDS[kinds]
    outcome = engine.run(everyone)
    record_kind(outcome, everyone, kinds)
    check(outcome, undisturbed(everyone))
    restored = Counter(everyone[restore.job].kind for restore in outcome.restores)
    assert restored.keys() == {job.kind for job in everyone}
    # With async scheduling one more step is under way when a request stops early.
    stops = sum(
        one.finish_reason == "stop" for out in outcome.outputs.values() for one in out.outputs
    )
    assert 0 <= outcome.recomputed_tokens <= (stops if engine.is_async else 0)


@pytest.mark.parametrize("salted", [True, False])
def test_no_blocks_are_shared_between_salts(engine, undisturbed, record_kind, salted):
    everyone = tuple(
        KindJob(job.prompt, job.max_tokens, salt=f"salt {i}" if salted else "salt")
        for i, job in enumerate(TWINS)
    )
    outcome = engine.run(everyone)
    record_kind(outcome, everyone, "cache salts" if salted else "one cache salt")
    check(outcome, undisturbed(everyone))
    assert outcome.restored_tokens > 0
    assert outcome.recomputed_tokens == 0
    assert (outcome.stats.shared_blocks == 0) == salted
    assert (engine.observer.found_tokens.total() == 0) == salted


def test_prompt_logprobs_of_requests_preempted_within_the_prompt(engine, undisturbed, record_kind):
    """vLLM 0.32 has them compute the prompt once more, whatever could be restored of it."""
    outcome = engine.run(LONG)
    record_kind(outcome, LONG, "prompt logprobs, preempted in the prompt")
    check(outcome, undisturbed(LONG))
    within = [p for p in outcome.preemptions if p.num_computed < len(LONG[p.job].prompt)]
    assert within
    assert outcome.restored_tokens > 0
    restored = {(restore.job, restore.end) for restore in outcome.restores}
    kept = engine.offload._keeps_prompt_logprobs
    for preemption in within:
        assert ((preemption.job, preemption.num_computed) in restored) == kept
    assert (outcome.recomputed_tokens == 0) == kept


def test_sessions(engine, undisturbed, record_kind):
    outcome = engine.run(SESSIONS)
    record_kind(outcome, SESSIONS, "sessions")
    check(outcome, undisturbed(SESSIONS))
    assert any(isinstance(SESSIONS[restore.job], Session) for restore in outcome.restores)
    assert outcome.recomputed_tokens == 0
