"""Servers in processes of their own, started as ``examples/pd/start.py`` does it."""

import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from harness import BLOCK
from preempt_offload import tiny_model

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "pd"))

import load  # noqa: F401
import start

# Of the tiny model.
BLOCK_BYTES = 49152
FLAGS = (
    *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
    *("--block-size", str(BLOCK), "--max-model-len", "512", "--max-num-seqs", "32"),
)


def with_tokenizer(model, folder):
    """A copy of the checkpoint that has a tokenizer."""
    return tiny_model.write_tokenizer(shutil.copytree(model, folder / "model"))


def free_ports(count):
    """Ports to listen on: free, and none that the system gives to a connection in the meantime."""
    ports = []
    for port in random.sample(range(20_000, 32_768), 12_768):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((start.HOST, port))
            ports.append(port)
        if len(ports) == count:
            break
    return ports


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that runs: its base URL, its log file, and its process."""

    url: str
    log: Path
    process: subprocess.Popen

    def text(self):
        return self.log.read_text()

    def counters(self, labels=""):
        """Sums of the metrics over all sets of labels that contain these, by name."""
        with urllib.request.urlopen(self.url + "/metrics") as response:
            metrics = response.read().decode()
        sums = {}
        for name, found, value in re.findall(r"^(\w[\w:]*)(?:\{(.*)\})? (\S+)$", metrics, re.M):
            if labels in found:
                sums[name] = sums.get(name, 0) + float(value)
        return sums

    def kill(self):
        """Ends it with all its children, as the loss of its machine would."""
        os.killpg(self.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def running(commands, folder):
    """Runs all of them; yields them by name when all are healthy.

    Args:
        commands: By name: the port, the command, and further environment variables.
        folder: Where the logs go.
    """
    with contextlib.ExitStack() as stack:
        started = {}
        for name, (port, command, environment) in commands.items():
            log = folder / f"{name}.log"
            process = stack.enter_context(start.running(command, log, environment))
            started[name] = Server(f"http://{start.HOST}:{port}", log, process)
        for name, server in started.items():
            start.wait_until_healthy(server.process, commands[name][0], server.log)
        yield started
