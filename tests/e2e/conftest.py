import pytest
import vllm

import docs_table
from preempt_offload import tiny_model
from reference import undisturbed_engine

COLUMNS = ("jobs", "preempted", "restored tokens", "recomputed tokens", "fallbacks", "D2H", "H2D")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def undisturbed(model):
    """The tokens of jobs on an engine with room for all of them, without us."""
    with undisturbed_engine(model) as tokens_of:
        yield tokens_of


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
            "fallbacks": outcome.stats.not_preserved if outcome.stats else "",
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


def pytest_terminal_summary(terminalreporter):
    cells = {
        report.nodeid: cell
        for report in terminalreporter.stats.get("passed", ())
        for name, cell in report.user_properties
        if name == "cell"
    }
    if not cells:
        return
    docs_table.keep(cells, vllm.__version__)
    rows = [
        (test.split("::", 1)[1], *(cell[column] for column in COLUMNS))
        for test, cell in sorted(cells.items())
        if "refused" not in cell
    ]
    terminalreporter.section("what happened on the engine")
    for row in [("case", *COLUMNS), ("---",) * (len(COLUMNS) + 1), *rows]:
        terminalreporter.write_line("| " + " | ".join(map(str, row)) + " |")
