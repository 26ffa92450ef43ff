# Every target makes .venv when it is missing; nothing has to be installed or running before.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
BIN := .venv/bin

.PHONY: test coverage matrix wheel demo faults soak check bench clean

test: .venv/installed
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile

coverage: .venv/installed
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --timeout 400 --cov --cov-report=term-missing:skip-covered
	$(BIN)/coverage json --quiet --fail-under 0 -o - | $(BIN)/python -m tests.branches

matrix: .venv/installed
	$(BIN)/tox run $(if $(ONLY),-e $(ONLY))

wheel: .venv/installed
	$(BIN)/tox run -e core,wheel

demo: .venv/installed
	$(BIN)/python -m examples.shop.demo

faults: .venv/installed
	$(BIN)/python -m pytest -m faults --numprocesses 2 --dist loadfile

soak: .venv/installed
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),2) $(if $(SEED),--seed $(SEED))

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	$(BIN)/python -m tests.benchmarks $(ONLY)

.venv/installed: pyproject.toml
	@echo "Installing into .venv; this takes a minute or two the first time."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .tox .bench .coverage build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
