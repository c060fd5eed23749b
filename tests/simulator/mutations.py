"""Faults to put into the package: each is one wrong line, and the simulator must notice.

``python -m simulator.mutate`` applies them one by one.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault: ``right`` occurs once in ``file``, and ``wrong`` takes its place."""

    name: str
    file: str
    right: str
    wrong: str

    @property
    def in_core(self) -> bool:
        """Whether the Rust core has to be built for it."""
        return self.file.startswith("rust/")


_SCHEDULER = "python/preempt_offload/offload_scheduler.py"
_WORKER = "python/preempt_offload/offload_worker.py"
_METADATA = "python/preempt_offload/metadata.py"
_RECOMPUTE = "python/preempt_offload/recompute_scheduler.py"
_COMPAT = "python/preempt_offload/compat.py"
_DRAFTS = "python/preempt_offload/draft_states.py"
_STREAM = "python/preempt_offload/stream_device.py"
_LAYOUT = "python/preempt_offload/kv_layout.py"
_TABLE = "rust/request_table.rs"
_POOL = "rust/block_pool.rs"
_TRANSFER = "rust/transfer.rs"
_COMPLETION = "rust/completion.rs"
_BINDINGS = "rust/python.rs"

MUTATIONS = (
    # ---- states that drafts may have passed ----
    Mutation(
        "take the first state of a step under way for its last",
        _DRAFTS,
        "return CertainState(certain, num_computed_tokens)",
        "return CertainState(num_computed_tokens, num_computed_tokens)",
    ),
    Mutation(
        "take the first state of a past step for that of its last draft",
        _DRAFTS,
        "return CertainState(certain, step_end)",
        "return CertainState(num_computed_tokens, step_end)",
    ),
    Mutation(
        "believe that a state under way stays in front",
        _DRAFTS,
        "if certain < num_computed_tokens and self._ends_block(num_computed_tokens):",
        "if False:",
    ),
    Mutation(
        "believe that a state at the end of a block has stayed",
        _DRAFTS,
        "if accepted == verified and self._ends_block(step_end):",
        "if False:",
    ),
    Mutation(
        "look for a state where its token is, not where its step ends",
        _SCHEDULER,
        "(i, ids, state.step_end)",
        "(i, ids, state.num_tokens)",
    ),
    Mutation(
        "count one accepted draft too many",
        _DRAFTS,
        "max(len(sampled) - 1, 0), len(drafts[request_id])",
        "len(sampled), len(drafts[request_id])",
    ),
    Mutation(
        "remember drafts of a step before the last",
        _DRAFTS,
        "                self._verified.pop(request_id, None)\n\n",
        "                pass\n\n",
    ),
    Mutation(
        "compute all tokens after a state at once",
        _RECOMPUTE,
        "            return min(num_new_tokens, 1)\n",
        "            pass\n",
    ),
    Mutation(
        "free what the window before accepted drafts reaches",
        _COMPAT,
        "margin = scheduler.num_spec_tokens",
        "margin = 0",
    ),
    # ---- what is preserved, and when it comes back ----
    Mutation(
        "look up a request whose store is under way",
        _SCHEDULER,
        'if state == "Storing":\n            return None, False',
        'if state == "Storing":\n            return 0, False',
    ),
    Mutation(
        "restore drafts that were rejected",
        _SCHEDULER,
        "return min(num_stored, known)",
        "return num_stored",
    ),
    Mutation(
        "store one token too many",
        _SCHEDULER,
        "                self._event,\n                num_computed_tokens,\n",
        "                self._event,\n                num_computed_tokens + 1,\n",
    ),
    Mutation(
        "store one token too few",
        _SCHEDULER,
        "                self._event,\n                num_computed_tokens,\n",
        "                self._event,\n                max(num_computed_tokens - 1, 1),\n",
    ),
    Mutation(
        "let the forward of a restored request run beside its load",
        _SCHEDULER,
        "return (num_tokens, True) if num_tokens > 0 else (0, False)",
        "return (num_tokens, False) if num_tokens > 0 else (0, False)",
    ),
    Mutation(
        "count local hits twice",
        _SCHEDULER,
        "self._restorable_tokens(request, num_stored) - num_computed_tokens\n",
        "self._restorable_tokens(request, num_stored)\n",
    ),
    Mutation(
        "begin the load a block late",
        _SCHEDULER,
        "first = num_tokens - num_external_tokens\n",
        "first = num_tokens - num_external_tokens + self._block_tokens[0]\n",
    ),
    Mutation(
        "leave a request Ready that runs without being restored",
        _SCHEDULER,
        "            self.table.settle(request_id, num_tokens)\n            return",
        "            return",
    ),
    Mutation(
        "share a block whose last token has no KV",
        _SCHEDULER,
        "num_hashes = num_known // tokens * step",
        "num_hashes = (num_known // tokens + 1) * step",
    ),
    Mutation(
        "share blocks by the hash of the block before",
        _SCHEDULER,
        "request.block_hashes[step - 1 : num_hashes : step]",
        "(request.block_hashes[:1] + request.block_hashes)[step - 1 : num_hashes : step]",
    ),
    Mutation(
        "pull into blocks that a store still reads",
        _SCHEDULER,
        "(None if is_remote and self._storing else 0), False",
        "0, False",
    ),
    Mutation(
        "let others in while a pulled request waits for room",
        _SCHEDULER,
        "self._landed |= pulled",
        "pass",
    ),
    Mutation(
        "take a request that has ended for one that was pulled",
        _SCHEDULER,
        "self._remote.discard(request_id)",
        "pass",
    ),
    Mutation(
        "let others in while a restored request waits for room",
        _SCHEDULER,
        "if self._landed and request.request_id not in self._landed:",
        "if False:",
    ),
    Mutation(
        "go on waiting for a restored request that runs",
        _SCHEDULER,
        "        self._landed.discard(request_id)\n"
        "        self._forget_step(request_id)\n"
        "        status = self.table.status(request_id)\n",
        "        self._forget_step(request_id)\n        status = self.table.status(request_id)\n",
    ),
    Mutation(
        "go on waiting for a restored request that is gone",
        _SCHEDULER,
        '        """Forgets a request, whatever its state."""\n'
        "        self._landed.discard(request_id)\n",
        '        """Forgets a request, whatever its state."""\n',
    ),
    Mutation(
        "forget to release a request that ends",
        _SCHEDULER,
        "            self._ended_loads.add(request_id)\n        self.table.release(request_id)",
        "            self._ended_loads.add(request_id)",
    ),
    Mutation(
        "keep preserved KV when the cache is reset",
        _SCHEDULER,
        "        self.table.release_all()\n",
        "",
    ),
    # ---- what crosses to the workers and back ----
    Mutation(
        "store twice",
        _SCHEDULER,
        "        self._store_pairs.clear()\n",
        "        del self._store_pairs[:-1]\n",
    ),
    Mutation("load twice", _SCHEDULER, "        self._load_pairs.clear()\n", ""),
    Mutation("report a load twice", _SCHEDULER, "        self._load_requests.clear()\n", ""),
    Mutation("forget to load", _SCHEDULER, "        self._load_pairs.append(pairs)\n", ""),
    Mutation("give two steps one event", _SCHEDULER, "            self._event += 1\n", ""),
    Mutation(
        "take a failed store for a good one",
        _SCHEDULER,
        "self.table.complete_store(request_id, event, ok)",
        "self.table.complete_store(request_id, event, True)",
    ),
    Mutation(
        "take a failed load for a good one",
        _SCHEDULER,
        "                if not ok:\n                    self._give_up_load(request_id)\n",
        "",
    ),
    Mutation(
        "lose the failed loads of a rank",
        _METADATA,
        "self.failed_loads | other.failed_loads",
        "self.failed_loads",
    ),
    Mutation(
        "lose the stores of a rank",
        _METADATA,
        "self.stores.get(e, {}) | other.stores.get(e, {})",
        "self.stores.get(e) or other.stores.get(e, {})",
    ),
    Mutation(
        "store again when asked again",
        _WORKER,
        "if event is None or event <= self._last_event:",
        "if event is None:",
    ),
    Mutation(
        "report a store that is under way",
        _WORKER,
        "            result = store.poll()\n",
        "            result = store.poll() or TransferResult(ok=True, num_bytes=0)\n",
    ),
    Mutation(
        "report one store of a step alone",
        _WORKER,
        "                stores[event] = {self._rank: result.ok}\n",
        "                stores = {event: {self._rank: result.ok}}\n",
    ),
    Mutation(
        "report a load that is under way",
        _WORKER,
        "                self._loads.append((load, metadata))\n",
        "                finished.update(metadata.load_requests)\n",
    ),
    # ---- the scheduler ----
    Mutation(
        "preserve a request that has given up its blocks",
        _RECOMPUTE,
        "        preserved = self._dropping_kv or self._preserve(request)\n"
        "        cached = compat.uncomputed_cached_blocks(self.kv_cache_manager, request)\n"
        "        if cached:\n"
        "            self.kv_cache_manager.evict_blocks(cached)\n"
        "        super()._preempt_request(request, *args, **kwargs)\n",
        "        super()._preempt_request(request, *args, **kwargs)\n"
        "        preserved = self._dropping_kv or self._preserve(request)\n",
    ),
    Mutation(
        "leave hashes of blocks that no forward has filled",
        _RECOMPUTE,
        "        if cached:\n            self.kv_cache_manager.evict_blocks(cached)\n",
        "",
    ),
    Mutation(
        "miss the block that was being filled",
        _COMPAT,
        "first = request.num_computed_tokens // single.block_size\n",
        "first = request.num_computed_tokens // single.block_size + 1\n",
    ),
    Mutation(
        "let the engine rest while copies are under way",
        _RECOMPUTE,
        "self._offload is not None and self._offload.has_pending_transfers()",
        "False",
    ),
    Mutation(
        "keep what is being loaded at a reset",
        _RECOMPUTE,
        "                self._abandon_loads()\n",
        "                pass\n",
    ),
    Mutation(
        "allocate before local hits are claimed",
        _COMPAT,
        "        pool.touch(claimed)\n",
        "        claimed.clear()\n",
    ),
    Mutation(
        "free what drafts under way may attend to",
        _COMPAT,
        "kept += scheduler.requests[request_id].num_output_placeholders",
        "pass",
    ),
    Mutation(
        "leave restored requests that hold all blocks to themselves",
        _RECOMPUTE,
        "            self._end_standoff()\n",
        "            pass\n",
    ),
    Mutation(
        "leave blocks to requests whose load has failed",
        _RECOMPUTE,
        "                compat.end_wait(self, request)\n        restored =",
        "                pass\n        restored =",
    ),
    # ---- copies on streams: what is ordered after what ----
    Mutation(
        "copy before the steps so far are through",
        _STREAM,
        "        stream.wait_event(ready)\n",
        "",
    ),
    Mutation(
        "store before the steps so far are through",
        _STREAM,
        "        stream.wait_event(ready)\n",
        '        if direction == "h2d":\n            stream.wait_event(ready)\n',
    ),
    Mutation(
        "load before the steps so far are through",
        _STREAM,
        "        stream.wait_event(ready)\n",
        '        if direction == "d2h":\n            stream.wait_event(ready)\n',
    ),
    Mutation(
        "compute on before stores have read",
        _STREAM,
        "            compute.wait_event(done)\n",
        "",
    ),
    Mutation(
        "compute on when stores may begin",
        _STREAM,
        "            compute.wait_event(done)\n",
        "            compute.wait_event(ready)\n",
    ),
    Mutation(
        "let only loads hold up what computes",
        _STREAM,
        'if direction == "d2h":\n            compute.wait_event',
        'if direction == "h2d":\n            compute.wait_event',
    ),
    Mutation(
        "let the other copies wait for what computed",
        _STREAM,
        "        stream.wait_event(ready)\n",
        '        self._streams["h2d" if direction == "d2h" else "d2h"].wait_event(ready)\n',
    ),
    Mutation(
        "copy on the other direction's stream",
        _STREAM,
        "with self._module.stream(stream):",
        'with self._module.stream(self._streams["h2d" if direction == "d2h" else "d2h"]):',
    ),
    Mutation(
        "wait for the copies so far instead of what computed",
        _STREAM,
        "        ready.record(compute)\n",
        "        ready.record(stream)\n",
    ),
    Mutation(
        "take what computed for the copies",
        _STREAM,
        "        done.record(stream)\n",
        "        done.record(compute)\n",
    ),
    Mutation(
        "record that copies are through before they are enqueued",
        _STREAM,
        "        stream.wait_event(ready)\n        try:",
        "        done.record(stream)\n        stream.wait_event(ready)\n        try:",
    ),
    Mutation(
        "wait for what computed when the copies are enqueued",
        _STREAM,
        "        stream.wait_event(ready)\n        try:\n"
        "            with self._module.stream(stream):\n"
        "                for ranges in batches:\n"
        "                    self._copy(direction, *ranges)\n",
        "        try:\n"
        "            with self._module.stream(stream):\n"
        "                for ranges in batches:\n"
        "                    self._copy(direction, *ranges)\n"
        "            stream.wait_event(ready)\n",
    ),
    Mutation(
        "report copies that are under way",
        _STREAM,
        "if not self.events[1].query():",
        "if False:",
    ),
    Mutation(
        "report copies that may begin",
        _STREAM,
        "if not self.events[1].query():",
        "if not self.events[0].query():",
    ),
    Mutation(
        "use the events of copies that are under way",
        _STREAM,
        "        return StreamTransfer(self, tuple(events), buffer, batches)\n",
        "        self._events.extend(events)\n"
        "        return StreamTransfer(self, tuple(events), buffer, batches)\n",
    ),
    Mutation(
        "use events that what computes may wait for",
        _STREAM,
        "if not self._events and self._retired and self._retired[0][-1].query():",
        "if not self._events and self._retired:",
    ),
    Mutation(
        "use one event for the beginning and the end",
        _STREAM,
        "ready, done = self._take_event(), self._take_event()",
        "ready = done = self._take_event()",
    ),
    Mutation(
        "let the addresses go before the copies are through",
        _STREAM,
        "        return StreamTransfer(self, tuple(events), buffer, batches)\n",
        "        copies = [tuple(map(torch.clone, ranges)) for ranges in batches]\n"
        "        return StreamTransfer(self, tuple(events), buffer.clone(), copies)\n",
    ),
    Mutation(
        "write the next addresses over those of copies under way",
        _STREAM,
        "        return StreamTransfer(self, tuple(events), buffer, batches)\n",
        "        self._buffers.append(buffer)\n"
        "        return StreamTransfer(self, tuple(events), buffer, batches)\n",
    ),
    Mutation(
        "have only as many addresses as there was room for",
        _STREAM,
        "        if count > buffer.shape[1]:\n",
        "        if count > 2 * buffer.shape[1]:\n",
    ),
    Mutation(
        "copy no more than goes into one call",
        _STREAM,
        "                for ranges in batches:\n",
        "                for ranges in batches[:1]:\n",
    ),
    Mutation(
        "go on after a failure with copies under way",
        _STREAM,
        "            stream.synchronize()\n            raise\n",
        "            raise\n",
    ),
    Mutation(
        "tell the operator the other direction",
        _STREAM,
        '_ASCEND_DIRECTIONS = {"h2d": 0, "d2h": 1}',
        '_ASCEND_DIRECTIONS = {"h2d": 1, "d2h": 0}',
    ),
    # ---- the core: requests ----
    Mutation(
        "leave out the last, partial block",
        _TABLE,
        "num_tokens.div_ceil(self.block_tokens) as usize",
        "(num_tokens / self.block_tokens) as usize",
    ),
    Mutation(
        "keep the partial block in the mirror",
        _TABLE,
        "let full = full as usize;",
        "let full = full as usize + 1;",
    ),
    Mutation(
        "keep states in the mirror",
        _TABLE,
        "let full = if group.state { 0 } else { num_tokens / group.block_tokens };",
        "let full = num_tokens.div_ceil(group.block_tokens);",
    ),
    Mutation(
        "keep the store of a request that is gone",
        _TABLE,
        "let keep = ok && !current.doomed;",
        "let keep = ok;",
    ),
    Mutation(
        "free host blocks under a store",
        _TABLE,
        "State::Storing { .. } | State::Loading => {\n"
        "                    Some(Arc::new(current.with(current.state, true)))\n"
        "                }\n"
        "                State::Ready | State::Mirrored => None,",
        "State::Loading => {\n"
        "                    Some(Arc::new(current.with(current.state, true)))\n"
        "                }\n"
        "                State::Storing { .. } | State::Ready | State::Mirrored => None,",
    ),
    Mutation(
        "load each block into another's place",
        _TABLE,
        "let host = current.tables[group][position];",
        "let host = current.tables[group][needed - 1 - (position - first)];",
    ),
    Mutation(
        "copy a block to where another is looked for",
        _TABLE,
        "            self.tables[group][position] = host;\n            self.pairs",
        "            self.tables[group][position] = claimed[claimed.len() - 1 - self.pairs.len()];"
        "\n"
        "            self.pairs",
    ),
    Mutation(
        "store the first state block instead of the last",
        _TABLE,
        "device != 0 && position >= state.unwrap_or(0)",
        "device != 0 && (state.is_none() || position == absent)",
    ),
    Mutation(
        "index what was stored before a reset",
        _TABLE,
        "self.pool.index_since(current.generation, *block, key)?;",
        "self.pool.index(*block, key)?;",
    ),
    Mutation(
        "refuse although mirrors could give way",
        _TABLE,
        "let available = available + self.held_by_mirrors_alone(&mirrors);",
        "let available = available.max(mirrors.len().min(0));",
    ),
    # ---- the core: blocks, events, copies ----
    Mutation(
        "find a block without taking a reference",
        _POOL,
        "|s| (s & INDEXED != 0 && s & ENDING == 0).then(|| s + 1),",
        "|s| (s & INDEXED != 0 && s & ENDING == 0).then_some(s),",
    ),
    Mutation(
        "lose count of the blocks that can be evicted",
        _POOL,
        "        index.evictable.fetch_add(1, Ordering::AcqRel);\n",
        "",
    ),
    Mutation(
        "keep shared blocks when the index is cleared",
        _POOL,
        "        index.generation.fetch_add(1, Ordering::AcqRel);\n"
        "        self.evict(self.capacity);\n",
        "        let _ = index;\n",
    ),
    Mutation(
        "be content with the first worker's report",
        _COMPLETION,
        "if open.missing.fetch_sub(1, Ordering::AcqRel) > 1 {",
        "if open.missing.fetch_sub(1, Ordering::AcqRel) < self.world_size {",
    ),
    Mutation(
        "forget that a worker has failed",
        _COMPLETION,
        "open.failed.store(true, Ordering::Release);",
        "open.failed.store(rank == 0, Ordering::Release);",
    ),
    Mutation(
        "merge what is apart on the host",
        _TRANSFER,
        "a.device + 1 == b.device && a.host + 1 == b.host",
        "a.device + 1 == b.device",
    ),
    Mutation(
        "merge what is apart on the device",
        _TRANSFER,
        "a.device + 1 == b.device && a.host + 1 == b.host",
        "a.host + 1 == b.host",
    ),
    Mutation(
        "copy the first segment of a block alone",
        _TRANSFER,
        "for segment in &self.segments[run[0].group as usize] {",
        "for segment in self.segments[run[0].group as usize].iter().take(1) {",
    ),
    Mutation(
        "let the segments overlap on the host",
        _LAYOUT,
        "host = column + begin - start",
        "host = pool[0] + begin",
    ),
    Mutation(
        "swap device and host blocks",
        _BINDINGS,
        "[pair.group, pair.device, pair.host]",
        "[pair.group, pair.host, pair.device]",
    ),
)
