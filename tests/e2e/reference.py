"""Engines with room for every request, one after another in a process of their own.

vLLM has one KV connector per process, so the undisturbed run and the run under test cannot
share one. What runs in that process is in this module because it has to be found by name.
"""

import contextlib
import functools
import multiprocessing
import operator
from concurrent.futures import ProcessPoolExecutor

import torch


@contextlib.contextmanager
def undisturbed_engines():
    """Yields a function from an engine to a function from jobs to what they get there.

    Nothing is ever preempted on these engines. Only the last of them runs, so whoever asks for
    several does well to ask for one after the other. Arguments of the first function:

    - ``model``: the checkpoint's folder
    - ``observe``: what is wanted of an ``Outcome``; it has to be found by name, too
    - ``engine_args``: further arguments of the engine
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:

        def engine(model, *, observe=operator.attrgetter("tokens"), **engine_args):
            return functools.cache(
                lambda all_jobs: process.submit(
                    _run, model, engine_args, all_jobs, observe
                ).result()
            )

        yield engine


# What ends the engine of this process, that engine, and the arguments that it was started with.
_running, _engine, _asked = contextlib.ExitStack(), None, None


def _start(model, engine_args):
    from harness import Engine

    return Engine(model, 600, **{"max_model_len": 1024} | engine_args)


def _run(model, engine_args, all_jobs, observe):
    global _engine, _asked
    if _asked != (model, engine_args):
        _running.close()
        _engine, _asked = _running.enter_context(_start(model, engine_args)), (model, engine_args)
    outcome = _engine.run(all_jobs)
    assert not outcome.preemptions
    assert outcome.recomputed_tokens == 0
    return observe(outcome)


def failure(model, all_jobs, engine_args):
    """What an engine says that is to run jobs and cannot, or ``None``."""
    try:
        _start(model, engine_args).run(all_jobs)
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
