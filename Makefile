# Two commands on a fresh machine: `make demo` and `make test`. `make explore` opens a page to try things on.
# Everything goes into .venv.
# `make docs` is for reading; that the documentation builds without a warning is a test (tests/docs).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# An install that could not build the native kernels is complete, only slower, and pip does not show why.
SAY := @$(BIN)/python -c 'import reassoc; print("native kernels:", reassoc.backends()["native"])'
WAIT := @echo "Installing into $(VENV) and building kernels: several minutes the first time, without a word"
# What an installed package is made from, beside the Python files, which are used where they lie.
BUILT_FROM := pyproject.toml constraints.txt $(wildcard csrc/CMakeLists.txt csrc/*.cpp csrc/*.h)

.PHONY: demo explore test docs native-test lint format clean

demo: $(VENV)/lab  ## fidelity report on the embedded sample
	$(BIN)/reassoc fidelity

explore: $(VENV)/lab  ## kernel attention at work, in the browser; Ctrl-C ends it
	$(BIN)/reassoc explore --open

test: $(VENV)/dev  ## the whole test suite
	$(BIN)/python -m pytest -n 2

docs: $(VENV)/dev  ## the documentation, to open from disk: docs/_build/html/index.html
	$(BIN)/python -m sphinx -b html -W --keep-going -n -q -d docs/_build/doctrees docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

native-test: $(VENV)/dev  ## the C++ tests: optimized, and under the address, undefined-behaviour and thread sanitizers
	$(BIN)/python -m pytest -m native -rs --capture=no tests/test_native_cpp.py

lint: $(VENV)/dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev  ## rewrite to the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist docs/_build reassoc-*/ .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("reassoc needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)

# A stamp per set of packages; asked for again when the pins, the package's own needs or the kernels change.
$(VENV)/lab: $(BUILT_FROM) | $(BIN)/python
	$(WAIT)
	$(PIP) -e '.[explore]'
	$(SAY)
	touch $@

$(VENV)/dev: $(BUILT_FROM) | $(BIN)/python
	$(WAIT)
	$(PIP) -e '.[dev]'
	$(SAY)
	touch $@ $(VENV)/lab
