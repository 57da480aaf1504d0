# make demo         trains a small convolutional net on two ranks (TORCH_DDP=1: with PyTorch's class)
# make test         the tests: every promise once; ARGS="-k planner", ARGS="tests/module -n 0"
# make test-all     all tests: further cells and draws, three ranks where two hold the promise, starts as users do them
# make lint         ruff, mypy, codespell, clang-format; make format applies what can be applied
# make conformance  PyTorch's own DDP tests, with minddp in the place of torch's class; TORCH=torch==2.15.0
# make site         the site, in build/docs/html, without what the tutorials print
# make docs         the site with it, and its tests: every page in a browser, every command of the docs
# make wheel        a wheel for the torch of .venv, in dist; make wheels: for each of 2.11, 2.13 and 2.15
# make lab          lists the rigs that are run by hand: fuzzer, faults, sanitizers, soak...; ARGS="soak --steps 3000"
# make size         counts lines by folder and in all
#
# CONTRIBUTING.md names the other targets: build, format, libraries, tutorials, exercises, check-torch, check-cuda, gpu-check.
#
# Each makes what it needs: .venv with torch, the extension built in place. PYTHON=/path/to/python uses an
# environment that exists instead (nothing is installed there). TORCH= is the torch that .venv gets; conformance
# goes aside for another one, as check-torch does.

HOME_TORCH := torch==2.13.0
TORCH ?= $(HOME_TORCH)
NEWEST_TORCH := $(shell sed -n 's/^torch==//p' requirements-newest.txt)
TORCHES ?= 2.11.0 2.13.0 $(NEWEST_TORCH)
CUDA_TORCH ?= torch==2.11.0
CUDA_ARCHS ?= 9.0

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: build demo test test-all lab size lint format conformance libraries tutorials site docs exercises
.PHONY: check-torch check-cuda gpu-check wheel wheels

ifdef PYTHON
PY := $(shell command -v $(PYTHON) || echo $(PYTHON))
else
PY := .venv/bin/python
BASE := .venv/.clone
needs = .venv/.extra-$(1)
endif

# ninja and torchrun lie beside Python.
export PATH := $(dir $(abspath $(PY))):$(PATH)
# The ranks that torchrun starts, and scripts in other folders, find the package built in place.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# Byte code is kept: otherwise each of hundreds of processes compiles the package and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

# --- the environment ---------------------------------------------------------------------------------

SYSTEM_PYTHON = $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
EXTRA = import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"][sys.argv[1]], sep="\n")

# Of pip's lines each file, with its size where it is fetched, and the last step.
FETCHED := s~^ *(Downloading|Using cached|Processing) (.*/)?([^ /]*\.whl)( \(.*\))?$$~   \3\4~p; s~^Installing coll.*~   installing~p

.venv/bin/python:
	@test -n "$(SYSTEM_PYTHON)" || { echo "minddp needs Python 3.11 or newer: none found on PATH"; exit 1; }
	@echo "1. An environment of its own, in .venv"
	@$(SYSTEM_PYTHON) -m venv .venv

.venv/.base: | .venv/bin/python
	@echo "2. $(TORCH), numpy and ninja"
	@set -o pipefail; .venv/bin/python -m pip install --disable-pip-version-check "$(TORCH)" numpy "setuptools>=77" wheel ninja \
	  | sed -unE '$(FETCHED)'
	@touch $@

# Scripts find the package built in place, and the command `minddp` is there.
.venv/.clone: .ci/clone.py | .venv/.base
	@.venv/bin/python .ci/clone.py
	@touch $@

.venv/.extra-%: pyproject.toml | $(BASE)
	@.venv/bin/python -c '$(EXTRA)' $* > .venv/extra-$*.txt
	@echo "What \"$*\" needs: $$(sed 's/[^A-Za-z0-9_-].*//' .venv/extra-$*.txt | paste -sd ' ')"
	@set -o pipefail; .venv/bin/python -m pip install --disable-pip-version-check -r .venv/extra-$*.txt | sed -unE '$(FETCHED)'
	@touch $@

# --- the extension -----------------------------------------------------------------------------------

SOURCES := setup.py $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
# One stamp for each Python and each choice of CUDA; whichever builds removes the others' stamps, since
# their extension has just been replaced.
BUILT := build/built$(subst /,-,$(abspath $(PY)))-$(MINDDP_CUDA)

# Of ninja's lines the number and the file, without the compiler's arguments.
PIECE := s|^(\[[0-9]+/[0-9]+\]).* -c ([^ ]*/)?([^/ ]+) -o .*|   \1 \3|

build: $(BUILT)

$(BUILT): $(SOURCES) | $(BASE)
	@rm -f build/built-*
	@echo "3. The C++ extension: a minute or two"
	@set -o pipefail; $(PY) setup.py -q build_ext --inplace | sed -uE '$(PIECE)'
	@touch $@

# --- what people run -----------------------------------------------------------------------------------

RANKS ?= 2
DEMO := tutorials/01_digits.py

demo: $(BUILT) $(call needs,demo)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) \
	  $(DEMO) $(if $(filter 1,$(TORCH_DDP)),--torch-ddp)
	@echo "Next:  TORCH_DDP=1 make demo              the same with torch's class, to the same digest"
	@echo "       $(PY) -m minddp doctor       what works on this machine"
	@echo "       open docs/how.html in a browser, and read tutorials/mini_ddp.py: how DDP works, and DDP in 100 lines"

# Much of a test is waiting: four workers for two processors.
WORKERS ?= 4
PYTEST = $(PY) -m pytest -n $(WORKERS) --dist worksteal --durations 20 \
	--ignore tests/libraries --ignore tests/docs --ignore tests/lab

# tests/conftest.py says which tests are marked.
test: $(BUILT) $(call needs,test)
	$(PYTEST) -m "not all" $(ARGS)

test-all: $(BUILT) $(call needs,test)
	$(PYTEST) $(ARGS)

# What a rig needs beside the tests' packages.
EXTRA_libraries := libraries suites
EXTRA_results := bench tutorials
EXTRA_overhead := bench

lab: $(BUILT) $(call needs,test) $(foreach extra,$(EXTRA_$(firstword $(ARGS))),$(call needs,$(extra)))
	@$(PY) -m tests.lab $(ARGS)

size: | $(BASE)
	@$(PY) .ci/size.py $(ARGS)

# Users' libraries, by unmodified scripts under torchrun.
libraries: $(BUILT) $(call needs,test) $(call needs,libraries)
	$(PY) -m pytest tests/libraries $(ARGS)

CLANG_FORMAT = $(PY) -c 'import clang_format; clang_format.clang_format()'
FORMATTED := $(filter-out setup.py,$(SOURCES)) $(wildcard tests/lab/*/*.h tests/lab/*/*.cpp)

lint: $(call needs,dev) $(call needs,test)
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m codespell_lib minddp csrc tests benchmarks/*.py benchmarks/*.md tutorials exercises docs *.md *.py *.toml Makefile
	$(CLANG_FORMAT) --dry-run -Werror $(FORMATTED)

format: $(call needs,dev)
	$(PY) -m ruff check --fix .
	$(CLANG_FORMAT) -i $(FORMATTED)

ifeq ($(or $(PYTHON),$(filter $(HOME_TORCH),$(TORCH))),)
conformance:
	$(MAKE) check-torch TORCHES=$(patsubst torch==%,%,$(TORCH)) TARGET=conformance
else
conformance: $(BUILT) $(call needs,test)
	$(PY) -m tests.conformance $(ARGS)
endif

tutorials: $(BUILT) $(call needs,tutorials)
	$(PY) tutorials/run_all.py $(ARGS)

site: $(BUILT) $(call needs,docs) $(call needs,test)
	$(PY) -m docs.website --no-tutorials

docs: $(BUILT) $(call needs,docs) $(call needs,tutorials) $(call needs,test)
	$(PY) -m docs.website
	$(PY) -m pytest -n 2 --dist load --maxschedchunk 1 --durations 10 tests/docs tests/lab/site $(ARGS)

exercises: $(BUILT) $(call needs,test)
	SOLUTIONS=$(SOLUTIONS) $(PY) -m pytest exercises $(ARGS)

# --- other releases of torch -----------------------------------------------------------------------------

# Each in an environment and a copy of the tree of its own, so that the extension built in place stays the one for
# the environment in use. TARGET= is any other target that is to run there.
TARGET ?= test
TREE := $(wildcard minddp csrc tests benchmarks docs tutorials *.py *.toml *.md *.txt LICENSE MANIFEST.in Makefile .clang-format .ci)

check-torch: $(TORCHES:%=check-torch-%)

check-torch-%: .venv-%/$(if $(filter wheel,$(TARGET)),.torch,.installed)
	@mkdir -p build/torch-$*
	@find build/torch-$* -type f ! -path 'build/torch-$*/build/*' ! -name '*.so' ! -name _build.json -delete
	@tar -cf - --exclude '*.so' --exclude _build.json --exclude __pycache__ $(TREE) | tar -xf - -C build/torch-$*
	PYTHONPATH= $(MAKE) -C build/torch-$* PYTHON=$(CURDIR)/.venv-$*/bin/python MINDDP_CUDA=$(or $(MINDDP_CUDA),0) $(TARGET)

.PRECIOUS: .venv-%/.torch .venv-%/.installed
.venv-%/.torch:
	@test -x .venv-$*/bin/python || $(SYSTEM_PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install -q "torch==$*" numpy "setuptools>=77" wheel ninja
	@touch $@

.venv-%/.installed: pyproject.toml .venv-%/.torch
	.venv-$*/bin/python -c '$(EXTRA)' test > .venv-$*/extra-test.txt
	.venv-$*/bin/python -m pip install -q -r .venv-$*/extra-test.txt
	@touch $@

# --- wheels ----------------------------------------------------------------------------------------------

# Installed where no compiler is. Its objects are those of the extension that is built in place.
WHEELS := $(CURDIR)/dist

wheel: $(BUILT)
	@rm -rf build/lib* build/bdist*
	@mkdir -p build/egg $(WHEELS)
	@set -o pipefail; $(PY) -W ignore setup.py -q egg_info --egg-base build/egg bdist_wheel --dist-dir $(WHEELS) 2>&1 | \
	  sed -uE '/^warning: no prev/d; $(PIECE)'
	@ls -t $(WHEELS)/*.whl | head -n 1

wheels:
	@rm -f $(WHEELS)/minddp-*.whl
	@$(MAKE) check-torch TARGET=wheel WHEELS=$(WHEELS)
	@ls $(WHEELS)

# --- CUDA ------------------------------------------------------------------------------------------------

NVCC = $(shell PATH="$$PATH:/usr/local/cuda/bin" command -v nvcc)
CUDA_BUILD := build/cuda

CHECK_CUDA = import minddp; print(minddp.__config__()); \
	from minddp._extension import build_record; assert build_record()["cuda"], "built without CUDA"

check-cuda:
ifeq ($(NVCC),)
	@echo "check-cuda: $(if $(filter true,$(CI)),failed,skipped), there is no nvcc on PATH or in /usr/local/cuda/bin"
	@$(if $(filter true,$(CI)),false)
else
	$(MAKE) $(CUDA_BUILD)/.built
	@echo "Registers of each kernel:" && grep -E "ptxas info *: Used [0-9]+ registers" $(CUDA_BUILD)/ptxas.txt | sort | uniq -c
	@! grep -E "[1-9][0-9]* bytes (stack frame|spill)" $(CUDA_BUILD)/ptxas.txt && echo "no stack, no spills"
	@! grep -l "trap;" $(CUDA_BUILD)/kept/*.ptx && echo "no traps: none uses an address of the host's"
	@! grep -l "fma\." $(CUDA_BUILD)/kept/block_quantization*.ptx && echo "blocks: no sum is fused with a product, as on the CPU"
	PYTHONPATH=$(CURDIR)/$(CUDA_BUILD)/lib .venv-cuda/bin/python -P -c '$(CHECK_CUDA)'
endif

.venv-cuda/.installed:
	@test -x .venv-cuda/bin/python || $(SYSTEM_PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip install -q "$(CUDA_TORCH)" numpy "setuptools>=77" wheel ninja
	@touch $@

# In folders of its own, so that the extension built in place stays the one for the environment in use.
$(CUDA_BUILD)/.built: $(SOURCES) $(wildcard minddp/*.py minddp/*/*.py) | .venv-cuda/.installed
	@mkdir -p $(CUDA_BUILD)/kept
	set -o pipefail; PATH=$(CURDIR)/.venv-cuda/bin:$(dir $(NVCC)):$$PATH MINDDP_CUDA=1 TORCH_CUDA_ARCH_LIST="$(CUDA_ARCHS)" \
	  NVCC_APPEND_FLAGS="-Xptxas=-v --keep --keep-dir $(CURDIR)/$(CUDA_BUILD)/kept" .venv-cuda/bin/python setup.py -q build --build-base $(CUDA_BUILD) \
	  --build-lib $(CUDA_BUILD)/lib 2>&1 | tee $(CUDA_BUILD)/ptxas.txt
	@touch $@

gpu-check: $(BASE) $(call needs,test) $(call needs,bench)  # builds by itself, with a limit of its own
	$(PY) benchmarks/gpu_check.py $(ARGS)
