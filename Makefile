SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

GO ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)

# The packages that have benchmarks.
BENCH_PACKAGES ?= ./rdma ./rdma/rpcrdma ./tests
BENCH ?= .
FUZZTIME ?= 30s
TEST_TIMEOUT ?= 15m
INTEROP_TIMEOUT ?= 45m
REPEAT_RUNS ?= 20
REPEAT_TIMEOUT ?= 30m
DURATION ?= 30m
CRASH_ROUNDS ?= 100
CRASH_TIMEOUT ?= 60m

INTEROP := ./tests/interop
CRC_TIME ?= 1h
IPSEC_ROUNDS ?= 5
REPORT_ROUNDS ?= 3
REPORT_RUNTIME ?= 2s
REPORT_TARGETS ?=
FIGURES ?= all
FIGURES_ROUNDS ?= 5
SCALE_GATEWAYS ?= 4
SCALE_LUNS ?= 80
SCALE_KILLED ?= 1
TUNING ?= all
TUNING_ROUNDS ?= 7
CONFORMANCE := ./tests/conformance
# All packages but the tests of a program that is built without the race detector, of
# which those of INTEROP want the machine to themselves.
CHECK = $$($(GO) list ./... | grep -vE '/tests/(interop|conformance)$$')
# The suite waits for a minute, so that it begins first.
UNIT = $(CONFORMANCE) $(CHECK)
REPEAT_PACKAGES = $(UNIT)
# Runs each test once. A test that fails is mended.
GOTESTSUM = $(GO) tool gotestsum --format pkgname-and-test-fails

.NOTPARALLEL:

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

.PHONY: build
build: ## bin/iser-target, a static binary
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-X main.version=$(VERSION)' -o bin/iser-target ./cmd/iser-target

.PHONY: sbom
sbom: build ## bin/iser-target.cdx.json, the modules in bin/iser-target (CycloneDX)
	$(GO) run ./tests/testkit/sbom bin/iser-target > bin/iser-target.cdx.json

.PHONY: packages
packages: ## build/packages: programs, .deb and .rpm for amd64 and arm64
	GO=$(GO) packaging/build.sh build/packages

.PHONY: packages-test
packages-test: ## installs, upgrades and purges the packages in the virtual machine, and runs the program for arm64 in qemu
	ISER_TARGET_PACKAGES=1 $(GO) test -v $(INTEROP) -run '^TestPackages$$' -count 1 -timeout 1h

# Nothing of the directory, the cache or the clock may be in the program. The second build has an empty cache.
.PHONY: reproducible
reproducible: ## builds the program twice, in two directories, and compares
	@dir=$$(mktemp -d); trap 'chmod -R u+w "$$dir"; rm -rf "$$dir"' EXIT; \
	cache=$$($(GO) env GOCACHE); \
	for name in one another-with-a-longer-name; do \
		mkdir "$$dir/$$name"; \
		tar -c --exclude=./.git --exclude=./bin . | tar -x -C "$$dir/$$name"; \
		(cd "$$dir/$$name" && GOCACHE="$$cache" CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false \
			-ldflags '-X main.version=$(VERSION)' -o "$$dir/$$name.bin" ./cmd/iser-target); \
		sha256sum "$$dir/$$name.bin"; \
		cache="$$dir/cache"; \
	done; \
	cmp "$$dir/one.bin" "$$dir/another-with-a-longer-name.bin"; \
	echo "the two builds are the same"

.PHONY: check
check: ## what every change has to pass: format, vet, staticcheck, modules, tests with -race
	@unformatted=$$(gofmt -l .); if [ -n "$$unformatted" ]; then echo "not formatted:"; echo "$$unformatted"; exit 1; fi
	$(GO) vet ./...
	$(GO) vet -tags invariants ./...
	$(GO) tool staticcheck ./...
	$(GO) mod tidy -diff
	$(GO) run ./tests/testkit/vulncheck
	$(GOTESTSUM) --packages="$(CHECK)" -- -race -tags invariants -timeout $(TEST_TIMEOUT)

.PHONY: test
test: setup unit interop ## all tests but the longest; the one command for a newcomer

# What the tests on a virtual machine need is installed where that is possible.
# Elsewhere they say what is missing and are skipped.
.PHONY: setup
setup:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		tests/interop/setup.sh; \
	else \
		echo "not root on a Debian machine: nothing is installed for tests/interop"; \
	fi

.PHONY: unit
unit: ## tests without a virtual machine
	$(GOTESTSUM) --packages="$(UNIT)" -- -timeout $(TEST_TIMEOUT)

.PHONY: repeat
repeat: ## all unit tests REPEAT_RUNS times on a busy machine, and a summary
	GO=$(GO) .ci/repeat $(REPEAT_RUNS) "$(REPEAT_PACKAGES)" -timeout $(REPEAT_TIMEOUT)

.PHONY: soak
soak: build ## verified load under disturbances for DURATION, with bounds for all resources
	$(GO) run ./tests/soak -program bin/iser-target -duration $(DURATION) $(if $(SEED),-seed $(SEED))

.PHONY: segments
segments: ## CRCs with the Linux initiator on Ethernet, verified for CRC_TIME (1h) per MTU
	ISER_TARGET_CRC_TIME=$(CRC_TIME) $(GO) test -v $(INTEROP) -run '^TestSegments$$' -count 1 -timeout 6h

.PHONY: ipsec-speed
ipsec-speed: ## commands per second with and without ESP in a virtual machine, in IPSEC_ROUNDS rounds, as a table
	$(GO) test $(INTEROP) -run '^$$' -bench '^BenchmarkIPsec$$' -benchtime $(IPSEC_ROUNDS)x -timeout 1h

.PHONY: report
report: setup build ## LIO, tgt, this target and REPORT_TARGETS in turn, REPORT_ROUNDS rounds; writes docs/report.html and docs/report.md
	$(GO) run ./tests/report -program bin/iser-target -rounds $(REPORT_ROUNDS) -runtime $(REPORT_RUNTIME) -targets '$(REPORT_TARGETS)' \
		$(if $(REPORT_OVERWRITE),-overwrite)

.PHONY: figures
figures: build ## the figures of docs/performance.md next to their bounds, FIGURES_ROUNDS rounds, as tables; REPORT_TARGETS as for report
	$(GO) run ./tests/report -program bin/iser-target -rounds $(FIGURES_ROUNDS) -runtime 1s -ramp 200ms -targets '$(REPORT_TARGETS)' \
		$(if $(REPORT_OVERWRITE),-overwrite) -figures $(FIGURES)

.PHONY: tuning
tuning: build ## the measurements of docs/tuning.md, TUNING_ROUNDS rounds, as tables
	$(GO) run ./tests/report -program bin/iser-target -rounds $(TUNING_ROUNDS) -runtime 1s -ramp 200ms -tuning $(TUNING)

# Three minutes and more each. With them make test takes longer than 35 minutes.
LONGEST = ^(TestIPsecHandover|TestIPsecPages|TestIPsecSYNACK|TestSegments)$$
# Its times hold on a machine without other load.
CLUSTERED = ^(TestCluster|TestClusterOnCeph|TestClusterRolls)$$
INTEROP_TEST = $(GO) tool gotestsum --format standard-verbose --packages="$(INTEROP)" -- -count 1 -timeout $(INTEROP_TIMEOUT)

.PHONY: interop
interop: ## tests against the Linux initiator in a virtual machine, but for those of interop-long; says why it skips one
	$(INTEROP_TEST) -skip '$(LONGEST)|$(CLUSTERED)'

.PHONY: interop-long
interop-long: ## the longest tests in the virtual machine
	$(INTEROP_TEST) -run '$(LONGEST)'

.PHONY: cluster
cluster: ## gateways that take over from each other under Linux with multipath, and tests and measurements on small Ceph clusters, which they bring up; needs ceph-mon, ceph-osd and ceph-common
	ISER_TARGET_CLUSTER=1 $(INTEROP_TEST) -run '$(CLUSTERED)'
	ISER_TARGET_CLUSTER=1 $(GO) test -v -count 1 -bench . -benchtime 1x -timeout $(TEST_TIMEOUT) ./tests/ceph

.PHONY: scale
scale: ## gateways that share LUNs, at an etcd of three members: SCALE_GATEWAYS with SCALE_LUNS, of which SCALE_KILLED die at once; needs etcd-server
	$(GO) test -v -count 1 ./tests/scale -gateways $(SCALE_GATEWAYS) -luns $(SCALE_LUNS) -killed $(SCALE_KILLED) -ttl 5s

.PHONY: atomic
atomic: ## WRITE ATOMIC on a device and on files in the virtual machine, with the newest kernel of Debian's backports (downloads 120 MB)
	ISER_TARGET_ATOMIC=$${XDG_CACHE_HOME:-$$HOME/.cache}/iser-target/vm-newest $(GO) test -v $(INTEROP) -run '^TestAtomic$$' -count 1 -timeout 30m

.PHONY: neighbours
neighbours: ## what an honest initiator keeps while others attack the target, as a table
	$(GO) test -count 1 -timeout $(TEST_TIMEOUT) -v ./tests/neighbours -run '^TestNeighbours$$' -measure

.PHONY: crash
crash: ## kill -9 and power cuts at CRASH_ROUNDS random moments, the end at each system call, and broken connections
	CRASH_ROUNDS=$(CRASH_ROUNDS) $(GO) test -count 1 -timeout $(CRASH_TIMEOUT) -v ./tests/crash -run '^Test(Kill|Faults|EachSystemCall|PowerCuts|PowerCutsFindLies)$$'

.PHONY: requirements
requirements: ## which rows of docs/requirements the tests quote; writes the list in docs/conformance-rdma.md
	$(GO) test -count 1 -run '^TestConformancePage$$' ./tests -update
	@$(GO) test -count 1 -v -run '^TestRequirementCoverage$$' ./tests | sed -n '/^table/,/^total/p'

.PHONY: schema
schema: ## writes config/schema.json, the JSON Schema of the configuration, from the code and docs/config.md
	$(GO) test -count 1 -run '^TestSchema$$' ./config -update

.PHONY: conformance
conformance: ## libiscsi's suite over iSCSI/TCP; writes docs/conformance.md
	$(GO) test -v -count 1 $(CONFORMANCE) -update

.PHONY: bench
bench: ## benchmarks
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem $(BENCH_PACKAGES)

# The commit to compare with.
BASE ?= HEAD~1
.PHONY: guard
guard: ## CPU time per command of the fast paths, compared with BASE (HEAD~1) in one run
	$(GO) run ./tests/guard -base $(BASE)

.PHONY: pgo
pgo: ## CPU profile of the fast paths in cmd/iser-target/default.pgo, which go build then uses
	$(GO) run ./tests/guard -profile cmd/iser-target/default.pgo -seconds 8

# Two targets at a time, one worker each; the output of each is kept together.
.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME
	@grep -rEn --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*\(' . | \
	sed -E 's|^(.*)/[^/]+:[0-9]+:func (Fuzz[A-Za-z0-9_]*)\(.*|\1 \2|' | sort -u | \
	GO=$(GO) xargs -P 2 -L 1 sh -c '.ci/fuzz $$0 $$1 $(FUZZTIME)'

# The targets of testkit.FuzzBytes. Blind runs use what guided ones have found.
BLIND ?= 10000000
.PHONY: fuzz-blind
fuzz-blind: ## fuzz targets of parsers, BLIND executions each, added to docs/fuzzing.md
	@grep -rl --include='*_test.go' 'testkit.FuzzBytes(' . | while read -r f; do \
		sed -nE '/^func Fuzz/h; /testkit\.FuzzBytes\(/{x; s|^func (Fuzz[A-Za-z0-9_]*)\(.*|\1|p}' $$f | sed "s|^|$${f%/*} |"; done | sort | \
	ISER_TARGET_BLIND=$(BLIND) GO=$(GO) xargs -P 2 -L 1 sh -c 'out=$$($$GO test $$0 -count 1 -timeout 0 -v -run "^$$1\$$" 2>&1) || { echo "$$out"; exit 255; }; \
		echo "== $$0 $$1"; echo "$$out" | grep ^blind:' >$(FUZZLOG)
	cat $(FUZZLOG)
	$(GO) run ./tests/fuzzing/ledger docs/fuzzing.md <$(FUZZLOG)
	rm -f $(FUZZLOG)

FUZZLOG := $(shell mktemp -u)
.PHONY: fuzz-long
fuzz-long: ## make fuzz, and its executions added to docs/fuzzing.md
	$(MAKE) fuzz FUZZTIME=$(if $(filter command line,$(origin FUZZTIME)),$(FUZZTIME),10m) | tee $(FUZZLOG)
	$(GO) run ./tests/fuzzing/ledger docs/fuzzing.md <$(FUZZLOG)
	rm -f $(FUZZLOG)

.PHONY: docs
docs: build ## man pages and shell completions, in bin/man and bin/completions
	bin/iser-target docs bin

.PHONY: clean
clean:
	rm -rf bin
