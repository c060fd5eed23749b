"""Wrong KV must show: the same comparison as everywhere else, with faults put in."""

import pytest

from harness import Engine, jobs
from preempt_offload.devices import Ended, TransferResult

CROWD = jobs(seed=23, lengths=[60 + 9 * i % 140 for i in range(24)], max_tokens=60)


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, 31, offload={"offload_host_memory_ratio": 4}) as engine:
        yield engine


def swap_two_blocks(begin):
    """Swaps the first block and the last, which is mostly a partial one.

    Two full blocks would not do: keys carry their position with them, so attention over all
    of them comes to the same in any order.
    """

    def faulty(direction, pairs):
        if direction == "h2d":
            pairs = pairs.copy()
            pairs[[0, -1], 1] = pairs[[-1, 0], 1]
        return begin(direction, pairs)

    return faulty


def leave_one_block_out(begin):
    return lambda direction, pairs: begin(direction, pairs[1:] if direction == "h2d" else pairs)


def store_after_the_forward(begin):
    """What a missing wait does: the blocks are read when others have overwritten them."""

    class Late:
        def __init__(self, pairs):
            self.pairs = pairs

        def poll(self):
            return begin("d2h", self.pairs).poll()

    return lambda direction, pairs: Late(pairs) if direction == "d2h" else begin(direction, pairs)


def load_nothing(begin):
    nothing = Ended(TransferResult(ok=True, num_bytes=0))
    return lambda direction, pairs: nothing if direction == "h2d" else begin(direction, pairs)


@pytest.mark.parametrize(
    "fault", [swap_two_blocks, leave_one_block_out, store_after_the_forward, load_nothing]
)
def test_wrong_kv_changes_the_output(engine, undisturbed, monkeypatch, fault):
    device = engine.worker._device
    monkeypatch.setattr(device, "begin", fault(device.begin))
    outcome = engine.run(CROWD)
    assert outcome.restores
    assert outcome.tokens != undisturbed(CROWD)


def test_without_a_fault_it_does_not(engine, undisturbed, record):
    outcome = engine.run(CROWD)
    record(outcome, CROWD)
    assert outcome.restores
    assert outcome.tokens == undisturbed(CROWD)
