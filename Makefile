# Everything a contributor runs. `make help` lists it.

GO      ?= go
MODULES := . bench adapter/goworkflows devpg console cmd/pgwake chaos adapter/watermill adapter/amqp examples adapter/cloudevents

# Of all modules at once: what they share is looked at once.
PACKAGES_OF_ALL := $(MODULES:%=./%/...)

# What is built does not depend on where the checkout is, so that another one has it from the cache.
export GOFLAGS := $(strip $(shell $(GO) env GOFLAGS) -trimpath)

# The race detector needs cgo, and that a C compiler. Without them the tests run all the same.
RACE := $(shell test "$$($(GO) env CGO_ENABLED)" = 1 && command -v $$($(GO) env CC | cut -d' ' -f1) >/dev/null 2>&1 && echo -race)

# How many packages are tested at a time, and how many tests of each: most of what they do is to wait. With one test of each the tests of the
# root take two processors 820 s, of which they use 240 s; with four of them, 390 s.
PROCESSORS := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
PACKAGES   := $(shell echo $$((($(PROCESSORS) * 3 + 1) / 2)))
PARALLEL   := $(shell echo $$(($(PROCESSORS) / 2 + 2)))

# One PostgreSQL for all of a run: found, or booted and removed again. Built and not `go run`, so that a
# signal to make reaches it.
WITH_PG := $(GO) build -o bin/withpg ./devpg/cmd/withpg && bin/withpg

.DEFAULT_GOAL := help

# Faults of a Provider, by a regular expression.
FAULTS ?= .

# Lines of many seeds of chaos: those that are published.
RESULTS ?= docs/reliability-seeds.jsonl

# How long each fuzz target looks for what breaks it: a time such as 30s, or so many inputs, such as 1000x.
FUZZTIME ?= 5s

# How long a soak takes.
DURATION ?= 60s

# Which trouble to survive, by commas.
SCENARIO ?= restart,crash,kill,idle-in-transaction,readers,pooler,soak

# Lines that name what failed, or what was running when time was up: they may be far above the end of the output.
FAILURES := '^ *--- FAIL|^(panic|FAIL|fatal error|goroutines were left)|^WARNING: DATA RACE|^[[:space:]]+Test[A-Za-z0-9_/]+ \([0-9]'

STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.7.0

.PHONY: demo test test-full test-matrix stress fuzz fuzz-quick suites check docs bench bench-quick mutants mutants-quick model model-quick chaos chaos-report soak upgrade tags freeze licences scenarios screenshots release clean help

## demo: the main job on a real PostgreSQL, measured live, in about a minute
demo:
	@$(GO) build -o bin/quickstart ./examples/quickstart && exec bin/quickstart

# Vetting is for check. To begin sessions would take PostgreSQL as long as all else that the tests want of it.
## test: all tests of all modules, with the race detector; installs what some of them need if it is root on Debian
test:
ifeq ($(RACE),)
	@echo "no cgo or no C compiler: testing without the race detector" >&2
endif
	@.ci/packages
	@mkdir -p bin; rm -f bin/test.status; { $(WITH_PG) -keep-sessions -- .ci/modules $(PACKAGES) "$(GO) test $(RACE) -vet=off -parallel $(PARALLEL) -timeout 30m" $(MODULES); \
		echo $$? >bin/test.status; } 2>&1 | tee bin/test.log; \
	status=$$(cat bin/test.status || echo 1); test $$status = 0 -o $$status = 130 || { echo 'What failed, from bin/test.log:'; grep -E $(FAILURES) bin/test.log; }; exit $$status

## test-full: the same, with as many rounds, steps and scenarios as the specification names
test-full:
	@PGWAKE_FULL=1 $(MAKE) test

## test-matrix: all tests on PostgreSQL 14 to 18, by turns (VERSIONS="14 18" to choose); needs bash 4 and, for versions that are not installed, npm and linux-x64
test-matrix:
	@.ci/matrix $(VERSIONS)

## stress: the suites that break and load things, at full length
stress:
	@export PGWAKE_ROUNDS=200 PGWAKE_STRESS=30s PGWAKE_CASES=300 PGWAKE_SCHEDULES=1000 PGWAKE_TICK_SECONDS=600; $(WITH_PG) -- $(GO) test $(RACE) -count=1 -v -timeout 40m \
		-p 1 -run 'UnderLoad|WakeProperty|TestSource.*(Throughput|Idle)|TestCrash|NextOccurrence' . ./eventbus
	@export PGWAKE_STRESS=30s; $(WITH_PG) -- $(GO) -C adapter/watermill test -count=1 -timeout 60m -tags stress -run PubSub .

## fuzz: each fuzz target of each module for FUZZTIME, 5s unless set, on a server for those that need one; what they begin with, testdata/fuzz included, runs with the other tests
fuzz:
	@$(WITH_PG) -- .ci/fuzz $(FUZZTIME)

## fuzz-quick: those that need no server for a second each (FUZZTIME=10s), without the instrumentation that fuzz builds everything with
fuzz-quick:
	@.ci/fuzz -quick $(if $(filter file,$(origin FUZZTIME)),1s,$(FUZZTIME))

## suites: those of go-workflows for its backends, ten times in a row with the race detector; some ten minutes
suites:
	@$(WITH_PG) -- $(GO) -C adapter/goworkflows test $(RACE) -count=10 -timeout 60m -run SuiteOfTheRuntime .

## check: format, vet, staticcheck, tidy modules, the list of dependencies
check:
	@files=$$(gofmt -l .) && test -z "$$files" || { echo "not gofmt-ed: $$files" >&2; exit 1; }
	@$(GO) run ./internal/licences -check
	@$(GO) vet $(PACKAGES_OF_ALL)
	@$(GO) run $(STATICCHECK) $(PACKAGES_OF_ALL)
	@for m in $(MODULES); do (cd $$m && $(GO) mod tidy -diff) || exit 1; done

## licences: writes docs/licences.md anew: each dependency with its version, licence and age; fails for a licence that none may have
licences:
	@$(GO) run ./internal/licences

## docs: writes docs/sql.md, docs/sql-taskgraph.md and docs/sql-eventbus.md anew, after a change of what the SQL functions say of themselves
docs:
	@PGWAKE_WRITE_DOCS=1 $(GO) test -count=1 -run "TestDocs_.*SQL" .

## bench: every figure beside its baseline (ARGS="-run idle -idle 3m" to choose)
bench:
	@$(GO) build -o bin/bench ./bench && exec bin/bench $(ARGS)

## bench-quick: the figures that have a goal, in small; a minute, or three on two slow processors (ARGS="-run idle,single" to choose)
bench-quick:
	@$(GO) build -o bin/bench ./bench && exec bin/bench -quick $(ARGS)

## mutants: breaks the wake engine, then the contract, one thing at a time; each must fail its test (FAULTS="delay" chooses among the contract's)
mutants:
	@$(WITH_PG) -- sh -c 'failed=0; $(GO) run ./internal/mutants || failed=1; \
		PGWAKE_FAULTS="$(FAULTS)" $(GO) test -count=1 -v -run TestFaults ./providertest || failed=1; exit $$failed'

## mutants-quick: each of the twelve holes once
mutants-quick:
	@$(WITH_PG) -keep-sessions -- $(GO) run ./internal/mutants -first -run '^[01][0-9] '

## model-quick: every order of steps of the wake-up protocol, in the sizes that take up to half a minute each, and simulations of it; without the race detector, about a minute
model-quick:
	$(GO) test -count=1 -timeout 20m ./docs/model
	$(GO) test -count=1 -timeout 20m -run 'ForAParkedDispatcher|NoDueItemWaitsLong|IsToldOfItsLeases' .

## model: every order of steps of the wake-up protocol, at full size; takes hours
model:
	GOMAXPROCS=1 GOGC=50 PGWAKE_MODEL=full $(GO) test -count=1 -v -timeout 24h ./docs/model

## chaos: several processes on one server while things go wrong (ARGS="-seed 7 -for 3m"; ARGS="-seeds 1-100 -for 3m" for many)
chaos:
	@$(GO) build -o bin/chaos ./chaos && exec bin/chaos $(ARGS)

## chaos-report: makes the tables of docs/reliability.md of lines that make chaos ARGS="-seeds 1-100 -for 3m" has left and that are published (RESULTS=chaos.jsonl for others)
chaos-report:
	@$(GO) build -o bin/chaos ./chaos && exec bin/chaos -report $(RESULTS)

## soak: every kind of load while nothing goes wrong; nothing may grow, be lost or be late (DURATION=1h)
soak:
	@$(GO) build -o bin/chaos ./chaos && exec bin/chaos -soak -for $(DURATION) $(ARGS)

## scenarios: what breaks others: restarts, crashes, killed backends, open transactions, long readers, a pooler, time (SCENARIO=restart,kill, or make scenario-restart)
scenarios:
	@$(GO) build -o bin/chaos ./chaos && $(GO) build -o bin/survival ./bench/survival && exec bin/survival -run $(SCENARIO) -chaos bin/chaos $(ARGS)

scenario-%:
	@$(MAKE) --no-print-directory scenarios SCENARIO=$*

## upgrade: an earlier state and this one on one schema during traffic, there and back (FROM=commit or tag, or else each whose migrations are continued; ARGS="-for 30s")
upgrade:
	@$(GO) build -o bin/upgrade ./internal/upgrade && exec bin/upgrade -from "$(FROM)" $(ARGS)

## tags: makes the tags of earlier states that internal/upgrade/stages names, where they are missing
tags:
	@while read -r name commit; do \
		git rev-parse -q --verify "refs/tags/$$name" >/dev/null || git tag "$$name" "$$commit" || exit 1; \
	done <internal/upgrade/stages

## freeze: notes the migrations as released: from then on they never change (internal/frozen)
freeze:
	@$(GO) run ./internal/frozen/freeze

## screenshots: the pictures of docs/console.md, of a shop at work; needs Chromium
screenshots:
	@export PGWAKE_SCREENSHOTS=$(CURDIR)/docs/images/console; $(WITH_PG) -- $(GO) -C console test -count=1 -run Screenshots .

## release: makes the modules for users what they are as part of a release, for a commit that is tagged and goes to no branch (VERSION=v1.2.3)
release:
	@.ci/release $(VERSION) console cmd/pgwake $(filter adapter/%,$(MODULES))

## clean: removes what the other targets built; what the bench has left stays
clean:
	rm -rf bin

## help: this list
help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST) | awk -F': ' '{ printf "%-13s %s\n", $$1, substr($$0, length($$1) + 3) }'
