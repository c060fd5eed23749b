import importlib.util

# With vllm-ascend on PYTHONPATH only; see the target "ascend" of the Makefile.
if importlib.util.find_spec("vllm_ascend") is None:
    collect_ignore_glob = ["test_*.py"]
