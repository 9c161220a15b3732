# make demo   build the environment, install, train a language model on real text over 4 ranks
# make test   build the environment, install, run all CPU tests
# make check  formatting, lint and types
# make long   the whole conformance matrix, of which `make test` runs a sample

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check long clean

demo: .venv/installed
	$(BIN)/zeco demo

test: .venv/installed
	$(BIN)/python -m pytest -m "not long and not gpu"

long: .venv/installed
	$(BIN)/python -m pytest -m "long and not gpu"

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

.venv/installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist runs .pytest_cache .ruff_cache .hypothesis
