# Everything runs from a bare checkout with Python 3.11 or newer; the first call sets up .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CAPTURE := .venv-capture
LOWEST := .venv-lowest
NEWEST := .venv-newest
JOBS ?= auto --maxprocesses 4
# Seconds of one core that the tests of `make test` take.
SAMPLE_S := 700

.PHONY: demo site test test-all test-drawn nightly mutation test-capture test-lowest test-newest fuzz lint bench fixtures docs constraints clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       a recorded step predicted and compared, what-if on other devices, traces for a simulator"
	@echo "make test       the tests that protect most per second (tests/sampling.py), about 10 minutes"
	@echo "make test-drawn about SECONDS=300 of the other tests, chosen by the commit"
	@echo "make test-all   all tests, also fuzzing, a million nodes and the commands of every document: hours"
	@echo "make nightly    lint, all tests with all versions, the fuzzer and mutation tests: hours"
	@echo "make mutation   the share of changes of numerical modules that tests notice, of SAMPLE=60 each"
	@echo "make test-capture  captures of models of PyTorch, Flax and Equinox, installed in .venv-capture (2 GB)"
	@echo "make test-lowest   the tests with the lowest versions that pyproject.toml allows, in .venv-lowest"
	@echo "make test-newest   the tests with the newest versions that pyproject.toml allows, in .venv-newest"
	@echo "make fuzz       wrong fields and damaged bytes to every reader, killed writers: COUNT=2000 of each to each"
	@echo "                reader, about 20 minutes of CPU time (COUNT=50000: 8 hours)"
	@echo "make release    wheel and source archive in dist/, tried for PYTHONS=\"python3.11 python3.13\""
	@echo "                (REPOSITORY=URL: with this address of the project in the metadata)"
	@echo "make lint       ruff, mypy strict, pyright strict"
	@echo "make bench      speed and memory as ratios against a floor measured in the same run"
	@echo "make docs       make the outputs shown in README.md and docs/ again"
	@echo "make site       build the documentation site into site/, which opens without a server or network"
	@echo "make constraints  pin the newest versions of all that the tests install, in constraints.txt"
	@echo "make fixtures   make the inputs in fixtures/ again (installs JAX)"

$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed: set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is older: set PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[stablehlo]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[stablehlo]' --group dev
	@touch $@

$(VENV)/.installed-jax: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[jax]'
	@touch $@

$(CAPTURE)/.installed: pyproject.toml
	$(PYTHON) -m venv $(CAPTURE)
	$(CAPTURE)/bin/python -m pip install --quiet --upgrade pip
	$(CAPTURE)/bin/python -m pip install --quiet --constraint constraints.txt \
		--editable '.[jax,torch]' --group dev --group capture
	@touch $@

demo: $(VENV)/.installed
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh fixtures/demo.sh demo-out

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --sample $(SAMPLE_S)

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS)

# The commit decides what is drawn, so that a failure repeats.
test-drawn: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --sample $(SAMPLE_S) --draw $(or $(SECONDS),300) \
		--seed "$$(git rev-parse HEAD 2>/dev/null || echo none)"

nightly: lint test-all test-lowest test-newest fuzz mutation release

release: $(VENV)/.installed-dev
	$(BIN)/python -m tools.release --repository "$(REPOSITORY)" $(PYTHONS)

mutation: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group mutation
	$(BIN)/python -m tools.mutation --sample $(or $(SAMPLE),60)

test-capture: $(CAPTURE)/.installed
	$(CAPTURE)/bin/python -m pytest -n $(JOBS) tests/captures tests/cli/test_capture_command.py

# uv resolves the floors of direct dependencies, which pip cannot. The lowest versions are those with wheels for the
# Python in use: pyarrow 17 and SciPy 1.14.0 have none for Python 3.13.
test-lowest test-newest:
	$(PYTHON) -m venv --clear $(TARGET)
	$(TARGET)/bin/python -m pip install --quiet --upgrade pip uv
	VIRTUAL_ENV=$(TARGET) $(TARGET)/bin/uv pip install --quiet --resolution $(RESOLUTION) \
		--only-binary :all: --no-binary hespas --editable '.[stablehlo]' --group dev
	$(TARGET)/bin/python -m pytest -n $(JOBS) --dist loadfile --sample $(SAMPLE_S)

test-lowest: TARGET := $(LOWEST)
test-lowest: RESOLUTION := lowest-direct
test-newest: TARGET := $(NEWEST)
test-newest: RESOLUTION := highest

fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.fuzzing --reader all --kind fields --count $(or $(COUNT),2000)
	$(BIN)/python -m tests.fuzzing --reader all --kind bytes --count $(or $(COUNT),2000)
	$(BIN)/python -m tests.faults.kills

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks

fixtures: $(VENV)/.installed-jax
	$(BIN)/python -m fixtures.make

docs: $(VENV)/.installed-jax
	$(BIN)/python -m tools.recorded
	$(BIN)/python -m tools.generate
	$(BIN)/python -m tools.roundtrip
	$(BIN)/python -m tools.schemas
	$(BIN)/python -m tools.concepts

site: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# Of Python 3.11, the oldest that is supported: what is pinned is there for later ones too.
constraints:
	rm -rf $(VENV)-constraints
	$(PYTHON) -m venv $(VENV)-constraints
	$(VENV)-constraints/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-constraints/bin/python -m pip install --quiet --editable '.[jax,learned]' --group dev
	@{ echo "# Versions that the tests run with; made by: make constraints"; \
	  $(VENV)-constraints/bin/python -m pip list --format=freeze --exclude pip --exclude setuptools --exclude hespas; } > constraints.txt
	rm -rf $(VENV)-constraints

clean:
	rm -rf $(VENV) $(VENV)-constraints $(CAPTURE) demo-out site .mypy_cache .ruff_cache .pytest_cache .hypothesis
