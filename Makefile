# Needs Python 3.10 to 3.13 (PYTHON=...), pip and make: no host compiler, no CUDA toolkit.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: validate test test-slow lint clean

validate: $(READY)
	$(BIN)/greenfast validate fp8_sdpa

test: $(READY)
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "not gpu and not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m slow

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 10) <= v <= (3, 13) and "greenfast needs Python 3.10 to 3.13, but $(PYTHON) is %d.%d; name another, as in: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv --clear .venv
	@echo "Installing requirements.lock into .venv; this can take minutes, PyTorch is large."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
