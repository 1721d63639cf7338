# Two commands on a fresh machine: `make demo` and `make test`. Everything goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint format clean

demo: $(VENV)/lab  ## fidelity report on the embedded sample
	$(BIN)/reassoc fidelity

test: $(VENV)/dev  ## the whole test suite
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev  ## rewrite to the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist reassoc-fidelity .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("reassoc needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)

# A stamp per set of packages; asked for again when the pins or the package's own needs change.
$(VENV)/lab: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[lab]'
	touch $@

$(VENV)/dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/lab
