"""Servers in processes of their own, started as ``examples/pd/start.py`` does it."""

import contextlib
import shutil
import socket
import sys
from pathlib import Path

from harness import BLOCK
from preempt_offload import tiny_model

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "pd"))

import start

FLAGS = (
    *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
    *("--block-size", str(BLOCK), "--max-model-len", "512", "--max-num-seqs", "32"),
)


def with_tokenizer(model, folder):
    """A copy of the checkpoint that has a tokenizer."""
    return tiny_model.write_tokenizer(shutil.copytree(model, folder / "model"))


def free_ports(count):
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((start.HOST, 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def running(commands, folder):
    """Runs all of them; yields their logs by name when all are healthy.

    Args:
        commands: By name: the port, the command, and further environment variables.
        folder: Where the logs go.
    """
    with contextlib.ExitStack() as stack:
        started = []
        for name, (port, command, environment) in commands.items():
            log = folder / f"{name}.log"
            environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | environment
            process = stack.enter_context(start.running(command, log, environment))
            started.append((process, port, log))
        for one in started:
            start.wait_until_healthy(*one)
        yield {log.stem: log for _, _, log in started}
