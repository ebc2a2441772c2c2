# Everything sets itself up: a virtual environment in $(VENV), pinned by constraints.txt, made once.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-debug exact algorithms clients test-sglang exact-sglang lint clean

VENV ?= .venv
# SGLang wants other versions of nearly everything, and Python 3.11 exactly.
VENV_SGLANG ?= .venv-sglang
# Its modules warn of what is to be deprecated; stand-ins for its CUDA kernels make it run on a CPU.
PYTEST_SGLANG = PYTHONPATH=$(CURDIR)/tests/sglang/shims:$(CURDIR) $(VENV_SGLANG)/bin/python -m pytest -W ignore
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

# Where tasks, processes and sockets are: actors, faults, frames, the router, the server's life and its clients'.
CONCURRENT = tests/actors tests/faults tests/wire tests/test_router.py tests/test_router_ahead.py \
  tests/test_router_members.py \
  $(addprefix tests/server/,test_gone.py test_health.py test_serve.py)

# Tests and demo models are small: one thread each is fastest, and leaves the other cores to the workers.
export OMP_NUM_THREADS ?= 1

help: ## Show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/.runtime ## Set up, then let two small trained models answer a word problem and a ledger
	$(BIN)/tokenflow run recipes/demo.yaml --chat --trace \
	  'Eva sold 2 mugs for $$10 each and 2 caps for $$4 each. Total?'
	$(BIN)/tokenflow run recipes/demo.yaml --chat --trace \
	  'Ledger from 39: a+3 b+5 c-3 d-1 e+1 f-1 g+8 h+6 i-8 j-9 k+7 l-6 m-6 n-8 o+1'

test: lint ## Set up, then lint, type-check and run the tests
	$(BIN)/python -m pytest --ignore=tests/exact --ignore=tests/clients --ignore=tests/sglang --ignore=tests/cuda

test-debug: $(VENV)/.dev ## Set up, then run what is concurrent with asyncio's checks and a garbage collector in a hurry
	PYTHONASYNCIODEBUG=1 $(BIN)/python -m pytest -p tests.strict $(CONCURRENT) --numprocesses=2 --timeout=300

exact: $(VENV)/.dev ## Set up, then compare routed output with a naive reference over the whole matrix (long)
	$(BIN)/python -m pytest -raP tests/exact/test_matrix.py --timeout=3600 --numprocesses=2

algorithms: $(VENV)/.dev ## Set up, then compare every algorithm in every form with its reference (longer)
	$(BIN)/python -m pytest -raP tests/exact/test_algorithms.py --timeout=3600 --numprocesses=2

clients: $(VENV)/.dev $(VENV)-clients/.made ## Set up, then let LangChain, LiteLLM and lm-eval ask a server (long)
	TOKENFLOW_PYTHON=$(abspath $(BIN))/python $(VENV)-clients/bin/python -m pytest tests/clients --timeout=900 \
	  --confcutdir=tests/clients --override-ini=filterwarnings=

test-sglang: $(VENV_SGLANG)/.installed ## Set up, then run the tests that need SGLang, on the CPU
	$(PYTEST_SGLANG) tests/sglang --numprocesses=2

exact-sglang: $(VENV_SGLANG)/.installed ## Set up, then compare algorithms on SGLang with their references (longer)
	$(PYTEST_SGLANG) -raP tests/exact/test_sglang.py --timeout=3600

lint: $(VENV)/.dev ## Set up, then ruff and mypy only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean: ## Remove the virtual environment and every cache
	rm -rf $(VENV) $(VENV)-clients $(VENV_SGLANG) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.runtime: pyproject.toml constraints.txt
	@python=$${PYTHON:-}; \
	for candidate in python3 python3.13 python3.12 python3.11; do \
	  [[ -z $$python ]] || break; \
	  ! "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || python=$$candidate; \
	done; \
	[[ -n $$python ]] || { echo "error: no Python >= 3.11 on PATH; install one or run make PYTHON=/path/to/python" >&2; exit 1; }; \
	echo "$$python -m venv $(VENV)"; \
	"$$python" -m venv $(VENV)
	$(INSTALL) .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(INSTALL) '.[dev]'
	@touch $@

$(VENV)-clients/.made: tests/clients/requirements.txt | $(VENV)/.runtime
	$(BIN)/python -m venv $(VENV)-clients
	$(VENV)-clients/bin/python -m pip install --quiet --requirement tests/clients/requirements.txt
	@touch $@

$(VENV_SGLANG)/.installed: tests/sglang/requirements.txt pyproject.toml
	@python=$${PYTHON:-}; \
	for candidate in python3.11 python3; do \
	  [[ -z $$python ]] || break; \
	  ! "$$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || python=$$candidate; \
	done; \
	[[ -n $$python ]] || { echo "error: no Python 3.11 on PATH, which SGLang is built for; install it or run make PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	echo "$$python -m venv $(VENV_SGLANG)"; \
	"$$python" -m venv $(VENV_SGLANG)
	$(VENV_SGLANG)/bin/python -m pip install --quiet "$$(grep ^torch== $<)"
	$(VENV_SGLANG)/bin/python -m pip install --quiet --no-deps --requirement $<
	$(VENV_SGLANG)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@
