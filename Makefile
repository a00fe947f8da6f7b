# Lumen's everyday commands.  `make setup` makes .venv; every other target sees to it first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Two trainers on two cores starve each other when OpenMP threads spin at barriers; a short spin costs nothing alone.
export GOMP_SPINCOUNT ?= 1000
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Tests use tiny models: one thread is faster than the barriers of two.
TEST_ENV := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} MPLBACKEND=Agg
PYTEST   := $(TEST_ENV) $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format unit test-slow bench-peers loss-table mutations gpu-check docs-check lock clean distclean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv with all that product and tests need
	@echo "setup: $(BIN)/lumen is ready"

$(READY): pyproject.toml requirements-dev.lock scripts/setup_env.py scripts/setup_torch.py
	@$(PYTHON) scripts/setup_env.py --venv $(VENV)
	@touch $@

demo: $(READY) ## fine-tune a small real model, and show before and after
	@$(BIN)/python scripts/demo.py

test: lint unit ## lint, types and the default test suite

lint: $(READY) ## ruff (style and format) and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(READY) ## rewrite the code in ruff's format
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

unit: $(READY) ## the default test suite alone; ARGS="tests/unit/test_x.py -k y" narrows it
	@$(PYTEST) -m "not slow" -rs $(ARGS)

test-slow: $(READY) ## kill -9 twenty times, real-model tests, long parity runs
	@$(PYTEST) -m slow -rs $(ARGS)

bench-peers: $(READY) ## PEFT + HF Trainer, LLaMA-Factory and Lumen on the same rows, in turns; ARGS="--data FILE.json --setting a"
	@$(BIN)/python bench/peers/run.py $(ARGS)

loss-table: $(READY) ## the loss-gap table, what is missing of it; DATA=folder of alpaca_en_demo.json and wiki_demo.txt
	@for i in 1 2; do $(BIN)/lumen bench loss-gap $(if $(DATA),--data "$(DATA)") --share $$i/2 --quiet $(ARGS) & done; wait
	@$(BIN)/lumen bench loss-gap $(if $(DATA),--data "$(DATA)") --table $(ARGS)

mutations: $(READY) ## break the source as others once did, on a copy: the tests that guard it must fail
	@$(BIN)/python bench/mutations.py $(ARGS)

gpu-check: $(READY) ## on a machine with a GPU: a few steps per dtype against the CPU
	@PYTHON=$(BIN)/python bash bench/gpu_check.sh

docs-check: $(READY) ## links, commands and keys in the documentation are real
	@$(BIN)/python scripts/docs_check.py

lock: $(READY) ## write requirements-dev.lock from what .venv holds
	@$(BIN)/python scripts/lock.py > requirements-dev.lock.new && mv requirements-dev.lock.new requirements-dev.lock

clean: ## remove caches and build outputs
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache src/*.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## and .venv
	rm -rf $(VENV)
