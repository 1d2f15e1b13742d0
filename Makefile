# kernelmark: everything runs in .venv, made from a hash-locked list of packages.
#
#   make bench            measure the quick plan on the best device here, record it, write the report
#   make bench IMAGE=h100 [GPUS=0,1] [WITH="vllm mamba"]   the same in a pinned image and its siblings (make image)
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

# Of what pip says: which package of how many it fetches, and that the long silence at its end is the unpacking.
TOLD := awk '/^Collecting/ { printf "  %d of %d: %s\n", ++seen, all, $$2; fflush() } \
	/^Installing collected/ { print "  unpacking them"; fflush() }'

.PHONY: bench test check types contracts pages format lock environment clean

bench: $(VENV)/.ready
	$(BIN)/kernelmark $(if $(IMAGE),bench $(IMAGE) $(if $(GPUS),--gpus $(GPUS)) $(WITH:%=--with %),run) --plan $(PLAN)

# The pinned images of docker/images.toml. `pin` asks registries, `pin-check` needs no network.
.PHONY: image pin pin-check test-images
image: $(VENV)/.ready
	$(BIN)/kernelmark image $(if $(IMAGE),build $(IMAGE),list)

pin: $(VENV)/.ready
	$(BIN)/kernelmark image pin $(IMAGE)
	$(MAKE) lock

pin-check: $(VENV)/.ready
	$(BIN)/kernelmark image pin-check

# Builds and runs the cpu image with a real engine, starting one where none runs (as root). Red in CI without one.
# AFTER names a target that comes first where several are made at once: .ci/run has it.
test-images: $(VENV)/.tested pin-check $(AFTER)
	$(BIN)/python -m pytest -m image tests/docker/images --timeout 1200

# One run over two images with different baselines, with a real engine; minutes.
.PHONY: test-siblings
test-siblings: $(VENV)/.tested pin-check
	$(BIN)/python -m pytest -m siblings tests/docker/images --timeout 1800

# Runs of training that are killed and resumed, the planted arms, and how often these are caught: minutes.
.PHONY: test-training
test-training: $(VENV)/.tested
	$(BIN)/python -m pytest -m training tests/suite tests/calibration --timeout 900

# Tests like those of `make test` that take longer than their share of it: minutes.
.PHONY: test-minutes
test-minutes: $(VENV)/.tested
	$(BIN)/python -m pytest -m minutes tests --timeout 900

PARALLEL := -n 2 --dist worksteal --timeout 300
# What takes minutes or has no lock has targets of its own: test-images, test-registry, test-training, test-ranks,
# test-fleet, test-load, test-minutes, test-notebook, test-quality, test-siblings.
SHORT := not image and not siblings and not docker and not training and not ranks and not fleet and not load and not minutes \
	and not notebook and not lm_eval
# BEHIND comes before the kernels' tests, which keep no times, where others run beside them: .ci/run has it. Tensors
# there are small: threads of each worker's own would only wait for each other.
test: test-rooms
	OMP_NUM_THREADS=1 $(BEHIND) $(BIN)/python -m pytest $(PARALLEL) -m 'not targets and not minutes' tests/kernels

# All but the kernels' tests. Those spend their time in Triton's interpreter, which a tracer slows down, and the
# coverage that is asked for is that of suite/ and registry/.
.PHONY: test-rooms
test-rooms: $(VENV)/.tested check
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest $(PARALLEL) -m '$(SHORT)' --ignore tests/kernels
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# Clone, wheel, every command of the README, with its exit code and its time: minutes. FACTOR widens the times.
FACTOR ?= 2
.PHONY: first-hour
first-hour: $(VENV)/.tested
	$(BIN)/python tests/first_hour.py $(FACTOR)

# Inputs that are nearly right, ten thousand of them by default: a few minutes. A failure names its number.
FUZZ ?= 10000
SEED ?= 0
.PHONY: fuzz
fuzz: $(VENV)/.tested
	cd tests/fuzz && ../../$(BIN)/python inputs.py $(FUZZ) --seed $(SEED)

# Every Triton kernel compiled for GPUs that are not here: that each fits, spills nothing and multiplies by the
# target's matrix units, but for the exceptions listed; counts by target. TARGETS="gfx942 7.5" narrows. Long.
.PHONY: test-targets
TARGETS ?=
test-targets: $(VENV)/.tested
	$(BIN)/python -m pytest $(PARALLEL) -m targets tests/kernels
	$(BIN)/python tests/kernels/gate.py $(TARGETS)

# Ranks of cases on several GPUs, here processes, killed and held in every stage, TIMES each: minutes.
.PHONY: test-ranks
TIMES ?= 1
test-ranks: $(VENV)/.tested
	KERNELMARK_TEST_TIMES=$(TIMES) $(BIN)/python -m pytest -m ranks tests/suite/run/test_ranks.py tests/suite/doctor/test_ranks.py tests/suite/test_emulated_nodes.py --timeout 300

# The last, the first and a middle one of RANKS by turns killed in every stage, TIMES over; DEVICE=cuda on GPUs.
.PHONY: rank-faults
DEVICE ?= cpu
RANKS ?= 3
rank-faults: TIMES = 3
rank-faults: $(VENV)/.tested
	$(BIN)/python tests/rank_faults.py --device $(DEVICE) --ranks $(RANKS) --times $(TIMES)

# Training through NODES launcher agents of this host, each with RANKS ranks, peer access and shared memory off.
.PHONY: emulated-nodes
NODES ?= 2
emulated-nodes: $(VENV)/.tested
	$(BIN)/python tests/emulated_nodes.py --device $(DEVICE) --nodes $(NODES) --ranks $(RANKS)

check: $(VENV)/.tested
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory types contracts

# Also one by one, for .pre-commit-config.yaml.
types: $(VENV)/.tested typing
	$(BIN)/mypy --num-workers 2 -p kernelmark.suite -p kernelmark.registry -p kernelmark.baselines

contracts: $(VENV)/.tested typing
	PYTHONPATH=build/typing $(BIN)/lint-imports --no-cache

# When the baselines' libraries were released, asked of the package index that pip is set up with.
.PHONY: releases
releases: $(VENV)/.ready
	$(BIN)/python -m kernelmark.suite.releases > registry/analysis/releases.json.new
	mv registry/analysis/releases.json.new registry/analysis/releases.json

# Their scripts share a module of their folder.
WRITE := PYTHONPATH=docs $(BIN)/python

# The pages that are written from journals and from the code; tests hold them to it.
pages: $(VENV)/.ready
	$(WRITE) docs/architecture.py --write
	$(WRITE) docs/deciding.py --write
	$(WRITE) docs/results.py --write
	$(WRITE) docs/serving.py --write
	$(WRITE) docs/peers.py --write

# What its pages look like; docs/pictures.py. Needs Chromium.
.PHONY: pictures
pictures: $(VENV)/.tested
	$(WRITE) docs/pictures.py

format: $(VENV)/.tested
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The registry for a team, in containers; docs/registry.md. Needs Docker and Python on the host, and no $(VENV).
.PHONY: registry registry-down registry-backup registry-restore registry-upgrade registry-user test-registry
registry:
	@$(PYTHON) docker/registry/admin.py up

registry-down:
	@$(PYTHON) docker/registry/admin.py down

registry-backup:
	@$(PYTHON) docker/registry/admin.py backup $(if $(TO),"$(TO)")

registry-restore:
	@$(PYTHON) docker/registry/admin.py restore "$(FILE)"

registry-upgrade:
	@$(PYTHON) docker/registry/admin.py upgrade

registry-user:
	@$(PYTHON) docker/registry/admin.py user "$(NAME)"

# The server as its image has it, on a real PostgreSQL (Debian: postgresql), and the stack in containers, starting an
# engine where none runs (as root; Debian: docker.io docker-compose debootstrap): minutes. Red in CI without them.
test-registry: $(VENV)/.tested build/registry/.ready
	$(BIN)/python -m pytest tests/docker/registry --timeout 600

# Ray and Slurm on this machine, hosts and drivers killed (Debian: slurmctld slurmd slurm-client munge; as root):
# minutes. Red in CI without them.
.PHONY: test-fleet
test-fleet: $(VENV)/.tested build/fleet/.ready
	PYTHONPATH=$(CURDIR)/build/fleet $(BIN)/python -m pytest -n 0 -m fleet tests/suite/fleet --timeout 900

# Endpoints through the providers' own SDKs, to a server of this machine: a minute.
.PHONY: test-endpoints
test-endpoints: $(VENV)/.tested build/endpoints/.ready
	PYTHONPATH=$(CURDIR)/build/endpoints $(BIN)/python -m pytest -n 0 -rs tests/suite/workloads/test_endpoint.py

build/endpoints/.ready: pyproject.toml
	$(BIN)/python -m pip install --quiet --upgrade --target build/endpoints openai anthropic boto3
	touch $@

# What docs/serving.md says of faults, queueing and the client, measured anew here: three minutes, on a quiet machine.
.PHONY: serving agreement
SERVING := registry/reference/serving
serving: $(VENV)/.ready
	$(BIN)/python tests/serving/faults.py $(SERVING)/faults.json
	$(BIN)/python tests/serving/capacity.py $(SERVING)/capacity.json
	$(WRITE) docs/serving.py --write

# The same servers measured by ours, guidellm and AIPerf, and by vLLM's client where build/agreement/vllm has vLLM.
# Each has its packages in a folder of its own, without a lock: nothing that measures loads them. Half an hour.
agreement: $(VENV)/.tested build/agreement/.ready
	$(BIN)/python tests/serving/agreement.py build/agreement $(SERVING)/agreement.json
	$(WRITE) docs/serving.py --write

build/agreement/.ready:
	$(BIN)/python -m pip install --quiet --upgrade --target build/agreement/guidellm 'guidellm==0.8.1'
	$(BIN)/python -m pip install --quiet --upgrade --target build/agreement/aiperf 'aiperf==0.13.0'
	touch $@

# Beside the environment and not in it: it is an optional extra that has no lock, and nothing that measures loads it.
build/fleet/.ready: pyproject.toml
	$(BIN)/python -m pip install --quiet --upgrade --target build/fleet 'ray==2.60.0'
	touch $@

# A real notebook, executed: half a minute. Its packages stand beside the environment, as Ray does.
.PHONY: test-notebook
test-notebook: $(VENV)/.tested build/notebook/.ready
	PYTHONPATH=$(CURDIR)/build/notebook $(BIN)/python -m pytest -n 0 -m notebook tests/suite/test_notebook.py

build/notebook/.ready: pyproject.toml
	$(BIN)/python -m pip install --quiet --upgrade --target build/notebook 'ipykernel==7.4.0' 'nbclient==0.11.0'
	touch $@

# The corpus built twice from its packages, which are downloaded once (122 MB): in the manifest's order on this disk, and
# in one drawn by ORDER in ELSEWHERE, on another file system; then packed and unpacked. The same bytes each time: minutes.
.PHONY: corpus-twice
ORDER ?= 7
CORPORA ?= build/corpus
ELSEWHERE ?= /dev/shm/kernelmark-corpus
corpus-twice: $(VENV)/.ready
	rm -rf $(CORPORA)/here $(CORPORA)/unpacked $(ELSEWHERE)
	KERNELMARK_CORPUS=$(CORPORA)/here $(BIN)/kernelmark corpus build --wheels $(CORPORA)/wheels
	KERNELMARK_CORPUS=$(ELSEWHERE) $(BIN)/kernelmark corpus build --wheels $(CORPORA)/wheels --order $(ORDER)
	KERNELMARK_CORPUS=$(CORPORA)/here $(BIN)/kernelmark corpus pack $(CORPORA)/packed
	KERNELMARK_CORPUS=$(CORPORA)/unpacked $(BIN)/kernelmark corpus build --packed $(CORPORA)/packed
	sha256sum $(CORPORA)/here/*/*.txt $(ELSEWHERE)/*/*.txt $(CORPORA)/unpacked/*/*.txt
	diff -r $(CORPORA)/here $(ELSEWHERE)
	diff -r $(CORPORA)/here $(CORPORA)/unpacked
	rm -rf $(ELSEWHERE)

# lm-evaluation-harness itself on a tiny checkpoint: half a minute. Beside the environment too.
.PHONY: test-quality
test-quality: $(VENV)/.tested build/lm_eval/.ready
	PYTHONPATH=$(CURDIR)/build/lm_eval $(BIN)/python -m pytest -n 0 -m lm_eval tests/suite/workloads/test_quality.py

build/lm_eval/.ready: pyproject.toml
	$(BIN)/python -m pip install --quiet --upgrade --target build/lm_eval 'lm_eval==0.4.13'
	touch $@

# A history and a site out of a million rows, pages first painted in a browser; then the same as above with 16 writers
# and 20,000 rows, the server killed under them. Three minutes on two idle cores, which first paint needs, and then an
# hour and more (registry/reference/load/registry.txt).
.PHONY: test-load
WRITERS ?= 16
CASES ?= 312
test-load: $(VENV)/.tested build/registry/.ready
	$(BIN)/python -m pytest -n 0 -s -m load tests/registry
	WRITERS=$(WRITERS) CASES=$(CASES) $(BIN)/python -m pytest -n 0 -s -m docker tests/docker/registry/test_server.py \
		-k 'writers or journal_once or syncing_again'

build/registry/.ready: docker/registry/requirements.txt
	$(PYTHON) -m venv build/registry
	build/registry/bin/python -m pip install --quiet --require-hashes --no-deps -r $<
	touch $@

# mypy and import-linter cannot see through an editable installation; they read the mapped names here.
.PHONY: typing
typing:
	@mkdir -p build/typing/kernelmark
	@for room in suite kernels baselines registry; do ln -sfn ../../../$$room build/typing/kernelmark/$$room; done

$(VENV)/.ready: $(LOCKS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kernelmark needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12" >&2; exit 2; }
	@echo "making $(VENV) for $(FLAVOUR): some gigabytes of packages, a few minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@for lock in $(LOCKS); do \
		echo "installing what $$lock lists, each file checked against its hash"; \
		$(subst --quiet,,$(INSTALL)) -r $$lock | $(TOLD) all=$$(grep -c '^[A-Za-z].*==' $$lock) -; \
	done
	@echo "installing kernelmark from this checkout"
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.tested: $(VENV)/.ready requirements/test.txt
	$(INSTALL) -r requirements/test.txt
	touch $@

# A baseline library that cannot share an environment lives in one of its own, .venv-NAME. What has to be built
# against its torch stands in a second lock, NAME-source.txt. Those for CPUs share the locks of the image cpu.
ENVIRONMENTS := cutile deepspeed flash_attn flashinfer helion mamba onnxruntime_gpu tilelang torchtitan transformer_engine vllm xformers
CPU_ENVIRONMENTS := neural_compressor onnx
environment:
	@test -n "$(filter $(NAME),$(ENVIRONMENTS) $(CPU_ENVIRONMENTS))" || \
		{ echo "no environment '$(NAME)'; there is: $(ENVIRONMENTS) $(CPU_ENVIRONMENTS)" >&2; exit 2; }
	$(PYTHON) -m venv .venv-$(NAME)
	for lock in $(if $(filter $(NAME),$(CPU_ENVIRONMENTS)),image-cpu image-$(NAME) torch-cpu,$(NAME)); do \
		.venv-$(NAME)/bin/python -m pip install --quiet --require-hashes --no-deps -r requirements/$$lock.txt; done
	$(if $(wildcard requirements/$(NAME)-source.txt),.venv-$(NAME)/bin/python -m pip install --quiet --require-hashes \
		--no-deps --no-build-isolation -r requirements/$(NAME)-source.txt)
	.venv-$(NAME)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .

COMPILE := uv pip compile --quiet --generate-hashes --python-version 3.11 --universal --no-annotate \
	--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock'
lock:
	$(COMPILE) requirements/cuda.in -o requirements/cuda.txt
	$(COMPILE) requirements/cpu.in -c requirements/cuda.txt -o requirements/cpu.txt
	$(COMPILE) requirements/image-cuda.in -c requirements/cuda.txt -o requirements/image-cuda.txt
	$(COMPILE) requirements/image-cpu.in -c requirements/cuda.txt -o requirements/image-cpu.txt
	$(COMPILE) requirements/test.in -c requirements/cuda.txt -o requirements/test.txt
	for name in $(CPU_ENVIRONMENTS); do \
		$(COMPILE) --unsafe-package torch requirements/image-$$name.in -c requirements/cuda.txt \
			-o requirements/image-$$name.txt; done
	for name in $(ENVIRONMENTS); do $(COMPILE) requirements/$$name.in -o requirements/$$name.txt; done
	$(COMPILE) requirements/nvcc.in -c requirements/cuda.txt -o requirements/nvcc.txt
	for source in $(wildcard requirements/*-source.in); do \
		$(COMPILE) --no-deps $$source -o $${source%.in}.txt; done
	$(COMPILE) docker/registry/requirements.in -c requirements/cuda.txt -o docker/registry/requirements.txt
	$(BIN)/kernelmark image locked

# torch's ROCm build is on PyTorch's own index alone. Then: take `lacks` out of [rocm] in docker/images.toml, and put
# requirements/torch-rocm.txt behind its locks.
.PHONY: lock-rocm
ROCM := 7.2
lock-rocm:
	echo 'torch==2.13.0+rocm$(ROCM)' | uv pip compile --quiet --generate-hashes --python-version 3.12 \
		--python-platform x86_64-manylinux_2_28 --no-annotate --emit-index-url --index-strategy unsafe-best-match \
		--extra-index-url https://download.pytorch.org/whl/rocm$(ROCM) --custom-compile-command 'make lock-rocm' \
		- -o requirements/torch-rocm.txt

clean:
	rm -rf $(VENV) .venv-* build
