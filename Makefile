# Everything runs from .venv, which is made once and again only when pyproject.toml or the lock changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RANKS ?= 4
JOBS ?= 2
DEMO ?=
PYTEST ?=
FUZZ ?=
ZOO ?=
SHARD ?=
PYTHONS ?= python3.11 python3.12 python3.13
TORCHES ?= 2.11 2.12 2.13

# One thread a rank: four ranks that each take every core only wait for one another.
export OMP_NUM_THREADS := 1
# torch and its neighbours are told not to look for a network.
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo lint test test-all test-matrix fuzz zoo docs clean

help: ## say what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## make .venv and install the locked set (the others do it when needed)

$(INSTALLED): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "autopar needs Python 3.11 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make $(or $(MAKECMDGOALS),install) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

demo: $(INSTALLED) ## train a GPT on 4 ranks and hold every loss against one device; leaves out/demo/
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_gpt.py --out out/demo $(DEMO)

lint: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks

test: lint ## lint, then the tests but for those marked slow
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST)

test-all: lint ## lint, then every test; SHARD=1/12 only the first of twelve parts
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "slow or not slow" $(if $(SHARD),--shard $(SHARD)) $(PYTEST)

test-matrix: ## smoke and parity tests of the wheel on other Pythons and torches; PYTHONS="python3.12" TORCHES="2.11 2.13"
	$(PYTHON) tests/support/matrix.py --pythons "$(PYTHONS)" --torches "$(TORCHES)"

fuzz: $(INSTALLED) ## fresh random modules for ten minutes, held against one device; FUZZ="--gloo" passes options on
	$(BIN)/python -m tests.fuzz --seconds 600 --ranks 2-16 --jobs $(JOBS) $(FUZZ)

zoo: $(INSTALLED) ## prove three layouts of every model of the zoo, for docs/models.md; ZOO="llama bert": of these
	$(BIN)/python -m benchmarks.zoo $(ZOO)

docs: $(INSTALLED) ## build the pages of docs/ into out/docs/, with links checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove what make made, .venv apart
	rm -rf out dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find autopar tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
