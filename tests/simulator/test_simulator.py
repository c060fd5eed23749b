"""A share of all plans, and what makes the simulator worth trusting.

``PREEMPT_OFFLOAD_SIMULATED_STEPS`` says how many steps each of the parts takes.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .engine import simulate
from .language import Sentence
from .mutations import MUTATIONS
from .plan import Add, Group, Plan, Reset, Setup, Steps, kept_plans, random_plan
from .shrink import shrink

PARTS = 4
STEPS = int(os.environ.get("PREEMPT_OFFLOAD_SIMULATED_STEPS", "50000"))

# What a share of plans must have led to.
WORTHWHILE = (
    "aborts in state Loading",
    "aborts in state Mirrored",
    "aborts in state Ready",
    "aborts in state Storing",
    "finished_stopped",
    "mirrored blocks",
    "not preserved",
    "pauses",
    "pulls",
    "resets done",
    "restored tokens",
    "returned to the proxy",
    "shared blocks",
)


@pytest.fixture(autouse=True)
def quiet():
    """What the package says of failed copies and full hosts is expected here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_slot_of_random_engines(part, record_property):
    happened = Counter()
    for seed in itertools.count(part, PARTS):
        try:
            happened += simulate(random_plan(seed))
        except Exception as error:
            error.add_note(
                f"Seed {seed}. For the shortest sequence that fails:  make simulate SEED={seed}"
            )
            raise
        if happened["steps"] >= STEPS:
            break
    record_property("simulated", dict(happened))
    missing = [what for what in WORTHWHILE if not happened[what]]
    assert not missing, f"never happened in {happened['steps']} steps: {missing}"


@pytest.mark.parametrize("name", kept_plans())
def test_every_slot_of_engines_that_are_kept(name):
    assert simulate(kept_plans()[name])["restored"]


PLAN = Plan(
    seed=0,
    setup=Setup(groups=(Group("full", 4, layers=2), Group("window", 4, 8)), num_blocks=34),
    events=(
        Add(0, tuple(range(30)), 30),
        Add(1, tuple(range(20, 45)), 30),
        Steps(3),
        Add(2, (4, 5, 6), 12, stop_token=9, priority=1, adapter=2),
        Reset(running=True, connector=False),
    ),
)


def test_a_plan_survives_being_written_down():
    assert Plan.from_json(PLAN.to_json()) == PLAN
    plan = random_plan(17)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_happens_the_same_way_again():
    assert simulate(PLAN) == simulate(PLAN)
    assert simulate(PLAN)["restored"] > 0


def test_blocks_may_be_spread_over_ranks():
    spread = dataclasses.replace(
        PLAN.setup,
        groups=(Group("full", 4, layers=2),),
        num_blocks=12,
        world_size=4,
        context_parallel=2,
    )
    happened = simulate(dataclasses.replace(PLAN, setup=spread))
    assert happened["restored"] > 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("state_mode", ["none", "align"])
def test_states_are_preserved_with_drafts(state_mode, asynchronous):
    setup = dataclasses.replace(
        PLAN.setup,
        groups=(Group("full", 4), Group("state", 4)),
        num_blocks=30,
        asynchronous=asynchronous,
        prefix_caching=state_mode == "align",
        drafts=3,
        state_mode=state_mode,
    )
    assert simulate(dataclasses.replace(PLAN, setup=setup))["restored"] > 0


def test_the_shortest_plan_that_fails_is_found():
    def fails(plan):
        return any(isinstance(event, Add) and 7 in event.prompt for event in plan.events)

    shortest = shrink(PLAN, fails, seconds=60)
    (event,) = shortest.events
    assert event == Add(0, tuple(range(8)), 1)
    assert shortest.setup == Setup(groups=(Group("window", 4, 8),), num_blocks=34, delay=0)


def test_tags_follow_from_all_that_was_said():
    said = Sentence((1, 2, 3), adapter=0, weights=0)
    others = [
        Sentence((2, 2, 3), adapter=0, weights=0),
        Sentence((1, 2, 3), adapter=1, weights=0),
        Sentence((1, 2, 3), adapter=0, weights=1),
    ]
    tags = [sentence.tags_to(6).tolist() for sentence in (said, *others)]
    assert len({tag for of_one in tags for tag in of_one}) == 4 * 6
    assert Sentence(tuple(said.said(0, 5)), adapter=0, weights=0).tags_to(6).tolist() == tags[0]


def test_a_failing_plan_is_reported_and_can_be_replayed(tmp_path):
    """With a fault in the package: nothing is ever loaded."""
    fault = (
        "from preempt_offload.devices import Ended, HostDevice, TransferResult\n"
        "begin = HostDevice.begin\n"
        "def lazy(self, direction, pairs):\n"
        "    done = Ended(TransferResult(ok=True, num_bytes=0))\n"
        "    return done if direction == 'h2d' else begin(self, direction, pairs)\n"
        "HostDevice.begin = lazy\n"
        "from simulator.__main__ import main\n"
        "raise SystemExit(main())\n"
    )
    tests = str(Path(__file__).parents[1])

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-c", fault, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": tests},
            check=False,
        )

    found = run("--steps", "20000", "--shrink-seconds", "10")
    assert found.returncode == 1
    seed, path = re.search(
        r"Seed (\d+) fails.*?\n\nWrongKV: .*?\n\nReplay it:  make simulate PLAN=(\S+)",
        found.stdout,
        re.S,
    ).groups()
    assert path == f"simulator-seed-{seed}.jsonl"
    replayed = run("--plan", path)
    assert replayed.returncode == 1
    assert "restores" in replayed.stdout
    assert "WrongKV" in replayed.stderr


def test_every_listed_fault_fits_the_code():
    root = Path(__file__).parents[2]
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 50
    for mutation in MUTATIONS:
        places = (root / mutation.file).read_text().count(mutation.right)
        assert places == 1, f"{mutation.name!r} fits {places} places in {mutation.file}"
