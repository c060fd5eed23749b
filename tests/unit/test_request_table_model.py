"""The request table through its bindings, step by step against a naive model of it."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from unit_support import plan, pool_state

from preempt_offload._core import BlockPool, CapacityError, RequestTable, StateError

CAPACITY = 12
BLOCK_TOKENS = (2, 3)
IDS = "abcde"


@dataclasses.dataclass
class Entry:
    state: str
    num_tokens: int
    event: int
    tables: list[list[int]]  # Host blocks by group and position, 0: none.
    keys: dict[int, tuple[int, bytes]]  # Of the blocks that this store fills.
    epoch: int  # Of the index, when the store was planned.
    doomed: bool = False
    used: int = 0

    @property
    def blocks(self):
        return [block for table in self.tables for block in table if block]


class Model:
    """What the documentation of the table and the pool says, without any cleverness."""

    def __init__(self):
        self.entries: dict[str, Entry] = {}
        self.index: dict[tuple[int, bytes], int] = {}
        self.unused: list[int] = []  # Indexed blocks without references, oldest first.
        self.epoch = 0
        self.clock = 0

    def references(self, entries=None):
        entries = self.entries.values() if entries is None else entries
        return Counter(block for entry in entries for block in entry.blocks)

    @property
    def indexed(self):
        return set(self.index.values())

    def num_free(self):
        return CAPACITY - len(self.references()) - len(self.unused)

    def dropped(self, blocks):
        """After references to ``blocks`` went, in this order."""
        left = self.references()
        for block in blocks:
            if not left[block] and block in self.indexed and block not in self.unused:
                self.unused.append(block)

    def remove(self, request_id):
        blocks = self.entries.pop(request_id).blocks
        self.dropped(blocks)

    def evict_unused(self, n):
        for block in self.unused[:n]:
            self.index = {key: b for key, b in self.index.items() if b != block}
        del self.unused[:n]


class TableMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = BlockPool(CAPACITY, indexed=True)
        self.table = RequestTable(self.pool, BLOCK_TOKENS)
        self.model = Model()
        self.event = 0
        self.device = 0

    def device_tables(self, num_tokens, skipped=0, extra=0):
        """Fresh device blocks for ``num_tokens``, without the first ``skipped`` of each group."""
        tables = []
        for tokens in BLOCK_TOKENS:
            positions = -(-num_tokens // tokens)
            count = max(0, positions - skipped)
            ids = range(self.device + 1, self.device + 1 + count + extra)
            self.device += count + extra
            tables.append([0] * (positions - count) + list(ids))
        return tables

    @rule(
        request_id=st.sampled_from(IDS),
        num_tokens=st.integers(1, 9),
        family=st.sampled_from("xy"),
        num_hashes=st.integers(0, 4),
        skipped=st.sampled_from([0, 0, 0, 1]),
        extra=st.integers(0, 1),
    )
    def begin_store(self, request_id, num_tokens, family, num_hashes, skipped, extra):
        model, entry = self.model, self.model.entries.get(request_id)
        device = self.device_tables(num_tokens, skipped, extra)
        hashes = [
            [f"{family}{i}".encode() for i in range(min(num_hashes, num_tokens // tokens))]
            for tokens in BLOCK_TOKENS
        ]
        event = self.event
        self.event += 1
        args = (request_id, event, num_tokens, device, hashes)
        if entry is not None and (entry.doomed or entry.state != "Mirrored"):
            with pytest.raises(StateError, match=f'"{request_id}"'):
                self.table.begin_store(*args)
            return

        # What the request's mirror has.
        wanted = {
            (group, position): block
            for group, tokens in enumerate(BLOCK_TOKENS)
            for position, block in enumerate(device[group][: -(-num_tokens // tokens)])
            if block
        }
        tables = [[0] * (-(-num_tokens // tokens)) for tokens in BLOCK_TOKENS]
        mirrored = 0
        if entry is not None:
            given_up = []
            for group, table in enumerate(entry.tables):
                for position, block in enumerate(table):
                    if block and (group, position) in wanted:
                        tables[group][position] = block
                        del wanted[group, position]
                        mirrored += 1
                    elif block:
                        given_up.append(block)
            entry.tables = [list(table) for table in tables]
            model.dropped(given_up)

        # What others have stored.
        shared = []
        for group, position in list(wanted):
            if position < len(hashes[group]):
                block = model.index.get((group, hashes[group][position]))
                if block is not None:
                    tables[group][position] = block
                    shared.append(block)
                    del wanted[group, position]
        model.unused = [block for block in model.unused if block not in shared]

        # What has to be claimed.
        mirrors = [
            (e.used, i, e)
            for i, e in model.entries.items()
            if e.state == "Mirrored" and i != request_id
        ]
        needed, references = len(wanted), model.references() + Counter(shared)
        free = CAPACITY - len(references) - len(model.unused)
        if free + len(model.unused) < needed:
            of_mirrors = model.references(e for _, _, e in mirrors)
            yielding = sum(of_mirrors[block] == references[block] for block in of_mirrors)
            available = free + len(model.unused) + yielding
            if available < needed:
                with pytest.raises(CapacityError) as caught:
                    self.table.begin_store(*args)
                error = caught.value
                assert (error.needed, error.available) == (needed, available)
                model.dropped(shared)
                return
        # The new entry holds what it shares and has mirrored while others give way.
        epoch = model.epoch
        fresh = Entry("Storing", num_tokens, event, tables, {}, epoch)
        model.entries[request_id] = fresh
        for _, mirror_id, _ in sorted(mirrors, key=lambda mirror: mirror[0]):
            if model.num_free() + len(model.unused) >= needed:
                break
            model.remove(mirror_id)
        model.evict_unused(max(0, needed - model.num_free()))
        taken = set(model.references()) | set(model.unused)

        pairs, was_mirrored, was_shared = plan(self.table.begin_store(*args))
        assert (was_mirrored, was_shared) == (mirrored, len(shared))
        assert [pair[:2] for pair in pairs] == sorted((g, b) for (g, _), b in wanted.items())
        claimed = {device_block: host for _, device_block, host in pairs}
        assert len(set(claimed.values())) == len(pairs)
        assert not taken & set(claimed.values())
        for (group, position), block in wanted.items():
            tables[group][position] = claimed[block]
            if position < len(hashes[group]):
                fresh.keys[claimed[block]] = (group, hashes[group][position])

    def having(self, state):
        return sorted(i for i, entry in self.model.entries.items() if entry.state == state)

    @precondition(lambda self: self.having("Storing"))
    @rule(data=st.data(), ok=st.sampled_from([True, True, False]))
    def complete_store(self, data, ok):
        request_id = data.draw(st.sampled_from(self.having("Storing")))
        model, entry = self.model, self.model.entries[request_id]
        if ok and entry.epoch == model.epoch:
            for block, key in entry.keys.items():
                if key not in model.index and block not in model.indexed:
                    model.index[key] = block
        restorable = ok and not entry.doomed
        assert self.table.complete_store(request_id, entry.event, ok) is restorable
        if restorable:
            entry.state = "Ready"
        else:
            model.remove(request_id)

    @precondition(lambda self: self.having("Ready"))
    @rule(data=st.data(), short=st.integers(0, 2), computed=st.integers(0, 9))
    def begin_load(self, data, short, computed):
        request_id = data.draw(st.sampled_from(self.having("Ready")))
        entry = self.model.entries[request_id]
        num_tokens = max(1, entry.num_tokens - short)
        computed = min(computed, num_tokens)
        device = self.device_tables(num_tokens)
        for group, table in enumerate(entry.tables):
            for position, host in enumerate(table):
                if not host and position < len(device[group]):
                    device[group][position] = 0
        expected = [
            (group, device[group][position], entry.tables[group][position])
            for group, tokens in enumerate(BLOCK_TOKENS)
            for position in range(computed // tokens, -(-num_tokens // tokens))
            if device[group][position]
        ]
        plan_ = plan(self.table.begin_load(request_id, computed, num_tokens, device))
        assert plan_ == (sorted(expected), 0, 0)
        entry.state, entry.num_tokens = "Loading", num_tokens

    def becomes_mirror(self, request_id):
        entry = self.model.entries[request_id]
        partial = []
        for table, tokens in zip(entry.tables, BLOCK_TOKENS, strict=True):
            full = entry.num_tokens // tokens
            partial += [block for block in table[full:] if block]
            del table[full:]
        entry.state, entry.used = "Mirrored", self.model.clock
        self.model.clock += 1
        self.model.dropped(partial)

    @precondition(lambda self: self.having("Loading"))
    @rule(data=st.data(), ok=st.sampled_from([True, True, False]))
    def finish_load(self, data, ok):
        request_id = data.draw(st.sampled_from(self.having("Loading")))
        self.table.finish_load(request_id, ok)
        if ok and not self.model.entries[request_id].doomed:
            self.becomes_mirror(request_id)
        else:
            self.model.remove(request_id)

    @precondition(lambda self: self.having("Ready"))
    @rule(data=st.data(), known=st.sampled_from([None, None, 9, 4, 3, 0]))
    def settle(self, data, known):
        request_id = data.draw(st.sampled_from(self.having("Ready")))
        if known is None:
            self.table.settle(request_id)
        else:
            entry = self.model.entries[request_id]
            entry.num_tokens = min(entry.num_tokens, known)
            self.table.settle(request_id, known)
        self.becomes_mirror(request_id)

    @rule(request_id=st.sampled_from(IDS))
    def release(self, request_id):
        entry = self.model.entries.get(request_id)
        assert self.table.release(request_id) is (entry is not None and not entry.doomed)
        self.forget(request_id)

    def forget(self, request_id):
        entry = self.model.entries.get(request_id)
        if entry is not None and entry.state in ("Storing", "Loading"):
            entry.doomed = True
        elif entry is not None:
            self.model.remove(request_id)

    @precondition(lambda self: len(self.model.entries) > 2)
    @rule()
    def release_all(self):
        self.table.release_all()
        self.model.epoch += 1
        self.model.index.clear()
        self.model.unused.clear()
        for request_id in list(self.model.entries):
            self.forget(request_id)

    @invariant()
    def the_table_is_as_the_model(self):
        entries, references = self.model.entries, self.model.references()
        for request_id in IDS:
            entry = entries.get(request_id)
            visible = entry is not None and not entry.doomed
            expected = (entry.state, entry.num_tokens) if visible else None
            assert self.table.status(request_id) == expected
        states = Counter(entry.state for entry in entries.values())
        assert Counter(self.table.counts()) == states
        assert pool_state(self.pool) == (
            self.model.num_free(),
            len(self.model.unused),
            [references[block] for block in range(1, CAPACITY + 1)],
        )

    def teardown(self):
        for request_id, entry in list(self.model.entries.items()):
            self.table.release(request_id)
            if entry.state == "Storing":
                self.table.complete_store(request_id, entry.event, True)
            elif entry.state == "Loading":
                self.table.finish_load(request_id, True)
        assert self.pool.num_free + self.pool.num_evictable == CAPACITY


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
