# Two commands set up everything: `make run`, then `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.gfgen-installed
RANKS_PER_GPU ?= 2
GPU_TESTS     ?=
GPU_PYTHON    := $(or $(wildcard $(BIN)/python),$(PYTHON))

.PHONY: run test test-gpu check install wheel format clean

run: $(READY)  ## the main job: four CPU ranks, a dozen jobs, pictures and videos in outputs/batch
	$(BIN)/gfgen run jobs/batch.jsonl --policy srtf --trace outputs/batch/trace.json

test: export PYTHONDONTWRITEBYTECODE =  # else each of some hundred processes compiles what it imports
test: check  ## everything that CI runs
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder  # files that start workers come first

test-gpu:  ## the tests marked gpu, without network, in nine minutes a call (CONTRIBUTING.md)
	$(GPU_PYTHON) setup.py --quiet build_ext --inplace
	$(GPU_PYTHON) tests/on_gpus.py --ranks-per-gpu $(RANKS_PER_GPU) $(GPU_TESTS)

check: $(READY)  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

install: $(READY)

$(READY): setup.py pyproject.toml constraints.txt
	@echo "installing gfgen and PyTorch into $(VENV): some minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

wheel: $(READY)  ## dist/gfgen-*.whl, and the oldest Linux that it serves
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -m pip install --quiet auditwheel
	$(BIN)/auditwheel show dist/*.whl

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) build dist outputs *.egg-info
