# make help lists the targets.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_FLAGS)

.PHONY: help train test test-more test-all test-oldest lint versions site docs readme parity memory scaling chaos fuzz mutate models bench bench-gpu clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

train: .venv/installed  ## install, then train recipes/quickstart.yaml on whatever is here
	$(BIN)/python train.py

test: .venv/installed  ## install, then run the tests that are not slow
	$(BIN)/python -m pytest -n 3 --dist worksteal

# A worker that has nothing left to do takes tests from the other. tests/deferred.txt names what is left to test-more.
test-more: .venv/installed  ## the tests that tests/deferred.txt leaves out of make test
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "more and not slow and not lm_eval and not serve"

test-all: .venv/installed  ## the slow ones too
	$(BIN)/python -m pytest -n 3 --dist worksteal -m ""

test-oldest:  ## those of make test with the oldest transformers that pyproject.toml allows
	test -d build/oldest || $(PYTHON) -m venv build/oldest
	build/oldest/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --editable '.[dev]' 'transformers==5.17.0'
	PATH="$(CURDIR)/build/oldest/bin:$$PATH" build/oldest/bin/python -m pytest -n 3 --dist worksteal

lint: .venv/installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch and what comes with it are left out: which build fits depends on the machine.
versions:  ## constraints.txt: the newest releases that pyproject.toml allows; then run the tests
	rm -rf build/newest && $(PYTHON) -m venv build/newest
	build/newest/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --editable '.[dev]'
	sed -n '/^#/p' constraints.txt > build/constraints.txt
	build/newest/bin/python -m pip freeze --exclude-editable | grep -vE '^(torch|triton|nvidia|cuda)' >> build/constraints.txt
	mv build/constraints.txt constraints.txt

# All pages in English and Traditional Chinese, with search, and nothing that another host serves. SITE_URL=https://... if it will have an address.
site: .venv/installed  ## the pages as a website in both languages, in build/site
	$(INSTALL) --editable '.[site]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python docs/check_site.py build/site

# What is generated from the code and checked by the tests.
docs: .venv/installed  ## pages that are generated from the code
	$(BIN)/acc-lm recipe schema > recipes/schema.json
	$(BIN)/acc-lm recipe markdown > docs/reference/recipe.md
	$(BIN)/python docs/update_readme.py recipes
	$(BIN)/python docs/notebooks/build.py

# Runs the quickstart anew and puts what it printed into the README.
readme: .venv/installed  ## train the quickstart and put its output into README.md
	$(BIN)/python docs/update_readme.py

# The tables of docs/promises/parity.md, by running every config.
parity: .venv/installed  ## docs/promises/parity.md: run every config
	$(BIN)/acc-lm parity --output docs/promises/parity.md
	$(BIN)/python benchmarks/precision.py docs/promises/parity.md
	$(BIN)/python benchmarks/trained.py docs/promises/parity.md

memory: .venv/installed  ## docs/promises/parity.md: memory of each config
	$(BIN)/python benchmarks/memory.py docs/promises/parity.md

# docs/measured/scaling.md, measured anew on the processes that fit here: PROCESSES=1,2,4,8 on eight GPUs.
PROCESSES ?= 1,2,4
scaling: .venv/installed  ## docs/measured/scaling.md, on PROCESSES=1,2,4 processes
	$(BIN)/acc-lm scaling --processes $(PROCESSES) --output docs/measured/scaling.md
	$(BIN)/acc-lm bench-comm --output docs/measured/scaling.md

# The gates of docs/promises/reliability.md: a hundred kills, twenty launches killed, every engine read by every other; what a save costs.
chaos: .venv/installed  ## docs/promises/reliability.md: kills, crashes, engines that read each other
	$(BIN)/python benchmarks/chaos.py docs/promises/reliability.md
	$(BIN)/python benchmarks/saving.py docs/promises/reliability.md

# Arbitrary input for MINUTES, and single faults planted in the code: what came of both is in docs/promises/reliability.md.
MINUTES ?= 10
fuzz: .venv/installed  ## docs/promises/reliability.md: arbitrary input for MINUTES=10
	$(BIN)/python benchmarks/fuzz.py --minutes $(MINUTES) docs/promises/reliability.md

mutate: .venv/installed  ## docs/promises/reliability.md: faults planted in the code
	$(BIN)/python benchmarks/mutate.py docs/promises/reliability.md

# What becomes of every causal type of transformers.
models: .venv/installed  ## docs/reference/models.md: every causal type of transformers
	$(BIN)/python docs/update_models.py

# docs/measured/benchmarks.md, measured next to every peer. Lightning and litgpt are packages; nanoGPT/ and transformers/
# (only examples/pytorch/language-modeling/run_clm_no_trainer.py) are clones in the folder PEERS.
PEERS ?= peers
bench: .venv/installed  ## docs/measured/benchmarks.md: speed next to peers, on a CPU; PEERS=FOLDER has their clones
	$(INSTALL) --editable '.[dev,bench]'
	$(INSTALL) --no-deps litgpt
	PEERS=$(PEERS) $(BIN)/python -m benchmarks.cpu --page docs/measured/benchmarks.md
	$(BIN)/python benchmarks/streaming.py docs/guides/data.md

# The same on a GPU, in three commands of less than ten minutes each.
bench-gpu: .venv/installed  ## the same on a GPU, in three parts
	$(BIN)/python -m benchmarks.gpu ceilings
	$(BIN)/python -m benchmarks.gpu gpt2
	$(BIN)/python -m benchmarks.gpu llama --page docs/measured/benchmarks.md

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "acc-lm needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	test -d .venv || $(PYTHON) -m venv .venv
	@echo 'installing into .venv, which takes some minutes and prints nothing'
	$(INSTALL) --editable '.[dev]'
	touch $@

clean:  ## remove .venv and builds
	rm -rf .venv build src/*.egg-info
