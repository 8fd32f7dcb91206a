# Everything a clone needs: `make verify` and `make test` do their own set-up. A second run redoes only what has changed.

PYTHON ?= python3
ARCH ?= all
PYTEST_ARGS ?= -n auto --dist worksteal
MUTATE_ARGS ?=
FUZZ_ARGS ?= --calls 10000 --seed 0 --right 0.1
WHEEL ?= $(wildcard dist/*.whl)
WHEEL_CHECK_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# The stamp carries the hash of all that decides what is installed, so that editing either file reinstalls.
SETUP_STAMP := $(VENV)/.setup-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)

# Each version of vLLM has an environment of its own, as its pins are not ours.
VLLM ?= 0.33.0
VLLM_TESTS := tests/engines/vllm_adapter
VLLM_VENV := .venv-vllm-$(VLLM)
VLLM_STAMP := $(VLLM_VENV)/.setup-$(shell cat pyproject.toml constraints.txt $(VLLM_TESTS)/requirements.txt | sha256sum | cut -c1-16)

# transformers and the package kernels likewise.
INTEGRATION_TESTS := tests/integrations
TRANSFORMERS_VENV := .venv-transformers
TRANSFORMERS_STAMP := $(TRANSFORMERS_VENV)/.setup-$(shell cat constraints.txt $(INTEGRATION_TESTS)/requirements.txt | sha256sum | cut -c1-16)

# mkdocs has one too: the test suite does not need it.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.setup-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
# The requirements of the extra `docs` alone: the pages are built from the sources, without torch.
DOCS_TOOLS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])

.PHONY: setup build quick verify test test-full test-vllm test-transformers fuzz mutate mutate-numbers wheel wheel-check hf-kernel docs lint clean

setup: $(SETUP_STAMP)

$(SETUP_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit("Python >= 3.11 is required, %s is %s" % (sys.executable, sys.version.split()[0]) if sys.version_info < (3, 11) else 0)'
	@echo "set-up of $(VENV): torch, CuTe DSL and the tools of build and tests, 1.9 GB; a minute or more, in which pip says nothing"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[build,dev]'
	rm -f $(VENV)/.setup-*
	touch $@

build: setup
	$(BIN)/cute-mla build --arch $(ARCH)

# The kernels of the quick suite and nothing else, then the suite: the first verdict of a clone.
quick: setup
	$(BIN)/cute-mla build --arch $(ARCH) --suite quick
	$(BIN)/cute-mla verify --arch $(ARCH) --suite quick

verify: build
	$(BIN)/cute-mla verify --arch $(ARCH)

test: lint build
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not slow"

# Also the tests with the mark slow.
test-full: lint build
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The adapter against vLLM itself; VLLM=version picks another one. Writes its row of the table in docs/engines.md. Not part of `make test`.
test-vllm: build $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m tests.engines.versions
	.ci/inputs vllm > .ci/passed/vllm

$(VLLM_STAMP): $(SETUP_STAMP)
	@echo "set-up of $(VLLM_VENV): torch and vLLM $(VLLM); minutes, in which pip says nothing"
	$(BIN)/python -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(VLLM_TESTS)/requirements.txt vllm==$(VLLM)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	rm -f $(VLLM_VENV)/.setup-*
	touch $@

# The integrations against transformers and kernels themselves, of the versions in the requirements. Not part of `make test`.
test-transformers: build $(TRANSFORMERS_STAMP)
	$(TRANSFORMERS_VENV)/bin/python -m pytest $(INTEGRATION_TESTS)
	.ci/inputs transformers > .ci/passed/transformers

$(TRANSFORMERS_STAMP): $(SETUP_STAMP)
	@echo "set-up of $(TRANSFORMERS_VENV): torch, transformers and kernels, 1.4 GB; a minute or more, in which pip says nothing"
	$(BIN)/python -m venv $(TRANSFORMERS_VENV)
	$(TRANSFORMERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(TRANSFORMERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(INTEGRATION_TESTS)/requirements.txt
	rm -f $(TRANSFORMERS_VENV)/.setup-*
	touch $@

# Calls of every function that launches kernels, right and wrong: each agrees with the reference or raises the documented error.
fuzz: build
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

# Breaks numbers of a kernel of each structure, 100 sites each, and runs its smoke cases; a second run goes on where the first one stopped.
mutate-numbers: build
	$(BIN)/python -m tests.mutation run numbers $(MUTATE_ARGS)
	$(BIN)/python -m tests.mutation report numbers

# Breaks every kernel in every way, hours long; a second run goes on where the first one stopped.
mutate: build
	$(BIN)/python -m tests.mutation run synchronisation $(MUTATE_ARGS)
	$(BIN)/python -m tests.mutation report synchronisation

# One wheel for every platform, with the kernels and the record of where they come from.
wheel: build
	$(BIN)/python -m cute_mla.aot_build.wheel

# Builds the kernels of dist/*.whl, or of WHEEL=FILE, again from the commit that the wheel records, and compares all bytes.
wheel-check: setup
	$(BIN)/python -m cute_mla.aot_build.rebuild $(WHEEL) $(WHEEL_CHECK_ARGS)

# The folder of a Hugging Face kernel in dist/hf-kernel, with the same kernels and record.
hf-kernel: build
	$(BIN)/python -m cute_mla.aot_build.hub_kernel

# The pages in site/. Fails on a dead link or anchor, on a page that the navigation lacks, and on anything loaded from the network.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo "pages: site/index.html"

$(DOCS_STAMP):
	@echo "set-up of $(DOCS_VENV): mkdocs and its plugins, 190 MB; half a minute, in which pip says nothing"
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $$($(PYTHON) -c '$(DOCS_TOOLS)')
	rm -f $(DOCS_VENV)/.setup-*
	touch $@

# The hooks of .pre-commit-config.yaml run the same commands.
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .venv-vllm-* $(TRANSFORMERS_VENV) $(DOCS_VENV) cute_mla/artifacts build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
