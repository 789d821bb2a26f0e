# `make help` lists the targets to begin with, `make help-all` all of them. The text
# after `##` gives the group of a target and what it does.
#
# You need python3 (3.11 to 3.13) with venv, g++ and make. Installed packages go into
# .venv, built files into build. pip reads its usual settings.

PYTHON ?= python3
JOBS ?= $(shell nproc)
# Extra arguments for a command: make demo DEMO=--resume, make structure STRUCTURE=--list
DEMO ?=
CHECK ?=
STRUCTURE ?=
PYTEST ?=
BENCH ?=
WHEELS ?=
# How many seconds `make fuzz` and `make fuzz-clang` run.
SECONDS ?= 600

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PACKAGE := setup.py pyproject.toml MANIFEST.in $(shell find tpu_embedding \
    -name __pycache__ -prune -o \( -type d -o -name '*.py' -o -name '*.cc' \
    -o -name '*.h' \) -print)
CPP := $(shell find tpu_embedding tests -name '*.cc' -o -name '*.h')

# Without these variables, Python imports only the packages in .venv.
unexport PYTHONPATH PYTHONHOME
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help help-all demo install test test-ci test-all lint check check-plan check-tpu docs structure format ops bench bench-one bench-preprocessing \
    bench-measures bench-telemetry bench-distributed bench-peers test-peers test-servers test-distributed test-everywhere test-tensorflow test-aarch64 fuzz fuzz-clang \
    fuzz-deltas fuzz-growing fuzz-refusals fuzz-histories fuzz-telemetry sanitize wheels test-minors clean
# Only one pip runs at a time, whatever -j says.
.NOTPARALLEL:

TARGETS_OF = sed -n 's/^\([a-z0-9-]*\):.*\#\# $(1): /  make \1\t/p' Makefile | expand -t 28

help:
	@$(call TARGETS_OF,start)
	@echo "  make help-all             all targets"

help-all:
	@for group in start "work on the code" "long tests" measure release; do \
	    echo "$$group:"; $(call TARGETS_OF,'"$$group"'); done

demo: $(VENV)/demo.stamp $(VENV)/host.stamp ## start: set up, then train a recommender on MovieLens-100K
	$(BIN)/python examples/01_movielens_ranking.py $(DEMO)

install: $(VENV)/package.stamp ## start: install the package into .venv, with the software TPU

# The tests run against the installed package and print the slowest files. For all files,
# run python tests/file_times.py, which reads build/test_times.json.
test: TIER := -m 'not second_tier and not third_tier'
test-ci: TIER := -m 'not third_tier'
test: ## start: lint, then run the tests of one process, and one of each other kind
test-ci: ## work on the code: lint, then the tests of the first and second tier, as CI does
test-all: ## work on the code: lint, then all tests
test test-ci test-all: lint $(VENV)/package.stamp
	TPU_EMBEDDING_TEST_INSTALLED=1 $(BIN)/pytest -n $(JOBS) --dist worksteal $(TIER) \
	    --doctest-modules --pyargs tpu_embedding tests $(PYTEST)

lint: $(VENV)/dev.stamp ## work on the code: format, style, types, layers, sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python tools/lint_report.py

check: $(VENV)/dev.stamp ops ## start: lint, and run the tests of what changed, which takes two minutes after a build
	$(BIN)/python tools/check.py $(CHECK)

docs: $(VENV)/docs.stamp ## start: build the pages and the API reference as a site: open build/docs/index.html
	$(BIN)/python tools/build_docs.py

structure: ## work on the code: print the counts of the package's structure and their aims; run `make ops` first
	$(BIN)/python tools/structure.py $(STRUCTURE)

format: $(VENV)/dev.stamp ## work on the code: rewrite Python and C++ in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

ops: $(VENV)/demo.stamp ## work on the code: build the library into the checkout, to run from there
	$(BIN)/python setup.py --quiet build_ext --inplace

wheels: ## release: build wheels in dist for TensorFlow 2.18 to 2.22 and print auditwheel's verdicts: make wheels WHEELS='2.21 2.22'
	$(PYTHON) tools/build_wheel.py $(WHEELS)

# tf_keras is installed without its requirements, which include TensorFlow for GPUs.
# TensorFlow 2.22 uses tf_keras 2.21, and its release candidate brings keras-nightly.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
MINORS ?= 2.18 2.19 2.20 2.21 2.22

test-minors: $(MINORS:%=test-minor-%) ## release: run the tests with the wheels of `make wheels`: make test-minors MINORS=2.19 PYTEST='-k csr'

test-minor-%: MINOR = build/test-minors/$*
test-minor-%:
	$(PYTHON) -m venv $(MINOR)
	$(PYTHON) -c '$(REQUIREMENTS)' examples test | grep -v -e tf_keras \
	    $(if $(filter 2.22,$*),-e ^keras) > $(MINOR)/tests.txt
	$(MINOR)/bin/python -m pip --disable-pip-version-check --quiet install \
	    setuptools wheel 'tensorflow-cpu>=$*.0rc0,<$*.99' --requirement $(MINOR)/tests.txt \
	    $(if $(filter 2.18 2.19 2.20,$*),'protobuf<6')
	$(MINOR)/bin/python -m pip --disable-pip-version-check --quiet install \
	    --no-deps --force-reinstall --find-links dist tpu_embedding==$(VERSION) \
	    'tf_keras==$(if $(filter 2.22,$*),2.21,$*).*'
	TPU_EMBEDDING_TEST_INSTALLED=1 $(MINOR)/bin/pytest -n $(JOBS) \
	    --dist worksteal tests $(PYTEST)

check-tpu: $(VENV)/demo.stamp ## long tests: compile 29 programs for v5p, v6e and 7x by libtpu: TPU_EMBEDDING_TPU_CHECK_PYTHON=...
	PYTHONPATH=. $(BIN)/python tools/check_tpu.py $(CHECK)

check-plan: ops ## long tests: compare plans with the measured memory of 12 configurations of 1 to 2 GiB
	PYTHONPATH=. $(BIN)/python tools/check_plan.py

bench: ops ## measure: run every benchmark that has an aim, with the peers: make bench BENCH=--quick
	$(BIN)/python -m benchmarks.everything $(BENCH)

bench-one: ops ## measure: one scenario: make bench-one BENCH='--optimizer sgd'
	$(BIN)/python -m benchmarks.run $(BENCH)

bench-preprocessing: ops ## measure: SparseCore preprocessing, with the peers
	$(BIN)/python -m benchmarks.preprocessing $(BENCH)

bench-telemetry: ops ## measure: steps with and without te.Telemetry
	$(BIN)/python -m benchmarks.telemetry $(BENCH)

bench-measures: ops ## measure: threads, odd widths, memory, import
	$(BIN)/python -m benchmarks.measures $(BENCH)

bench-distributed: ops ## measure: several processes, beside TorchRec and TensorFlow; after make bench-peers
	$(BIN)/python -m benchmarks.distributed $(BENCH)

# Each peer has a venv of its own, because their requirements conflict.
NO_DEPS := benchmarks/peers/requirements/no_deps
PEERS := $(basename $(notdir $(wildcard benchmarks/peers/requirements/*.txt)))

bench-peers: $(PEERS:%=build/peers/%/installed.stamp) ## measure: install the peers of `make bench`

build/peers/%/installed.stamp: benchmarks/peers/requirements/%.txt
	$(PYTHON) -m venv --clear build/peers/$*
	build/peers/$*/bin/python -m pip --disable-pip-version-check --quiet install \
	    --requirement $<
	@# A peer that requires the CUDA build of a library is installed beside the CPU one.
	test ! -f $(NO_DEPS)/$*.txt || build/peers/$*/bin/python -m pip \
	    --disable-pip-version-check --quiet install --no-deps \
	    --requirement $(NO_DEPS)/$*.txt
	@touch $@

PEER_TESTS := build/peers/tests

test-peers: ## long tests: test the tf_keras layer, also beside tensorflow-recommenders and with its tests, and deltas by TensorFlow Serving's API
	$(PYTHON) -m venv --clear $(PEER_TESTS)
	$(PEER_TESTS)/bin/python -m pip --disable-pip-version-check --quiet install \
	    setuptools wheel --requirement tests/peers/requirements-tfrs.txt
	$(PEER_TESTS)/bin/python -m pip --disable-pip-version-check --quiet install \
	    --no-build-isolation --no-deps .
	TF_USE_LEGACY_KERAS=1 $(PEER_TESTS)/bin/pytest tests/peers tests/tf_keras

fuzz: $(VENV)/dev.stamp $(VENV)/package.stamp ## long tests: fuzz with random input for minutes: make fuzz SECONDS=60
	PYTHONPATH=tests $(BIN)/python -P -m reliability.fuzz --seconds $(SECONDS)

STEPS ?= 20000

test-servers: $(VENV)/dev.stamp $(VENV)/package.stamp ## long tests: faults and costs of workers and parameter servers, 20 minutes
	PYTHONPATH=tests $(BIN)/python -P tests/parameter_server_faults.py
	PYTHONPATH=tests $(BIN)/python -P tests/parameter_server_costs.py
	PYTHONPATH=tests $(BIN)/python -P tests/parameter_server_storage.py

BATCHES ?= 1000

fuzz-telemetry: $(VENV)/dev.stamp ops ## long tests: compare the figures of te.Telemetry with a slow count: make fuzz-telemetry BATCHES=1000
	TPU_EMBEDDING_TELEMETRY_BATCHES=$(BATCHES) $(BIN)/pytest tests/test_telemetry.py -k fuzzed

# Arguments: one or more of fuzz, refusals, faults, checkpoints, steps; --quick; --seed 2.
DISTRIBUTED ?=

test-distributed: $(VENV)/dev.stamp $(VENV)/package.stamp ## long tests: jobs of 1 to 4 processes, an hour: make test-distributed DISTRIBUTED=faults
	PYTHONPATH=tests $(BIN)/python -P -m multi_process.long_run $(DISTRIBUTED)

fuzz-refusals: $(VENV)/dev.stamp $(VENV)/package.stamp ## long tests: compare refused steps with a reference: make fuzz-refusals STEPS=2000
	PYTHONPATH=tests $(BIN)/python -P -m reliability.refusals --steps $(STEPS)

HISTORIES ?= 100

fuzz-histories: $(VENV)/dev.stamp $(VENV)/package.stamp ## long tests: steps, saves and restores on every engine: make fuzz-histories HISTORIES=20
	PYTHONPATH=tests $(BIN)/python -P -m everywhere.histories --histories $(HISTORIES)

fuzz-deltas: $(VENV)/dev.stamp $(VENV)/package.stamp ## long tests: fuzz trainers, deltas and the models that follow them: make fuzz-deltas HISTORIES=1000
	PYTHONPATH=tests $(BIN)/python -P -m reliability.following --histories $(HISTORIES)

test-everywhere: $(VENV)/dev.stamp ops ## long tests: both queue classes on every engine, 1, 2 and 4 devices, pipelined or not
	TPU_EMBEDDING_TEST_EVERY_CELL=1 $(BIN)/pytest tests/everywhere -k test_numbers

fuzz-growing: $(VENV)/dev.stamp ops ## long tests: compare growing tables with a NumPy reference: make fuzz-growing STEPS=2000
	TPU_EMBEDDING_GROWING_STEPS=$(STEPS) $(BIN)/pytest tests/test_growing_fuzz.py

# A checkout of TensorFlow; only its test files are read.
TF_TESTS ?=

test-tensorflow: $(VENV)/dev.stamp ops ## long tests: TensorFlow's own tests: make test-tensorflow TF_TESTS=tensorflow
	PYTHONPATH=. $(BIN)/python -P tools/test_tensorflow.py $(TF_TESTS)

test-aarch64: $(VENV)/dev.stamp ## release: the C++ tests for aarch64: needs g++-aarch64-linux-gnu and qemu-user-static
	CXX=aarch64-linux-gnu-g++ \
	    TPU_EMBEDDING_TEST_EMULATOR="qemu-aarch64-static -L /usr/aarch64-linux-gnu" \
	    $(BIN)/python -m pytest tests/test_cc.py $(PYTEST)

CLANG ?= clang++

fuzz-clang: $(VENV)/dev.stamp $(VENV)/package.stamp ## long tests: fuzz the C++ core with libFuzzer
	PYTHONPATH=tests $(BIN)/python -P -m reliability.fuzz --seconds $(SECONDS) --clang $(CLANG)

# Builds the op libraries with g++'s sanitizers, which must be loaded before Python's own
# libraries. Their flags come last, so that -O1 takes effect. Leaks are not reported,
# because Python and TensorFlow do not free all memory. GCC 12 cannot compile TensorFlow's
# headers with checks of null pointers. Without NDEBUG_SANITIZER, Abseil's containers
# would have different members from those in TensorFlow's libraries.
SANITIZE := build/sanitize
SANITIZE_FLAGS := -O1 -fsanitize=address,undefined -fno-sanitize-recover=all \
    -fno-sanitize=vptr,null,nonnull-attribute,returns-nonnull-attribute \
    -fno-omit-frame-pointer -DNDEBUG_SANITIZER
SANITIZED_TESTS ?= tests/reliability/test_bad_input.py \
    tests/reliability/test_bad_input_tpus.py \
    tests/reliability/test_malformed_graphs.py tests/test_embedding.py \
    tests/test_embedding_v2.py tests/test_preprocessing.py

sanitize: $(VENV)/dev.stamp ## long tests: run a part of the tests with the ops under g++'s sanitizers
	CXX="sh -c 'exec g++ \"\$$@\" $(SANITIZE_FLAGS)' g++" \
	    $(BIN)/python setup.py --quiet build_py --build-lib $(SANITIZE)/lib \
	    build_ext --build-lib $(SANITIZE)/lib --build-temp $(SANITIZE)/temp
	PYTHONPATH=$(SANITIZE)/lib ASAN_OPTIONS=detect_leaks=0 \
	    LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	    $(BIN)/pytest -p no:faulthandler $(SANITIZED_TESTS) $(PYTEST)

clean: ## work on the code: remove everything that set-up and builds made
	rm -rf $(VENV) build dist *.egg-info tpu_embedding/*/*.so
	rm -rf .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find tpu_embedding tests examples -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/venv.stamp:
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/docs.stamp: pyproject.toml $(VENV)/venv.stamp
	$(call install,docs)
	@touch $@

# The package itself is installed last, because its library is compiled against the
# TensorFlow among its requirements. So pip first gets only the lists of pyproject.toml.
REQUIREMENTS := import sys, tomllib; \
    project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    extras = [project["optional-dependencies"][name] for name in sys.argv[1:]]; \
    print("setuptools>=65", "wheel", *project["dependencies"], *sum(extras, []), sep="\n")

# Before Python 3.12, venv brings setuptools: then another CPU core compiles what does not
# need TensorFlow while pip unpacks it. Python's modules are compiled afterwards, in the
# background.
define install
@echo "Installing requirements ($(1)) into $(VENV); the first time takes minutes."
@$(BIN)/python -c '$(REQUIREMENTS)' $(1) > $(VENV)/requirements.txt
@if $(BIN)/python -c 'import setuptools' 2>/dev/null; then \
    $(BIN)/python setup.py --quiet build_core & fi; \
$(PIP) install --no-compile --requirement $(VENV)/requirements.txt && wait
@$(BIN)/python -m compileall -qq $(VENV)/lib > /dev/null 2>&1 &
endef

$(VENV)/demo.stamp: pyproject.toml $(VENV)/venv.stamp
	$(call install,cpu examples)
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(VENV)/venv.stamp
	$(call install,cpu examples test lint)
	@touch $@

# build/lib is removed because setuptools would pack what an earlier build left there;
# the object files beside it stay. A stamp has the time at which the build started, so
# that a source that is edited during the build is newer.
define install_package
@touch $@.start
rm -rf build/lib* build/bdist*
$(1) $(PIP) install --no-build-isolation --no-deps --force-reinstall .
@mv $@.start $@
endef

# Installs the package without the software TPU, which takes half of the build time.
$(VENV)/host.stamp: $(PACKAGE) | $(VENV)/demo.stamp
	@rm -f $(VENV)/package.stamp
	$(call install_package,TPU_EMBEDDING_BUILD_SOFTWARE_TPU=0)

$(VENV)/package.stamp: $(PACKAGE) | $(VENV)/demo.stamp
	$(call install_package)
	@touch -r $@ $(VENV)/host.stamp
