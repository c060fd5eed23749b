"""An engine with room for every request, in a process of its own.

vLLM has one KV connector per process, so the undisturbed run and the run under test cannot
share one. What runs in that process is in this module because it has to be found by name.
"""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def undisturbed_engine(model, **engine_args):
    """Yields a function from jobs to the tokens they get when nothing is ever preempted."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1, spawn, initializer=_start, initargs=(model, engine_args)
    ) as process:
        yield functools.cache(lambda all_jobs: process.submit(_run, all_jobs).result())


def _start(model, engine_args):
    global _engine
    from harness import Engine

    _engine = Engine(model, 600, **{"max_model_len": 1024} | engine_args)


def _run(all_jobs):
    outcome = _engine.run(all_jobs)
    assert not outcome.preemptions
    assert outcome.recomputed_tokens == 0
    return outcome.tokens


def failure(model, all_jobs, engine_args):
    """What an engine says that is to run jobs and cannot, or ``None``."""
    try:
        _start(model, engine_args)
        _engine.run(all_jobs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
