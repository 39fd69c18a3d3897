# Two commands matter: `make demo` and `make test`. Both set up what they need by themselves.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

RELEASE := target/release/roommate
SHARED ?= ../shared
ANCHORS := $(wildcard $(SHARED)/anchors/*)
DIR ?=
INPUTS ?=
SEED ?= 1
# Where archives will be found, for krew's manifest.
RELEASES ?= https://example.org/roommate/releases
OUT ?= out

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: build
build: ## build the program
	@cargo build --release --quiet

.PHONY: demo
demo: build ## compare policies on an invented trace, run a real mix on this machine, write reports
	@$(RELEASE) compare --cluster 4x8 --seed 7 --journals $(OUT)/demo --report $(OUT)/report.html
	@$(RELEASE) replay $(OUT)/demo/tiresias.jsonl | sed 's/^/replay of tiresias: /'
	@PYTHONPATH=$(CURDIR)/python $(RELEASE) run examples/mix.yaml --versus-exclusive --report $(OUT)/mix.html
	@echo "next: open $(OUT)/report.html and $(OUT)/mix.html, or try"
	@echo "  $(RELEASE) explain 100 --journal $(OUT)/demo/tiresias.jsonl"
	@echo "  $(RELEASE) sim --gantt --cluster 2x4 --policy srtf"
	@echo "  $(RELEASE) compare --cluster 4x8 --seed 7 -p all"

# mdBook is built once, with nothing but its search, and kept beside the user's other caches.
MDBOOK_VERSION := 0.5.4
TOOLS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/roommate/tools

.PHONY: docs
docs: ## the documentation as a site, its links checked: out/docs/index.html
	@$(TOOLS)/bin/mdbook --version 2> /dev/null | grep -qx 'mdbook v$(MDBOOK_VERSION)' || \
	  cargo install --locked --quiet mdbook --version $(MDBOOK_VERSION) --no-default-features --features search \
	    --root $(TOOLS)
	@python3 scripts/book.py --mdbook $(TOOLS)/bin/mdbook $(OUT)/docs

.PHONY: test
test: lint python ## run all tests
	@cargo test --workspace --quiet
	@$(MAKE) --no-print-directory live browser budgets

.PHONY: lint
lint: ## format and lints
	@cargo fmt --all --check
	@cargo clippy --workspace --all-targets --quiet -- -D warnings

.PHONY: python
python: python-setup ## the Python SDK and scripts: lints, types, tests
	@cd python && ../.venv/bin/ruff check --quiet --config pyproject.toml . ../tests/live ../tests/kube ../tests/docs ../tests/packaging ../tests/integrations ../packaging ../scripts/kube-programs ../scripts/*.py && ../.venv/bin/mypy --no-error-summary roommate ../tests/kube/testbed && MYPYPATH=../scripts ../.venv/bin/mypy --no-error-summary ../scripts/book.py ../scripts/follow.py ../scripts/links.py ../scripts/record.py ../scripts/terminal.py ../tests/docs && ../.venv/bin/pytest && ../.venv/bin/pytest -q ../tests/docs

.PHONY: live
live: build python-setup ## real processes: jobs, crashes, refusals
	@.venv/bin/pytest -q tests/live

.PHONY: integrations
integrations: ## callbacks with the real PyTorch, Lightning and transformers (some GB are installed)
	@cmp -s tests/integrations/requirements.txt target/integrations/requirements.txt || { \
	  python3 -m venv target/integrations && target/integrations/bin/pip install --quiet -r tests/integrations/requirements.txt \
	  && cp tests/integrations/requirements.txt target/integrations/; }
	@target/integrations/bin/pytest -q tests/integrations

.PHONY: kube
kube: build python-setup ## on a real Kubernetes on this machine, built from its sources once (7 minutes on two idle cores)
	@folder=$$(scripts/kube-programs) && ROOMMATE_KUBE_PROGRAMS=$$folder .venv/bin/pytest -q tests/kube

# The lock file of what is installed is the stamp: it is made again when the list changes.
.PHONY: python-setup
python-setup:
	@cmp -s python/requirements-dev.txt .venv/requirements-dev.txt || { \
	  python3 -m venv .venv && .venv/bin/pip install --quiet -r python/requirements-dev.txt -e python \
	  && cp python/requirements-dev.txt .venv/; }

.PHONY: browser
browser: build browser-setup ## the report and the dashboard in a real Chromium
	@$(RELEASE) compare --cluster 4x8 --seed 7 -p all --report $(OUT)/browser/all.html -o csv > /dev/null
	@$(RELEASE) sim --cluster 2x4 --policy srtf --journal $(OUT)/browser/one.jsonl -o csv > /dev/null
	@$(RELEASE) report $(OUT)/browser/one.jsonl -o $(OUT)/browser/one.html 2> /dev/null
	@$(RELEASE) trace study tests/browser/study.csv --report $(OUT)/browser/study.html -o csv > /dev/null 2>&1
	@$(RELEASE) advise examples/sacct.txt --seeds 2 --report $(OUT)/browser/advise.html -o csv > /dev/null 2>&1
	@cd tests/browser && ROOMMATE_BIN=$(CURDIR)/$(RELEASE) ADVISE_HTML=$(CURDIR)/$(OUT)/browser/advise.html STUDY_HTML=$(CURDIR)/$(OUT)/browser/study.html REPORT_HTML=$(CURDIR)/$(OUT)/browser/all.html:$(CURDIR)/$(OUT)/browser/one.html npm test --silent

.PHONY: browser-setup
browser-setup:
	@command -v chromium > /dev/null || scripts/apt-install chromium
	@cd tests/browser && { [ -d node_modules/playwright-core ] && [ -d node_modules/axe-core ] || npm ci --silent --no-audit --no-fund; }

.PHONY: budgets
budgets: ## instruction budgets of the hot paths, of the build for releases
	@command -v valgrind > /dev/null || scripts/apt-install valgrind
	@cargo build --profile dist --quiet -p roommate
	@cargo build --profile dist --quiet -p roommate-core --example rounds
	@python3 bench/budgets.py

# Two builds (docs/decisions/013-two-builds.md): for an old GNU C library, and without any.
GNU := x86_64-unknown-linux-gnu
STATIC := x86_64-unknown-linux-musl
ZIGBUILD := PATH="$(CURDIR)/target/packaging/bin:$$PATH" cargo zigbuild --quiet --locked --profile dist

.PHONY: dist
dist: dist-programs python-setup ## packages under dist/, each installed into an empty place (half an hour the first time)
	@target/packaging/bin/python packaging/package.py --gnu target/$(GNU)/dist --static target/$(STATIC)/dist --releases $(RELEASES) dist
	@.venv/bin/pytest -q tests/packaging

.PHONY: dist-programs
dist-programs:
	@cmp -s packaging/requirements.txt target/packaging/requirements.txt || { \
	  python3 -m venv target/packaging && target/packaging/bin/pip install --quiet -r packaging/requirements.txt \
	  && rustup --quiet target add $(STATIC) && cp packaging/requirements.txt target/packaging/; }
	@$(ZIGBUILD) --target $(STATIC) -p roommate
	@$(ZIGBUILD) --target $(GNU).2.17 -p roommate -p roommate-gate

.PHONY: anchors
anchors: build ## results of published simulators: make anchors [DIR=../shared/anchors/muri] [INPUTS=...]
	@failed=0; for dir in $(or $(DIR),$(ANCHORS)); do \
	  python3 bench/anchors.py $$dir $(if $(INPUTS),--inputs $(INPUTS)) || failed=$$?; done; exit $$failed

.PHONY: shared
shared: ## tests that need the public traces in ../shared
	@ROOMMATE_REQUIRE_SHARED=1 cargo test --workspace --quiet --test shared_traces --test shared_runs --test shared_predictors --test shared_latency --test shared_serving

.PHONY: bench
bench: build ## large runs with limits on time and memory
	@python3 bench/speed.py $(if $(wildcard $(SHARED)/traces/helios/venus_gpu_jobs.csv.gz),--venus $(SHARED)/traces/helios/venus_gpu_jobs.csv.gz)
	@python3 bench/sdk.py

.PHONY: stress
stress: build python-setup ## 1,000 kills of daemon, keepers and tenants, a crowd, a flood (half an hour)
	@.venv/bin/python bench/machine.py

.PHONY: fuzz
fuzz: build python-setup ## a million changed requests and messages to a daemon that is killed: make fuzz [SEED=1]
	@.venv/bin/python tests/live/fuzz.py --seed $(SEED)

.PHONY: faults
faults: ## the daemon with seeded faults in virtual time, 10,000 days (ten minutes)
	@ROOMMATE_TWIN_DAYS=10000 cargo test --release --quiet -p roommate-agent --lib twin

.PHONY: deny
deny: ## licences and sources of all dependencies
	@command -v cargo-deny > /dev/null || cargo install --locked --quiet cargo-deny
	@cargo deny check bans licenses sources

.PHONY: clean
clean: ## remove what was built
	@rm -rf target $(OUT) .venv tests/browser/node_modules
