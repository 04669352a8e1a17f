# Each target sets up all it needs in .venv inside the clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Exact versions of all that is installed, pip and what builds the package too.
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test quick lint types pytest docs coverage constraints matrix newest clean

demo: $(VENV)/.demo
	$(BIN)/wellposed demo

test: lint types pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# One thread a worker: two workers with two threads each only get in each other's way.
pytest: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The numerics, the edits and the probes, without what is marked as slow.
QUICK := tests/linalg tests/nn tests/anatomy tests/surgery tests/probes tests/test_records.py
quick: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow' $(QUICK)

# The same strict build is one of the tests (tests/test_site.py).
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/docs/index.html, or serve it: $(BIN)/mkdocs serve"

# Every edit and probe on a model of each kind, docs/coverage.md, and the proofs that are shipped; some minutes.
coverage: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python tools/coverage.py

# The newest versions that pyproject.toml allows; needs the package index and a minute.
constraints: | $(VENV)/bin/python
	$(BIN)/python tools/constraints.py

# The oldest supported and the newest published versions of timm, transformers, torchvision and torch.
matrix: $(VENV)/.dev
	$(BIN)/python tools/matrix.py

# The newest alone, where there are newer ones than those pinned; NEWEST=--keep-torch without a new torch.
newest: $(VENV)/.dev
	$(BIN)/python tools/matrix.py --newest $(NEWEST)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --build-constraint constraints.txt --editable '.[train]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --build-constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
