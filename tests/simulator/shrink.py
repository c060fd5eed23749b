"""A failing plan to the shortest that still fails."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from .plan import Add, Plan, Setup, Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def shrink(plan: Plan, fails: Callable[[Plan], bool], *, seconds: float) -> Plan:
    """Simplifies ``plan`` as long as it fails, for at most about ``seconds``."""
    deadline = time.monotonic() + seconds
    improved = True
    while improved:
        improved = False
        for simpler in _simpler(plan):
            if time.monotonic() > deadline:
                return plan
            if fails(simpler):
                plan, improved = simpler, True
                break
    return plan


def _simpler(plan: Plan) -> Iterator[Plan]:
    """Plans that are one move simpler, the boldest moves first."""
    events = plan.events
    size = len(events) // 2
    while size:
        for start in range(0, len(events), size):
            yield dataclasses.replace(plan, events=events[:start] + events[start + size :])
        size //= 2
    for setup in _simpler_setups(plan.setup):
        yield dataclasses.replace(plan, setup=setup)
    for i, event in enumerate(events):
        for simpler in _simpler_events(event):
            yield dataclasses.replace(plan, events=(*events[:i], simpler, *events[i + 1 :]))


def _simpler_setups(setup: Setup) -> Iterator[Setup]:
    if len(setup.groups) > 1:
        for i in range(len(setup.groups)):
            yield dataclasses.replace(setup, groups=setup.groups[:i] + setup.groups[i + 1 :])
    plain = Setup(delay=0)
    for field in dataclasses.fields(Setup):
        default, value = getattr(plain, field.name), getattr(setup, field.name)
        if field.name not in ("groups", "num_blocks") and value != default:
            yield dataclasses.replace(setup, **{field.name: default})
    if setup.delay:
        yield dataclasses.replace(setup, delay=setup.delay - 1)


def _simpler_events(event: object) -> Iterator[Add | Steps]:
    if isinstance(event, Steps) and event.count > 1:
        yield Steps(event.count // 2)
        yield Steps(event.count - 1)
    if isinstance(event, Add):
        if len(event.prompt) > 1:
            yield dataclasses.replace(event, prompt=event.prompt[: len(event.prompt) // 2])
            yield dataclasses.replace(event, prompt=event.prompt[:-1])
        if event.max_tokens > 1:
            yield dataclasses.replace(event, max_tokens=event.max_tokens // 2)
        for name, value in (("stop_token", None), ("priority", 0), ("adapter", 0)):
            if getattr(event, name) != value:
                yield dataclasses.replace(event, **{name: value})
