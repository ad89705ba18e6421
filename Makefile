# Two commands are enough: `make quickstart` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv/bin
export PYTHONSAFEPATH := 1

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-unit test-disturb lint format generate lock bench-compile bench-guard bench-memory bench-storm bench-regional clean-runs environment environment-dev binaries browser

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

quickstart: environment ## train the main job here, all four stages, and say where the report is
	$(VENV)/ctj run examples/quickstart.yaml

test: environment-dev binaries browser ## every test: unit, contract, trainer, cluster, page
	$(VENV)/python -m pytest tests/unit tests/contract tests/trainer tests/cluster tests/page

test-unit: environment-dev ## the fast tier only, under a minute
	$(VENV)/python -m pytest tests/unit

test-disturb: environment-dev binaries ## the long one: 20 seeded moments of every disturbance on the real API server
	CTJ_DISTURBANCES=20 $(VENV)/python -m pytest tests/cluster/test_disturbances.py

lint: environment-dev ## formatting, ruff, mypy strict, import rules, generated files
	$(VENV)/ruff format --check .
	$(VENV)/ruff check .
	$(VENV)/mypy
	$(VENV)/lint-imports
	$(VENV)/python -m ctj_api.generate --check

format: environment-dev ## format and fix what can be fixed
	$(VENV)/ruff format .
	$(VENV)/ruff check --fix .

generate: environment-dev ## write the CRD and the reference from crds/ctj_api
	$(VENV)/python -m ctj_api.generate

bench-compile: environment-dev ## first compiled step: regional / full, warm / cold; table and JSON
	$(VENV)/python bench/compile_start.py

bench-guard: environment-dev ## what our own work costs a step, against 250 ms and a hand-written loop; table and JSON
	$(VENV)/python bench/guard.py

bench-memory: environment-dev ## predicted memory against measured, and against published figures; table and JSON
	$(VENV)/python bench/memory.py

bench-storm: environment-dev ## 24 lengths: ours / marking by hand, accelerate launch's default / ours; table and JSON
	$(VENV)/python bench/storm.py

bench-regional: environment-dev ## eager, full and regional by batch and size, and five claims judged; table and JSON
	$(VENV)/python bench/regional.py

lock: ## resolve pyproject.toml again into requirements/*.lock
	$(VENV)/python -m uv pip compile -q pyproject.toml --all-extras --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --no-annotate -o requirements/dev.lock
	$(VENV)/python -m uv pip compile -q pyproject.toml --extra operator --extra trainer -c requirements/dev.lock --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --no-annotate -o requirements/run.lock

environment:
	@$(PYTHON) scripts/prepare.py run

environment-dev:
	@$(PYTHON) scripts/prepare.py dev

binaries: environment-dev
	@$(VENV)/python tests/cluster/binaries.py

browser:
	@$(PYTHON) scripts/browser.py
