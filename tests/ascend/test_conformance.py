"""What the package uses of torch_npu and vllm-ascend, against these packages as PyPI has them.

Neither can be imported without CANN, so their sources are read, and the texts in their libraries.
``make ascend`` downloads them.
"""

import ast
import mmap
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "target/ascend"
OURS = ROOT / "python/preempt_offload"
# What the package calls ``torch.npu``.
MODULES = ("self._module", "module")
SCHEMA = rb"swap_blocks_batch\([^)]*\) -> \(\)"

if not (PACKAGES / ".ready").exists():
    pytest.skip("torch_npu and vllm-ascend are not downloaded", allow_module_level=True)

TORCH_NPU = sorted(PACKAGES.glob("torch-npu*"))
VLLM_ASCEND = sorted(PACKAGES.glob("vllm-ascend*"))


@pytest.fixture(params=TORCH_NPU, ids=lambda path: path.name)
def torch_npu(request):
    return request.param / "torch_npu"


@pytest.fixture(params=VLLM_ASCEND, ids=lambda path: path.name)
def vllm_ascend(request):
    return request.param / "vllm_ascend"


def parse(path):
    return ast.parse(path.read_text())


def calls_in(path):
    """Calls of attributes in a file: what it is an attribute of, its name, and the arguments."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert not node.keywords or not ast.unparse(node.func.value).startswith(MODULES)
            yield ast.unparse(node.func.value), node.func.attr, len(node.args)


def definition(package, module, name):
    """The class or function behind a name in a module, wherever it is imported from."""
    path = package / f"{module}.py"
    path = path if path.exists() else package / module / "__init__.py"
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return definition(path.parent, node.module.removeprefix("torch_npu.npu."), name)
    raise AssertionError(f"{name} is not in {path}")


def methods(cls):
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}


def accepts(function, num_args):
    """Whether it can be called with as many positional arguments, ``self`` included."""
    args = function.args
    required = len(args.args) - len(args.defaults)
    return required <= num_args and (args.vararg is not None or num_args <= len(args.args))


def texts_in(library, pattern):
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as bytes_:
        return [match[0].decode() for match in re.finditer(pattern, bytes_)]


# ---- torch_npu ----


def test_the_modules_names_are_there_and_take_what_we_give(torch_npu):
    used = {
        (name, n)
        for file in ("stream_device.py", "host_pool.py")
        for of, name, n in calls_in(OURS / file)
        if of in MODULES
    }
    assert {name for name, _ in used} == {
        "Stream",
        "Event",
        "current_stream",
        "stream",
        "get_device_properties",
    }
    for name, num_args in used:
        found = definition(torch_npu, "npu", name)
        if isinstance(found, ast.ClassDef):
            found, num_args = methods(found)["__new__"], num_args + 1
        assert accepts(found, num_args), ast.unparse(found)


def test_streams_and_events_have_the_methods_we_call(torch_npu):
    theirs = {
        name: method
        for cls in ("Stream", "Event")
        for name, method in methods(definition(torch_npu, "npu", cls)).items()
    }
    used = {
        (name, n)
        for of, name, n in calls_in(OURS / "stream_device.py")
        if name in theirs and of not in MODULES
    }
    assert {name for name, _ in used} >= {"record", "query", "wait_event", "synchronize"}
    for name, num_args in used:
        assert accepts(theirs[name], num_args + 1), ast.unparse(theirs[name])


def test_torch_finds_the_module_by_the_device(torch_npu):
    sources = "\n".join(path.read_text() for path in torch_npu.glob("__init__.py"))
    sources += "\n".join(path.read_text() for path in torch_npu.glob("_init/**/*.py"))
    assert re.search(r"""_register_device_module\(["']npu["'], torch_npu\.npu\)""", sources)
    assert re.search(r"""rename_privateuse1_backend\(["']npu["']\)""", sources)


def test_host_memory_can_be_pinned(torch_npu):
    # What torch asks a device's backend for when memory is to be pinned.
    assert texts_in(torch_npu / "lib/libtorch_npu.so", rb"getPinnedMemoryAllocator")


def test_the_format_of_a_tensor_is_told_as_a_number(torch_npu):
    used = {name for of, name, _ in calls_in(OURS / "kv_layout.py") if of == "torch_npu"}
    assert used == {"get_npu_format"}
    (schema,) = texts_in(torch_npu / "lib/libtorch_npu.so", rb"get_npu_format\([^)]*\) -> \w+")
    assert re.fullmatch(r"get_npu_format\(Tensor \w+\) -> int", schema)
    formats = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in definition(torch_npu, "npu/_format", "Format").body
        if isinstance(node, ast.Assign)
    }
    plain = constant(OURS / "kv_layout.py", "_PLAIN_NPU_FORMATS")
    plain_names = {name for name, number in formats.items() if number in plain}
    assert plain_names == {"ND", "NCHW", "NHWC", "NCDHW"}


# ---- vllm-ascend ----


def constant(path, name):
    for node in parse(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{name} is not in {path}")


def test_the_operator_that_copies_ranges_has_the_schema_that_we_call(vllm_ascend):
    (library,) = vllm_ascend.glob("vllm_ascend_C*.so")
    (schema,) = texts_in(library, SCHEMA)
    assert re.fullmatch(
        r"swap_blocks_batch\(Tensor \w+, Tensor \w+, Tensor \w+, int \w+\) -> \(\)", schema
    )
    assert texts_in(library, rb"\0_C_ascend\0")
    # It checks that the three are what we give.
    for wanted in (rb"\w+ must be int64", rb"\w+ must be on CPU"):
        checked = {text.split()[0] for text in texts_in(library, wanted)}
        assert checked >= {"src_ptrs", "dst_ptrs", "sizes"}
    # And the tests' stand-in has the same.
    (ours,) = texts_in(ROOT / "tests/strict_npu/__init__.py", SCHEMA)
    assert re.sub(r" \w+([,)])", r"\1", ours) == re.sub(r" \w+([,)])", r"\1", schema)


def test_the_directions_are_ours(vllm_ascend):
    ours = constant(OURS / "stream_device.py", "_ASCEND_DIRECTIONS")
    theirs = vllm_ascend / "simple_kv_offload/npu_mem_ops.py"
    assert ours == {
        "h2d": constant(theirs, "DIRECTION_H2D"),
        "d2h": constant(theirs, "DIRECTION_D2H"),
    }
    (library,) = vllm_ascend.glob("vllm_ascend_C*.so")
    for direction, code in ours.items():
        assert texts_in(library, rb"%d=%s\b" % (code, direction.upper().encode()))


def test_the_operator_is_loaded_when_kv_caches_are_registered(vllm_ascend):
    """A worker's module loads the allocator of sleep mode, and that the library."""
    assert "vllm_ascend.device_allocator.camem" in imports_of(vllm_ascend / "worker/worker.py")
    assert "vllm_ascend.vllm_ascend_C" in imports_of(vllm_ascend / "device_allocator/camem.py")


def test_what_loads_the_operator_takes_nothing(vllm_ascend):
    assert accepts(definition(vllm_ascend, "utils", "enable_custom_op"), 0)


def imports_of(path):
    """Modules that are imported when a module is."""
    top = [*parse(path).body]
    top += [node for block in top if isinstance(block, ast.Try) for node in block.body]
    return {node.module for node in top if isinstance(node, ast.ImportFrom)}


def test_the_hook_takes_what_theirs_takes(vllm_ascend):
    folder = vllm_ascend / "distributed/kv_transfer"
    multi = methods(definition(folder, "ascend_multi_connector", "AscendMultiConnector"))
    ours = methods(definition(OURS, "connector", "PreemptOffloadConnector"))
    names = [
        [arg.arg for arg in hooks["update_state_before_preempt"].args.args]
        for hooks in (multi, ours)
    ]
    assert names[0] == names[1]
