import pytest
import vllm
from xdist.scheduler import LoadFileScheduling

import docs_table
from preempt_offload import tiny_model
from reference import undisturbed_engines

COLUMNS = ("jobs", "preempted", "restored tokens", "recomputed tokens", "fallbacks", "D2H", "H2D")
SERVER_COLUMNS = ("requests", "preempted", "restored tokens", "resent", "mismatches")
# What was asked of the stand-in for an NPU.
NPU_COLUMNS = (
    "calls of the operator",
    "copies",
    "events made",
    "events recorded",
    "events asked",
    "waits of a stream",
    "waits of the host",
    "accesses of what computes",
)
# Their engines are several processes each, so they run one after another.
CROWDED = (
    "test_prefill_decode.py",
    "test_server.py",
    "test_failures.py",
    "test_tensor_parallel.py",
)
# Of the others those that take longest.
LONG = (
    "test_models.py",
    "test_speculative.py",
    "test_request_kinds.py",
    "test_matrix.py",
    "test_budgets.py",
    "test_multimodal.py",
    "test_decode_node.py",
)


def pytest_collection_modifyitems(items):
    """Puts what takes long before what does not, so that two processes end at the same time."""
    first = {name: i for i, name in enumerate(CROWDED)}
    then = {name: i for i, name in enumerate(LONG)}

    def place(item):
        name = item.path.name
        if name in first:
            return 0, first[name]
        if item.path.parent.name != "e2e":
            return 1, 0
        return 2, then.get(name, len(then))

    items.sort(key=place)


class _Scheduling(LoadFileScheduling):
    """Gives each file to one of the processes, and those that are crowded all to one."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return "crowded" if file.endswith(CROWDED) else file


def pytest_xdist_make_scheduler(config, log):
    return _Scheduling(config, log)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def undisturbed_engine():
    """Engines with room for all jobs, without us; see ``undisturbed_engines``."""
    with undisturbed_engines() as engine:
        yield engine


@pytest.fixture(scope="session")
def undisturbed(undisturbed_engine, model):
    """The tokens of jobs on an engine with room for all of them, without us."""
    return undisturbed_engine(model)


@pytest.fixture
def record(request):
    """Notes an outcome for the table that ends the test run.

    With a kind of model or request and a mode it is a cell of the table in ``docs/models.md``,
    too; see ``docs_table.py``.
    """

    def row(outcome, all_jobs, *, kind=None, mode=None, async_scheduling=False):
        cell = {
            "jobs": len(all_jobs),
            "preempted": len(outcome.preemptions),
            "restored tokens": outcome.restored_tokens,
            "recomputed tokens": outcome.recomputed_tokens,
            "fallbacks": outcome.stats.not_preserved,
            "D2H": f"{outcome.bytes_stored / 2**20:.2f} MiB",
            "H2D": f"{outcome.bytes_loaded / 2**20:.2f} MiB",
        }
        where = {"kind": kind, "mode": mode, "async": async_scheduling}
        request.node.user_properties.append(("cell", where | cell))

    return row


@pytest.fixture
def record_refusal(request):
    """Notes that a kind of model or request does not run in a mode, or in any, and why."""

    def row(kind, mode, reason):
        where = {"kind": kind, "mode": mode, "refused": reason}
        request.node.user_properties.append(("cell", where))

    return row


@pytest.fixture
def record_npu(request):
    """Notes what was asked of the stand-in for an NPU, for a table of its own."""

    def row(npu):
        request.node.user_properties.append(("npu", [npu.calls[name] for name in NPU_COLUMNS]))

    return row


@pytest.fixture
def record_servers(request):
    """Notes what prefill and decode servers did, by ``SERVER_COLUMNS``, for a table like that."""

    def row(*figures):
        request.node.user_properties.append(("servers", figures))

    return row


def pytest_terminal_summary(terminalreporter):
    recorded = {"cell": {}, "servers": {}, "npu": {}}
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in report.user_properties:
            recorded[name][report.nodeid] = value
    cells = recorded["cell"]
    if cells:
        docs_table.keep(cells, vllm.__version__)
    rows = {
        test: [cell[column] for column in COLUMNS]
        for test, cell in cells.items()
        if "refused" not in cell
    }
    _write_table(terminalreporter, "what happened on the engine", COLUMNS, rows)
    title = "what happened on prefill and decode servers"
    _write_table(terminalreporter, title, SERVER_COLUMNS, recorded["servers"])
    title = "what was asked of the stand-in for an NPU"
    _write_table(terminalreporter, title, NPU_COLUMNS, recorded["npu"])


def _write_table(terminalreporter, title, columns, rows):
    if not rows:
        return
    terminalreporter.section(title)
    lines = [(test.split("::", 1)[1], *cells) for test, cells in sorted(rows.items())]
    for line in [("case", *columns), ("---",) * (len(columns) + 1), *lines]:
        terminalreporter.write_line("| " + " | ".join(map(str, line)) + " |")
