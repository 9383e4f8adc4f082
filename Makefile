PYTHON ?= python3
BIN := .venv/bin
# Threads that spin while waiting make small kernels slow on a busy machine.
export OMP_WAIT_POLICY := passive

.PHONY: demo test test-slow lint bench clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/installed  ## the toy comparison: a table, and a page with its figures
	$(BIN)/arsm toy --demo
	$(BIN)/arsm report

test: .venv/installed  ## the whole test suite
	$(BIN)/pytest -n 2

test-slow: .venv/installed  ## what takes minutes
	$(BIN)/pytest -n 2 -m slow

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

bench: .venv/installed  ## time and memory, printed as tables
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv
