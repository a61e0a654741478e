# Builds, tests, and measures fastpipe in the virtual environment .venv. `make help` lists the targets.

PYTHON ?= python3
CARGO ?= cargo
# Examples: `make test PYTEST_ARGS="-k snappy"`, `make test CARGO_FLAGS=--locked`.
CARGO_FLAGS ?=
# Set this to `--no-default-features` for a free-threaded Python.
EXTENSION_FLAGS ?=
PYTEST_ARGS ?=
# Number of test processes. The tests of a file run sequentially in one process. The default is one more than the number
# of cores because many tests wait for programs that they start.
PYTEST_PROCESSES ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
BENCH_ARGS ?=
FILES ?=
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= container csv decode entry index order schema tfrecord

BIN := .venv/bin
STAMPS := .venv/.stamps
TARGET := $(or $(CARGO_TARGET_DIR),target)
MSRV = $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
EXTENSION_SOURCES := $(wildcard Cargo.toml Cargo.lock pyproject.toml README.md) \
    $(shell find rust -name target -prune -o -path rust/fuzz -prune -o \( -name '*.rs' -o -name Cargo.toml \) -print)

# Builds for .venv even if another environment is active. maturin fails if a Conda environment is active as well.
export VIRTUAL_ENV := $(CURDIR)/.venv
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
unexport CONDA_PREFIX
unexport PYTHONHOME
unexport PYTHONPATH

# Prints the requirements of the given extras and dependency groups of pyproject.toml, so that they can be installed
# without building the extension. `build` and `core` are the requirements to build and to import the package.
define REQUIREMENTS
import re, sys, tomllib
with open("pyproject.toml", "rb") as file:
    pyproject = tomllib.load(file)
project = pyproject["project"]
lists = {"build": pyproject["build-system"]["requires"], "core": project["dependencies"]}
lists |= project["optional-dependencies"] | pyproject["dependency-groups"]
itself = re.compile(re.escape(project["name"]) + r"\[(.+)\]")
names, found = sys.argv[1:], {}
for name in names:
    for requirement in lists[name]:
        if match := itself.fullmatch(requirement):
            names += match[1].split(",")
        else:
            found[requirement] = None
print("\n".join(found))
endef
export REQUIREMENTS

# Copies the extension from a Cargo output folder to the Python sources, and adds the sources to the path of .venv. It
# deletes an old extension first instead of overwriting it, because a running program may have loaded it.
define IN_PLACE
import shutil, sys, sysconfig
from pathlib import Path
[built] = (path for path in Path(sys.argv[1]).glob("lib_fastpipe.*") if path.suffix in (".so", ".dylib"))
suffix = sysconfig.get_config_var("EXT_SUFFIX") if sysconfig.get_config_var("Py_GIL_DISABLED") else ".abi3.so"
extension = Path("python/fastpipe/_fastpipe" + suffix)
extension.unlink(missing_ok=True)
shutil.copy(built, extension)
Path(sysconfig.get_path("purelib"), "fastpipe_data.pth").write_text(f"{Path('python').resolve()}\n")
endef
export IN_PLACE

EXTENSION_EXISTS = ls python/fastpipe/_fastpipe*.so >/dev/null 2>&1 || \
    { echo "The extension isn't built: make build, or make test." >&2; exit 1; }
# FASTPIPE_DOCS_INTERSPHINX=1 adds links to the documentation of Python, NumPy, pyarrow and torch, and needs the network.
BUILD_DOCS = $(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -c docs . $(TARGET)/docs

.PHONY: help demo test test-rust build-rust-tests test-python test-fast soak fuzz bench docs lint lint-rust lint-python lines msrv \
    licenses build deps clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Cargo already uses every core, and two pip runs in the same environment would conflict.
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(STAMPS)/demo $(STAMPS)/extension ## build fastpipe and run the demo on FILES or on generated data
	$(BIN)/python examples/demo.py $(FILES)

test: test-rust test-python ## run all tests

# The bindings need Python's headers. All crates are tested with the same features, so Cargo compiles them only once.
test-rust: $(STAMPS)/venv
	$(CARGO) test $(CARGO_FLAGS) $(EXTENSION_FLAGS) --workspace

# Compiles the tests of test-rust without running them.
build-rust-tests: $(STAMPS)/venv
	$(CARGO) test $(CARGO_FLAGS) $(EXTENSION_FLAGS) --workspace --no-run

test-python: $(STAMPS)/test $(STAMPS)/checked
	FASTPIPE_REWRITE="$(abspath $(TARGET)/debug/examples/rewrite)" $(BIN)/python -m pytest \
	    -n $(PYTEST_PROCESSES) --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
	    --max-worker-restart 2 $(PYTEST_ARGS)

# Uses the existing extension, in a debug or a release build.
test-fast: $(STAMPS)/test ## run the tests that need no framework, server, or other program, without a build
	@$(EXTENSION_EXISTS)
	$(BIN)/python -m pytest -n $(PYTEST_PROCESSES) --dist loadfile --no-loadscope-reorder --quick $(PYTEST_ARGS)

soak: $(STAMPS)/test $(STAMPS)/extension ## run the tests that take hours: many examples, negatives, mutated files, out of memory
	FASTPIPE_EXAMPLES=500 $(BIN)/python -m pytest -n $(PYTEST_PROCESSES) -m hypothesis $(PYTEST_ARGS)
	FASTPIPE_NEGATIVES=1000000000 FASTPIPE_MUTATIONS=200000 FASTPIPE_OOM_RUNS=200 FASTPIPE_TOY=1 \
	FASTPIPE_SQL_QUERIES=500 FASTPIPE_CSV_FILES=10000 FASTPIPE_CSV_MEGABYTES=1000 FASTPIPE_NUMBERS=10000000 FASTPIPE_LEASE_RUNS=200 \
	FASTPIPE_SERVICE_RUNS=200 FASTPIPE_TICKETS=1000000 FASTPIPE_CONNECTIONS=1000 \
	FASTPIPE_LOADER_RUNS=500 FASTPIPE_HOSTILE=1 FASTPIPE_CHANCES=2000 FASTPIPE_PIPELINES=720 FASTPIPE_CACHE_KILLS=100 \
	FASTPIPE_DAMAGED_FILES=10000 FASTPIPE_FLIPPED_BITS=100000 \
	$(BIN)/python -m pytest -s \
	    tests/test_negatives.py tests/test_mutations.py tests/test_out_of_memory.py tests/test_new_source.py \
	    tests/test_hostile_container.py tests/test_csv.py tests/test_csv_soak.py tests/test_sql_queries.py tests/test_leases_chaos.py \
	    tests/test_equal_chances.py tests/test_loader_chaos.py tests/test_service_requests.py \
	    tests/test_service_connections.py tests/test_service_chaos.py tests/test_pipelines.py tests/test_block_cache.py \
	    tests/test_damage.py tests/test_index_checksums.py $(PYTEST_ARGS)

# Two files of libdeflate define a global of the same name. This is harmless, so the ODR check is off.
fuzz: ## run each fuzz target for FUZZ_SECONDS (needs a nightly Rust and `cargo install cargo-fuzz`)
	for target in $(FUZZ_TARGETS); do \
	    ASAN_OPTIONS=detect_odr_violation=0 $(CARGO) +nightly fuzz run $$target --fuzz-dir rust/fuzz -- \
	        -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=2048 -timeout=10 -max_len=65536 || exit 1; \
	done

bench: $(STAMPS)/bench $(STAMPS)/extension ## compare with other libraries; measure speed and memory (QUICK=1: small datasets)
	$(BIN)/python benches/bench.py $(BENCH_ARGS)

# Uses the existing extension, because the reference imports the package.
docs: $(STAMPS)/docs ## build the manual as a site in target/docs, without a build of the extension
	@$(EXTENSION_EXISTS)
	$(BUILD_DOCS)
	@echo "$(TARGET)/docs/index.html"

lint: lint-rust lint-python ## check formatting, lints, imports, types, stubs, documentation, and prose

lint-rust: $(STAMPS)/venv
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(CARGO_FLAGS) --workspace --all-targets -- -D warnings
	$(CARGO) clippy --locked --manifest-path rust/fuzz/Cargo.toml --target-dir $(TARGET) -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(CARGO_FLAGS) --workspace --no-deps
	$(BIN)/python tests/acyclic.py

# Also installs the requirements of the tests: mypy doesn't check the types of missing libraries.
lint-python: $(STAMPS)/lint $(STAMPS)/docs $(STAMPS)/test $(STAMPS)/checked
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml fastpipe._fastpipe
	$(BIN)/python tests/prose.py
	$(BUILD_DOCS)

lines: ## count the lines of each part
	@for part in rust python tests benches examples docs; do \
	    printf '%-9s %7d\n' $$part $$(git ls-files -z "$$part/*.rs" "$$part/*.py" "$$part/*.pyi" "docs/*.md" | \
	        grep -z "^$$part/" | xargs -0 cat | wc -l); \
	done
	@for room in rust/* python/fastpipe/*/; do \
	    printf '  %-32s %6d\n' $${room%/} $$(git ls-files -z "$$room" | xargs -0 cat | wc -l); \
	done

msrv: $(STAMPS)/venv ## check with the oldest Rust version that Cargo.toml supports (needs rustup)
	@rustup run $(MSRV) rustc --version >/dev/null 2>&1 || rustup toolchain install $(MSRV) --profile minimal || \
	    { echo "Rust $(MSRV) isn't installed and couldn't be fetched: the minimum version wasn't checked." >&2; exit 1; }
	CARGO_TARGET_DIR="$(TARGET)/msrv" rustup run $(MSRV) cargo check $(CARGO_FLAGS) --workspace --all-targets

licenses: ## write THIRD-PARTY-LICENSES.md for the wheels (needs `cargo install cargo-about --features cli`)
	$(CARGO) about generate --manifest-path rust/fastpipe-python/Cargo.toml $(CARGO_FLAGS) \
	    --config rust/fastpipe-python/about.toml --fail rust/fastpipe-python/about.hbs >THIRD-PARTY-LICENSES.md

build: $(STAMPS)/extension ## build the extension into .venv

deps: $(STAMPS)/build $(STAMPS)/demo $(STAMPS)/test $(STAMPS)/lint $(STAMPS)/docs ## create .venv with all development dependencies

clean: ## remove everything that was built, downloaded or generated
	$(CARGO) clean
	rm -rf .venv dist wheelhouse .hypothesis .mypy_cache .pytest_cache .ruff_cache benches/.cache benches/.envs
	rm -f python/fastpipe/_fastpipe*.so THIRD-PARTY-LICENSES.md
	find python tests benches -name __pycache__ -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@command -v $(PYTHON) >/dev/null || { echo "fastpipe needs Python 3.11 or newer; $(PYTHON) wasn't found." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fastpipe needs Python 3.11 or newer;" \
	    "$(PYTHON) is $$($(PYTHON) --version). Choose another version: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@mkdir -p $(STAMPS)
	@touch $@

# Each list of requirements has a stamp file.
$(STAMPS)/build $(STAMPS)/demo $(STAMPS)/docs $(STAMPS)/test $(STAMPS)/lint $(STAMPS)/bench: $(STAMPS)/%: pyproject.toml $(STAMPS)/venv
	$(BIN)/python -c "$$REQUIREMENTS" core $* > $@.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement $@.txt
	@touch $@

# The release build (`extension`) and the debug build (`checked`) write the same file among the Python sources. Only one
# can be installed, so each removes the other's stamp.
$(STAMPS)/extension: $(EXTENSION_SOURCES) $(STAMPS)/build
	@command -v $(CARGO) >/dev/null || { echo "fastpipe is built with Rust $(MSRV) or newer; $(CARGO) wasn't found." >&2; exit 1; }
	$(BIN)/maturin develop --release $(CARGO_FLAGS) $(EXTENSION_FLAGS)
	@rm -f $(STAMPS)/checked
	@touch $@

# The build for tests, with debug assertions and overflow checks. It selects the same packages and development
# dependencies as `cargo test`, so Cargo chooses the same features and compiles only the bindings again. The example
# `rewrite` copies an Avro file with another library's writer.
$(STAMPS)/checked: $(EXTENSION_SOURCES) $(STAMPS)/build
	$(CARGO) build $(CARGO_FLAGS) $(EXTENSION_FLAGS) --workspace --lib --example rewrite
	$(BIN)/python -c "$$IN_PLACE" "$(TARGET)/debug"
	@rm -f $(STAMPS)/extension
	@touch $@

# Build again if a stamp exists but the library doesn't.
ifeq ($(wildcard python/fastpipe/_fastpipe*.so),)
.PHONY: $(STAMPS)/extension $(STAMPS)/checked
endif
