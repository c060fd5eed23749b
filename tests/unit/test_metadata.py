import dataclasses
import pickle

import numpy as np
import pytest

from preempt_offload.compat import KVConnectorMetadata, KVConnectorWorkerMetadata
from preempt_offload.metadata import NOTHING, OffloadMetadata, OffloadWorkerMetadata


def test_nothing_asks_for_nothing():
    assert dataclasses.astuple(NOTHING) == (None, None, (), None)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_survives_pickling(protocol):
    pairs = np.array([[0, 10, 1], [1, 11, 2]], np.uint32)
    sent = OffloadMetadata(3, pairs, ("a", "b"), pairs[:1])
    received = pickle.loads(pickle.dumps(sent, protocol))
    assert type(received) is OffloadMetadata
    assert isinstance(received, KVConnectorMetadata)
    assert (received.store_event, received.load_requests) == (3, ("a", "b"))
    for name in ("store_pairs", "load_pairs"):
        array, expected = getattr(received, name), getattr(sent, name)
        assert array.dtype == np.uint32
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_worker_metadata_survives_pickling(protocol):
    sent = OffloadWorkerMetadata({3: {0: True, 1: False}}, frozenset({"a"}))
    received = pickle.loads(pickle.dumps(sent, protocol))
    assert type(received) is OffloadWorkerMetadata
    assert isinstance(received, KVConnectorWorkerMetadata)
    assert received == sent


def test_nothing_is_small_on_the_wire():
    assert len(pickle.dumps(NOTHING)) < 200


@pytest.mark.parametrize(
    ("one", "other", "joined"),
    [
        (({}, ()), ({}, ()), ({}, ())),
        (({1: {0: True}}, ()), ({1: {1: False}}, ()), ({1: {0: True, 1: False}}, ())),
        (({1: {0: True}}, ()), ({2: {0: True}}, ()), ({1: {0: True}, 2: {0: True}}, ())),
        (
            ({1: {0: True}, 2: {0: False}}, ("a",)),
            ({2: {1: True}}, ("b", "a")),
            ({1: {0: True}, 2: {0: False, 1: True}}, ("a", "b")),
        ),
        (({1: {0: True}}, ()), ({}, ("a",)), ({1: {0: True}}, ("a",))),
    ],
    ids=["nothing", "two ranks", "two steps", "both, and failed loads", "unlike kinds"],
)
def test_reports_are_joined_whoever_joins_whom(one, other, joined):
    one, other, joined = (
        OffloadWorkerMetadata(stores, frozenset(failed)) for stores, failed in (one, other, joined)
    )
    before = pickle.dumps((one, other))
    assert one.aggregate(other) == joined
    assert other.aggregate(one) == joined
    assert pickle.dumps((one, other)) == before


def test_a_report_of_another_connector_is_not_joined():
    class Foreign(KVConnectorWorkerMetadata):
        def aggregate(self, other):
            return self

    with pytest.raises(TypeError, match="OffloadWorkerMetadata with Foreign"):
        OffloadWorkerMetadata({}).aggregate(Foreign())
