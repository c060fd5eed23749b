"""What will happen in a simulation: a setup and a list of events, all from one seed."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any, Literal

Kind = Literal["full", "window", "chunked", "state"]


@dataclasses.dataclass(frozen=True)
class Group:
    """A KV cache group.

    Attributes:
        kind: What its layers are.
        block_tokens: Tokens per block.
        reach: Tokens of the sliding window, or of a chunk of chunked local attention.
        layers: Its layers. The first layers of all groups share a storage, and so on.
    """

    kind: Kind
    block_tokens: int
    reach: int = 0
    layers: int = 1


@dataclasses.dataclass(frozen=True)
class Setup:
    """The engine of a simulation.

    Attributes:
        groups: Its KV cache groups.
        num_blocks: Device blocks, null block included.
        host_ratio: Host blocks per device block.
        share: Whether full blocks are shared between preserved requests.
        world_size: Workers.
        context_parallel: Workers that a block of full attention spreads its tokens over in turn,
            as with decode context parallelism; it divides ``world_size``.
        asynchronous: Async scheduling: a step is scheduled while one is under way.
        prefix_caching: The device's own prefix cache.
        priorities: Priority scheduling instead of first come, first served.
        max_seqs: Requests in a batch.
        max_tokens: Tokens in a batch.
        long_prefill: vLLM's threshold that cuts long prompts into chunks; 0: none.
        drafts: Speculative tokens per step.
        lookahead: Whether drafts have KV of their own, as with EAGLE or a draft model.
        state_mode: vLLM's cache mode of state groups: none, align or all.
        second_runner: Whether the workers call as vLLM's second model runner does.
        loads_last: Whether loads begin after the forward, as in newer vLLM, or before it.
        pulls: Where the connector that pulls KV from prefill nodes is: before ours or after it in
            vLLM's MultiConnector, or in ours; empty: there is none.
        role: The engine's role: a consumer returns what it cannot preserve.
        unfenced: Whether newer vLLM, too, preempts requests with a step under way.
        delay: The most steps that a copy takes.
        streams: Whether copies run on the streams of a device, or by the processor.
        failures: Copies out of a thousand that fail.
    """

    groups: tuple[Group, ...] = (Group("full", 4),)
    num_blocks: int = 16
    host_ratio: float = 1.0
    share: bool = False
    world_size: int = 1
    context_parallel: int = 1
    asynchronous: bool = False
    prefix_caching: bool = False
    priorities: bool = False
    max_seqs: int = 4
    max_tokens: int = 32
    long_prefill: int = 0
    drafts: int = 0
    lookahead: bool = False
    state_mode: Literal["none", "align", "all"] = "none"
    second_runner: bool = False
    loads_last: bool = False
    pulls: Literal["", "before", "after", "ours"] = ""
    role: Literal["kv_both", "kv_consumer"] = "kv_both"
    unfenced: bool = False
    streams: bool = False
    delay: int = 2
    failures: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of a layer's block in every group: one or more tags for each of its tokens."""
        return 8 * math.lcm(*(group.block_tokens for group in self.groups))

    def ranks_of(self, group: Group) -> int:
        """Workers that the tokens of a block of this group are spread over."""
        return self.context_parallel if group.kind == "full" else 1

    @property
    def has_states(self) -> bool:
        """Whether any group's blocks hold states."""
        return any(group.kind == "state" for group in self.groups)

    @property
    def layer_names(self) -> list[list[str]]:
        """The names of the layers of each group."""
        return [
            [f"group.{i}.layer.{layer}" for layer in range(group.layers)]
            for i, group in enumerate(self.groups)
        ]


@dataclasses.dataclass(frozen=True)
class Add:
    """A request comes in.

    Attributes:
        remote: Whether a prefill node has the KV of its prompt, if there is one.
    """

    request: int
    prompt: tuple[int, ...]
    max_tokens: int
    stop_token: int | None = None
    priority: int = 0
    adapter: int = 0
    remote: bool = False


@dataclasses.dataclass(frozen=True)
class Abort:
    """A client goes away, between steps or while a step is under way."""

    request: int
    within_step: bool = False


@dataclasses.dataclass(frozen=True)
class Reset:
    """The prefix cache is reset while the engine runs."""

    running: bool
    connector: bool


@dataclasses.dataclass(frozen=True)
class Pause:
    """The engine is paused and comes to rest.

    Attributes:
        wait: Whether the requests that run go on until they have ended.
        clear: Whether the prefix cache is reset then, as before new weights are loaded.
    """

    wait: bool
    clear: bool


@dataclasses.dataclass(frozen=True)
class Resume:
    """The engine is not paused any more."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """The engine takes steps."""

    count: int


Event = Add | Abort | Reset | Pause | Resume | Steps
_EVENTS = {kind.__name__.lower(): kind for kind in (Add, Abort, Reset, Pause, Resume, Steps)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A simulation. ``seed`` also decides what the events leave open: how long copies take,
    which of them fail, and how many drafts are right."""

    seed: int
    setup: Setup
    events: tuple[Event, ...]

    def to_json(self) -> str:
        """One line for the setup and one for each event."""
        setup = dataclasses.asdict(self.setup)
        lines = [json.dumps({"seed": self.seed, "setup": setup})]
        lines += [
            json.dumps({type(event).__name__.lower(): dataclasses.asdict(event)})
            for event in self.events
        ]
        return "\n".join(lines)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads what ``to_json`` wrote."""
        head, *lines = map(json.loads, text.strip().splitlines())
        setup = head["setup"]
        setup["groups"] = tuple(Group(**group) for group in setup["groups"])
        events = [_event(*line.popitem()) for line in lines]
        return cls(head["seed"], Setup(**setup), tuple(events))


def _event(kind: str, fields: dict[str, Any]) -> Event:
    if "prompt" in fields:
        fields["prompt"] = tuple(fields["prompt"])
    event: Event = _EVENTS[kind](**fields)
    return event


def kept_plans() -> dict[str, Plan]:
    """Plans that show faults which random ones rarely come near, by what they show."""
    files = sorted((Path(__file__).parent / "plans").glob("*.jsonl"))
    return {file.stem: Plan.from_json(file.read_text()) for file in files}


# ---- at random ----

VOCABULARY = 50
MAX_LENGTH = 80
# Tokens of the smallest blocks.
BLOCK_TOKENS = 4


def random_plan(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(seed)
    priorities = rng.random() < 0.5
    events = _random_events(rng, priorities=priorities)
    longest = max(
        len(event.prompt) + event.max_tokens for event in events if isinstance(event, Add)
    )
    return Plan(seed, _random_setup(rng, priorities, longest), tuple(events))


def _random_setup(rng: random.Random, priorities: bool, longest: int) -> Setup:
    prefix_caching = rng.random() < 0.5
    drafts = rng.choice((0, 0, 0, 1, 3))
    groups = _random_groups(rng)
    if prefix_caching and len({dataclasses.replace(g, layers=1) for g in groups}) == 1:
        # vLLM's prefix cache takes several groups only if they differ.
        groups = groups[:1]
    states = any(group.kind == "state" for group in groups)
    asynchronous = rng.random() < 0.5
    state_mode: Literal["none", "align", "all"] = "none"
    if states and prefix_caching:
        # With drafts and mode "all" nothing is preserved.
        state_mode = "align" if drafts else rng.choice(("align", "all"))
    setup = Setup(
        groups=groups,
        # At least what the longest request needs, and the null block.
        num_blocks=1
        + len(groups) * -(-(longest + 2 * drafts) // BLOCK_TOKENS)
        + rng.choice((0, 0, 1, 3, 8)),
        host_ratio=rng.choice((0.2, 0.5, 1.0, 2.0, 4.0)),
        share=prefix_caching and rng.random() < 0.5,
        world_size=rng.choice((1, 1, 2, 3)),
        asynchronous=asynchronous,
        prefix_caching=prefix_caching,
        priorities=priorities,
        max_seqs=rng.choice((2, 4, 8, 16)),
        max_tokens=rng.choice((12, 24, 64)),
        long_prefill=rng.choice((0, 8)),
        drafts=drafts,
        lookahead=drafts > 0 and rng.random() < 0.5,
        state_mode=state_mode,
        second_runner=rng.random() < 0.3,
        loads_last=rng.random() < 0.5,
        # Of states, no prompt is pulled: its state would have to be that before its last token.
        pulls="" if states else rng.choice(("", "before", "after", "ours")),
        role=rng.choice(("kv_both", "kv_both", "kv_consumer")),
        unfenced=rng.random() < 0.3,
        streams=rng.random() < 0.5,
        delay=rng.choice((0, 1, 3, 6)),
        failures=rng.choice((0, 0, 0, 30, 300)),
    )
    if [group.kind for group in groups] == ["full"]:
        # The only ones that all versions of vLLM spread.
        ranks = rng.choice((1, setup.world_size))
        num_blocks = 1 + -(-(setup.num_blocks - 1) // ranks)
        setup = dataclasses.replace(setup, context_parallel=ranks, num_blocks=num_blocks)
    return setup


def _random_groups(rng: random.Random) -> tuple[Group, ...]:
    kinds: list[Kind] = ["full"] * (rng.random() < 0.85)
    kinds += rng.choices(("window", "chunked", "state"), k=rng.choice((0, 0, 1, 1, 2, 3)))
    kinds = kinds or ["full"]
    # vLLM's prefix cache takes chunked attention and states with blocks of one size only.
    sizes = {"chunked", "state"}.isdisjoint(kinds) and rng.random() < 0.5
    return tuple(_random_group(rng, kind, (1, 2, 3) if sizes else (1,)) for kind in kinds)


def _random_group(rng: random.Random, kind: Kind, sizes: tuple[int, ...]) -> Group:
    # Windows may begin anywhere; chunks, as in real models, where a block begins.
    reaches: dict[str, tuple[int, ...]] = {"window": (3, 7, 8, 12, 20), "chunked": (8, 12, 20)}
    return Group(
        kind,
        block_tokens=rng.choice(sizes) * BLOCK_TOKENS,
        reach=rng.choice(reaches.get(kind, (0,))),
        layers=rng.choice((1, 1, 2)),
    )


def _random_events(rng: random.Random, *, priorities: bool) -> list[Event]:
    events: list[Event] = []
    lengths = rng.choice(((1, 8), (1, 12), (1, 40), (20, 40)))
    prefixes = [_tokens(rng, rng.randrange(4, 4 + lengths[1])) for _ in range(3)]
    prompts: list[tuple[int, ...]] = []
    added = 0
    paused = False
    for _ in range(rng.randrange(10, 60)):
        if paused and rng.random() < 0.4:
            events.append(Resume())
            paused = False
        what = rng.random()
        if what < 0.7 or not added:
            prompt = _tokens(rng, rng.randrange(*lengths))
            if rng.random() < 0.5:
                prompt = rng.choice(prefixes) + prompt[: rng.randrange(0, 20)]
            if prompts and rng.random() < 0.3:
                prompt = rng.choice(prompts[-4:])
            prompts.append(prompt[: MAX_LENGTH - 40])
            events.append(
                Add(
                    request=added,
                    prompt=prompts[-1],
                    max_tokens=rng.choice((1, 10, 30, 40)),
                    stop_token=rng.randrange(VOCABULARY) if rng.random() < 0.2 else None,
                    priority=rng.randrange(3) if priorities else 0,
                    adapter=rng.choice((0, 0, 1, 2)),
                    remote=rng.random() < 0.5,
                )
            )
            added += 1
        elif what < 0.82:
            recent = rng.randrange(max(added - 6, 0), added)
            events.append(Abort(recent, within_step=rng.random() < 0.5))
        elif what < 0.85:
            events.append(Reset(rng.random() < 0.7, rng.random() < 0.5))
        elif what < 0.87:
            events.append(Pause(wait=rng.random() < 0.5, clear=rng.random() < 0.5))
            paused = True
        if rng.random() < 0.6:
            events.append(Steps(rng.choice((1, 1, 2, 4, 8))))
    if rng.random() < 0.3:
        # Nobody is left, maybe with copies under way.
        events += [Abort(request) for request in range(added)]
    return events


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))
