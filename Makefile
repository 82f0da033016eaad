# Needs Python 3.10 to 3.13 (PYTHON=...), pip and make: no host compiler, no CUDA toolkit.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
COMPILED := .venv/.compiled

# As many processes as cores, a thread in each.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest --dist worksteal

# Every process would compile what it imports anew.
unexport PYTHONDONTWRITEBYTECODE

TRITON_TESTS := tests/emulator/test_triton.py tests/judge/solution/test_recording.py

HAS_GPU := import sys; from cuda.bindings import driver; sys.exit(int(driver.cuInit(0)[0]))

.PHONY: judge validate test test-triton test-gpu test-slow docs sanitize lint clean

# validate: the former name
judge validate: $(READY)
	$(BIN)/greenfast judge fp8_sdpa

test: $(COMPILED)
	$(PYTEST) --numprocesses auto -m "not gpu and not slow"
	@if $(BIN)/python -c "$(HAS_GPU)" 2>/dev/null; then $(MAKE) test-gpu; else echo "no GPU here: make test-gpu was left out"; fi

# The tests of Triton on CPU tensors. Triton is large (0.3 GB) and in no other test's way, so it has a folder of its own.
test-triton: $(COMPILED)
	@test -d .venv/triton || $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --target .venv/triton triton==3.9.0
	@# In one process: another one would take half of the tests' time to import torch and Triton.
	PYTHONPATH=.venv/triton TRITON_CACHE_DIR=.venv/triton-cache $(PYTEST) --numprocesses 0 -m "not gpu and not slow" $(TRITON_TESTS)

# Its processes share one GPU: more than 16 bring nothing and need memory there.
test-gpu: $(READY)
	$(BIN)/python -m tests.gpu.compile_ahead
	$(PYTEST) --numprocesses auto --maxprocesses 16 -m "gpu and not slow" --require-gpu

test-slow: $(READY)
	$(PYTEST) --numprocesses auto -m slow

# The documentation as a site: site/index.html. A warning, such as a broken link, is an error.
docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs site

# Needs a Hopper GPU and compute-sanitizer on the PATH.
sanitize: $(READY)
	$(BIN)/python scripts/sanitize.py

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf .venv build dist site docs/generated .mypy_cache .pytest_cache .ruff_cache

# The bytecode of what tests import, once: processes that begin together would each compile it, 20 s of CPU.
$(COMPILED): $(READY)
	@$(PYTEST) --collect-only --quiet > /dev/null || true
	@touch $@

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 10) <= v <= (3, 13) and "greenfast needs Python 3.10 to 3.13, but $(PYTHON) is %d.%d; name another, as in: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv --clear .venv
	@# What is imported is compiled then; to compile all of it takes longer than to install it.
	@echo "Installing requirements.lock into .venv; this can take minutes, PyTorch is large."
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
