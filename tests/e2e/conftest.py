import pytest

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
    """Puts an outcome into the table that ends the test run."""

    def row(outcome, all_jobs):
        cells = (
            len(all_jobs),
            len(outcome.preemptions),
            outcome.restored_tokens,
            outcome.recomputed_tokens,
            outcome.stats.not_preserved if outcome.stats else "",
            f"{outcome.bytes_stored / 2**20:.2f} MiB",
            f"{outcome.bytes_loaded / 2**20:.2f} MiB",
        )
        request.node.user_properties.append(("row", cells))

    return row


def pytest_terminal_summary(terminalreporter):
    rows = [
        (report.nodeid.split("::", 1)[1], *cells)
        for report in terminalreporter.stats.get("passed", ())
        for name, cells in report.user_properties
        if name == "row"
    ]
    if not rows:
        return
    terminalreporter.section("what happened on the engine")
    for row in [("case", *COLUMNS), ("---",) * (len(COLUMNS) + 1), *sorted(rows)]:
        terminalreporter.write_line("| " + " | ".join(map(str, row)) + " |")
