# The commands of the project; `make` alone lists them.
#
# Environments are made from requirements/*.txt, kept outside the clone and linked here: .venv (core), .venv-test,
# .venv-vllm, .venv-trl, .venv-verl. They hold no path of a clone, so the clone goes on PYTHONPATH.

PYTHON ?= $(or $(shell command -v python3.11),python3)
ARGS ?=
NAME ?=
ROLLOUT ?=

export PYTHONPATH := $(CURDIR)

CODE := hybridflow benchmarks requirements tests setup.py
environment = @$(PYTHON) requirements/environment.py
test_env := .venv-test/bin

.DEFAULT_GOAL := help
.PHONY: help core test-env vllm-env verl-env demo smollm2 test unit pytest check format docs bench learn clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

core:
	$(environment) core

test-env:
	$(environment) test

vllm-env: ## the core with vLLM for a CPU, as .venv-vllm: for rollout=vllm
	$(environment) vllm

verl-env:
	$(environment) verl

demo: $(if $(filter vllm,$(ROLLOUT)),vllm-env,core) ## GRPO on arithmetic with a tiny model, a few minutes; ROLLOUT=vllm samples with vLLM
	@$(if $(filter vllm,$(ROLLOUT)),.venv-vllm,.venv)/bin/python -m hybridflow.recipes.demo $(if $(ROLLOUT),rollout=$(ROLLOUT))

smollm2: core ## SmolLM2-135M-Instruct as a Hugging Face folder, for model=smollm2
	@.venv/bin/python -m hybridflow.workers.models.smollm2

test: test-env verl-env ## every test
	@$(test_env)/python -m pytest

unit: test-env ## the tests without engines and Ray
	@$(test_env)/python -m pytest -m unit

pytest: test-env ## pytest with your arguments: make pytest ARGS="-m fsdp -x"
	@$(test_env)/python -m pytest $(ARGS)

check: test-env ## formatter, linter, types, import rules, size limits, documentation
	@$(test_env)/ruff format --check --quiet $(CODE) || { echo "make format mends these"; exit 1; }
	@$(test_env)/ruff check $(CODE)
	@$(test_env)/mypy
	@$(test_env)/lint-imports --no-logo
	@$(test_env)/python tests/size_limits.py
	@$(MAKE) --no-print-directory docs

format: test-env ## rewrite the code as the formatter and the linter want it
	@$(test_env)/ruff check --fix --quiet $(CODE); $(test_env)/ruff format $(CODE)

docs: test-env ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(test_env)/mkdocs build --strict --quiet

bench: core ## every benchmark, or one: make bench NAME=packing
	@.venv/bin/python -m benchmarks.run $(NAME)

learn: core ## the learning runs of the recipes, three seeds each; hours
	@.venv/bin/python -m benchmarks.learn $(ARGS)

clean: ## remove what the other commands made in this clone (shared environments stay)
	rm -rf .venv .venv-test .venv-vllm .venv-trl .venv-verl site build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
