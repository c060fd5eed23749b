# make check   the quick loop: format, lints, types, Rust and Python units
# make test    everything: check, loom, stress, and the end-to-end matrix on real vLLM
# make demo    the same requests three ways on a real engine, and a table of what happened
# make bench   criterion benches of the Rust core
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

.PHONY: check format lint rust-test python-test loom stress e2e test demo bench lock clean

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
		.venv/vllm-$*/bin/pytest tests/engine tests/e2e -n 2 --dist loadfile

test: check loom stress e2e

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
	# Compiled once here instead of at every start of an engine.
	$(UV) pip install -q --compile-bytecode --python .venv/$*/bin/python --no-deps -r environments/$*.txt
	touch $@

$(WHEEL): $(PACKAGE) $(DEV)/.ready
	rm -rf target/package
	$(DEV)/bin/maturin build -q --release --out target/package --interpreter $(DEV)/bin/python
	touch $@

.venv/%/.installed: $(WHEEL) .venv/%/.ready
	$(UV) pip install -q --python .venv/$*/bin/python --no-deps --reinstall target/package/*.whl
	touch $@

.PRECIOUS: .venv/%/.ready .venv/%/.installed $(WHEEL)
