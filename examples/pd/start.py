"""A prefill server, a decode server and the proxy on this machine, joined by NIXL.

    python examples/pd/start.py MODEL [options] [more flags for both servers of vLLM]

Runs until it is interrupted or one of the three ends. Needs a vLLM of 0.32 or later with nixl
(``pip install nixl``) and preempt-offload. Each process writes a log into ``--logs``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HOST = "127.0.0.1"


def nixl(role: str) -> dict[str, Any]:
    """A transfer config that takes KV from, or gives it to, the other server."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        # Seconds for which KV waits to be fetched. A decode server that is full lets it wait.
        "kv_connector_extra_config": {"kv_lease_duration": 300},
    }


def decode_transfer(offload: dict[str, Any]) -> dict[str, Any]:
    """The decode server's transfer config: NIXL, and ours with ``offload`` as extra config."""
    ours = {
        "kv_connector": "PreemptOffloadConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": offload,
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [nixl("kv_consumer"), ours]},
    }


def prefill_flags(side_channel_port: int) -> tuple[list[str], dict[str, str]]:
    """Flags and environment variables of the prefill server."""
    return _with_nixl(side_channel_port, nixl("kv_producer"))


def decode_flags(
    side_channel_port: int, transfer: dict[str, Any]
) -> tuple[list[str], dict[str, str]]:
    """Flags and environment variables of the decode server."""
    flags, environment = _with_nixl(side_channel_port, transfer)
    return [*flags, "--scheduler-cls", "preempt_offload.RecomputeScheduler"], environment


def _with_nixl(
    side_channel_port: int, transfer: dict[str, Any]
) -> tuple[list[str], dict[str, str]]:
    flags = [
        *("--kv-transfer-config", json.dumps(transfer)),
        *("--worker-extension-cls", "nixl_on_cpu.Worker"),
    ]
    environment = {
        "UCX_TLS": os.environ.get("UCX_TLS", "tcp,self"),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        # Where nixl_on_cpu is.
        "PYTHONPATH": str(HERE),
        # An engine and its worker are one process. As two, they wait for each other by yielding the
        # CPU, which they get back late on a busy machine.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    return flags, environment


def vllm_server(model: str, port: int) -> list[str]:
    """The command of a server, to which flags are appended."""
    module = "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-m", module, "--model", model, "--host", HOST, "--port", str(port)]


def proxy(port: int, prefill_port: int, decode_port: int) -> list[str]:
    """The command of the proxy."""
    return [
        *(sys.executable, str(HERE / "proxy.py"), "--host", HOST, "--port", str(port)),
        *("--prefill", f"http://{HOST}:{prefill_port}"),
        *("--decode", f"http://{HOST}:{decode_port}"),
    ]


@contextlib.contextmanager
def running(
    command: list[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command, with its output in ``log``, and ends it with all its children."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | (environment or {}),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Waits for a server to answer.

    Raises:
        RuntimeError: It ended instead; the message has the end of its log.
    """
    while process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://{HOST}:{port}/health").close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"{log.stem} ended:\n{log.read_text()[-3000:]}")


def main() -> None:
    """Starts all three and waits."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="All other flags go to both servers.",
        allow_abbrev=False,
    )
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000, help="of the proxy")
    parser.add_argument("--prefill-port", type=int, default=8100)
    parser.add_argument("--decode-port", type=int, default=8200)
    parser.add_argument("--side-channel-port", type=int, default=5600, help="and the next one")
    parser.add_argument("--decode-blocks", type=int, help="KV blocks of the decode server")
    parser.add_argument(
        "--offload",
        type=json.loads,
        default={"offload_host_memory_ratio": 4},
        help="kv_connector_extra_config of PreemptOffloadConnector",
    )
    parser.add_argument("--logs", type=Path, default=Path("pd-logs"))
    options, flags_of_both = parser.parse_known_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    prefill = prefill_flags(options.side_channel_port)
    decode = decode_flags(options.side_channel_port + 1, decode_transfer(options.offload))
    if options.decode_blocks:
        decode[0].extend(("--num-gpu-blocks-override", str(options.decode_blocks)))
    commands = {
        "prefill": (options.prefill_port, *prefill),
        "decode": (options.decode_port, *decode),
    }
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        started = []
        for name, (port, flags, environment) in commands.items():
            command = vllm_server(options.model, port) + flags + flags_of_both
            log = options.logs / f"{name}.log"
            started.append((stack.enter_context(running(command, log, environment)), port, log))
        command = proxy(options.port, options.prefill_port, options.decode_port)
        log = options.logs / "proxy.log"
        started.append((stack.enter_context(running(command, log)), options.port, log))
        for process, port, log in started:
            wait_until_healthy(process, port, log)
            print(f"{log.stem} is ready: http://{HOST}:{port}, log in {log}", flush=True)
        while all(process.poll() is None for process, _, _ in started):
            time.sleep(0.5)
        ended = next(log for process, _, log in started if process.poll() is not None)
        sys.exit(f"{ended.stem} ended, see {ended}")


if __name__ == "__main__":
    main()
