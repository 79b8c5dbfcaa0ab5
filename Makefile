# Two commands: `make demo` shows what the project does, `make test` shows that it is right.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# Without a C++ compiler on the machine, the one of the ziglang wheel is used.
COMPILER := $(if $(shell command -v c++ || command -v g++ || command -v clang++),,compiler)
COMMA := ,

DEMO_PROMPT ?= Explain in a few sentences why the sky is blue.

.PHONY: demo test clean

demo: .venv/demo
	$(BIN)/python bench/demo.py --out build/demo --prompt "$(DEMO_PROMPT)"

test: .venv/test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m pytest -q -n 2

.venv/bin/python:
	$(PYTHON) -m venv .venv

# llama.cpp is a peer of the table: taken where pip has it built, left out where it would take long.
.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable ".$(if $(COMPILER),[$(COMPILER)])"
	timeout 60 $(PIP) "llama-cpp-python>=0.3" 2>/dev/null || echo "llama-cpp-python is left out"
	touch $@

.venv/test: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable ".[test$(if $(COMPILER),$(COMMA)$(COMPILER))]"
	touch $@

clean:
	rm -rf build .venv
