# make build   bin/iop, one static binary
# make test    all tests with the race detector
# make explore every state of small worlds around the cores of edge/registry and edge/pool: millions
# make mutants small wrong variants of the cores, each of which a test must find; TESTS=all: with all tests
# make sim     fabrics in virtual time, thousands of seeds of faults; SIM_TIME=10m: for so long; SEED=n: one, with a trace
# make check   what CI runs: generated code, format, vet, lint, tests, a short fuzz
# make proto   wire/iopv1 from wire/proto, with the pinned tools
# make bench   the product beside the bare hop of the harness, interleaved
# make clients the public Go SDKs through the product, in front of imitated model servers
# make conformance the stream protocol's cases: in memory, over lossy buses, over the real broker; the largest bodies
# make compose the compose file brought up for real, streamed through, broken and taken down
# make churn   streams whose callers leave and whose provider fails, and thousands that wait
# make netns   hosts in network namespaces of their own, killed and cut off; needs root, ip, iptables
# make chaos   the same hosts under a thousand streams, one fault after another; CHAOS_TIME=10m: for so long; needs the same
# make leaf-bench what a leaf adds, beside the same without one; needs the same
# make unit    a Node that a real systemd starts; needs root, systemd and Docker
# make fences  how soon a Node that was killed or stopped is fenced; two machines with one identity
# make generations a broker killed 30 times, alone and as one of three, while Nodes dial
# make herd    a thousand Nodes that dial one broker at once, and then idle
# make flood   what honest callers see while a hostile Node floods, in every way there is, beside as long without
# make fuzz    every fuzz target for FUZZTIME each

SHELL := /bin/bash
TOOLS := bin/tools
# A count, not a time: at the end of a time the fuzzer may report its own deadline as a failure.
FUZZTIME ?= 10000x
GOFILES = $(shell git ls-files '*.go' | grep -v '\.pb\.go$$\|_vtproto\.pb\.go$$\|^test/bench/')
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)

.PHONY: conformance explore sim mutants streams churn build test check proto proto-check bench rtt fuzz fmt fmt-check lint vet vuln tools clean ollama clients herd fences compose netns chaos leaf-bench unit generations flood

build:
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=$(VERSION)" -o bin/iop ./cmd/iop

# Most of it waits, for packages of brokers and processes: so four run at once. What
# failed is said again at the end, below the logs of those that did.
test:
	@mkdir -p bin
	set -o pipefail; go test -race -p 4 -timeout 15m ./... 2>&1 | tee bin/test.log || { \
		echo "== failed:"; grep -E '^ *--- FAIL|^FAIL|DATA RACE|^panic: |^ +[a-z0-9_]+_test\.go:[0-9]+: ' bin/test.log | cut -c 1-300 | head -n 60; exit 1; }

# Not under the race detector: the cores have no goroutine, and make test runs the
# small worlds with it. WORLDS=huge takes minutes and gigabytes.
WORLDS ?= large
explore:
	set -o pipefail; go test ./edge/registry -run '^TestExplore$$' -count 1 -v -timeout 60m -worlds $(WORLDS) | grep -v '^=== '

# Each mutant with the test that is named for it, all in one build, under a minute; with
# all tests it takes many and prints which of them find it.
TESTS ?= named
mutants:
	set -o pipefail; go test ./edge/registry -run '^TestMutants$$' -count 1 -v -timeout 15m -mutants $(TESTS) | grep -v '^ *[=-]\{3\} \(RUN\|PAUSE\|CONT\|NAME\|PASS\)'
	set -o pipefail; go test ./test/sim -run '^TestMutants$$' -count 1 -v -timeout 15m -mutants | grep -v '^ *[=-]\{3\} \(RUN\|PAUSE\|CONT\|NAME\|PASS\)'

# Not under the race detector: a world has one goroutine, and make test plays some with
# it. Fails below half of SCHEDULES, and where the faults met nothing. The seeds are fresh
# ones; where FIRST is given, SCHEDULES of them from there on, as CI does: there a change is
# judged by the same schedules on every machine, and is not red for what it did not touch.
SIM_TIME ?= 75s
FIRST ?= 0
SCHEDULES ?= 15000
sim:
ifdef SEED
	go test ./test/sim -run '^TestReplay$$' -count 1 -v -seed $(SEED)
else
	set -o pipefail; go test ./test/sim -run '^Test(Simulation|Regressions|SameSeed.*)$$' -count 1 -v -timeout 0 -sim $(SIM_TIME) -first $(FIRST) -schedules $(SCHEDULES) | grep -v '^=== '
endif

check: fmt-check vet lint proto-check test fuzz

$(TOOLS)/.stamp: internal/tools/go.mod internal/tools/go.sum
	mkdir -p $(TOOLS)
	cd internal/tools && GOFLAGS= go build -o ../../$(TOOLS)/ tool
	touch $@

tools: $(TOOLS)/.stamp

proto: tools
	cd wire/proto && PATH="$(CURDIR)/$(TOOLS):$$PATH" buf lint && PATH="$(CURDIR)/$(TOOLS):$$PATH" buf generate

# The generated code is what the sources say, and no field was renumbered since
# the schema of wire/testdata/v1 was frozen.
proto-check: tools
	rm -rf bin/_proto && mkdir -p bin/_proto && cp -r wire/proto bin/_proto/proto
	cd bin/_proto/proto && PATH="$(CURDIR)/$(TOOLS):$$PATH" buf lint && PATH="$(CURDIR)/$(TOOLS):$$PATH" buf generate
	diff -r bin/_proto/iopv1 wire/iopv1
	cd wire/proto && PATH="$(CURDIR)/$(TOOLS):$$PATH" buf breaking --against ../testdata/v1/schema.binpb

fmt: tools
	$(TOOLS)/gofumpt -w $(GOFILES)
	$(TOOLS)/goimports -local github.com/iop-fabric/iop -w $(GOFILES)

fmt-check: tools
	@out=$$($(TOOLS)/gofumpt -l $(GOFILES); $(TOOLS)/goimports -local github.com/iop-fabric/iop -l $(GOFILES)); \
	if [ -n "$$out" ]; then echo "not formatted (make fmt):"; echo "$$out"; exit 1; fi

vet:
	go vet ./...

lint: tools
	$(TOOLS)/golangci-lint run --allow-parallel-runners ./...

# Each package is built once for all its targets: linking takes longer than the short form.
fuzz:
	@set -e; mkdir -p bin; for pkg in $$(grep -rl --include='*_test.go' '^func Fuzz' . | grep -v '^./test/bench/' | xargs -n1 dirname | sort -u); do \
	  go test -c -fuzz . -o bin/fuzz.test $$pkg; \
	  for f in $$(grep -rhoE '^func Fuzz[A-Za-z0-9_]+' $$pkg/*_test.go | sed 's/func //' | sort -u); do \
	    echo "fuzz $$pkg $$f $(FUZZTIME)"; \
	    (cd $$pkg && $(CURDIR)/bin/fuzz.test -test.run '^$$' -test.fuzz "^$$f\$$" -test.fuzztime $(FUZZTIME) -test.fuzzcachedir $(CURDIR)/bin/fuzz-cache); \
	  done; done

bench: build
	test/bench/product.sh

# The same over a link with a round trip between Node and broker (RTTS, ROUNDS).
rtt: build
	test/bench/rtt.sh

# What the goals of docs/performance.md ask beside `make bench`: streams without a
# break, and how long it takes until a caller's or a node's end is noticed.
STREAMS ?= 20000
streams:
	IOP_STREAMS=$(STREAMS) go test ./test/e2e -run 'TestFastStreams' -count 1 -v -timeout 20m | grep -v level=
	go test ./test/e2e -run '^$$' -bench 'CallerGone|NodeKilled' -benchtime 50x -timeout 20m | grep -v level=

# A fifth of the callers leaving at random moments, a tenth of the answers failing:
# every place comes back, memory and goroutines stay where they were.
CHURN ?= 30000
churn:
	IOP_CHURN=$(CHURN) go test ./test/e2e -run '^TestChurn$$' -count 1 -v -timeout 20m | grep -v level=
	IOP_WAITERS=7000 go test ./test/e2e -run '^TestManyWaiters$$' -count 1 -v -timeout 20m | grep -v level=

# The public Go SDKs as callers, recorded and imitated model servers behind the product.
clients: build
	test/clients/run.sh

# A real Ollama with a tiny scripted model behind the product, the Go SDKs as callers.
ollama: build
	test/clients/ollama.sh

# docs/protocol.md, "Conformance". make test has it with fewer lossy buses.
LOSSY ?= 20
conformance:
	set -o pipefail; go test ./test/conformance -count 1 -v -timeout 15m -seeds $(LOSSY) | grep -E '^conformance, |^ *--- FAIL|_test.go:|^(ok|FAIL|panic)'
	go test ./test/e2e -run '^(TestBodySizes|TestCutInvariance)$$' -count 1 -timeout 10m

# What `docker compose up` gives, on a Docker engine that is there.
compose:
	test/compose/run.sh

# Separate processes on hosts that share nothing but a network. HUB_GONE is how long
# a leaf is without its hub.
HUB_GONE ?= 20s
netns:
	IOP_NETNS=1 go test ./test/netns -count 1 -timeout 8m -hub-gone $(HUB_GONE)

# Faults between real processes under STREAMS_EACH streams, each judged by the history of
# both its ends. SEED=n: from that tour on; FAULT=words: those whose names have them. What
# broke a rule is kept in bin/chaos. make netns has one tour of it.
CHAOS_TIME ?= 10m
STREAMS_EACH ?= 1000
chaos:
	@mkdir -p bin/chaos
	set -o pipefail; IOP_NETNS=1 go test ./test/netns -count 1 -run '^TestChaos$$' -v -timeout 0 -artifacts -outputdir $(CURDIR)/bin/chaos \
		-chaos $(CHAOS_TIME) -chaos-streams $(STREAMS_EACH) -chaos-only "$(FAULT)" $(if $(SEED),-chaos-seed $(SEED)) | \
		grep --line-buffered -E '_test\.go:|^ *--- |^(ok|FAIL|panic)|WARN|ERROR'

CALLS ?= 2000
leaf-bench:
	IOP_NETNS=1 go test ./test/netns -count 1 -run '^$$' -bench Leaf -benchtime $(CALLS)x -timeout 8m

# A Node that a real systemd starts, in a container; needs root, systemd and Docker.
unit:
	IOP_UNIT=1 go test ./test/unit -count 1 -timeout 8m

# A thousand Node daemons that dial one broker at once, then idle: time, CPU, memory.
herd:
	HERD=1000 HERD_IDLE=30s go test ./test/herd -run '^TestHerd$$' -count=1 -v -timeout 10m

# How soon a Node that was killed or stopped is fenced, as processes on one host, with
# the goals checked; and a minute of two machines that have one identity.
FENCES ?= 200
fences:
	IOP_FENCES=$(FENCES) IOP_DUEL=60 go test ./test/hosts -run '^(TestFencedHowSoon|TestTwoMachinesOneIdentity)$$' -count 1 -v -timeout 15m | grep -v level=

# A hostile Node, a process at the lowest priority with one thread, floods and dials again
# for so long in each way; streams and calls of an honest one beside it.
FLOOD ?= 10s
FLOODS ?= 1
flood:
	IOP_FLOOD=$(FLOOD) IOP_FLOODS=$(FLOODS) go test ./test/hosts -run '^TestFloodBesideHonestStreams$$' -count 1 -v -timeout 60m | grep -v level=

# The generation never falls over kill -9, of one broker and of three; what an admission
# costs the stores.
KILLS ?= 30
generations:
	IOP_KILLS=$(KILLS) go test ./broker -run '^TestGenerationsRiseOverKills$$' -count 1 -v -timeout 15m
	go test ./broker -run '^$$' -bench '^BenchmarkNextGeneration$$' -benchtime 5000x

clean:
	rm -rf bin
