"""The same requests three ways on a real engine, and a table of what happened.

Each run is a process of its own: ``python -m preempt_offload.demo SPEC FD`` reads what to
do from the file ``SPEC``, writes the number of output tokens so far to the file descriptor
``FD``, one number a line, and leaves ``result.json`` beside ``SPEC``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import select
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from preempt_offload import tiny_model

# The CPU engines of newer vLLM take multiples of 32 only.
BLOCK_TOKENS = 32
PROMPT_TOKENS = range(100, 201)
OUTPUT_TOKENS = 384
# What the small KV cache holds of all that the requests need at their end.
SMALL_SHARE = 0.2


class DemoError(Exception):
    """The demo did not show what it is to show; the text says why in one line."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """The requests: prompts of random tokens, so that no two have a block in common."""

    prompts: list[list[int]]

    @classmethod
    def generate(cls, num_requests: int, seed: int) -> Workload:
        """The same requests for the same arguments."""
        rng = np.random.default_rng(seed)
        vocabulary = tiny_model.CONFIG["vocab_size"]
        lengths = rng.choice(PROMPT_TOKENS, num_requests)
        return cls([rng.integers(3, vocabulary, size).tolist() for size in lengths])

    @property
    def computed_tokens(self) -> int:
        """Tokens to send through the model once: all but the last of each request."""
        return sum(len(prompt) + OUTPUT_TOKENS - 1 for prompt in self.prompts)

    @property
    def batched_tokens(self) -> int:
        """Tokens per step: few more than one per request, as on a decode node."""
        return max(64, len(self.prompts) * 2)

    @property
    def blocks(self) -> list[int]:
        """KV blocks that each request needs at its end."""
        return [math.ceil((len(p) + OUTPUT_TOKENS) / BLOCK_TOKENS) for p in self.prompts]


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """One run.

    Attributes:
        title: What is special about it.
        num_blocks: Blocks of the KV cache.
        host_ratio: Host blocks per block of the KV cache; ``None``: vLLM alone.
    """

    title: str
    num_blocks: int
    host_ratio: int | None = None


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run did; ``None`` where the run has no connector.

    Attributes:
        preemptions: Preemptions of all requests.
        most_preemptions: Preemptions of the request that was preempted most.
        recomputed_tokens: Tokens sent through the model more than once.
        restored_tokens: Tokens copied back instead.
        bytes_out: Bytes copied from the KV cache to the host pool.
        bytes_in: Bytes copied back.
        steps: Steps of the engine.
        seconds: Wall time of the generation; the start of the engine is not in it.
        outputs: Output tokens of each request.
    """

    preemptions: int
    most_preemptions: int
    recomputed_tokens: int
    restored_tokens: int | None
    bytes_out: int | None
    bytes_in: int | None
    steps: int
    seconds: float
    outputs: list[list[int]]


def plan_runs(workload: Workload) -> list[RunSpec]:
    """The three runs: ample, small with vLLM's recompute, small with the connector."""
    needed = workload.blocks
    # Block 0 is vLLM's null block. The largest request must fit or the engine refuses it.
    ample = sum(needed) + 1
    small = max(int(sum(needed) * SMALL_SHARE), max(needed) * 3 // 2) + 1
    return [
        RunSpec("KV cache ample", ample),
        RunSpec("KV cache small, vLLM alone", small),
        RunSpec("KV cache small, preempt-offload", small, math.ceil(ample / small)),
    ]


# ---- the parent ----


def run_demo(num_requests: int, seed: int, keep: Path | None) -> None:
    """Runs the demo and prints its table.

    Args:
        num_requests: Requests of each run.
        seed: Decides prompts and weights.
        keep: Where to work and leave the model, logs and results; else a temporary folder.

    Raises:
        DemoError: There is no vLLM, a run failed, or it did not show what it is to show.
    """
    if importlib.util.find_spec("vllm") is None:
        raise DemoError(
            "vLLM is not installed here; run the demo in the environment of your vLLM, or run "
            "`make demo` in a checkout of preempt-offload, which sets up its own"
        )
    workload = Workload.generate(num_requests, seed)
    runs = plan_runs(workload)
    width = shutil.get_terminal_size().columns
    with _work_folder(keep) as folder:
        note = "" if keep else " (removed if all goes well; --keep FOLDER keeps it)"
        print(f"Working in {folder}{note}; engine logs are in run1/log to run3/log.", flush=True)
        model = tiny_model.write(folder / "model", seed=seed)
        results = [
            _run(folder / f"run{i}", model, workload, spec, f"run {i} of {len(runs)}")
            for i, spec in enumerate(runs, 1)
        ]
        print(f"\n{describe(workload, runs, width)}\n")
        print(f"{format_table(runs, results, width)}\n", flush=True)
        check(results)
    print("All outputs are the same. preempt-offload restored what vLLM alone had to recompute.")


def check(results: Sequence[RunResult]) -> None:
    """Checks that the three runs show what they are to show.

    Raises:
        DemoError: They do not.
    """
    ample, _, offload = results
    for i, result in enumerate(results[1:], 2):
        pairs = zip(ample.outputs, result.outputs, strict=True)
        different = sum(expected != got for expected, got in pairs)
        if different:
            raise DemoError(
                f"the outputs of {different} of {len(ample.outputs)} requests differ between "
                f"run 1 and run {i}"
            )
        if not result.preemptions:
            raise DemoError(f"no request was preempted in run {i}; try more --requests")
    if ample.preemptions or ample.recomputed_tokens:
        raise DemoError("run 1 preempted or recomputed although its KV cache is ample")
    if not offload.restored_tokens:
        raise DemoError("preempt-offload restored nothing in run 3")
    if offload.recomputed_tokens:
        raise DemoError(f"run 3 recomputed {offload.recomputed_tokens} tokens; it should restore")


@contextlib.contextmanager
def _work_folder(keep: Path | None) -> Iterator[Path]:
    """A folder to work in; a temporary one goes away unless a ``DemoError`` is raised."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="preempt-offload-demo-"))
    try:
        yield folder
    except DemoError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, model: Path, workload: Workload, spec: RunSpec, label: str) -> RunResult:
    """Carries out one run in a process of its own, showing its progress."""
    print(f"{label}: {spec.title}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    log, result = folder / "log", folder / "result.json"
    result.unlink(missing_ok=True)
    file = folder / "spec.json"
    todo = {"model": str(model), "workload": vars(workload), "run": vars(spec)}
    file.write_text(json.dumps(todo))
    reader, writer = os.pipe()
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "preempt_offload.demo", str(file), str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[writer],
            env={**os.environ, **_ENGINE_ENVIRONMENT},
        )
    os.close(writer)
    try:
        with os.fdopen(reader, "rb", buffering=0) as progress:
            _show_progress(progress.fileno(), len(workload.prompts) * OUTPUT_TOKENS)
        code = child.wait()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if code or not result.exists():
        tail = log.read_text(errors="replace").splitlines()[-15:]
        print("\n".join(["", f"The end of {log}:", *tail]), file=sys.stderr)
        raise DemoError(f"the engine of {label} ended with exit code {code}; its log is {log}")
    return RunResult(**json.loads(result.read_text()))


def _show_progress(reader: int, total: int) -> None:
    """Shows the numbers that arrive at ``reader`` as a bar, until it is closed.

    Where standard error is not a terminal, prints the time in the end instead.
    """
    from tqdm import tqdm

    start = time.monotonic()
    on_terminal = sys.stderr.isatty()
    with tqdm(
        total=total,
        desc="  starting the engine",
        bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}",
        dynamic_ncols=True,
        disable=not on_terminal,
    ) as bar:
        rest = b""
        while True:
            if not select.select([reader], [], [], 0.5)[0]:
                # Nothing has arrived; the clock goes on.
                bar.refresh()
                continue
            chunk = os.read(reader, 65536)
            if not chunk:
                break
            *numbers, rest = (rest + chunk).split(b"\n")
            if numbers:
                bar.set_description_str("  generating", refresh=False)
                bar.update(int(numbers[-1]) - bar.n)
    if not on_terminal:
        print(f"  {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


# ---- the table ----


def describe(workload: Workload, runs: Sequence[RunSpec], width: int) -> str:
    """What the three runs have in common, and what not."""
    lengths = [len(prompt) for prompt in workload.prompts]
    paragraphs = [
        f"{len(lengths)} requests at once, prompts of {min(lengths)} to {max(lengths)} tokens "
        f"without a common prefix, {OUTPUT_TOKENS} output tokens each, at most "
        f"{workload.batched_tokens} tokens per step. KV blocks of {BLOCK_TOKENS} tokens: "
        f"{runs[0].num_blocks} where ample, {runs[1].num_blocks} where small.",
        "Prefix caching is on in all runs, as is vLLM's default: blocks of a preempted request "
        "that are still in the KV cache when it comes back are neither recomputed nor restored.",
        "Wall time is that of the generation alone. It says little here: this model is so small "
        "that recomputing costs next to nothing.",
    ]
    return "\n".join(textwrap.fill(text, min(width, 100)) for text in paragraphs)


def format_table(runs: Sequence[RunSpec], results: Sequence[RunResult], width: int) -> str:
    """The runs side by side, or one below the other where ``width`` is too small."""
    columns = [_column(result, results[0]) for result in results]
    titles = [spec.title.split(", ") for spec in runs]
    names = list(columns[0])
    height = max(map(len, titles))
    head = [[""] + [(title + [""] * height)[i] for title in titles] for i in range(height)]
    rows = head + [[name] + [column[name] for column in columns] for name in names]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    if sum(widths) + 2 * (len(widths) - 1) <= width:
        lines = [_line(row, widths) for row in rows]
        lines.insert(height, "  ".join("-" * w for w in widths))
        return "\n".join(lines)
    blocks = []
    for spec, column in zip(runs, columns, strict=True):
        inner = max(map(len, column.values()))
        lines = [_line(item, [widths[0], inner]) for item in column.items()]
        blocks.append("\n".join([spec.title, "-" * len(spec.title), *lines]))
    return "\n\n".join(blocks)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    numbers = [cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *numbers])


def _column(result: RunResult, reference: RunResult) -> dict[str, str]:
    if result is reference:
        same = "(reference)"
    else:
        same = "yes" if result.outputs == reference.outputs else "NO"
    return {
        "preemptions": f"{result.preemptions:,}",
        "most of one request": f"{result.most_preemptions:,}",
        "tokens recomputed": f"{result.recomputed_tokens:,}",
        "tokens restored": _number(result.restored_tokens),
        "bytes out (D2H)": _number(result.bytes_out),
        "bytes in (H2D)": _number(result.bytes_in),
        "engine steps": f"{result.steps:,}",
        "wall time": f"{result.seconds:.2f} s",
        "outputs identical": same,
    }


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


# ---- the child ----

_ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the scheduler can be watched
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the number of blocks is given and far smaller
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than all of this model's work
    "OMP_NUM_THREADS": "1",  # more are no faster with this model, and far slower on a busy machine
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONSAFEPATH": "1",  # a checkout of vLLM in the working directory is not meant
    "HF_HUB_OFFLINE": "1",
}


def _child(spec_file: Path, progress_fd: int) -> None:
    """Carries out the run that ``spec_file`` describes."""
    todo = json.loads(spec_file.read_text())
    with os.fdopen(progress_fd, "w", buffering=1) as parent:
        result = _generate(
            Path(todo["model"]),
            Workload(**todo["workload"]),
            RunSpec(**todo["run"]),
            lambda tokens: print(tokens, file=parent),
        )
    (spec_file.parent / "result.json").write_text(json.dumps(vars(result)))


def _generate(
    model: Path, workload: Workload, spec: RunSpec, progress: Callable[[int], None]
) -> RunResult:
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.platforms import current_platform

    from preempt_offload.observe import SchedulerObserver

    if not current_platform.is_cpu():
        raise SystemExit("preempt-offload's demo needs a vLLM built for CPUs, for the time being")
    options = {}
    if spec.host_ratio is not None:
        options = {
            "scheduler_cls": "preempt_offload.RecomputeScheduler",
            "kv_transfer_config": {
                "kv_connector": "PreemptOffloadConnector",
                "kv_connector_module_path": "preempt_offload",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"offload_host_memory_ratio": spec.host_ratio},
            },
        }
    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=spec.num_blocks,
        max_model_len=max(map(len, workload.prompts)) + OUTPUT_TOKENS,
        max_num_seqs=len(workload.prompts),
        max_num_batched_tokens=workload.batched_tokens,
        **options,
    )
    engine = llm.llm_engine

    def generate(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        outputs: list[list[int]] = [[] for _ in prompts]
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
            progress(sum(map(len, outputs)))
        return outputs

    # What happens once only, such as the start of threads, before the clock runs.
    generate([[3, 4, 5]], 2)

    scheduler = engine.engine_core.engine_core.scheduler
    observer = SchedulerObserver(scheduler)
    start = time.monotonic()
    outputs = generate(workload.prompts, OUTPUT_TOKENS)
    seconds = time.monotonic() - start
    restored_tokens = bytes_out = bytes_in = None
    if spec.host_ratio is not None:
        restored_tokens = scheduler.connector.scheduler.stats.restored_tokens
        worker_stats = get_kv_transfer_group().worker.stats
        bytes_out, bytes_in = worker_stats.bytes_stored, worker_stats.bytes_loaded
    engine.engine_core.shutdown()
    return RunResult(
        preemptions=observer.preemptions.total(),
        most_preemptions=max(observer.preemptions.values(), default=0),
        recomputed_tokens=observer.recomputed_tokens(workload.computed_tokens),
        restored_tokens=restored_tokens,
        bytes_out=bytes_out,
        bytes_in=bytes_in,
        steps=observer.steps,
        seconds=seconds,
        outputs=outputs,
    )


if __name__ == "__main__":
    _child(Path(sys.argv[1]), int(sys.argv[2]))
