"""The scheduler role in a small world where every block's content is known.

A block's content is the tokens that its KV was computed from, and the weights (the epoch)
it was computed with. Requests come, run out of device blocks, are preempted and come
back, while stores and loads take their time and fail, requests are aborted and weights
change; a request that runs must always find what its own tokens lead to.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from unit_support import Request, Scene

BLOCK_TOKENS = (2, 4)
HASH_TOKENS = 2
NUM_HOST_BLOCKS = 40
NUM_DEVICE_BLOCKS = 34
WORLD_SIZE = 2
MAX_TOKENS = 30  # So that a hash, which is the tokens themselves, fits the index.
GARBAGE = ("garbage", ())


@dataclasses.dataclass(eq=False)
class Live:
    """A request as vLLM's scheduler has it."""

    request: Request
    script: tuple[int, ...]  # Its tokens, those of the future included.
    state: str = "waiting"  # waiting, running, loading, landed
    computed: int = 0
    drafts: int = 0  # Those of the computed tokens that will be rejected.
    blocks: list[list[int]] = dataclasses.field(default_factory=lambda: [[] for _ in BLOCK_TOKENS])
    aborted: bool = False
    abandoned: bool = False  # What is being loaded is not valid any more.

    @property
    def id(self):
        return self.request.request_id

    def learn(self, num_new):
        """Tokens come out of the steps under way, and ``num_new`` more from this one."""
        request = self.request
        request.num_tokens += request.num_output_placeholders + num_new
        request.num_output_placeholders = 0
        self.computed -= self.drafts if self.state == "running" else 0
        self.drafts = 0
        request.block_hashes = [
            bytes(self.script[:end])
            for end in range(HASH_TOKENS, request.num_tokens + 1, HASH_TOKENS)
        ]

    @property
    def known(self):
        """Tokens once the steps under way are through."""
        return self.request.num_tokens + self.request.num_output_placeholders


class World:
    """Plays vLLM's scheduler and two workers around the scheduler role."""

    def __init__(self, seed, share_blocks):
        self.random = random.Random(seed)
        self.scene = Scene(
            num_host_blocks=NUM_HOST_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            world_size=WORLD_SIZE,
            share_blocks=share_blocks,
            hash_tokens=HASH_TOKENS,
        )
        self.live: list[Live] = []
        self.num_added = 0
        self.epoch = 0
        self.device = {}
        self.host = {}
        self.free = list(range(1, NUM_DEVICE_BLOCKS + 1))
        self.stores: list[tuple[int, int, bool]] = []  # Event, rank and verdict to report.
        self.loads: list[tuple[Live, bool]] = []  # Loads to report, with success or not.
        self.landed: set[Live] = set()  # Their load is through; not scheduled since.

    def chance(self, probability):
        return self.random.random() < probability

    def having(self, state):
        return [live for live in self.live if live.state == state]

    # ---- device blocks ----

    def extend(self, live, num_tokens):
        """Gives ``live`` blocks for ``num_tokens``, if there are enough."""
        missing = [
            max(0, -(-num_tokens // tokens) - len(blocks))
            for tokens, blocks in zip(BLOCK_TOKENS, live.blocks, strict=True)
        ]
        if sum(missing) > len(self.free):
            return False
        for blocks, n in zip(live.blocks, missing, strict=True):
            blocks += [self.free.pop(0) for _ in range(n)]
        return True

    def lose(self, live):
        """``live`` gives its blocks back and has to start again."""
        for blocks in live.blocks:
            self.free += blocks
            blocks.clear()
        live.state, live.computed, live.abandoned = "waiting", 0, False
        live.drafts = 0

    def compute(self, live, start, end):
        """A forward over the tokens ``start..end`` of ``live`` writes their blocks."""
        for tokens, blocks in zip(BLOCK_TOKENS, live.blocks, strict=True):
            for position in range(start // tokens, -(-end // tokens)):
                covered = min((position + 1) * tokens, end)
                wrong = (-1,) * max(0, covered - live.known)
                content = live.script[: covered - len(wrong)] + wrong
                self.device[blocks[position]] = (self.epoch, content)

    def check(self, live):
        """The blocks of ``live`` hold what its computed tokens lead to."""
        computed = live.computed - live.drafts
        for tokens, blocks in zip(BLOCK_TOKENS, live.blocks, strict=True):
            for position in range(-(-computed // tokens)):
                covered = min((position + 1) * tokens, computed)
                epoch, content = self.device[blocks[position]]
                assert epoch == self.epoch
                assert content[:covered] == live.script[:covered]

    # ---- vLLM's scheduler ----

    def step(self):
        forwards = self.schedule()
        meta = self.scene.step()
        self.carry_out(meta)
        for live, end, asynchronous in forwards:
            sampled = end >= live.known
            live.drafts = max(0, end - live.known)
            self.compute(live, live.computed, end)
            live.computed = end
            if sampled and asynchronous:
                live.request.num_output_placeholders += 1
            elif sampled:
                live.learn(1)
        for live in self.having("running"):
            self.check(live)
        self.check_answers()

    def schedule(self):
        """Running requests go on, at the cost of the youngest; then others get blocks."""
        forwards, preempted = [], False
        running = self.having("running")
        while running:
            live = running.pop(0)
            if live.drafts:
                continue  # How many of them stay is not known yet.
            end = min(live.computed + self.random.randint(1, 5), live.known, MAX_TOKENS - 1)
            asynchronous = self.chance(0.3)
            if asynchronous and end == live.known < MAX_TOKENS - 1:
                end += self.random.choice([0, 1])
            while not self.extend(live, end):
                victim = running.pop() if running else live
                self.preempt(victim)
                preempted = True
                if victim is live:
                    break
            if live.state == "running" and end > live.computed:
                forwards.append((live, end, asynchronous))
        for live in self.having("landed"):
            if self.chance(0.7):
                self.allocate(live, 0)
                live.state = "running"
        waiting = self.having("waiting")
        while waiting and not preempted:
            self.schedule_waiting(waiting.pop(0))
        return forwards

    def allocate(self, live, num_external_tokens):
        self.scene.allocate(live.request, live.blocks, num_external_tokens)
        self.landed.discard(live)

    def preempt(self, live):
        blocks = [list(blocks) for blocks in live.blocks]
        self.scene.preempt(live.request, blocks, live.computed)
        self.lose(live)
        # It goes to the front of the queue.
        self.live.remove(live)
        self.live.insert(0, live)

    def schedule_waiting(self, live):
        request, largest = live.request, max(BLOCK_TOKENS)
        hit = min(self.random.choice([0, 0, 1, 2]), (request.num_tokens - 1) // largest) * largest
        num_tokens, asynchronous = self.scene.ask(request, hit)
        assert self.scene.ask(request, hit) == (num_tokens, asynchronous)
        if num_tokens is None:
            storing = self.scene.state(live.id) == "Storing"
            assert storing or request.num_output_placeholders or self.landed - {live}
            return
        assert hit + num_tokens <= max(hit, request.num_tokens - 1)
        if request.num_output_placeholders or not self.extend(live, max(hit + num_tokens, 1)):
            self.lose(live)
            return
        self.compute(live, 0, hit)  # Where the device's own prefix cache has it from.
        self.allocate(live, num_tokens)
        live.computed = hit + num_tokens
        live.state = "loading" if asynchronous else "running"

    def add(self):
        prompt, family = self.random.randint(1, 12), self.random.choice([0, 0, 1])
        shared = min(prompt, self.random.choice([4, 9]))
        own = self.random.randint(2, 255)
        script = (*[family] * shared, *[own] * (MAX_TOKENS - shared))
        live = Live(Request(f"r{self.num_added}", 0), script)
        live.learn(prompt)
        self.num_added += 1
        self.live.append(live)

    def end(self, live):
        self.scene.scheduler.request_finished(live.id)
        if live.state == "loading":
            live.aborted = True  # vLLM frees its blocks when the load is through.
            return
        self.lose(live)
        self.live.remove(live)
        self.landed.discard(live)

    def reset(self):
        """New weights: running requests lose their KV, and so does everything else."""
        for live in self.having("running") + self.having("landed"):
            self.lose(live)
            live.request.num_preemptions += 1
        loading = self.having("loading")
        for live in loading:
            live.abandoned = True
        assert self.scene.scheduler.reset_cache() is not bool(loading)
        self.epoch += 1

    # ---- the workers ----

    def carry_out(self, meta):
        """Copies the step's blocks: stores first, then loads, then the forward writes."""
        if meta.store_event is not None:
            failing = self.random.choice([None] * 8 + [0, 1])
            for _, device, host in meta.store_pairs.tolist():
                self.host[host] = self.device[device] if failing is None else GARBAGE
            self.stores += [(meta.store_event, rank, rank != failing) for rank in range(WORLD_SIZE)]
        if meta.load_requests:
            ok = not self.chance(0.1)
            for _, device, host in meta.load_pairs.tolist():
                self.device[device] = self.host[host] if ok else GARBAGE
            loading = {live.id: live for live in self.having("loading")}
            self.loads += [(loading[request_id], ok) for request_id in meta.load_requests]

    def report(self, probability):
        """Some of what is through is reported, in any order."""
        self.random.shuffle(self.stores)
        for store in [store for store in self.stores if self.chance(probability)]:
            self.stores.remove(store)
            event, rank, ok = store
            self.scene.report_store(event, ok=ok, ranks=[rank])
        for load in [load for load in self.loads if self.chance(probability)]:
            self.loads.remove(load)
            live, ok = load
            self.scene.report_loads(live.id, failed=() if ok else [live.id])
            if live.aborted:
                self.lose(live)
                self.live.remove(live)
                continue
            valid = ok and not live.abandoned
            assert (self.scene.state(live.id) == "Mirrored") is valid
            self.landed.add(live)
            if valid:
                live.state = "landed"
                self.check(live)
            else:
                self.lose(live)

    # ---- what must always hold ----

    def check_answers(self):
        scheduler = self.scene.scheduler
        for live in self.live:
            if scheduler.has_preempted_request(live.id):
                assert live.state == "waiting"
        pending = bool(self.stores or self.having("loading"))
        assert scheduler.has_pending_transfers() is pending

    # ---- all of it ----

    def run(self, num_steps):
        for _ in range(num_steps):
            if len(self.live) < 6 and self.chance(0.5):
                self.add()
            if self.live and self.chance(0.03):
                self.end(self.random.choice(self.live))
            if self.chance(0.01):
                self.reset()
            self.go_on()

    def go_on(self):
        self.step()
        self.report(0.6)
        for live in self.live:
            if self.chance(0.7):
                live.learn(0)
        for live in self.having("running"):
            if live.computed == MAX_TOKENS - 1:
                self.end(live)

    def finish_all(self):
        """Undisturbed, everybody gets to the end."""
        for _ in range(1000):
            if not self.live:
                break
            self.go_on()
        assert not self.live

    def abort_all(self):
        """Nothing may stay behind."""
        for live in list(self.live):
            self.end(live)
        self.step()
        self.report(1)
        self.scene.assert_nothing_left()
        assert sorted(self.free) == list(range(1, NUM_DEVICE_BLOCKS + 1))


@pytest.mark.parametrize("share_blocks", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_finds_its_own_kv(seed, share_blocks):
    world = World(seed, share_blocks)
    world.run(1500)
    world.finish_all()
    world.run(1500)
    world.abort_all()
    # Else it would have proved nothing.
    stats = world.scene.scheduler.stats
    assert world.epoch > 10
    assert min(stats.preserved, stats.restored, stats.mirrored_blocks) > 100
    assert stats.not_preserved > 20
    assert (stats.shared_blocks > 100) is share_blocks
