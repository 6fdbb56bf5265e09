# Each target sets up what it needs: Python 3.11 or newer is all that must be there.
#   make gate    the CPU gate: every row, from checkpoint to verdict
#   make study   the CPU gate of the whole matrix with its report, in gate-report/
#   make h200    the gate on a GPU host; also make b200, make b300
#   make search  on a GPU host: which sets of projections are worth building, measured
#   make test    everything: unit tests, self-tests and the CPU gate
#   make test-long  more of the tests that kill, mutate and race at random
#   make check   ruff and mypy
#   make measure what the gate costs: seconds cold and warm, peak memory
# ARGS is handed to pytest: make gate ARGS="--variants fp16,fp8"; with search, TARGET is the GPU
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
TARGET ?= h200
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: gate study h200 b200 b300 search test test-long check measure clean

gate: $(READY)
	$(BIN)/python -m pytest -m cpu tests/gate $(ARGS)

h200 b200 b300: $(READY)
	$(BIN)/python -m pytest -m $@ $(ARGS)

study: $(READY)
	$(BIN)/python -m pytest -m cpu tests/gate --variants all --gate-report=gate-report $(ARGS)

search: $(READY)
	$(BIN)/python -m tests.search_sets --target $(TARGET) --report gate-report/search $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-long: $(READY)
	$(BIN)/python -m pytest -n 2 -m long $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy gptneo_trt

measure: $(READY)
	$(BIN)/python -m tests.measure_gate $(ARGS)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}; do: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[rtx,calibration,report,test,dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .cache .pytest_cache .hypothesis .mypy_cache .ruff_cache
