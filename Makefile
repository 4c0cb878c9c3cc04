# make demo   install, then train and evaluate a small looped model on this machine
# make test   install, then everything CI runs
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TEST_WORKERS ?= 2
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0
# Tests start hundreds of processes: where an environment says so, each would compile all of LT2 anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint install chromium clean

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

# The dashboard's tests drive Debian's chromium; without it (and without root to install it) they are skipped.
chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y chromium; } \
		|| echo "no chromium: the browser tests will be skipped"

# Two files at a time: most of a test's time goes by in processes that start or wait.
test: lint chromium
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

clean:
	rm -rf $(VENV) lt2-storage
