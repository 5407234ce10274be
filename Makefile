# What a person runs. `make help` lists it.

PYTHON ?= python3
export TOKENFLOW_HOME ?= $(CURDIR)/.tokenflow

BIN := .venv/bin
CLIENTS := tests/compat/adapters/node/node_modules
JS_CLIENT := clients/js
SOAK_S ?= 600
SOAK_REQUESTS ?= 200
FUZZ_S ?= 60
COMPAT_RESULTS := $(TOKENFLOW_HOME)/compat/results.json
FUZZ_SEED ?= $(shell date +%s)
SERVERS := nginx redis-server openssl

.DEFAULT_GOAL := help
.PHONY: help up doctor test compat check soak fuzz bench-readers bench-burst bench-gateway bench-workers proof paper format clean .browser .clients .servers

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 15

up: .venv/.gateway ## Run everything here: engine on port 30000, gateway on port 8080 (MODEL=... TOKENFLOW_PORT=...)
	@exec $(BIN)/tokenflow up

doctor: .venv/.gateway ## Say what this machine lacks, if anything
	@exec $(BIN)/tokenflow doctor

test: .venv/.dev ## Run all tests (ARGS="tests/unit -k sse" for some)
	@$(BIN)/tokenflow up --prepare
	@$(MAKE) --no-print-directory .browser .clients .servers $(JS_CLIENT)/node_modules
	$(BIN)/pytest $(ARGS)

soak: .venv/.dev ## Preempt at random for ten minutes (SOAK_S=600), then 200 requests in every configuration (SOAK_REQUESTS=200); limits, for minutes
	@$(BIN)/tokenflow up --prepare
	@TOKENFLOW_SOAK_S=$(SOAK_S) TOKENFLOW_TEST_REQUESTS=$(SOAK_REQUESTS) TOKENFLOW_THOROUGH=1 $(BIN)/pytest -s \
		tests/engine/test_preempt_soak.py tests/engine/test_preempt_equality.py tests/engine/test_host_memory.py \
		tests/engine/test_hicache.py tests/e2e/test_topology_limits.py

compat: .venv/.dev ## Try every client on recorded bytes and on the real engine, write docs/compatibility.md, in ten minutes
	@$(BIN)/tokenflow up --prepare
	@PYTHONPATH=tests $(BIN)/python -m compat.environments aiperf
	@$(if $(ARGS),,rm -f $(COMPAT_RESULTS))
	@TOKENFLOW_COMPAT_RESULTS=$(COMPAT_RESULTS) $(BIN)/pytest tests/compat $(ARGS); status=$$?; \
		PYTHONPATH=bench:tests $(BIN)/python -m compat.matrix $(COMPAT_RESULTS) && exit $$status

fuzz: .venv/.dev ## Streams and requests drawn at random, a minute of each kind (FUZZ_S=60 FUZZ_SEED=now)
	@TOKENFLOW_FUZZ_S=$(FUZZ_S) TOKENFLOW_FUZZ_SEED=$(FUZZ_SEED) $(BIN)/pytest -q -s --log-level=ERROR tests/wire/test_fuzz.py

check: .venv/.dev ## Check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@$(MAKE) --no-print-directory $(JS_CLIENT)/node_modules
	@cd $(JS_CLIENT) && npm run --silent build

bench-readers: .venv/.dev ## Measure what the gateway knows of its readers (ARGS="--quick" for two minutes of it)
	@$(MAKE) --no-print-directory .browser
	@PYTHONPATH=bench:tests $(BIN)/python -m tokenflow_bench.readers $(ARGS)

bench-burst: .venv/.dev ## Measure policies on the real engine with readers on sockets (ARGS="--quick" for four minutes)
	@$(BIN)/tokenflow up --prepare
	@PYTHONPATH=bench:tests $(BIN)/python -m tokenflow_bench.experiment $(ARGS)

bench-gateway: .venv/.dev ## Measure what the gateway costs beside nginx and other gateways (ARGS="--quick" for a part)
	@PYTHONPATH=bench:tests $(BIN)/python -m tokenflow_bench.gateway $(ARGS)

bench-workers: .venv/.dev ## Measure what a second worker of the gateway adds, in a minute
	@PYTHONPATH=bench:tests $(BIN)/python -m tokenflow_bench.gateway.workers $(ARGS)

proof: .venv/.dev ## Measure stock against ours on the real engine, check the simulator by it, in half an hour (ARGS="--minutes 15")
	@$(BIN)/tokenflow up --prepare
	@PYTHONPATH=bench:tests $(BIN)/python -m tokenflow_bench.proof $(ARGS)

paper: .venv/.dev ## Simulate the paper's set-ups and more, write docs/results.md, in twelve minutes on two cores (ARGS="--section goals" for a part)
	@PYTHONPATH=bench $(BIN)/python -m tokenflow_bench.paper $(ARGS)

format: .venv/.dev ## Format the code, fix what can be fixed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean: ## Remove environments, models, caches
	rm -rf .venv $(TOKENFLOW_HOME) $(CLIENTS) $(JS_CLIENT)/node_modules $(JS_CLIENT)/dist .mypy_cache .ruff_cache .pytest_cache

# ---- what the targets above need -------------------------------------------------------------------

.venv/bin/pip:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "Python is missing: install Python 3.11 or newer, or name it: PYTHON=python3.12 make up" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: install a newer one and name it: PYTHON=python3.12 make up" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv is missing: install it (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "making .venv (the gateway's environment)"
	@$(PYTHON) -m venv .venv

# A stamp each: installed again only when pyproject.toml has changed. pip shows errors only.
.venv/.gateway: pyproject.toml | .venv/bin/pip
	@echo "installing the gateway into .venv"
	@$(BIN)/pip install -qq --disable-pip-version-check -e '.[gateway]' || \
	  { echo "The gateway could not be installed (see above); make up, run again, continues" >&2; exit 1; }
	@touch $@

.venv/.dev: pyproject.toml | .venv/bin/pip
	@echo "installing gateway and tools into .venv"
	@$(BIN)/pip install -qq --disable-pip-version-check -e '.[gateway,dev]' || \
	  { echo "The tools could not be installed (see above)" >&2; exit 1; }
	@touch $@ .venv/.gateway

.browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing chromium"; \
	    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; } >/dev/null; \
	  else \
	    echo "The dashboard's tests need Chromium: install it (Debian, Ubuntu: apt-get install chromium)" >&2; exit 1; \
	  fi

.clients:
	@command -v npm >/dev/null || { echo "The client tests need npm: install Node 20 or newer with it" >&2; exit 1; }
	@PYTHONPATH=tests $(BIN)/python -m compat.environments

# Installed in CI only: a package of nginx or Redis starts its server where systemd runs.
.servers:
	@missing=$$(for name in $(SERVERS); do PATH=$$PATH:/usr/sbin command -v $$name >/dev/null || echo $$name; done); \
	  if [ -z "$$missing" ]; then exit 0; fi; \
	  if [ "$$CI" = true ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing" $$missing; \
	    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
	      $$(echo $$missing | sed s/nginx/nginx-light/); } >/dev/null; \
	  else \
	    echo "Tests of proxies and fleets are skipped without" $$missing "(Debian, Ubuntu: apt-get install nginx-light redis-server)"; \
	  fi

%/node_modules: %/package-lock.json
	@command -v npm >/dev/null || { echo "The client tests need Node 20 or newer with npm: install it" >&2; exit 1; }
	@cd $* && npm ci --silent --no-audit --no-fund
	@touch $@
