# Every target makes the virtual environment first; nothing else is needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PROMPT ?= What is the capital of France, and why do people visit it?
# Neither make nor the shell may expand what a user asks: the unexpanded value travels by the
# environment, and PROMPT itself, which make would expand on its way there, does not.
unexport PROMPT
run: export ASKED := $(value PROMPT)

.PHONY: run serve test test-waiting test-computing test-all test-gpu interop lint type proto format clean

run: $(STAMP)        ## answer one question with the whole system, then stop
	@$(BIN)/nightjar up --prompt="$$ASKED"

serve: $(STAMP)      ## keep the whole system up; Ctrl-C stops it
	$(BIN)/nightjar up

# Two lanes at once: tests that wait for processes most of the time, and those that compute.
COMPUTING := tests/worker/engine tests/worker/gpu tests/worker/model tests/worker/sampling
test: $(STAMP)       ## everything that must hold, under 15 minutes on 2 cores
	@echo "two lanes of tests side by side, some 9 minutes; each says what it found at its end"
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=line test-waiting lint type test-computing

test-waiting: $(STAMP)
	$(BIN)/pytest -m "not slow and not gpu" $(addprefix --ignore=,$(COMPUTING))

test-computing: $(STAMP)
	$(BIN)/pytest -m "not slow and not gpu" $(COMPUTING)

test-all: $(STAMP) lint type  ## the same, the long sweeps, and interop
	$(BIN)/pytest -m "not gpu"
	$(MAKE) interop

interop: $(STAMP)    ## public clients and a public gateway, unmodified, against `nightjar up`
	$(BIN)/python tests/interop/run.py $(TOOLS)

test-gpu: $(STAMP)   ## what only a GPU can tell: equal bits, and the engine on it
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or \
	  sys.exit("make test-gpu needs an NVIDIA GPU, and a torch that was built for it; here is none")'
	$(BIN)/pytest tests/worker/gpu tests/memory_agent/test_remap_kernel.py tests/memory_agent/test_ipc_on_gpu.py

lint: $(STAMP)       ## style, protos, import contracts
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/buf lint
	$(BIN)/lint-imports

type: $(STAMP)       ## mypy, strict
	$(BIN)/mypy

format: $(STAMP)     ## rewrite to the house style
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

proto: $(STAMP)      ## regenerate nightjar/v1 from proto/
	PATH=$(BIN):$$PATH $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --grpc_python_out=. \
	  --mypy_out=. --mypy_grpc_out=. proto/nightjar/v1/*.proto

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
	  { echo "Nightjar needs Python 3.11 or 3.12: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages into $(VENV): some minutes, once"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) .interop build *.egg-info .mypy_cache .ruff_cache .pytest_cache
