# Each target creates .venv with the pinned packages first if it is missing or constraints.txt has changed.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
export PATH := $(CURDIR)/.venv/bin:$(PATH)

PIPELINE_TESTS := $(addprefix tests/test_,pipeline.py question_pipeline.py hub_pipeline.py)
# PIPELINE=qa has a program run in the folder of the second pipeline; a path of the user's is from here.
IN = cd $(or $(PIPELINE),.) && PYTHONPATH="$(CURDIR)"
PATH_OF = $(if $(filter /%,$(firstword $(1))),,$(CURDIR)/)$(1)

.PHONY: test-pipelines test-units repro repro-qa test lint verify verify-qa mutants compare report-html export bundle restore

repro: .venv/installed.txt
	dvc repro
	@echo "The report is reports/report.md"

repro-qa: .venv/installed.txt
	dvc repro qa/dvc.yaml
	@echo "The report is qa/reports/report.md"

# Two at a time: the whole pipelines at toy size on one core, everything else on the other.
test: .venv/installed.txt
	$(MAKE) --jobs 2 test-pipelines test-units

test-pipelines: .venv/installed.txt
	pytest $(PIPELINE_TESTS)

test-units: .venv/installed.txt
	pytest $(addprefix --ignore=,$(PIPELINE_TESTS))

lint: .venv/installed.txt
	ruff check .
	ruff format --check .

verify: .venv/installed.txt
	python -m tools.verify $(STAGES)

verify-qa: .venv/installed.txt
	python -m tools.verify --run-file qa/dvc.yaml $(STAGES)

mutants: .venv/installed.txt
	python tests/mutants.py

compare: .venv/installed.txt
	python -m tools.compare $(if $(PIPELINE),--pipeline $(PIPELINE)) $(EXPS)

report-html: .venv/installed.txt
	python -m tools.report_html

export: .venv/installed.txt
	$(IN) python -m tools.export "$(POLICY)" "$(call PATH_OF,$(TO))" $(if $(MERGED),--merged)

bundle: .venv/installed.txt
	$(IN) python -m tools.bundle pack "$(call PATH_OF,$(ZIP))"

restore: .venv/installed.txt
	$(IN) python -m tools.bundle restore "$(call PATH_OF,$(ZIP))" $(if $(FORCE),--force)

.venv/installed.txt: constraints.txt
	@test -n "$(PYTHON)" || { echo "error: Python 3.11, 3.12 or 3.13 is needed" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	python -m pip install --quiet --disable-pip-version-check -r constraints.txt
	cp constraints.txt .venv/installed.txt
