# make demo: the main job.  make test: the default suite.  make lint: ruff and mypy.  make slow: the long sweeps.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
RUN := OMP_NUM_THREADS=1 $(PY)

.PHONY: demo test slow lint clean

$(STAMP): requirements-dev.txt setup.py
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip setuptools wheel
	$(PY) -m pip install --quiet -r requirements-dev.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $(STAMP)

demo: $(STAMP)
	$(PY) examples/megatron_grpo/main.py

test: $(STAMP)
	$(RUN) -m pytest

slow: $(STAMP)
	$(RUN) -m pytest -m slow

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
