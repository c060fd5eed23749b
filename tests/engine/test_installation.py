"""Installing us may not move anything that the engine's environment has."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The environment in which this runs has the name of the file that pins it.
PINNED = ROOT / "environments" / f"{Path(sys.prefix).name}.txt"


def uv_pip(*args):
    done = subprocess.run(
        [ROOT / ".venv/uv/bin/uv", "pip", *args, "--offline", "--python", sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def wheel():
    (wheel,) = ROOT.glob("target/package/preempt_offload-*.whl")
    return wheel


def test_the_environment_is_what_is_pinned_and_us():
    frozen = set(uv_pip("freeze").stdout.splitlines())
    pinned = set(re.findall(r"^[^\s#].*", PINNED.read_text(), re.M))
    assert {line.split(" ")[0] for line in frozen - pinned} == {"preempt-offload"}
    assert pinned - frozen == set()


def test_installing_us_with_our_dependencies_changes_nothing_else(wheel):
    report = uv_pip("install", "--dry-run", "--reinstall-package", "preempt-offload", str(wheel))
    changes = re.findall(r"^ [-+~] (\S+?)(?:==| @)", report.stderr, re.M)
    assert changes == ["preempt-offload", "preempt-offload"]
