# kernelmark: everything runs in .venv, made from a hash-locked list of packages.
#
#   make bench            measure the quick plan on the best device here, record it, write the report
#   make test             the whole test suite
#   make check            formatting, types, import directions (part of make test)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

# With the checkout on the path, its folder `kernels` would shadow Hugging Face's package of that name.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PYTHON ?= python3
PLAN ?= quick
# A driver decides which torch fits. Say FLAVOUR=cpu or FLAVOUR=cuda to decide yourself.
FLAVOUR ?= $(if $(wildcard /proc/driver/nvidia/version /dev/nvidiactl),cuda,cpu)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --require-hashes --no-deps
LOCKS := requirements/$(FLAVOUR).txt $(if $(filter cpu,$(FLAVOUR)),requirements/torch-cpu.txt)

.PHONY: bench test check format lock environment clean

bench: $(VENV)/.ready
	@test -z "$(IMAGE)" || { echo "IMAGE=$(IMAGE): there are no pinned images yet; without IMAGE," \
		"make bench measures on this machine" >&2; exit 2; }
	$(BIN)/kernelmark run --plan $(PLAN)

test: $(VENV)/.tested check
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -n 2 --dist worksteal --timeout 300
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

check: $(VENV)/.tested typing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p kernelmark.suite -p kernelmark.registry -p kernelmark.baselines
	PYTHONPATH=build/typing $(BIN)/lint-imports --no-cache

format: $(VENV)/.tested
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# mypy and import-linter cannot see through an editable installation; they read the mapped names here.
.PHONY: typing
typing:
	@mkdir -p build/typing/kernelmark
	@for room in suite kernels baselines registry; do ln -sfn ../../../$$room build/typing/kernelmark/$$room; done

$(VENV)/.ready: $(LOCKS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kernelmark needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12" >&2; exit 2; }
	@echo "making $(VENV) for $(FLAVOUR); this takes a few minutes once"
	$(PYTHON) -m venv $(VENV)
	for lock in $(LOCKS); do $(INSTALL) -r $$lock; done
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.tested: $(VENV)/.ready requirements/test.txt
	$(INSTALL) -r requirements/test.txt
	touch $@

# A baseline library that cannot share an environment lives in one of its own, .venv-NAME.
environment:
	@test -f requirements/$(NAME).txt || { echo "no environment '$(NAME)'; there is:" \
		$(filter-out cpu cuda test torch-cpu,$(basename $(notdir $(wildcard requirements/*.txt)))) >&2; exit 2; }
	$(PYTHON) -m venv .venv-$(NAME)
	.venv-$(NAME)/bin/python -m pip install --quiet --require-hashes --no-deps -r requirements/$(NAME).txt
	.venv-$(NAME)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .

COMPILE := uv pip compile --quiet --generate-hashes --python-version 3.11 --universal --no-annotate \
	--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock'
lock:
	$(COMPILE) requirements/cuda.in -o requirements/cuda.txt
	$(COMPILE) requirements/cpu.in -c requirements/cuda.txt -o requirements/cpu.txt
	$(COMPILE) requirements/test.in -c requirements/cuda.txt -o requirements/test.txt

clean:
	rm -rf $(VENV) .venv-* build
