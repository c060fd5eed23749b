"""The package as it is installed: what is in it, what it needs, what it says it has."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pickle
import pydoc
import re
import resource
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import preempt_offload
from preempt_offload import _core

ROOT = Path(__file__).parents[2]
INSTALLED = Path(preempt_offload.__file__).parent
STUB = ast.parse((INSTALLED / "_core.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}


def test_what_is_tested_is_the_installed_package():
    assert ROOT / "python" not in INSTALLED.parents
    assert "site-packages" in INSTALLED.parts


def test_the_version_is_that_of_the_crate():
    cargo = (ROOT / "Cargo.toml").read_text()
    assert preempt_offload.__version__ == re.search(r'^version = "(.+)"', cargo, re.M)[1]
    assert preempt_offload.__version__ == distribution("preempt-offload").version


@pytest.mark.parametrize("name", ["py.typed", "_core.pyi"])
def test_types_are_in_the_package(name):
    assert (INSTALLED / name).is_file()
    files = [file.as_posix() for file in distribution("preempt-offload").files]
    assert f"preempt_offload/{name}" in files


def test_the_package_needs_numpy_at_most():
    requirements = distribution("preempt-offload").requires or []
    assert {re.match(r"[\w-]+", r)[0] for r in requirements} <= {"numpy"}


def test_the_wheel_fits_every_python_from_its_stable_abi_on():
    wheel = distribution("preempt-offload").read_text("WHEEL")
    assert re.search(r"^Tag: cp310-abi3-", wheel, re.M)
    assert distribution("preempt-offload").metadata["Requires-Python"] == ">=3.10"


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("vllm.general_plugins", "preempt_offload", "preempt_offload.plugin:register"),
        ("console_scripts", "preempt-offload", "preempt_offload.cli:main"),
    ],
)
def test_entry_points_lead_somewhere(group, name, value):
    (found,) = distribution("preempt-offload").entry_points.select(group=group, name=name)
    assert found.value == value
    assert callable(found.load())


def test_importing_needs_neither_vllm_nor_torch():
    assert importlib.util.find_spec("vllm") is None
    assert importlib.util.find_spec("torch") is None
    code = "import preempt_offload, preempt_offload.offload_scheduler, preempt_offload.plugin"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", preempt_offload.__all__)
def test_what_needs_vllm_says_so(name):
    with pytest.raises(ImportError, match=rf"preempt_offload\.{name} needs '(vllm|torch)"):
        getattr(preempt_offload, name)


def test_the_scheduler_names_vllm():
    with pytest.raises(ImportError, match=r"needs 'vllm'.*install preempt-offload into"):
        preempt_offload.RecomputeScheduler  # noqa: B018


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'preempt_offload' has no attribute 'Nonsense'"):
        preempt_offload.Nonsense  # noqa: B018


def members(node):
    """Methods and properties of a class in the stub, with their parameters but ``self``."""
    found = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            is_property = any(getattr(d, "id", None) == "property" for d in item.decorator_list)
            args = [*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs]
            found[item.name] = None if is_property else [arg.arg for arg in args[1:]]
    return found


def test_the_stub_has_every_name_of_the_module_and_no_other():
    public = {name for name in dir(_core) if not name.startswith("_")}
    assert public == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_the_stub_of_a_class_matches_it(name):
    runtime, stub = getattr(_core, name), members(CLASSES[name])
    public = {member for member in vars(runtime) if not member.startswith("_")}
    assert public == {member for member in stub if not member.startswith("_")}
    for member, parameters in stub.items():
        if member == "__new__":
            assert list(inspect.signature(runtime).parameters) == parameters
        elif parameters is None:
            assert inspect.isgetsetdescriptor(getattr(runtime, member))
        else:
            signature = inspect.signature(getattr(runtime, member))
            assert list(signature.parameters)[1:] == parameters


@pytest.mark.parametrize("name", [name for name, node in CLASSES.items() if node.bases])
def test_the_stub_has_the_bases_of_the_errors(name):
    bases = [pydoc.locate(base.id) or getattr(_core, base.id) for base in CLASSES[name].bases]
    assert list(getattr(_core, name).__bases__) == bases


def test_an_error_crosses_between_processes():
    with pytest.raises(_core.CapacityError) as caught:
        _core.BlockPool(1).claim(2)
    received = pickle.loads(pickle.dumps(caught.value))
    assert type(received) is _core.CapacityError
    assert (received.needed, received.available, received.capacity) == (2, 1, 1)


def test_absurdly_many_tokens_are_an_error_and_do_not_end_the_process():
    code = (
        "from preempt_offload import _core\n"
        "table = _core.RequestTable(_core.BlockPool(4), [1])\n"
        "try:\n"
        "    table.begin_store('a', 0, 2**60, [[1]])\n"
        "except Exception as error:\n"
        "    assert str(2**60) in str(error) or isinstance(error, _core.CapacityError)\n"
    )
    limit = (4 * 2**30, 4 * 2**30)
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
