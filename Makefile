# Everything happens in .venv; nothing outside this folder is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BUILT := $(VENV)/.built
AUDIT := build/audit
NATIVE := $(wildcard src/samebits/csrc/* src/samebits/csrc/kernels/*) CMakeLists.txt pyproject.toml

.PHONY: demo ablate test lint types unit conformance sabotage env build clean audit matrix matrix-full

## demo: install what is missing, run the default job, print where the report is
demo: env
	rm -rf runs/demo
	$(BIN)/samebits run --run-dir runs/demo

## ablate: eight arms, each module native or on the samebits route; goes on where it stopped
ablate: env
	$(BIN)/samebits ablate --run-dir runs/ablate --num-rollout 8

## test: lint, types, every test, and the audit of the GPU kernels
test: env lint
	$(MAKE) --jobs=2 --output-sync=target types audit
	$(MAKE) unit

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

# Two files at a time: a job of the engines is busy on little more than one core.
unit: env
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

## conformance: the cases of every operator, long ones too, and the primitives over all 2^32 inputs
conformance: env
	$(BIN)/python -m samebits.testing.conformance --long
	$(BIN)/python -m samebits.testing.sweep

## sabotage: build every kernel wrongly, one fault at a time, and see each one caught
sabotage: env
	$(BIN)/python -m samebits.testing.sabotage

## audit: compile every Triton kernel for sm_90, gfx942 and gfx950, without a GPU, and check the generated code
audit: env $(AUDIT)/.ready
	PYTHONPATH=$(AUDIT)/site $(BIN)/python -m pytest -q tests/audit
	PYTHONPATH=$(AUDIT)/site $(BIN)/python -m samebits.testing.audit --json $(AUDIT)/audit.json

$(AUDIT)/.ready: requirements/audit.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(AUDIT)/site -r requirements/audit.txt
	touch $@

## matrix: all pairs of the most important trainer and rollout layouts, in minutes
matrix: env
	$(BIN)/samebits run --matrix recipes/topology.toml --matrix-dir runs/matrix

## matrix-full: all layouts, then whole runs in the reference workload's own layout
matrix-full: env
	$(BIN)/samebits run --matrix recipes/topology-full.toml --matrix-dir runs/matrix-full
	$(BIN)/samebits run --matrix recipes/topology-reference.toml --matrix-dir runs/matrix-reference

env: $(READY) $(BUILT)

$(READY): requirements/cpu.txt requirements/cpu-no-deps.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 is needed, this is " + sys.version + "; name one: make PYTHON=python3.11") if sys.version_info[:2] != (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/cpu.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu-no-deps.txt
	touch $@

## build: compile the C++ kernels again and install the package in place
build $(BUILT): $(READY) $(NATIVE)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $(BUILT)

clean:
	rm -rf $(VENV) build runs
