# Everything runs in .venv, which the targets create and fill when they need it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
VERSIONS := -c constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
# VERL=0.9.0: with that version of verl, in a folder of its own.
VERL_FOLDER := .verl$(VERL:%=-%)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(VERSIONS)

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-docs test-newest release-check test-slow test-sandbox test-examples test-learning test-models test-pretrained test-references test-games test-openenv test-verifiers test-postgres test-clients test-litellm test-trackers test-vllm test-sglang test-verl test-fuzz test-kills test-accelerator test-frameworks test-viewer nightly check house audit format benchmarks clean

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-17s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "rllm needs Python 3.11 or newer; this is $$($(PYTHON) --version 2>&1). Use: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing rllm with what training needs (once) ..."
	$(PIP) -e '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	@echo "Installing what the tests need (once) ..."
	$(PIP) -e '.[train,dev]'
	@touch $@

# MODEL=HuggingFaceTB/SmolLM2-135M-Instruct: a pretrained model learns to add, in a quarter of an hour.
demo: $(VENV)/.train  ## Train a tiny agent on this machine: a few minutes, no network.
	$(BIN)/rllm demo $(MODEL:%=--model %)

test: $(VENV)/.dev  ## The fast test suite: about three minutes.
	$(BIN)/python tests/side_by_side.py

# The versions of an installation without constraints.txt, except torch: its newest build may be one of several gigabytes for GPUs.
test-newest:  ## The fast test suite with the newest version of each dependency, in an environment of its own.
	$(MAKE) test VENV=$(VENV)-newest VERSIONS="$(TORCH)"

test-slow: $(VENV)/.dev  ## Tests that start many processes or train longer, with the demo for three seeds: a few minutes.
	$(PYTEST) -m "slow and not pretrained"

# AutoGen asks for an older protobuf than the other packages, so it has a folder of its own.
.autogen: examples/autogen_team/requirements.txt | $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ -r $<
	@touch $@

# Bubblewrap, podman and a Debian image are installed where they are missing, as root. Where that is not possible, their
# tests are skipped; RLLM_TEST_SANDBOXES=required lets them fail.
test-sandbox: $(VENV)/.dev  ## Untrusted code, tasks and agents in sandboxes, and attacks on them: a few minutes.
	required=required; $(BIN)/python tests/sandbox/install.py || required=$$RLLM_TEST_SANDBOXES; \
	RLLM_TEST_SANDBOXES=$$required $(PYTEST) --dist worksteal -n 3 -m sandbox tests/rewards tests/security tests/tools tests/sandbox tests/tasks tests/cli/test_task_agents.py

test-examples: $(VENV)/.dev .autogen  ## Train every example to its stated improvement: a quarter of an hour.
	-$(BIN)/python tests/sandbox/install.py
	$(PYTEST) -m examples

test-learning: $(VENV)/.dev  ## Train with every algorithm, three seeds each: a few minutes.
	$(PYTEST) --dist worksteal -m learning tests/learning

.references: tests/references/requirements.txt | $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ -r $<
	@touch $@

.templates: tests/models/requirements.txt tests/models/unpack.py | $(VENV)/.dev
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --dest $@ -r $<
	$(BIN)/python tests/models/unpack.py $@
	@touch $@

test-models: $(VENV)/.dev .templates  ## Real chat templates, and a tiny model of every architecture; writes docs/models.md.
	RLLM_TEMPLATES=.templates $(BIN)/python -m tests.models.table
	RLLM_TEMPLATES=.templates $(PYTEST) -m models tests/models

.pretrained/.installed: tests/pretrained/install.py | $(VENV)/.dev
	$(BIN)/python tests/pretrained/install.py .pretrained
	@touch $@

.bitsandbytes: constraints.txt | $(VENV)/.dev
	$(PIP) --no-deps --upgrade --target $@ bitsandbytes
	@touch $@

# One process, with all cores for its tensors. SHORT=1 runs only the tests that need no other server and no cluster, and one training.
test-pretrained: export OMP_NUM_THREADS := $(shell nproc 2>/dev/null || echo 2)
test-pretrained: $(VENV)/.dev .pretrained/.installed .bitsandbytes $(if $(SHORT),,.vllm/.installed $(VERL_FOLDER))  ## A real pretrained model, its exact numbers and its training: an hour and more; with SHORT=1 ten minutes.
	PYTHONPATH=$(CURDIR)/.bitsandbytes$(if $(SHORT),,:$(CURDIR)/$(VERL_FOLDER)) $(BIN)/pytest -m "pretrained$(if $(SHORT), and not slow)" tests/pretrained

# Parts of it for CI, each of a quarter of an hour or so.
PRETRAINED_seeds := tests/pretrained/test_training.py -k other_seeds
PRETRAINED_lora := tests/pretrained/test_training.py -k LoRA
PRETRAINED_async := tests/pretrained/test_training.py -k asynchronous
PRETRAINED_checkpoint := tests/pretrained/test_training.py -k "not other_seeds and not other_training_methods"
PRETRAINED_memory := tests/pretrained/test_memory.py tests/pretrained/test_calculator.py
PRETRAINED_others := tests/pretrained $(addprefix --ignore tests/pretrained/,test_training.py test_memory.py test_calculator.py)
test-pretrained-%: export OMP_NUM_THREADS := $(shell nproc 2>/dev/null || echo 2)
test-pretrained-%: $(VENV)/.dev .pretrained/.installed .bitsandbytes .vllm/.installed $(VERL_FOLDER)
	PYTHONPATH=$(CURDIR)/.bitsandbytes:$(CURDIR)/$(VERL_FOLDER) $(BIN)/pytest -m pretrained $(PRETRAINED_$*)

test-references: $(VENV)/.dev .references .templates  ## Compare estimators, losses and tool calls with those of verl, TRL and renderers.
	PYTHONPATH=.references RLLM_TEMPLATES=.templates $(PYTEST) -m references tests/references

.games: tests/games/requirements.txt | $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ -r $<
	@touch $@

test-games: $(VENV)/.dev .games  ## Games of the real TextArena, tasks of reasoning-gym, and self-play that must beat the starting policy: a few minutes.
	PYTHONPATH=$(CURDIR)/.games $(PYTEST) -m games tests/games tests/examples

# Each version of verifiers pins other packages than the project, so each has its own environment; the tests run in .venv.
.verifiers/old/.installed: VERIFIERS := .[train] verifiers==0.1.14 $(TORCH)
.verifiers/new/.installed: VERIFIERS := . verifiers==0.4.0 uv
.verifiers/%/.installed: pyproject.toml | $(VENV)/.dev
	$(PYTHON) -m venv .verifiers/$*
	.verifiers/$*/bin/python -m pip install --quiet --disable-pip-version-check -e $(VERIFIERS)
	@touch $@

test-verifiers: $(VENV)/.dev .verifiers/old/.installed .verifiers/new/.installed  ## Environments of verifiers, old and new, and training on an old one: a few minutes.
	$(BIN)/pytest -m envs tests/verifiers

.clients: tests/gateway/clients/requirements.txt | $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ -r $<
	@touch $@

test-clients: $(VENV)/.dev .clients  ## The gateway with the previous major versions of its clients.
	PYTHONPATH=.clients RLLM_CLIENTS=.clients $(PYTEST) tests/gateway/clients

.litellm: tests/integrations/requirements.txt | $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $@ -r $<
	@touch $@

test-litellm: $(VENV)/.dev .litellm  ## The callback in a real LiteLLM proxy.
	RLLM_LITELLM=.litellm $(PYTEST) -m litellm tests/integrations

$(VENV)-trackers/.installed: pyproject.toml tests/tracking/requirements.txt | $(VENV)/bin/python
	$(PYTHON) -m venv $(VENV)-trackers
	$(VENV)-trackers/bin/python -m pip install --quiet --disable-pip-version-check \
		-e '.[tensorboard,wandb,mlflow,trackio]' -r tests/tracking/requirements.txt
	@touch $@

test-trackers: $(VENV)-trackers/.installed  ## Write metrics with the real TensorBoard, W&B, MLflow and trackio, and read them back.
	$(VENV)-trackers/bin/pytest -m "trackers or not trackers" tests/tracking

.browser/.installed: tests/browser/requirements.txt tests/browser/install.py | $(VENV)/.dev
	$(PIP) -r $<
	$(BIN)/python tests/browser/install.py .browser
	@touch $@

# One browser at a time; screenshots of the pages are written to build/viewer.
test-viewer: $(VENV)/.dev .browser/.installed  ## The viewer in a real headless Chromium, with screenshots: a minute or two.
	RLLM_BROWSER=.browser $(BIN)/pytest -m browser tests/browser

$(VENV)/.fuzz: tests/gateway/fuzz/requirements.txt | $(VENV)/.dev
	$(PIP) -r $<
	@touch $@

test-fuzz: $(VENV)/.fuzz  ## Send malformed requests to the gateway, and test every property with more examples than the fast suite.
	RLLM_FUZZ_EXAMPLES=300 $(PYTEST) tests/gateway/fuzz
	RLLM_EXAMPLES=100 $(PYTEST) -m hypothesis

test-kills: $(VENV)/.dev  ## Kill the gateway and the processes around it, a hundred times: half an hour.
	RLLM_KILL_RUNS=$${RLLM_KILL_RUNS:-100} $(BIN)/pytest -n 2 -m slow tests/gateway/test_kills.py

$(VENV)/.ninja: tests/accelerator/requirements.txt | $(VENV)/.dev
	$(PIP) -r $<
	@touch $@

# The tests compile a torch device, which must be the only one of its process. Without a C++ compiler they are skipped.
test-accelerator: $(VENV)/.ninja  ## The embedded backend on a device that refuses tensors of another device: two minutes.
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest -m accelerator tests/accelerator

.vllm/.installed: tests/vllm/install.py | $(VENV)/.dev
	$(BIN)/python tests/vllm/install.py .vllm
	@touch $@

# One server at a time, so one process.
test-vllm: $(VENV)/.dev .vllm/.installed .templates  ## A real vLLM on the CPU: exact capture, new weights, training; a few minutes.
	RLLM_TEMPLATES=.templates $(BIN)/pytest -m vllm tests/vllm

.sglang/.installed: tests/sglang/install.py .vllm/.installed | $(VENV)/.dev
	$(BIN)/python tests/sglang/install.py .vllm .sglang
	@touch $@

test-sglang: $(VENV)/.dev .sglang/.installed  ## A real SGLang on the CPU: exact capture, new weights, training; a minute or two.
	$(BIN)/pytest -m sglang tests/sglang

$(VERL_FOLDER): tests/verl/requirements.txt | $(VENV)/.dev
	sed '$(VERL:%=s/^verl==.*/verl==%/)' $< | $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--no-deps --upgrade --target $@ -r /dev/stdin
	@touch $@

test-verl: $(VENV)/.dev $(VERL_FOLDER) .vllm/.installed  ## Train on real workers of verl on Ray, on the CPU: a few minutes.
	-$(BIN)/python tests/sandbox/install.py
	PYTHONPATH=$(CURDIR)/$(VERL_FOLDER) $(BIN)/pytest -m verl tests/verl

# FRAMEWORK=openai runs that one only. A framework that fails or cannot be installed is a red row in docs/frameworks/index.md.
test-frameworks: $(VENV)/.dev  ## Every agent framework, unedited, through the gateway; writes the table in the docs.
	$(BIN)/python tests/frameworks/install.py .frameworks $(FRAMEWORK)
	$(if $(FRAMEWORK),,-$(BIN)/python tests/sandbox/install.py)
	@$(PYTEST) -m frameworks $(if $(FRAMEWORK),$(foreach name,$(FRAMEWORK),tests/frameworks/test_$(subst -,_,$(name)).py),tests/frameworks tests/tasks/test_programs.py tests/examples/test_claude_agent.py); \
		status=$$?; $(BIN)/python tests/frameworks/table.py; exit $$status

$(VENV)/.postgres: tests/store/requirements-postgres.txt | $(VENV)/.dev
	$(PIP) -r $<
	@touch $@

# The package openenv needs an older mcp than the project, so it has its own environment.
$(VENV)-openenv/.installed: pyproject.toml tests/openenv/requirements.txt | $(VENV)/bin/python
	$(PYTHON) -m venv $(VENV)-openenv
	$(VENV)-openenv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[openenv,train]' -r tests/openenv/requirements.txt $(TORCH)
	@touch $@

test-openenv: $(VENV)-openenv/.installed  ## Environments of real OpenEnv servers, and training on one: a few minutes.
	$(VENV)-openenv/bin/pytest -m openenv tests/openenv

test-postgres: $(VENV)/.postgres  ## The store's tests, the viewer's and those of several gateways, on a real PostgreSQL.
	RLLM_TEST_POSTGRES=required $(PYTEST) -m postgres tests/store tests/viewer tests/gateway/test_shared_store.py

# The long suites in twelve parts: TURN=0 to 11 runs one of them, as .ci/run does, a different one each day; without TURN all run.
NIGHTLY_0 := test-vllm test-sglang test-litellm test-trackers test-fuzz
NIGHTLY_1 := test-slow test-accelerator test-kills
NIGHTLY_2 := test-verifiers test-verl
NIGHTLY_3 := test-pretrained-seeds
NIGHTLY_4 := test-learning test-openenv
NIGHTLY_5 := test-examples
NIGHTLY_6 := test-pretrained-lora
NIGHTLY_7 := test-pretrained-async
NIGHTLY_8 := test-pretrained-checkpoint
NIGHTLY_9 := test-games test-frameworks
NIGHTLY_10 := test-pretrained-memory
NIGHTLY_11 := test-pretrained-others

nightly: $(VENV)/.dev  ## The long suites; TURN=0 to 11 for one of twelve parts.
	@for suite in $(if $(TURN),$(NIGHTLY_$(TURN)),$(foreach turn,0 1 2 3 4 5 6 7 8 9 10 11,$(NIGHTLY_$(turn)))); do \
		begin=$$(date +%s); $(MAKE) --no-print-directory $$suite || exit 1; \
		echo "== $$suite: $$(($$(date +%s) - begin)) s"; \
	done

check: $(VENV)/.dev  ## Formatting, lint, types, layers, language.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests/test_language.py

.audit/bin/pip-audit:
	$(PYTHON) -m venv .audit
	.audit/bin/pip install --quiet --disable-pip-version-check pip-audit==2.10.1

house:  ## Count files, lines, types and odd words of the source, next to their limits.
	@$(PYTHON) tests/house.py

audit: $(VENV)/.dev .audit/bin/pip-audit  ## Check the installed packages for known vulnerabilities; needs the internet.
	.audit/bin/pip-audit --progress-spinner off --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

format: $(VENV)/.dev  ## Format the code and fix what can be fixed.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.dev
	$(PIP) -e '.[train,dev,docs]'
	@touch $@

docs: $(VENV)/.docs  ## Build the documentation site into site/; a broken link is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test-docs: docs  ## Run every page of the documentation as a program, and build the site.
	$(PYTEST) -m docs tests/docs tests/cli tests/frameworks/test_docs.py

# DEMO=1 also runs the demo; OUT=dist keeps the built files.
release-check: $(VENV)/bin/python  ## Build the last commit, inspect the wheel, install it alone, and use it: a few minutes.
	$(BIN)/python tests/release/check.py $(if $(OUT),--out $(OUT)) $(if $(DEMO),--demo)

benchmarks: $(VENV)/.dev  ## Measure: gateway, store, rollouts, sampler, start-up, training, viewer.
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/gateway.py
	$(BIN)/python benchmarks/gateway_scaling.py
	$(BIN)/python benchmarks/rollouts.py
	$(BIN)/python benchmarks/long_rollout.py
	$(BIN)/python benchmarks/sampler.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/logprob_memory.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/step_share.py
	$(BIN)/python benchmarks/viewer.py

clean:  ## Remove the environment and caches; runs stay.
	rm -rf $(VENV) site $(VENV)-newest $(VENV)-trackers $(VENV)-openenv .autogen .references .games .verifiers .clients .litellm .vllm .sglang .verl .verl-* .browser .frameworks .pretrained .bitsandbytes .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
