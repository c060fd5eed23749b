"""An engine with room for every request, in a process of its own.

vLLM has one KV connector per process, so the undisturbed run and the run under test cannot
share one. What runs in that process is in this module because it has to be found by name.
"""

import functools
import multiprocessing
import operator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def undisturbed_engine(model, *, observe=operator.attrgetter("tokens"), **engine_args):
    """Yields a function from jobs to what they get when nothing is ever preempted.

    Args:
        model: The checkpoint's folder.
        observe: What is wanted of an ``Outcome``; it has to be found by name, too.
        engine_args: Further arguments of the engine.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1, spawn, initializer=_start, initargs=(model, engine_args)
    ) as process:
        yield functools.cache(lambda all_jobs: process.submit(_run, all_jobs, observe).result())


def _start(model, engine_args):
    global _engine
    from harness import Engine

    _engine = Engine(model, 600, **{"max_model_len": 1024} | engine_args)


def _run(all_jobs, observe):
    outcome = _engine.run(all_jobs)
    assert not outcome.preemptions
    assert outcome.recomputed_tokens == 0
    return observe(outcome)


def failure(model, all_jobs, engine_args):
    """What an engine says that is to run jobs and cannot, or ``None``."""
    try:
        _start(model, engine_args)
        _engine.run(all_jobs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def tokens_of_transformers(reference, prompt, max_tokens, **inputs):
    """What a model of ``transformers`` itself generates.

    Args:
        reference: The model.
        prompt: Token ids.
        max_tokens: Tokens to generate.
        inputs: Further arguments of its forward.
    """
    ids = torch.tensor([prompt])
    generated = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **inputs,
    )
    return generated[0, len(prompt) :].tolist()
