# make install | quickstart | test | test-rdma | lint | bench-handover | bench-transfer | bench-peers | bench-rdma | bench-hosts | soak | clean
PYTHON ?= python3
# The version that is tested. On PyPI this is a CUDA build of several GB; on a machine without a GPU,
# `make install TORCH_INDEX=https://download.pytorch.org/whl/cpu` takes the small CPU build instead.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
TOPOLOGY ?= topologies/quickstart.yaml
QUESTION ?= What is the capital of France? Answer in one sentence.
NATIVE := $(wildcard native/CMakeLists.txt native/src/*)
# The editable install knows where each module is: one that comes or moves needs a new install.
MODULES := $(shell find pdctl runtime -name '*.py' | LC_ALL=C sort | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/.installed-$(MODULES)

.PHONY: install install-test model quickstart test test-rdma lint bench-handover bench-transfer bench-peers bench-rdma bench-hosts soak clean

install: $(INSTALLED)

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; pass PYTHON=python3.11 or newer"; exit 2; }
	@command -v $${CXX:-g++} >/dev/null || { echo "error: no C++ compiler; apt-get install g++"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.python
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

# Editable, so that a change within a module needs no new install; a change of C++ does, and make sees it.
$(INSTALLED): $(VENV)/.torch pyproject.toml $(NATIVE)
	$(PIP) install 'scikit-build-core>=0.11' 'nanobind>=2.7' ninja
	$(PIP) install --no-build-isolation -e '.[runtime]'
	@$(BIN)/python -c 'import runtime._native'
	@touch $@

install-test: install $(VENV)/.test

$(VENV)/.test: pyproject.toml $(INSTALLED)
	$(PIP) install --no-build-isolation -e '.[runtime,test]'
	@touch $@

model: install
	$(BIN)/pdctl model pull smollm2-135m

# Named in each command, because other deployments may run here.
quickstart: model
	@$(eval DEPLOYMENT := $(shell $(BIN)/pdctl validate $(TOPOLOGY) 2>/dev/null | sed -n 's/^name: //p'))
	$(BIN)/pdctl up $(TOPOLOGY)
	$(BIN)/pdctl ask --name $(DEPLOYMENT) '$(QUESTION)'
	$(BIN)/pdctl bench $(DEPLOYMENT) --num-prompts 8 --input-len 256 --output-len 16 --max-concurrency 2 --ignore-eos
	@echo
	@$(BIN)/pdctl status $(DEPLOYMENT)
	@echo
	@echo "It is still running. Stop it with: $(BIN)/pdctl down $(DEPLOYMENT)"

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: install-test model lint
	@tests/system-packages
	$(BIN)/python -m pytest -n 2 --max-worker-restart 0 --durations 12

# Needs root: real RDMA verbs in a User-Mode Linux guest, whose kernel is built the first time (docs/rdma.md).
test-rdma: install-test
	tests/rdma_vm/test.sh $(BIN)/python

bench-rdma: install-test
	tests/rdma_vm/test.sh --bench $(BIN)/python

bench-handover: model
	$(BIN)/python tests/bench/handover.py

# Needs root: 64 machines made of namespaces on this one.
bench-hosts: install
	$(BIN)/python tests/bench/hosts.py

bench-transfer: install
	$(BIN)/python tests/bench/transfer.py

# Other transfer engines to compare with, each in an environment of its own. NIXL's bindings ask for torch, 6 GB, and work without it.
bench-peers:
	$(PYTHON) -m venv build/peers/mooncake
	build/peers/mooncake/bin/pip install --quiet numpy mooncake-transfer-engine-non-cuda
	$(PYTHON) -m venv build/peers/nixl
	build/peers/nixl/bin/pip install --quiet numpy && build/peers/nixl/bin/pip install --quiet --no-deps nixl nixl-cu12

# Random faults with a checker on every token and ledger, then memory over 10,000 hand-overs.
SOAK_SECONDS ?= 300
HANDOVERS ?= 10000
soak: install-test
	$(BIN)/python tests/soak.py --seconds $(SOAK_SECONDS)
	$(BIN)/python tests/soak.py --handovers $(HANDOVERS)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
