# make demo       train a small model by asynchronous GRPO on this machine and show the reward rise
# make test       lint, documentation, architecture test and the CPU suite without the tests marked slow
# make test-all   make test and the tests marked slow, end-to-end runs of many seconds each, as CI does
# make test-agents  train through real clients (Claude Code, Codex, SDKs) from .venv-agents, and let
#                   OpenEnv read what areal export writes; tools of servers of the MCP SDK
# make test-eval  run lm-eval and inspect-ai from .venv-eval against areal serve
# make test-browser  look at the dashboard with a real Chromium
# make test-wheel  build the wheel, install it into an empty environment, and train a short demo there
# make test-multi-gpu  runs over several GPUs, on a machine that has them; others are skipped with the reason
# make test-vllm  tests against a real vLLM server; needs areal env create vllm
# make docs       build the documentation into site/, without a network
# make lint       ruff, basedpyright and mdformat, without changing anything
# make format     let them change what they can
#
# Each target first sees to .venv; that costs nothing while pyproject.toml and constraints.txt are
# unchanged. Another interpreter: make test PYTHON=python3.12. Arguments of the demo: make demo
# ARGS="--out /tmp/demo".

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
MARKDOWN := $(wildcard *.md docs examples benchmark docker .github)
SUITE := $(BIN)/python -m pytest --dist worksteal --durations 60
# What has a target, an environment or a machine of its own.
ELSEWHERE := not gpu and not multi_gpu and not real_agents and not real_browser and not evaluators

.PHONY: demo test test-all test-agents test-eval test-browser test-wheel test-multi-gpu test-vllm docs lint format
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/areal demo $(ARGS)

# Compiled once, not by each of the suite's processes where PYTHONDONTWRITEBYTECODE is set.
test: lint docs
	$(BIN)/python -m compileall -q areal
	$(SUITE) -n 3 -m "not slow and $(ELSEWHERE)"

# One process more than above: the slow tests wait more.
test-all: lint docs
	$(BIN)/python -m compileall -q areal
	$(SUITE) -n 4 -m "$(ELSEWHERE)"

# One thread: the clients need the other core.
test-agents: $(VENV)/.installed-dev .venv-agents/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m real_agents tests/agents/test_real_agents.py \
	tests/cli/test_export.py tests/environments/test_real_mcp.py

test-eval: $(VENV)/.installed-dev .venv-eval/.installed
	$(BIN)/python -m pytest -m evaluators tests/evaluation/test_evaluators.py

# AREAL_SCREENSHOTS=docs/assets draws the pictures of the documentation again.
test-browser: $(VENV)/.installed-dev .venv-browser/.installed
	@command -v chromium >/dev/null || { echo \
	"make test-browser needs Chromium: install it (Debian: apt-get install chromium)" >&2; exit 1; }
	$(BIN)/python -m pytest -m real_browser tests/dashboard/test_page.py

# With the packages of .venv, because to install them again takes longer than the rest.
test-wheel: $(VENV)/.installed-dev
	$(BIN)/python scripts/release.py --demo --borrow

test-multi-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m multi_gpu -rs tests

test-vllm: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow -rs -k "vllm" tests/engine/remote/test_vllm_remote.py \
		tests/engine/remote/test_vllm_vision.py \
		tests/trainer/test_stock_fleet_run.py tests/doctor/test_real_vllm.py

# The variable keeps a notice about MkDocs' own future out of the output.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/mdformat --check $(MARKDOWN)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mdformat $(MARKDOWN)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit( \
	"areal needs Python 3.11 to 3.13, $(PYTHON) is %d.%d: make PYTHON=python3.12" % v)'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	echo "could not make $(VENV): is the venv module there? (Debian: apt install python3-venv)" >&2; exit 1; }

# torch by itself first: later requirements then find the pinned build in place.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (minutes, once) ..."
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

# The clients have an environment of their own: their pins and ours need not agree.
.venv-agents/.installed: tests/data/real_agents/requirements.txt tests/data/real_agents/openenv.txt \
	| $(VENV)/bin/python
	@echo "installing the agents into .venv-agents (minutes, once) ..."
	$(BIN)/python -m venv .venv-agents
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
	--requirement $<
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
	--target .venv-agents/openenv --upgrade --requirement tests/data/real_agents/openenv.txt
	@touch $@

.venv-eval/.installed: tests/data/evaluators/requirements.txt | $(VENV)/bin/python
	@echo "installing lm-eval and inspect-ai into .venv-eval (a minute, once) ..."
	$(BIN)/python -m venv .venv-eval
	.venv-eval/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
	--requirement $<
	@touch $@

# Beside .venv, which only needs it for this.
.venv-browser/.installed: tests/data/browser.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade \
	--target .venv-browser --requirement $<
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	@touch $@
