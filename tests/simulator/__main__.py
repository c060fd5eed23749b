"""The simulator's command line: ``python -m simulator --help``."""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from .engine import simulate
from .plan import Plan, random_plan
from .shrink import shrink


def main() -> int:
    """Runs plans by seed, or one from a file; the exit code tells whether all went well."""
    parser = argparse.ArgumentParser(prog="simulator", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--stride", type=int, default=1, help="from one seed to the next")
    parser.add_argument("--steps", type=int, default=20_000, help="stop after so many steps")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="or after so long")
    parser.add_argument("--shrink-seconds", type=float, default=60, help="to shorten a failure")
    parser.add_argument("--plan", type=Path, help="run this plan instead, and tell what happens")
    args = parser.parse_args()
    # What the package says of failed copies and full hosts is expected here.
    logging.disable(logging.CRITICAL)
    if args.plan:
        _print_counts(simulate(Plan.from_json(args.plan.read_text()), trace=print))
        return 0
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    happened, start = Counter[str](), time.monotonic()
    for seed in itertools.count(args.seed, args.stride):
        plan = random_plan(seed)
        try:
            happened += simulate(plan)
        except Exception:
            traceback.print_exc()
            _report(shrink(plan, _fails, seconds=args.shrink_seconds))
            return 1
        if happened["steps"] >= args.steps or time.monotonic() - start >= args.seconds:
            break
    _print_counts(happened)
    rate = happened["steps"] / (time.monotonic() - start)
    print(f"{happened['steps']:,} steps, {rate:,.0f} per second, up to seed {seed}")
    return 0


def _print_counts(happened: Counter[str]) -> None:
    for name, count in sorted(happened.items()):
        print(f"{count:>12,}  {name}")


def _fails(plan: Plan) -> bool:
    try:
        simulate(plan)
    except Exception:
        return True
    return False


def _report(plan: Plan) -> None:
    path = Path(f"simulator-seed-{plan.seed}.jsonl")
    path.write_text(plan.to_json())
    print(f"\nSeed {plan.seed} fails. The shortest sequence found that fails:\n")
    print(plan.to_json())
    try:
        simulate(plan)
    except Exception as error:
        print(f"\n{type(error).__name__}: {error}")
    print(f"\nReplay it:  make simulate PLAN={path}")


if __name__ == "__main__":
    sys.exit(main())
