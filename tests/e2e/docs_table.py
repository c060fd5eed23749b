"""The table of ``docs/models.md``, filled by what the end-to-end tests have recorded.

Every test run keeps the cells of the tests that passed in ``target/cells``, a file for each
version of vLLM, as lines of JSON; a test that runs again replaces its own. Run as a program
this renders them between two lines of ``docs/models.md``. It knows neither kinds nor modes:
they come in the order of the tests' names. To be rid of cells whose tests are gone, remove
``target/cells`` and run all tests again.
"""

import json
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
CELLS = ROOT / "target/cells"
DOCS = ROOT / "docs/models.md"
BEGIN, END = "<!-- cells: make docs-table -->", "<!-- end of cells -->"
FIGURES = ("preempted", "restored tokens", "recomputed tokens", "D2H")


def keep(cells, version):
    """Adds cells, by the id of their test, to those of earlier runs."""
    version = version.split("+")[0]
    file = CELLS / f"{version}.jsonl"
    known = {cell["test"]: cell for cell in _read(file)} if file.exists() else {}
    known |= {test: {"test": test, "version": version} | cell for test, cell in cells.items()}
    CELLS.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(known[test]) + "\n" for test in sorted(known)))


def render(cells):
    """The table for cells of any kinds, modes and versions, as lines of Markdown."""
    cells = [cell for cell in cells if cell["kind"]]
    versions = sorted({cell["version"] for cell in cells}, key=_numbers)
    # In the order of the tests, but each kind together.
    kinds = list(dict.fromkeys(cell["kind"] for cell in cells))
    modes = dict.fromkeys((cell["kind"], cell["mode"]) for cell in cells if cell["mode"])
    rows = sorted(modes, key=lambda row: kinds.index(row[0]))
    yield "| kind | mode | " + " | ".join(versions) + " |"
    yield "|" + "---|" * (2 + len(versions))
    for kind, of_kind in groupby(rows, key=lambda row: row[0]):
        for i, (_, mode) in enumerate(of_kind):
            texts = [_text(cells, kind, mode, version) for version in versions]
            yield f"| {kind if i == 0 else ''} | {mode} | " + " | ".join(texts) + " |"


def _text(cells, kind, mode, version):
    here = [
        cell
        for cell in cells
        if cell["kind"] == kind and cell["version"] == version and cell["mode"] in (mode, None)
    ]
    refusals = [cell["refused"] for cell in here if "refused" in cell]
    if refusals:
        return refusals[0]
    figures = {cell["async"]: " / ".join(_shown(cell[f]) for f in FIGURES) for cell in here}
    named = [
        f"{'async' if is_async else 'sync'} {figures[is_async]}" for is_async in sorted(figures)
    ]
    return "works: " + "; ".join(named) if named else "not run, see below"


def _shown(figure):
    return f"{figure:,}" if isinstance(figure, int) else figure


def _numbers(version):
    return tuple(map(int, version.split(".")))


def _read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def main():
    files = sorted(CELLS.glob("*.jsonl"), key=lambda file: _numbers(file.stem), reverse=True)
    if not files:
        sys.exit(f"no cells in {CELLS}: run the end-to-end tests first")
    table = render([cell for file in files for cell in _read(file)])
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    DOCS.write_text("\n".join([before + BEGIN, "", *table, "", END + after]))


if __name__ == "__main__":
    main()
