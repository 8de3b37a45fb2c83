# Two commands: `make quickstart` and `make test`. Each makes .venv and installs what it needs into it.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
EXTRAS ?= dev,composer,torchft
RUN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(notdir $(CONSTRAINTS))
OVERRIDES ?=
WORKERS ?= 2
# A module of tests stays with one worker: what its tests share is trained once.
SPREAD := -n $(WORKERS) --dist loadscope
SITE ?= site

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-faults reliability check lint types format docs clean

help: ## Show the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@echo "Installing into $(VENV) (PyTorch is a large download the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS)]'
	@touch $@

install: $(STAMP) ## Install into .venv (VENV=...: elsewhere)

quickstart: $(STAMP) ## Train a small language model on four replicas, about three minutes on two cores
	$(RUN)/composer-replication launch recipes/quickstart.yaml $(OVERRIDES)

test: $(STAMP) ## Run the tests (about a quarter of an hour on two cores)
	$(RUN)/python -m pytest -m "not slow" $(SPREAD) $(PYTEST_ARGS)

test-faults: $(STAMP) ## Run the long fault suite: replicas killed at every step
	$(RUN)/python -m pytest -m slow $(SPREAD) $(PYTEST_ARGS)

reliability: $(STAMP) ## Run all of the fault suite and write docs/reliability.md's table
	$(RUN)/python -m tests.faults.report $(SPREAD) $(PYTEST_ARGS)

check: lint types ## Lint and type-check

lint: $(STAMP)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

types: $(STAMP)
	$(RUN)/pyright --pythonpath $(RUN)/python

format: $(STAMP) ## Put the code into form
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

docs: $(STAMP) ## Build the documentation as a site into site/ (SITE=...: elsewhere)
	NO_MKDOCS_2_WARNING=1 $(RUN)/python -m mkdocs build --strict --site-dir $(SITE)

clean: ## Remove what the commands above made
	rm -rf .venv* .pytest_cache .ruff_cache .hypothesis runs site build dist *.egg-info
