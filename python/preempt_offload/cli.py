"""The command ``preempt-offload``."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preempt_offload import __version__
from preempt_offload.config import OffloadConfig

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SWITCH = {"recompute_scheduler_enable": True}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = _parser().parse_args(argv)
    if args.command == "version":
        print(__version__)
        return 0
    if args.command == "config":
        print(_config(args), end="")
        return 0
    from preempt_offload import demo

    try:
        demo.run_demo(args.requests, args.seed, args.keep)
    except demo.DemoError as error:
        print(f"preempt-offload demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preempt-offload",
        description="Keeps the KV cache of preempted vLLM requests in host memory.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo", help="the same requests three ways on a real engine, and a table of what happened"
    )
    demo.add_argument(
        "--requests", type=_requests, default=24, metavar="N", help="requests (default: 24)"
    )
    demo.add_argument(
        "--seed", type=int, default=0, help="decides prompts and weights (default: 0)"
    )
    demo.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="leave the model, logs and results there"
    )

    config = commands.add_parser("config", help="print the flags that vLLM needs, ready to paste")
    config.add_argument(
        "target",
        choices=["vllm", "ascend-decode"],
        help="vllm: vLLM as it is; ascend-decode: a decode node of vllm-ascend",
    )
    budget = config.add_mutually_exclusive_group()
    budget.add_argument(
        "--bytes-per-rank",
        type=_bytes,
        metavar="BYTES",
        help="host memory of each rank, e.g. 17179869184 or 16GiB",
    )
    budget.add_argument("--ratio", type=_ratio, help="host blocks per device block (default: 1.0)")

    commands.add_parser("version", help="print the version")
    return parser


def _config(args: argparse.Namespace) -> str:
    """The flags for one kind of vLLM, one a line, in a shell's syntax."""
    extra: dict[str, Any] = {}
    if args.bytes_per_rank is not None:
        extra["cpu_bytes_to_use_per_rank"] = args.bytes_per_rank
    if args.ratio is not None:
        extra["offload_host_memory_ratio"] = args.ratio
    OffloadConfig.from_extra_config(extra)
    ours: dict[str, Any] = {
        "kv_connector": "PreemptOffloadConnector",
        "kv_connector_module_path": "preempt_offload",
        "kv_role": "kv_both" if args.target == "vllm" else "kv_consumer",
        "kv_connector_extra_config": extra,
    }
    if args.target == "vllm":
        # vLLM's default is to end a request with an error if restoring it fails.
        ours["kv_load_failure_policy"] = "recompute"
        flags: dict[str, Any] = {
            "--scheduler-cls": "preempt_offload.RecomputeScheduler",
            "--kv-transfer-config": ours,
        }
    else:
        sizes = {"dp_size": 1, "tp_size": 1}
        from_prefill = {
            "kv_connector": "MooncakeConnectorV1",
            "kv_role": "kv_consumer",
            "kv_port": "28000",
            "kv_connector_extra_config": {"prefill": sizes, "decode": sizes},
        }
        flags = {
            # vllm-ascend up to 0.24 reads the first, from 0.25.1 on the second.
            "--additional-config": {**_SWITCH, "scheduler_config": _SWITCH},
            "--kv-transfer-config": {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_consumer",
                "kv_connector_extra_config": {"connectors": [from_prefill, ours]},
            },
        }
        print(
            "Set kv_port, prefill and decode of MooncakeConnectorV1 to what your nodes use.",
            file=sys.stderr,
        )
    values = {k: v if isinstance(v, str) else json.dumps(v, indent=2) for k, v in flags.items()}
    return " \\\n".join(f"{flag} {shlex.quote(value)}" for flag, value in values.items()) + "\n"


def _requests(text: str) -> int:
    number = int(text)
    if number < 4:
        raise argparse.ArgumentTypeError("at least 4 requests are needed to crowd a KV cache")
    return number


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+) ?([kmgt]ib)?", text.strip().lower())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 17179869184 or 16GiB")
    return int(match[1]) * _UNITS[match[2] or ""]


def _ratio(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return number
