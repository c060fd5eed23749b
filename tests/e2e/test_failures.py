"""Copies that fail: the request is recomputed or failed, as the policy says; the engine goes on."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import vllm

from checkpoints import KINDS
from harness import Engine, jobs

CROWD = jobs(seed=29, lengths=[60 + 9 * i % 140 for i in range(24)], max_tokens=60)
FAILURES = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """An engine: its kind of model, device blocks that are too few, how many workers it has."""

    kind: str
    num_blocks: int
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def faulty_rank(self):
        """The last one; the others succeed."""
        return self.args.get("tensor_parallel_size", 1) - 1


TWO_WORKERS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
ASYNC = {"async_scheduling": True}
CASES = {
    "dense": Case("dense", 31),
    "dense-async": Case("dense", 31, ASYNC),
    "windows-one-of-two-workers": Case("sliding-window", 32, TWO_WORKERS),
}
if vllm.__version__.startswith("0.32."):
    # Those of before do not run it on CPUs.
    CASES["states-async"] = Case("mamba2", 25, ASYNC)


@pytest.fixture(scope="module")
def checkpoints(model, tmp_path_factory):
    """The folder of a kind's checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    kinds = {case.kind for case in CASES.values()} - {"dense"}
    return {"dense": model} | {kind: KINDS[kind].write(folder / kind) for kind in kinds}


@pytest.fixture(scope="module")
def expected(undisturbed_engine, checkpoints):
    """The tokens of the crowd on undisturbed engines, by kind."""
    return {kind: undisturbed_engine(checkpoint)(CROWD) for kind, checkpoint in checkpoints.items()}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def engine(case, checkpoints, expected):
    with Engine(
        checkpoints[case.kind],
        case.num_blocks,
        offload={"offload_host_memory_ratio": 4},
        transfer={"kv_load_failure_policy": "fail"},
        max_model_len=288,
        **case.args,
    ) as engine:
        assert not engine.scheduler.recompute_kv_load_failures
        yield engine
        # Whatever has failed before, it is as good as new.
        outcome = engine.run(CROWD)
        assert outcome.tokens == expected[case.kind]
        assert outcome.restored_tokens > 0
        assert outcome.recomputed_tokens == 0


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_failed_copy(engine, case, expected, record, monkeypatch, policy, direction):
    # All that vLLM makes of the policy.
    recompute = policy == "recompute"
    monkeypatch.setattr(engine.scheduler, "recompute_kv_load_failures", recompute)
    engine.in_workers("fail_first_copies", case.faulty_rank, direction)
    before = engine.in_workers("failed_copies")
    outcome = engine.run(CROWD)
    failed = [
        (stores - stores_before, loads - loads_before)
        for (stores, loads), (stores_before, loads_before) in zip(
            engine.in_workers("failed_copies"), before, strict=True
        )
    ]
    engine.in_workers("copy_well")
    record(outcome, CROWD)
    once = (FAILURES, 0) if direction == "d2h" else (0, FAILURES)
    assert failed == [(0, 0)] * case.faulty_rank + [once]
    assert outcome.restored_tokens > 0
    errors = {i for i, reason in outcome.finish_reasons.items() if reason == "error"}
    # Only a load that fails can fail a request: a failed store is a KV cache lost in time.
    assert bool(errors) == (direction == "h2d" and policy == "fail")
    tokens = expected[case.kind]
    assert all(outcome.tokens[i] == tokens[i] for i in outcome.tokens if i not in errors)
    # What an error has broken off is right as far as it goes.
    assert all(outcome.tokens[i] == tokens[i][: len(outcome.tokens[i])] for i in errors)
    if not errors:
        assert outcome.recomputed_tokens > 0
