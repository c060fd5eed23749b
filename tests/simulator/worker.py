"""A rank: its KV caches, the made-up model, and the order of calls of a model runner.

What a worker knows of a request it has from the scheduler's outputs alone, as a real one.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from preempt_offload import compat
from preempt_offload.devices import TransferResult
from preempt_offload.kv_layout import CacheLayout
from preempt_offload.stream_device import StreamDevice
from strict_npu import StrictNpu

from .language import GARBAGE
from .late import LateDevice, LateTransfer
from .plan import MAX_LENGTH, VOCABULARY
from .pull import Pull

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.output import SchedulerOutput

    from .language import Sentence
    from .plan import Group, Setup
    from .pull import Prompt

_POSITIONS = np.arange(2 * MAX_LENGTH)


class WrongKV(AssertionError):
    """A slot does not hold what the request that reads it has written."""


@dataclasses.dataclass
class _Row:
    """A request as the worker knows it.

    Attributes:
        tables: Its block table in each group.
        prompt: Tokens of its prompt.
        known: Tokens known, sampled ones included.
        computed: Tokens whose KV is in the cache.
        drafts: Tokens proposed for the next step.
        accepted: Drafts accepted in the last step.
        step_end: Tokens up to the end of that step, its rejected drafts included.
    """

    tables: list[npt.NDArray[np.int64]]
    prompt: int
    known: int
    computed: int
    drafts: list[int] = dataclasses.field(default_factory=list)
    accepted: int = 0
    step_end: int = 0


class _Cache:
    """The KV cache of one layer: a tag for each slot of each block.

    Args:
        index: The group's place among the groups.
        group: The layer's group.
        pages: The storage, bytes of shape (blocks, bytes of a page).
        setup: The engine.
        rank: The worker's.
        layer: The layer's place in its group.
        npu: The device that is told what is read and written, if it is one.
    """

    def __init__(
        self,
        index: int,
        group: Group,
        pages: npt.NDArray[np.uint8],
        setup: Setup,
        rank: int,
        layer: int,
        npu: StrictNpu | None,
    ) -> None:
        self.group = group
        self._index = index
        # What the tags of this rank, group and layer differ by.
        self._mark = (rank * 16 + index) * 16 + layer
        self._state_mode = setup.state_mode
        self._most_drafts = setup.drafts
        words = pages.view(np.int64)
        if group.kind == "state":
            self._slots = words[:, 0]
            self._stride, width = words.shape[1], 1
            tokens = 10**6 if setup.state_mode == "none" else group.block_tokens
            self.tensor = torch.from_numpy(words)
        else:
            tokens = group.block_tokens
            self._slots = words.reshape(len(pages) * tokens, -1)
            self._stride = width = self._slots.shape[1]
            self.tensor = torch.from_numpy(pages)
        self._address, self._npu = pages.ctypes.data, npu
        self._words_of_slot = np.arange(width)
        self._tokens = tokens
        # Where tokens are spread over ranks, each in turn has one of them, one behind the other.
        num_ranks = setup.ranks_of(group)
        self._is_here = _POSITIONS % num_ranks == rank % num_ranks
        self._block_of = _POSITIONS // (tokens * num_ranks)
        self._offset_of = _POSITIONS % (tokens * num_ranks) // num_ranks

    def step(
        self, name: str, row: _Row, tags: npt.NDArray[np.int64], num_tokens: int, good: int
    ) -> None:
        """Reads what the step's tokens attend to and writes what is theirs.

        Args:
            name: The request, for errors.
            row: What the worker knows of it.
            tags: The tags of its sentence.
            num_tokens: Tokens in this step.
            good: How many of them are not rejected drafts.
        """
        if self.group.kind == "state":
            self._step_state(name, row, tags, num_tokens, good)
        else:
            self._step_attention(name, row, tags, num_tokens, good)

    def pull(self, prompt: Prompt, tags: npt.NDArray[np.int64] | int) -> None:
        """Takes what another machine writes into the slots of a prompt."""
        positions = self._here(prompt.first, prompt.end)
        blocks = np.asarray(prompt.tables[self._index])[self._block_of[positions]]
        # A window has moved on from the null blocks.
        positions, blocks = positions[blocks > 0], blocks[blocks > 0]
        slots = blocks * self._tokens + self._offset_of[positions]
        if self._npu is not None:
            self._npu.write_from_outside(self._address, self._words(slots))
        if isinstance(tags, int):
            self._slots[slots] = tags
        else:
            self._slots[slots] = (tags[positions] ^ self._mark)[:, None]

    def scribble(self, row: _Row, num_tokens: int) -> None:
        """Overwrites the slots of the step's tokens."""
        if self.group.kind != "state":
            positions = self._here(row.computed, row.computed + num_tokens)
            blocks = row.tables[self._index][self._block_of[positions]]
            self._write(blocks * self._tokens + self._offset_of[positions], GARBAGE)

    def _here(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Of the positions from ``start`` to ``end``, those whose tokens this rank has."""
        return _POSITIONS[start:end][self._is_here[start:end]]

    def _step_attention(
        self, name: str, row: _Row, tags: npt.NDArray[np.int64], num_tokens: int, good: int
    ) -> None:
        group, start = self.group, row.computed
        first = 0
        if group.kind == "window":
            first = max(0, start - group.reach + 1)
        elif group.kind == "chunked":
            first = start // group.reach * group.reach
        table = row.tables[self._index]
        end = start + num_tokens
        if table.size <= self._block_of[end - 1]:
            raise WrongKV(f"{name}: group {self._index} has no slot for token {end - 1}")
        positions = self._here(first, end)
        blocks = table[self._block_of[positions]]
        if not blocks.all():
            position = positions[np.argmin(blocks != 0)]
            raise WrongKV(f"{name}: group {self._index} has the null block at token {position}")
        slots = blocks * self._tokens + self._offset_of[positions]
        num_read, num_good = np.searchsorted(positions, (start, start + good))
        right = (tags[positions[:num_good]] ^ self._mark)[:, None]
        wrong = (self._read(slots[:num_read]) != right[:num_read]).any(axis=1)
        if wrong.any():
            position = positions[np.argmax(wrong)]
            raise WrongKV(
                f"{name}: group {self._index} ({group.kind}) reads the wrong KV at token "
                f"{position} of {start}, in block {table[self._block_of[position]]}"
            )
        self._write(slots[num_read:num_good], right[num_read:])
        self._write(slots[num_good:], GARBAGE)

    def _step_state(
        self, name: str, row: _Row, tags: npt.NDArray[np.int64], num_tokens: int, good: int
    ) -> None:
        start, end = row.computed, row.computed + num_tokens
        if start:
            block = self._state_block(name, row, row.step_end or start, row.accepted)
            if self._read(np.array([block])) != tags[start - 1] ^ self._mark:
                raise WrongKV(
                    f"{name}: group {self._index} does not have the state after {start} tokens "
                    f"in block {block}"
                )
        if self._state_mode == "all":
            for boundary in range(start // self._tokens + 1, end // self._tokens + 1):
                length = boundary * self._tokens
                block = self._state_block(name, row, length, 0)
                self._write(np.array([block]), tags[length - 1] ^ self._mark)
        # One state after each token that may be the last, so that drafts can be rejected; and
        # after a prompt, as vLLM does with Mamba2, of no more tokens than a step with drafts has.
        as_drafts = start >= row.prompt and num_tokens <= 1 + self._most_drafts
        num_places = num_tokens if as_drafts else min(num_tokens, 1 + len(row.drafts))
        for place in range(num_places):
            after = end - num_places + 1 + place
            block = self._state_block(name, row, end, place)
            tag = tags[after - 1] ^ self._mark if after <= start + good else GARBAGE
            self._write(np.array([block]), tag)

    def settle_states(self, name: str, row: _Row, tags: npt.NDArray[np.int64]) -> bool:
        """Moves the state after the last full block to that block, as in cache mode "align".

        Returns:
            Whether that is the state from which the request goes on.
        """
        if self.group.kind != "state" or self._state_mode != "align":
            return False
        length = row.computed // self._tokens * self._tokens
        if length < row.computed - row.accepted:
            return False
        block = self._state_block(name, row, length, 0)
        self._write(np.array([block]), tags[length - 1] ^ self._mark)
        return (row.step_end - 1) // self._tokens == length // self._tokens - 1

    def _read(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self._npu is not None:
            self._npu.read(self._address, self._words(slots))
        return self._slots[slots]

    def _write(self, slots: npt.NDArray[np.int64], tags: npt.NDArray[np.int64] | int) -> None:
        if self._npu is not None:
            self._npu.write(self._address, self._words(slots))
        self._slots[slots] = tags

    def _words(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return (slots[:, None] * self._stride + self._words_of_slot).ravel()

    def _state_block(self, name: str, row: _Row, length: int, place: int) -> int:
        """The block of a state that a step ending after ``length`` tokens has left."""
        table = row.tables[self._index]
        at = (length - 1) // self._tokens + place
        block = int(table[at]) if at < table.size else 0
        if not block:
            raise WrongKV(f"{name}: group {self._index} has no block for state {length}+{place}")
        return block


class Worker:
    """One rank of the simulated engine.

    Args:
        rank: Its rank.
        setup: The engine.
        connector: The connector in the worker role: ours, or one that has it among others.
        sentences: What each request must say.
        seed: Decides what is left open.
    """

    def __init__(
        self,
        rank: int,
        setup: Setup,
        connector: KVConnectorBase_V1,
        sentences: Mapping[str, Sentence],
        seed: int,
    ) -> None:
        self._setup = setup
        self._connector = connector
        self._sentences = sentences
        self._seed = seed
        self.rows: dict[str, _Row] = {}
        self._prompts: dict[str, int] = {}
        self._storages = [
            np.zeros((setup.num_blocks, setup.page_bytes), np.uint8)
            for _ in range(max(group.layers for group in setup.groups))
        ]
        self._npu = StrictNpu(seed * 31 + rank, failures=setup.failures) if setup.streams else None
        self._caches = [
            _Cache(i, group, pages, setup, rank, layer, self._npu)
            for i, group in enumerate(setup.groups)
            for layer, pages in enumerate(self._storages[: group.layers])
        ]
        names = [name for names in setup.layer_names for name in names]
        tensors = [cache.tensor for cache in self._caches]
        kv_caches = dict(zip(names, tensors, strict=True))
        connector.register_kv_caches(kv_caches)
        worker = compat.find_offload_connector(connector).worker
        assert worker is not None
        self._offload = worker
        # Whether vLLM goes on with a request that could not be pulled.
        self._recovers = compat.loads_fail_by_request() or compat.loads_fail_by_block(
            worker._kv_cache_config
        )
        self.num_pulls = 0
        self._outputs: deque[Callable[[], None]] = deque()
        for child in getattr(connector, "_connectors", ()):
            if isinstance(child, Pull):
                child.begin = self._begin_pull
        self._rng = random.Random(seed * 31 + rank)
        if self._npu is not None:
            worker._device = self._stream_device(CacheLayout.of(kv_caches, worker._kv_cache_config))
            return
        worker._device = LateDevice(
            worker._device,
            self._rng,
            most=setup.delay,
            failures=setup.failures,
        )

    def device_calls(self) -> Counter[str]:
        """What was asked of the device; the host has never waited for it."""
        calls = Counter[str]() if self._npu is None else self._npu.calls
        assert self._setup.failures or not calls["waits of the host"]
        return calls

    def _stream_device(self, layout: CacheLayout) -> StreamDevice:
        npu, worker = self._npu, self._offload
        assert npu is not None
        device = StreamDevice(
            layout,
            torch.device("cpu"),
            num_host_blocks=worker._num_host_blocks,
            module=npu,
            most_per_call=8,
        )
        for column in device.pool:
            npu.watch(column, "host")
        for storage in self._storages:
            npu.watch(torch.from_numpy(storage), "device")
        return device

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Carries out a step, as vLLM's model runner does."""
        connector, metadata = self._connector, output.kv_connector_metadata
        if self._setup.second_runner:
            # It updates its rows first; that it may call twice was reported of vLLM-Ascend's.
            self._update_rows(output)
            connector.handle_preemptions(metadata)
            self._scribble(output)
            connector.handle_preemptions(metadata)
        else:
            connector.handle_preemptions(metadata)
            self._update_rows(output)
        connector.bind_connector_metadata(metadata)
        if not self._setup.loads_last:
            connector.start_load_kv(None)
        self._compute()
        sampled = [
            self._forward(request_id, count, output)
            for request_id, count in output.num_scheduled_tokens.items()
        ]
        if self._setup.loads_last:
            connector.start_load_kv(None)
        report = KVConnectorOutput()
        if compat.loads_fail_by_request():
            results = connector.get_transfer_results(output.finished_req_ids)
            report.finished_recving = results.finished_recving
            report.failed_recving = results.failed_recving
        else:
            _, report.finished_recving = connector.get_finished(output.finished_req_ids)
        report.invalid_block_ids = connector.get_block_ids_with_load_errors()
        report.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        computes = self._npu is not None and output.total_num_scheduled_tokens
        self._outputs.append(self._npu.computed() if computes else lambda: None)
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=report,
        )

    def outputs_are_seen(self) -> None:
        """Those of the oldest step of which they have not been."""
        self._outputs.popleft()()

    def _begin_pull(self, prompt: Prompt) -> LateTransfer:
        setup, rng = self._setup, self._rng
        self.num_pulls += 1
        fails = self._recovers and rng.randrange(1000) < setup.failures
        # By the weights of now.
        tags = self._sentences[prompt.request_id].tags_to(prompt.end).copy()

        def write(tags: npt.NDArray[np.int64] | int) -> None:
            for cache in self._caches:
                cache.pull(prompt, tags)

        def end() -> TransferResult:
            write(GARBAGE if fails else tags)
            return TransferResult(ok=not fails, num_bytes=0)

        write(GARBAGE)
        return LateTransfer(rng.randint(0, setup.delay), end)

    def drafts(self, output: SchedulerOutput) -> DraftTokenIds:
        """The drafts for the requests of a step."""
        ids = list(output.num_scheduled_tokens)
        return DraftTokenIds(ids, [list(self.rows[request_id].drafts) for request_id in ids])

    def _update_rows(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        self._compute()
        for block in output.new_block_ids_to_zero or ():
            for storage in self._storages:
                self._zero(storage, block)
        for new in output.scheduled_new_reqs:
            tokens = (
                new.prompt_token_ids if new.prefill_token_ids is None else new.prefill_token_ids
            )
            self._prompts[new.req_id] = len(new.prompt_token_ids)
            self._begin(new.req_id, tokens, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            computed, blocks = cached.num_computed_tokens[i], cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                self._begin(request_id, cached.all_token_ids[request_id], blocks, computed)
                continue
            row = self.rows[request_id]
            if blocks is not None:
                row.tables = [
                    np.append(table, np.asarray(new, np.int64))
                    for table, new in zip(row.tables, blocks, strict=True)
                ]
            # Rejected drafts of a step under way are not taken off yet.
            extra = computed - row.computed
            if extra and not (self._setup.asynchronous and 0 < extra <= self._setup.drafts):
                raise WrongKV(f"{request_id}: {computed} tokens computed, not {row.computed}")

    def _compute(self) -> None:
        """The stream that computes comes to what the host launches next."""
        if self._npu is not None:
            self._npu.compute()

    def _zero(self, storage: npt.NDArray[np.uint8], block: int) -> None:
        if self._npu is not None:
            words = self._setup.page_bytes // 8
            self._npu.write(storage.ctypes.data, np.arange(block * words, (block + 1) * words))
        storage[block] = 0

    def _begin(
        self, request_id: str, tokens: list[int], blocks: tuple[list[int], ...], computed: int
    ) -> None:
        if self._sentences[request_id].said(0, len(tokens)) != tokens:
            raise WrongKV(f"{request_id} begins with tokens that are not its own: {tokens}")
        tables = [np.asarray(table, np.int64) for table in blocks]
        prompt = self._prompts[request_id]
        self.rows[request_id] = _Row(tables, prompt, len(tokens), computed)

    def _scribble(self, output: SchedulerOutput) -> None:
        """Overwrites what the forward is going to write, as something before it may."""
        self._compute()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            for cache in self._caches:
                cache.scribble(self.rows[request_id], num_tokens)

    def _forward(self, request_id: str, num_tokens: int, output: SchedulerOutput) -> list[int]:
        row, sentence = self.rows[request_id], self._sentences[request_id]
        num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        # Newer vLLM lets a restored request come back with drafts that nobody has proposed.
        unknown = [-1] * (num_drafts - len(row.drafts))
        row.drafts = row.drafts[:num_drafts] + unknown
        fed = row.computed + num_tokens - num_drafts
        assert fed <= row.known
        right = sentence.said(fed, fed + num_drafts)
        accepted = next(
            (i for i, pair in enumerate(zip(row.drafts, right, strict=True)) if len(set(pair)) > 1),
            num_drafts,
        )
        tags = sentence.tags_to(fed + num_drafts)
        good = num_tokens - num_drafts + accepted
        for cache in self._caches:
            cache.step(request_id, row, tags, num_tokens, good)
        row.step_end = row.computed + num_tokens
        row.computed += good
        row.accepted = accepted
        row.drafts = []
        moved = [cache.settle_states(request_id, row, tags) for cache in self._caches]
        if any(moved):
            row.accepted = 0
        if fed < row.known:
            return []
        sampled = sentence.said(row.known, row.known + accepted + 1)
        row.known += len(sampled)
        row.drafts = self._propose(request_id, row.known, sentence)
        return sampled

    def _propose(self, request_id: str, known: int, sentence: Sentence) -> list[int]:
        """Drafts of which a random number is right, the same on every rank."""
        setup, rng = self._setup, random.Random(f"{self._seed} {request_id} {known}")
        count = setup.drafts
        if not (setup.lookahead or setup.asynchronous):
            # As n-grams, which are not always found.
            count = rng.randint(0, count)
        right = rng.randint(0, count)
        drafts = sentence.said(known, known + count)
        return drafts[:right] + [(token + 1) % VOCABULARY for token in drafts[right:]]
