PYTHON ?= python3
BIN := .venv/bin
# Threads that spin while waiting make small kernels slow on a busy machine.
export OMP_WAIT_POLICY := passive

.PHONY: help demo reproduce test test-slow lint docs readme bench clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 \t\2/p' Makefile | expand -t 20

.venv/installed: pyproject.toml experiments/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' --editable experiments
	touch $@

demo: .venv/installed  ## one page: a choice, a latent code, a sequence task, an agent and a wrong gradient; takes minutes
	$(BIN)/arsm demo

reproduce: .venv/installed  ## every experiment of the paper, shortened to minutes, and the page that reports them
	$(BIN)/arsm reproduce --scale smoke

test: .venv/installed  ## the test suite
	$(BIN)/pytest -n 2

test-slow: .venv/installed  ## the tests that take minutes
	$(BIN)/pytest -n 2 -m slow

lint: .venv/installed  ## formatting, style, types and spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/codespell

docs: .venv/installed  ## the documentation, as a site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

readme: .venv/installed  ## the README's figure and results, and the index of the reference, made again
	$(BIN)/python -m arsm_experiments.readme
	$(BIN)/python docs/reference_index.py

bench: .venv/installed  ## time and memory, printed as tables
	$(BIN)/python -m benchmarks univariate swap overhead rl
	# Alone on a machine the opposite holds for steps of several threads: waking them would be half of the time.
	OMP_WAIT_POLICY=active $(BIN)/python -m benchmarks vae
	if $(BIN)/python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then $(BIN)/python -m benchmarks gpu; fi

clean:  ## remove what was installed
	rm -rf .venv
