"""Puts each of the listed faults into a copy of the package and runs the simulator on it.

``python -m simulator.mutate [part of a name or file ...]`` (``make mutations`` for all) prints a
table of what was caught, and how; it fails if the unchanged package is, or if more than two of
fifty faults are not.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from .mutations import MUTATIONS, Mutation

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ROOT = Path(__file__).parents[2]
WORK = ROOT / "target" / "mutations"
# A fault that is not noticed in so many steps, or seconds, is not caught.
STEPS, SECONDS = 200_000, 600
# Enough to tell that faults are what is caught.
UNCHANGED_STEPS = 20_000


def main(parts: list[str]) -> int:
    """Applies the faults whose names or files have one of ``parts``, or all."""
    chosen = [
        mutation
        for mutation in MUTATIONS
        if not parts or any(part in f"{mutation.name} {mutation.file}" for part in parts)
    ]
    # Those that need no build first, so that the core is built anew for the others alone.
    chosen.sort(key=lambda mutation: mutation.in_core)
    sources = _copy_sources()
    _build(sources)
    caught = _run(sources, steps=UNCHANGED_STEPS)
    if caught:
        print(f"the unchanged package fails: {caught}")
        return 1
    missed = 0
    print(f"| {'fault':60} | {'file':22} | caught |\n|{'-' * 62}|{'-' * 24}|---|")
    for mutation in chosen:
        caught = _try(mutation, sources)
        missed += caught is None
        file = Path(mutation.file).name
        print(f"| {mutation.name:60} | {file:22} | {caught or 'NOT CAUGHT'} |", flush=True)
    print(f"\n{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed * 50 > 2 * len(chosen))


def _copy_sources() -> Path:
    sources = WORK / "sources"
    shutil.rmtree(sources, ignore_errors=True)
    sources.mkdir(parents=True)
    for name in ("Cargo.toml", "Cargo.lock", "README.md"):
        shutil.copy(ROOT / name, sources)
    for name in ("rust", "python", "benches"):
        # With new times: cargo builds what is newer than its last build, whatever that was of.
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, sources / name, copy_function=shutil.copy, ignore=ignore)
    return sources


def _build(sources: Path) -> None:
    environment = os.environ | {
        "CARGO_TARGET_DIR": str(WORK / "build"),
        "PYO3_PYTHON": sys.executable,
        "CARGO_PROFILE_DEV_OPT_LEVEL": "1",
    }
    command = ["cargo", "build", "-q", "--lib", "--features", "extension-module"]
    subprocess.run(command, cwd=sources, env=environment, check=True)
    library = WORK / "build" / "debug" / "libpreempt_offload.so"
    target = sources / "python" / "preempt_offload" / "_core.abi3.so"
    target.unlink(missing_ok=True)
    shutil.copy2(library, target)


def _try(mutation: Mutation, sources: Path) -> str | None:
    path = sources / mutation.file
    text = path.read_text()
    if text.count(mutation.right) != 1:
        raise SystemExit(f"{mutation.name!r} fits {text.count(mutation.right)} places, not one")
    path.write_text(text.replace(mutation.right, mutation.wrong))
    try:
        if mutation.in_core:
            _build(sources)
        return _run(sources, steps=STEPS)
    finally:
        path.write_text(text)


def _run(sources: Path, *, steps: int) -> str | None:
    """How the simulator fails on the package in ``sources``, or ``None``."""
    here, there = multiprocessing.Pipe(duplex=False)
    # By a fork, so that vLLM, which takes many seconds to import, is imported once.
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_simulate, args=(sources / "python", steps, there))
    process.start()
    there.close()
    if not here.poll(SECONDS):
        process.kill()
        caught: str | None = "hangs"
    else:
        try:
            caught = here.recv()
        except EOFError:
            caught = "crashes"
    process.join()
    return caught


def _simulate(package: Path, most_steps: int, result: Connection) -> None:
    sys.path.insert(0, str(package))
    import logging

    logging.disable(logging.CRITICAL)
    from .engine import simulate
    from .plan import kept_plans, random_plan

    plans = itertools.chain(
        ((f"plan {name}", plan) for name, plan in kept_plans().items()),
        ((f"seed {seed}", random_plan(seed)) for seed in itertools.count()),
    )
    steps, start = 0, time.monotonic()
    for name, plan in plans:
        try:
            steps += simulate(plan)["steps"]
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1].name
            text = (str(error).splitlines() or [""])[0][:70].replace("|", "/")
            result.send(f"{name}, {steps:,} steps: {type(error).__name__} in {where}: {text}")
            return
        # Well before the parent would call it a hang.
        if steps >= most_steps or time.monotonic() - start >= SECONDS / 2:
            break
    result.send(None)


if __name__ == "__main__":
    import vllm.engine.arg_utils
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.engine  # noqa: F401

    assert "preempt_offload" not in sys.modules
    sys.exit(main(sys.argv[1:]))
