def pytest_terminal_summary(terminalreporter):
    """Says what the simulated engines went through, all parts together."""
    happened = {}
    for report in terminalreporter.stats.get("passed", ()):
        for name, counts in report.user_properties:
            if name == "simulated":
                for what, count in counts.items():
                    happened[what] = happened.get(what, 0) + count
    if happened:
        terminalreporter.section("what happened in the simulator")
        for what, count in sorted(happened.items()):
            terminalreporter.write_line(f"{count:>12,}  {what}")
