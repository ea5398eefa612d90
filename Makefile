# Every target installs what it needs into .venv (Python) or tools/node_modules (Node); only system-deps needs root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEBIAN_PACKAGES := chromium prometheus shellcheck
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
LOCK_COMMAND := $(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 \
	--fork-strategy fewest --extra syncer --extra learner --extra dev \
	--no-emit-index-url --no-emit-find-links --no-header --annotation-style line

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export JAX_PLATFORMS ?= cpu
MAKEFLAGS += --no-print-directory
comma := ,
.DEFAULT_GOAL := help
.SUFFIXES:

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# --- set-up -----------------------------------------------------------------------------------------------------

.PHONY: setup
setup: $(VENV)/.stamp ## .venv with the pinned packages and this project (editable)

$(VENV)/.stamp: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "PYTHON=$(PYTHON) is older than Python 3.11, which this project needs: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@echo "setting up $(VENV) (about 1.5 GB, two minutes)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -r requirements.lock
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

tools/node_modules/.stamp: tools/package.json tools/package-lock.json
	@if command -v npm >/dev/null; then \
		echo "setting up tools/node_modules (about 90 MB, ten seconds)"; \
		cd tools && npm ci --ignore-scripts --no-progress --loglevel=error >/dev/null && touch node_modules/.stamp; \
	else echo "no npm: the checks that need buf will be skipped"; fi

.PHONY: system-deps
system-deps: ## Debian packages for test-operate, by apt-get (needs root)
	@echo "installing Debian packages: $(DEBIAN_PACKAGES)"
	@$(SUDO) apt-get update -qq
	@$(SUDO) env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(DEBIAN_PACKAGES) >/dev/null

# --- the thing itself -------------------------------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.stamp ## a run with faults on this machine: make demo LEARNERS=3 SECONDS=100 QUORUM=1
	@$(BIN)/python -m demo $(if $(LEARNERS),--learners $(LEARNERS)) $(if $(SECONDS),--seconds $(SECONDS)) \
		$(if $(QUORUM),--quorum $(QUORUM))

.PHONY: chaos chaos-long
chaos: $(VENV)/.stamp ## faults on purpose: make chaos SEED=1 MINUTES=3 FAULTS=kill-learner,kill-syncer
	@$(BIN)/python -m chaos $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(FAULTS),--faults $(FAULTS))

chaos-long: $(VENV)/.stamp ## five seeds of it, one after the other
	@$(BIN)/python -m chaos --seeds 5 $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(FAULTS),--faults $(FAULTS))

.PHONY: up down
up: ## syncer, three learners, evaluator, Prometheus and Grafana in containers
	docker compose --file deploy/compose/compose.yaml up --build --detach --wait
down: ## stop them; volumes stay
	docker compose --file deploy/compose/compose.yaml down

# --- checks -----------------------------------------------------------------------------------------------------

.PHONY: simulate
simulate: $(VENV)/.stamp ## runs full of faults in simulated time, on all processors: make simulate SEEDS=1000 FIRST=0
	@$(BIN)/python -m simulator --seeds $(or $(SEEDS),100) --first $(or $(FIRST),0) $(if $(MINUTES),--seconds $$(($(MINUTES) * 60)))

.PHONY: test test-slow test-operate lint
test: $(VENV)/.stamp ## fast tests: no root, no Debian package, no Node
	@$(BIN)/python -m pytest -m "not slow and not operate" $(PYTEST_ARGS)

test-slow: $(VENV)/.stamp ## several processes, the wheel in an empty environment, the examples
	@$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-operate: $(VENV)/.stamp tools/node_modules/.stamp ## deployment files, protos and pages, with Debian and Node tools
	@$(BIN)/python -m pytest -m operate $(PYTEST_ARGS)

lint: $(VENV)/.stamp ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

.PHONY: format
format: $(VENV)/.stamp ## ruff's fixes and formatting
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# --- benchmarks -------------------------------------------------------------------------------------------------

.PHONY: bench bench-quick bench-gpu bench-env bench-env-flower bench-env-hivemind bench-env-nvflare
bench: $(VENV)/.stamp ## every benchmark, 15 minutes: make bench ONLY=wire,peers PEERS=flower (docs/benchmarks.md)
	@$(MAKE) bench-env $(foreach peer,$(subst $(comma), ,$(PEERS)),bench-env-$(peer)) \
		|| echo "what could not be set up is left out of the comparison"
	@$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY)) $(if $(PEERS),--peers $(PEERS))

bench-quick: $(VENV)/.stamp ## a first look in two minutes, in figures of little weight
	@$(BIN)/python -m benchmarks --quick $(if $(ONLY),--only $(ONLY))

bench-gpu: $(VENV)/.stamp ## copies, applies and overlap on the accelerator that JAX finds (install its JAX into .venv first)
	@JAX_PLATFORMS= $(BIN)/python -m benchmarks.overlap --json benchmarks/results/accelerator.json

# Environments of the peers: one for gloo and torchft, one each for those whose pins clash.
bench-env: .venv-bench/.stamp ## gloo and torchft for the benchmark `peers` (1.2 GB); bench-env-flower, -hivemind, -nvflare
bench-env-flower bench-env-hivemind bench-env-nvflare: bench-env-%: .venv-bench-%/.stamp

# uv knows where PyTorch keeps its CPU builds; pip, asked next, takes what the configured index has (CUDA, on Linux).
define install_peers
	@echo "setting up $(@D)"
	@[ -x $(@D)/bin/python ] || $(PYTHON) -m venv $(@D)
	@$(BIN)/uv pip install --quiet --python $(@D)/bin/python --torch-backend cpu --requirement $< 2>/dev/null \
		|| $(@D)/bin/python -m pip install --quiet --requirement $<
	@touch $@
endef

.venv-bench/.stamp: benchmarks/peers/requirements.txt | $(VENV)/.stamp
	$(install_peers)

.venv-bench-%/.stamp: benchmarks/peers/requirements-%.txt | $(VENV)/.stamp
	$(install_peers)

# --- generated files --------------------------------------------------------------------------------------------

.PHONY: proto proto-baseline dashboard lock
proto: $(VENV)/.stamp ## Python stubs from protos/
	@$(BIN)/python tools/generate_protos.py

proto-baseline: tools/node_modules/.stamp ## what `buf breaking` compares with; only when a version is released
	@tools/node_modules/.bin/buf build --exclude-source-info --output protos/baseline.binpb

dashboard: $(VENV)/.stamp ## the Grafana dashboard from its table of panels
	@$(BIN)/python tools/build_dashboard.py

lock: $(VENV)/.stamp ## requirements.lock from pyproject.toml, with UPGRADE=1 to the newest versions
	@$(LOCK_COMMAND) $(if $(UPGRADE),--upgrade) --output-file requirements.lock

.PHONY: clean
clean: ## everything that make made, except runs/
	rm -rf $(VENV) .venv-bench* benchmarks/results tools/node_modules build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
