# Needs only python3 (3.11 or newer) and make; everything else is installed into .venv.

PYTHON ?= python3
VENV ?= .venv
SITE := .venv-docs
CORES ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)

# Without an NVIDIA GPU, torch comes from its CPU index, which saves gigabytes of CUDA; `TORCH_INDEX=` turns that off.
ifeq ($(shell command -v nvidia-smi),)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
endif

BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.installed
TRITON := $(VENV)/.triton
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.lock)
export PATH := $(BIN):$(PATH)
# Each process gets a run of whole files, because tests of a file share costly fixtures; one that is done takes over half of
# what another has left.
PYTEST := python -m pytest -n $(CORES) --maxprocesses 4 --dist worksteal

# Commands run as modules, because scripts do not start in a folder with quotes or blanks in its name.
.PHONY: install mini test test-all test-numeric lint gpu-check docs clean

install: $(STAMP)

mini: $(STAMP)
	python -m snakemake --cores $(CORES) all

test: $(STAMP)
	$(PYTEST) -m "not slow and not gpu"

test-all: $(STAMP) $(TRITON)
	$(PYTEST) --hypothesis-profile thorough -m "not gpu"

# With ATEN_CPU_CAPABILITY=default, avx2 or avx512, torch sums in the order of other CPUs. It does not check this CPU: without AVX-512 it would end with an illegal instruction.
test-numeric: $(STAMP)
	@if [ "$$ATEN_CPU_CAPABILITY" = avx512 ] && ! grep -qw avx512bw /proc/cpuinfo; then echo "no AVX-512 here, so nothing is tested"; \
	else $(PYTEST) -m "not slow and not gpu" $(addprefix tests/unit/,core kernels methods model decode measure diagnostics training runtime); fi

lint: $(STAMP)
	python -m ruff check .
	python -m ruff format --check .
	python -m snakefmt --check Snakefile workflow
	python -m snakemake --lint

# Installs nothing: a machine with a GPU may have no package index. The environment is used if there is one.
gpu-check:
	PYTHONPATH=src $(PYTHON) benchmarks/gpu_check.py

# The pages of docs/ as a site, in site/. Its search needs a server, such as `python -m http.server -d site`.
docs: $(SITE)/.installed
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --strict --quiet

$(SITE)/.installed: tools/site/requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip --disable-pip-version-check install -r $<
	@touch $@

# Triton's interpreter, for tests of its kernels: torch for CUDA depends on Triton, torch for CPUs does not.
$(TRITON): $(STAMP)
	$(PIP) install --no-deps "triton==3.7.1; platform_system == 'Linux' and platform_machine == 'x86_64'"
	@touch $@

# Keeps results/, which may hold weeks of work.
clean:
	rm -rf logs site .pytest_cache .ruff_cache .hypothesis $(filter-out paper_tables/templates/,$(wildcard paper_tables/*/))

# torch for CPUs comes first and alone, because its hash is not that of the package index. If its index cannot be reached,
# pip says so, and torch comes from pip's configured index with the others, by hash. That build names the versions of
# NVIDIA's libraries itself, and the third line installs them.
$(STAMP): requirements.lock pyproject.toml setup.py $(wildcard src/residual_mass/kernels/*.[ch]pp)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"$(PYTHON) is Python {sys.version.split()[0]}; 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),-$(PIP) install --retries 0 --timeout 15 --extra-index-url $(TORCH_INDEX) --no-deps $(TORCH))
	$(PIP) install --require-hashes --no-deps -r requirements.lock
	$(PIP) install $(TORCH)
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@
