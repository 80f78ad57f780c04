# Everything a person or CI does here. `make help` lists it.
#
#   PYTHON=python3.12          another interpreter (3.11 or newer)
#   VENV=.venv                 where the virtual environment goes
#   HELM=helm                  for `make manifests`
#   TORCH_INDEX=URL            a package index with CPU builds of torch (the default one brings
#                              gigabytes of CUDA on Linux)
#   RATE=2                     requests a second of `make loadtest`
#   ROUTERS= PREFILL= COLOCATED= DECODE= TAU= THETA= MODEL= PORT= INTERNAL_PORT=   options of `make up`
#                              (both ports for a second one beside the first)

PYTHON ?= python3
VENV ?= .venv
HELM ?= helm
TORCH_INDEX ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

UP_FLAGS := \
	$(if $(ROUTERS),--routers $(ROUTERS)) \
	$(if $(PREFILL),--prefill $(PREFILL)) \
	$(if $(COLOCATED),--colocated $(COLOCATED)) \
	$(if $(DECODE),--decode $(DECODE)) \
	$(if $(TAU),--tau $(TAU)) \
	$(if $(THETA),--theta $(THETA)) \
	$(if $(MODEL),--model $(MODEL)) \
	$(if $(PORT),--port $(PORT)) \
	$(if $(INTERNAL_PORT),--internal-port $(INTERNAL_PORT))

# A misspelt option of `make up` would start another fleet than the one that was asked for.
UP_OPTIONS := ROUTERS PREFILL COLOCATED DECODE TAU THETA MODEL PORT INTERNAL_PORT
OTHER_OPTIONS := PYTHON VENV BIN STAMP HELM TORCH_INDEX RUN_ENV SHELL RATE OUT DEVICE ARGS BUILDER VARIANT TAG REGISTRY \
	GPU_TESTS GPU_PYTHON
ifneq ($(filter up,$(MAKECMDGOALS)),)
GIVEN := $(foreach each,$(.VARIABLES),$(if $(filter command,$(origin $(each))),$(each)))
UNKNOWN := $(filter-out $(UP_OPTIONS) $(OTHER_OPTIONS),$(GIVEN))
$(if $(UNKNOWN),$(error no option of make up: $(UNKNOWN). It has $(UP_OPTIONS)))
endif

.PHONY: help install up chat check format test test-fast gpu-interfaces test-gpu test-cluster images settings-table chart-schema helm-there manifests demo-cpu bench-engine bench-passes bench-fp8 bench-host-gap bench-simulator bench-router bench-client bench-gpu bench-gpu-serving gpu-wheels gpu-kernels reproduce loadtest clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Sangam needs Python 3.11 or newer; say make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV): some minutes, silently: pip installs torch and the rest'
	$(BIN)/pip install --disable-pip-version-check --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints.txt torch
	$(BIN)/pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[router,worker,loadtest,local,dev]'
	@touch $@

install: $(STAMP) ## make the virtual environment

up: $(STAMP) ## start Redis, a router and workers with the small model, and say what to try
	@$(RUN_ENV) $(BIN)/sangam up $(UP_FLAGS)

chat: $(STAMP) ## talk to what `make up` started (with the same PORT=)
	@$(BIN)/sangam chat $(if $(PORT),--url http://127.0.0.1:$(PORT))

check: $(STAMP) ## formatting, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/lint-imports

format: $(STAMP) ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(STAMP) ## every test: unit, property, golden, integration with real processes
	$(RUN_ENV) $(BIN)/python -m pytest

test-fast: $(STAMP) ## the tests that start no processes
	$(RUN_ENV) $(BIN)/python -m pytest -m 'not integration'

GPU_LIBRARIES := flashinfer-python apache-tvm-ffi ninja nvidia-ml-py nccl4py nvmath-python cuda-core cuda-bindings cuda-pathfinder

gpu-interfaces: $(STAMP) ## FlashInfer's, NCCL's and cuBLASLt's Python (not CUDA), so that tests hold calls against their signatures
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps -c constraints-gpu.txt $(GPU_LIBRARIES)

GPU_TESTS ?= tests/gpu

test-gpu: ## the tests that need a GPU, with PYTHON as it is; fails where there is none (GPU_TESTS='tests/gpu -k graphs')
	@$(PYTHON) -c 'import sys, importlib.util as found; sys.exit(next((f"{name} is not installed for {sys.executable}; name a Python that has it: make test-gpu PYTHON=..." for name in ("torch", "pytest") if found.find_spec(name) is None), 0))'
	PYTHONPATH=services/core:services/router:services/worker:loadtest:.$${PYTHONPATH:+:$$PYTHONPATH} $(RUN_ENV) \
		$(PYTHON) -m pytest --confcutdir=tests/gpu --require-gpu $(GPU_TESTS)

test-cluster: $(STAMP) ## the cluster tests: on KUBECONFIG's cluster, or on one that it brings up
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/cluster/run $(abspath $(BIN))/python

BUILDER ?= $(firstword $(foreach each,docker podman buildah,$(if $(shell command -v $(each)),$(each))))
VARIANT ?= cpu
TAG ?= $(shell sed -nE 's/^appVersion: *"?([^"]*)"?$$/\1/p' charts/sangam/Chart.yaml)
REGISTRY ?= localhost

# Named as the chart looks for them by default.
images: ## build both images (VARIANT=cpu|gpu, TAG=, REGISTRY=, BUILDER=docker|podman|buildah, TORCH_INDEX=)
	@test -n '$(BUILDER)' || { echo 'no docker, podman or buildah is on the PATH; name one with BUILDER=' >&2; exit 1; }
	$(BUILDER) build -f services/router/Dockerfile -t $(REGISTRY)/sangam-router:$(TAG) .
	$(BUILDER) build -f services/worker/Dockerfile --build-arg VARIANT=$(VARIANT) \
		$(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX)) \
		-t $(REGISTRY)/sangam-worker:$(TAG)-$(VARIANT) .

settings-table: $(STAMP) ## write the services' settings tables, and the list of all names, from the settings classes
	$(BIN)/python -m sangam_router.local.settings_table services/router/README.md router=sangam_router.settings:RouterSettings
	$(BIN)/python -m sangam_router.local.settings_table services/worker/README.md worker=sangam_worker.settings:WorkerSettings
	$(BIN)/python -m sangam_router.local.settings_names services/core/sangam_core/settings_names.txt \
		sangam_router.settings:RouterSettings sangam_worker.settings:WorkerSettings

chart-schema: $(STAMP) ## write the settings' part of the chart's schema from the settings classes
	$(BIN)/python -m sangam_router.local.settings_schema charts/sangam/values.schema.json \
		routerSettings=sangam_router.settings:RouterSettings workerSettings=sangam_worker.settings:WorkerSettings

# Whole before any of it is written: where helm fails, no half of a file is left.
RENDERED_DEMO = rendered=$$($(HELM) template sangam charts/sangam --namespace sangam-demo \
	-f charts/sangam/ci/cpu-values.yaml -f manifests/demo-cpu/values.yaml); \
	{ cat manifests/demo-cpu/header.yaml; printf '%s\n' "$$rendered"; }

helm-there:
	@command -v $(firstword $(HELM)) > /dev/null || { echo 'no $(HELM) is on the PATH; name one with HELM=' >&2; exit 1; }

manifests: helm-there ## write the rendered demo, and the chart's copies of dashboard and alerts
	cp manifests/grafana/sangam.json charts/sangam/files/dashboard.json
	cp manifests/prometheus/alerts.yaml charts/sangam/files/alerts.yaml
	@$(RENDERED_DEMO) > manifests/demo-cpu.yaml

demo-cpu: helm-there ## print the rendered demo
	@$(RENDERED_DEMO)

bench-engine: $(STAMP) ## engine against a plain Fast-dLLM loop
	cd loadtest && $(RUN_ENV) $(abspath $(BIN))/python -m benchmarks.engine_throughput

bench-passes: $(STAMP) ## what a worker's iterations cost, as CSV (OUT=FILE, MODEL=small, DEVICE=cpu)
	cd loadtest && $(RUN_ENV) $(abspath $(BIN))/python -m benchmarks.pass_costs \
		$(if $(OUT),--out $(abspath $(OUT))) $(if $(MODEL),--model $(MODEL)) $(if $(DEVICE),--device $(DEVICE))

bench-fp8: $(STAMP) ## what FP8 does to answers, on a CPU: golden models and the shipped one's questions (OUT=FILE for JSON)
	cd loadtest && $(RUN_ENV) $(abspath $(BIN))/python -m benchmarks.fp8_accuracy $(if $(OUT),--json $(abspath $(OUT)))

bench-host-gap: $(STAMP) ## what the host takes for an iteration of decodes, as the gap that a GPU waits; no GPU needed
	cd loadtest && $(RUN_ENV) $(abspath $(BIN))/python -m benchmarks.host_gap

bench-simulator: $(STAMP) ## the simulator against real workers on this machine, two fleets, about five minutes (OUT=FOLDER)
	cd loadtest && $(RUN_ENV) $(abspath $(BIN))/python -m benchmarks.simulator_check --out $(abspath $(or $(OUT),.sangam/simulator-check))

# On a GPU machine, whose own environment has torch for its CUDA: these make no virtual environment
# but take PYTHON's. ARGS is handed on (--seconds, --only, --help). Without a network there, bring
# what `make gpu-wheels gpu-kernels` leave in wheels/, and use loadtest/benchmarks/gpu/run.sh.
GPU_PATH := $(CURDIR)/services/core:$(CURDIR)/services/router:$(CURDIR)/services/worker:$(CURDIR)/loadtest
GPU_ENV = PYTHONPATH=$(GPU_PATH)$${PYTHONPATH:+:$$PYTHONPATH}
GPU_FLAGS = $(if $(OUT),--out $(abspath $(OUT))) $(ARGS)
GPU_PYTHON ?= 3.12
WHEEL_FLAGS := --no-deps --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
	$(foreach glibc,39 28 27 17,--platform manylinux_2_$(glibc)_x86_64) --platform manylinux2014_x86_64

bench-gpu: ## passes, operators and transfers on one GPU beside their floors, 8 minutes (PYTHON=, OUT=, ARGS=)
	$(GPU_ENV) $(PYTHON) -m benchmarks.gpu $(GPU_FLAGS)

bench-gpu-serving: ## latency against rate on one GPU, batched and one at a time, 8 minutes (PYTHON=, OUT=, ARGS=)
	$(GPU_ENV) $(PYTHON) -m benchmarks.gpu.serving $(GPU_FLAGS)

gpu-wheels: ## fetch what bench-gpu needs into wheels/, for a machine without a network (GPU_PYTHON=3.12)
	$(PYTHON) -m pip download --disable-pip-version-check $(WHEEL_FLAGS) -d wheels \
		-c constraints-gpu.txt -r loadtest/benchmarks/gpu/wheels.txt
	$(PYTHON) -m pip wheel --disable-pip-version-check --no-deps -w wheels .

GPU_TOOLKIT := .sangam/toolkit
GPU_TOOLKIT_STAMP := $(GPU_TOOLKIT)/.installed

$(GPU_TOOLKIT_STAMP): loadtest/benchmarks/gpu/toolkit.txt | $(STAMP)
	rm -rf $(GPU_TOOLKIT)
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --target $(GPU_TOOLKIT) -r $<
	@touch $@

gpu-kernels: gpu-interfaces $(GPU_TOOLKIT_STAMP) ## compile FlashInfer's kernels for an H200 into wheels/, without a GPU (19 minutes on 2 cores, once)
	cd loadtest && PATH="$(abspath $(BIN)):$$PATH" FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE=$(CURDIR)/.sangam \
		$(abspath $(BIN))/python -m benchmarks.gpu.carried_kernels pack $(CURDIR)/wheels $(CURDIR)/$(GPU_TOOLKIT)/nvidia/cu13

bench-router: $(STAMP) ## block dispatches a second of one router, workers stubbed
	cd loadtest && $(RUN_ENV) $(abspath $(BIN))/python -m benchmarks.router_dispatch

bench-client: $(STAMP) ## how much load one core of the load test's client makes, server stubbed
	cd loadtest && $(RUN_ENV) $(abspath $(BIN))/python -m benchmarks.client_load

loadtest: $(STAMP) ## load what `make up` started with the small model's questions (RATE=2, PORT=)
	$(BIN)/sangam loadtest run --rate $(or $(RATE),2) --duration 30 --warmup 5 $(if $(PORT),--url http://127.0.0.1:$(PORT))

reproduce: $(STAMP) ## the paper's evaluation in simulation, into loadtest/reproduction (half an hour on 2 cores; goes on where it was)
	nice $(BIN)/python -m sangam_loadtest.reproduction

clean: ## remove the virtual environment and logs; results of load tests and benchmarks (.sangam) stay
	rm -rf $(VENV) .sangam/logs
