# make demo   install, then train and evaluate a small looped model on this machine
# make test   install, then everything CI runs
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: demo test lint install clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,interpret]'
	touch $@

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/lt2 run quickstart

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) lt2-storage
