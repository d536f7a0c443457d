# make all   set up and run the main job on the embedded default model
# make test  set up and run the tests
# Both make their own virtual environment in .venv and touch nothing outside the project.

PYTHON ?= python3
RUN ?= configs/smollm2-135m-sample.yaml
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: all test check slow clean
.DELETE_ON_ERROR:

all: .venv/ready
	$(BIN)/snakemake all --cores all --config run=$(RUN)

# One torch thread a worker, and the tests of a file on one worker, which then share its models.
test: .venv/ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

# The tests that take minutes: every BFCL row, both real models, differential runs.
slow: .venv/ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

check: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile
	$(BIN)/snakemake --lint

.venv/ready: requirements.txt requirements-nodeps.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else f"Python 3.11 or 3.12 is needed, $(PYTHON) is {v[0]}.{v[1]}: run make PYTHON=python3.11")'
	@echo "Setting up .venv: some minutes, and about 4 GB of disk"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) "$$(grep ^torch== requirements.txt)"
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --require-hashes -r requirements-nodeps.txt
	$(PIP) --no-deps --no-build-isolation -e .
	$(BIN)/python -m kernels.cpu.build
	touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt requirements-dev-nodeps.txt
	$(PIP) -r requirements-dev.txt
	$(PIP) --no-deps --require-hashes -r requirements-dev-nodeps.txt
	touch $@

clean:
	rm -rf .venv .snakemake .cache
