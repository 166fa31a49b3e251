# Each target sets up .venv by itself; a set-up that is still good takes no time.
#   make quickstart   trains the embedded model
#   make test         formatting, lint, types on the built wheel, tests
#   make lint         the same without the tests
#   make test-slow    the tests that take minutes each, and those of several processes
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: quickstart test test-slow lint

quickstart: $(READY)
	$(BIN)/sage train --preset quickstart

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(READY)
	$(BIN)/python -m pytest -m 'slow or distributed'

# mypy reads the wheel's own files, away from the checkout: there the packages have their real names.
lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/dist .
	$(BIN)/python -m pip install --quiet --no-deps --target build/wheel build/dist/*.whl
	cd build/wheel && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p sagecli

# torch goes first and pinned: unpinned, pip may choose a build that brings gigabytes of CUDA packages.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("sage needs Python 3.11 or newer, and $(PYTHON) is %d.%d; name another: make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
