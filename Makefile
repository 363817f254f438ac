# make run       train and evaluate the recipe RECIPE (tiny); a second call does what has changed
# make test      the tests; with DATA=<folder> on the benchmark files there instead of small ones
# make lint      ruff and mypy
# make plan      whether RECIPE fits GPUs of 24, 80 and 141 GB, or CARD=80 alone: memory by part,
#                tokens, seconds, disk, and what to change
# make compare   train RECIPE with every row of params/algorithms.yaml; the table goes to reports/
# make bench     the speed of a training step beside TRL's, in one run
# make chaos     kill, damage and cut off runs of the recipe smoke in some 40 ways, two at a time: half
#                an hour
# make test-gpu  the tests that need a GPU
# make ui        the runs of this checkout in Prefect and in MLflow
# make deploy    the pools POOLS, and what prefect.yaml declares, to the server at PREFECT_API_URL
# make doctor    what crashes have left here, and the offer to clear it; with YES=1 without asking
# make clean     remove what runs have left, except DVC's cache, from which equal runs come back
#
# Each of them makes .venv first, which takes Linux, Python 3.11, git and some minutes.

RECIPE ?= tiny
ITERATIONS ?= 30
POOLS ?= cpu gpu
PYTHON := .venv/bin/python
INSTALLED := .venv/installed

export DO_NOT_TRACK := 1
export OMP_WAIT_POLICY ?= PASSIVE
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: run test lint plan compare bench chaos test-gpu ui deploy doctor clean
.DEFAULT_GOAL := run

run: $(INSTALLED)
	@$(PYTHON) -m flows.retrain $(RECIPE) --here

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

ui: $(INSTALLED)
	@$(PYTHON) -m flows.server

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
		rm -rf data/$$recipe models/$$recipe reports/$$recipe; \
	done

$(INSTALLED): pyproject.toml constraints.txt
	@python=$$(for name in python3.11 python3 python; do \
		$$name -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
			&& echo $$name && break; done); \
	if [ -z "$$python" ]; then \
		echo "Beamline needs Python 3.11, and neither python3.11 nor python3 is it: install it first"; \
		exit 1; \
	fi; \
	echo "installing into .venv; this takes some minutes, once"; \
	$(PYTHON) -m pip --version >/dev/null 2>&1 || $$python -m venv .venv
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[test]'
	@touch $@
