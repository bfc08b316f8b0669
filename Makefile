PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
ONE_THREAD := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: help install quickstart check format test test-all test-gpu clean

help:
	@echo "make quickstart   set up .venv, then train and measure a draft head on a small real model"
	@echo "make test         the CPU tests; test-all: the long ones too; test-gpu: those that need CUDA"
	@echo "make check        lint, formatting, types, import rule"
	@echo "make format       apply the formatter"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[dev]'
	touch $@

quickstart: $(INSTALLED)
	$(BIN)/spectrain quickstart

check: $(INSTALLED) .dev/spectrain
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

.dev/spectrain:
	mkdir -p .dev
	ln -sfn .. .dev/spectrain

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(INSTALLED)
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist loadscope -q

test-all: $(INSTALLED)
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist loadscope -q -m "not gpu"

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -q -m gpu

clean:
	rm -rf $(VENV) .dev build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
