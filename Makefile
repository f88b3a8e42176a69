# Two commands: `make demo` shows the main job, `make test` proves it. Both set up .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint slow fuzz docs

demo: $(VENV)/.ready
	$(BIN)/vitlab demo

test: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest

slow: $(VENV)/.tested
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -m slow --timeout 3600

# A million mutated files; VITLAB_FUZZ_INPUTS=N for another number, VITLAB_FUZZ_START=N to go on.
fuzz: $(VENV)/.tested
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py

docs: $(VENV)/.tested
	$(BIN)/pip install --quiet --editable '.[docs]'
	$(BIN)/mkdocs build --strict

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.tested: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable '.[test,dev]'
	touch $@
