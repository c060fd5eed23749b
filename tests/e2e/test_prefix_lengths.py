"""Requests preempted after exactly so many tokens, at every place within a block."""

import pytest

from harness import BLOCK, Engine, jobs


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(model, request):
    """An engine with room for 20 blocks of KV, which computes two such prompts in one step."""
    with Engine(
        model,
        21,
        offload={"offload_host_memory_ratio": 2},
        fence=False,
        async_scheduling=request.param,
        max_model_len=512,
        max_num_batched_tokens=20 * BLOCK,
    ) as engine:
        yield engine


@pytest.mark.parametrize("num_computed", range(9 * BLOCK + 1, 10 * BLOCK + 1))
def test_preempted_while_decoding(engine, undisturbed, record, num_computed):
    """320 tokens fill ten blocks; 319 and 289 are the neighbours of a boundary."""
    # Both prompts are computed in the first step, and one token each in the second. In the
    # third, the elder wants an eleventh block when both have ten: the younger has to go.
    pair = jobs(seed=num_computed, lengths=[10 * BLOCK - 1, num_computed - 1], max_tokens=40)
    outcome = engine.run(pair)
    record(outcome, pair)

    first = outcome.preemptions[0]
    assert (first.job, first.num_computed) == (1, num_computed)
    assert first.step_under_way == engine.is_async
    assert outcome.tokens == undisturbed(pair)
    assert outcome.recomputed_tokens == 0
    assert [restore.end for restore in outcome.restores] == [
        preemption.num_computed for preemption in outcome.preemptions
    ]
