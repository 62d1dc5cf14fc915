# maskserve: `make help` lists what there is.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# What README needs, what its page needs beside, and what develops, which has all of both.
SERVING := $(VENV)/.installed-serving
PAGE := $(VENV)/.installed-page
STAMP := $(VENV)/.installed
# For pip, such as an index that has the CPU or a CUDA build of torch.
PIP_FLAGS ?=
MODEL ?= assets/models/demo
WORKERS ?= 1
# What all draws of the tests come from: a number, or `fresh` for another one in each run.
SEED ?= 0
SHARD ?= 1
SHARDS ?= 8
PYTEST_FLAGS ?=
# What torch itself pins, each build of it another version: never in constraints.txt.
BY_TORCH := triton|cuda-[a-z-]+|nvidia-(cu|nccl|nv)[a-z0-9-]*
JOBS ?= 2
GPU := $(shell command -v nvidia-smi)
# Where this is set each process compiles all modules, and each of pytest rewrites all tests, anew.
export PYTHONDONTWRITEBYTECODE :=
# Links to the models' files, for mypy.
MODELS := .mypy_cache/models

.DEFAULT_GOAL := help
.PHONY: help setup demo page test test-units test-e2e test-full test-slow compose-test check lint types installs bench bench-full \
	serve constraints clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1 : /' \
		| awk -F ' : ' '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo
	@echo '  PYTHON=python3.12      the interpreter for the virtual environment'
	@echo '  PIP_FLAGS="…"          flags for pip, such as an index with another build of torch'
	@echo '  MODEL=… WORKERS=…      what `make serve` serves'
	@echo '  JOBS=2                 cores that `make test` may use'
	@echo '  SEED=0                 what the tests draw by; `fresh` is another in each run'

setup: $(STAMP) ## make .venv with everything that is needed

define TORCH
	@PYTHONPATH=serving $(PYTHON) scripts/check_host.py
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	# torch first and by itself: its index may be another than the rest's.
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt torch
endef

$(SERVING): pyproject.toml constraints.txt
	$(TORCH)
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[clients,engine,jobs,server]'
	@touch $@

$(PAGE): $(SERVING)
	$(PY) -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[web]'
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	$(TORCH)
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[engine,jobs,server,dev]'
	@touch $(SERVING) $(PAGE) $@

demo: $(SERVING) ## a masked edit through a real Triton; writes demo-output/
	$(PY) scripts/bench demo --model $(MODEL)

# Several servers share the cores. A thread that spins while it waits for others keeps these from
# running, and Triton gives up a model's process that stands still for a second.
SHARING := OMP_WAIT_POLICY=PASSIVE

# Both at a time: tests of e2e wait for servers that start, and the others, which give way, compute
# meanwhile. What needs a GPU has it for itself; without one it is skipped where its modules are
# imported already.
test: $(STAMP) ## the tests, with a real Triton
	$(MAKE) -j2 test-e2e test-units
	$(if $(GPU),$(PY) -m pytest tests/gpu --seed $(SEED) $(PYTEST_FLAGS))

test-units: $(STAMP)
	OMP_NUM_THREADS=1 $(SHARING) nice -n 5 $(PY) -m pytest -n $(JOBS) --dist worksteal tests/unit \
		tests/contract tests/triton $(if $(GPU),,tests/gpu) --seed $(SEED) $(PYTEST_FLAGS)

# A file runs in one process, where its Triton is (tests/e2e/conftest.py says which share one).
test-e2e: $(STAMP)
	$(SHARING) $(PY) -m pytest -n $(JOBS) --dist loadfile tests/e2e --seed $(SEED) $(PYTEST_FLAGS)

test-full: $(STAMP) ## the tests, slow ones too
	MASKSERVE_FULL=1 $(MAKE) test SEED=fresh

# What every other run leaves out; a night takes one shard after the other.
test-slow: $(STAMP) ## one of SHARDS shards of the slow tests: SHARD=1, SHARD=2, …
	OMP_NUM_THREADS=1 MASKSERVE_FULL=1 $(PY) -m pytest -n $(JOBS) --dist loadfile tests/unit tests/e2e \
		--slow-shard $(SHARD)/$(SHARDS) --seed fresh $(PYTEST_FLAGS)

compose-test: $(STAMP) ## the containers: build, up, edit, kill a worker, down (needs Docker)
	MASKSERVE_COMPOSE=required $(PY) -m pytest --slow tests/e2e/test_compose.py $(PYTEST_FLAGS)

check: $(STAMP) ## lint, format, types, imports, whether all extras install from the public index
	$(MAKE) -j$(JOBS) --output-sync=target types lint installs

types: $(STAMP)
	# Triton wants a model.py in a folder of that number; mypy wants a name for each.
	mkdir -p $(MODELS)
	for model in model_repository/* services/*; do test ! -e $$model/1/model.py \
		|| ln -sfn $(CURDIR)/$$model/1/model.py $(MODELS)/triton_$${model##*/}.py; done
	$(VENV)/bin/mypy --num-workers $(JOBS) --scripts-are-modules engine/maskserve_common engine/maskserve_lora engine/maskserve_workflows engine/maskserve_engine engine/maskserve_triton router/maskserve_router \
		client/maskserve_client client/maskserve_page serving/maskserve_serving benchmarks/maskserve_benchmarks studies/maskserve_studies \
		scripts/*.py scripts/bench $(MODELS)/*.py

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	PYTHONPATH=engine:router:client:serving:benchmarks:studies $(VENV)/bin/lint-imports
	$(PY) scripts/bench check_words

installs: $(STAMP)
	$(PY) scripts/bench check_install

bench: $(STAMP) ## measured beside what people would use instead: 20 to 35 minutes, by processor
	$(PY) scripts/bench end_to_end

bench-full: $(STAMP) ## the same with more edits, rounds, rates and masks: an hour and a half
	$(PY) scripts/bench end_to_end --full

# Whichever of the two ends takes the other along; Ctrl-C reaches both by itself.
page: SHELL := bash
page: $(PAGE) ## serve MODEL and a page to paint or click masks on, until Ctrl-C
	@$(VENV)/bin/maskserve serve --model $(MODEL) --router --nodes assets/nodes/demo.toml & \
		both=$$!; \
		$(VENV)/bin/maskserve web --url localhost:8080 --router localhost:8080 \
			--images assets/photos & \
		both="$$both $$!"; stop="kill $$both"; \
		trap 'stop=:' INT; trap 'exit' TERM; trap '$$stop 2> /dev/null; wait' EXIT; \
		wait -n $$both

serve: $(SERVING) ## serve MODEL with WORKERS workers until Ctrl-C
	$(VENV)/bin/maskserve serve --model $(MODEL) --workers $(WORKERS)

constraints: $(STAMP) ## write the installed versions to constraints.txt
	@head -2 constraints.txt > constraints.new
	@$(PY) -m pip freeze --exclude-editable | sed -E 's/\+(cpu|cu[0-9]+)$$//' \
		| grep -vE '^($(BY_TORCH))==' >> constraints.new
	@mv constraints.new constraints.txt

clean: ## remove the virtual environment, caches and outputs
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-output logs
