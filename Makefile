# Needs make, git and python3 >= 3.11; everything else is installed by the first `make` of any target.
SHELL := /bin/sh
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO_READY := .venv/.demo-ready
PEERS := .peers/.ready
CLASSES := .venv/spark.jsa
FUZZ := .venv/.fuzz
KILLS ?= 20
UPSERT_KILLS ?= 40
WORKER_KILLS ?= 100
TORTURE ?= 300
STORE_SECONDS ?= 600
JOBS ?= auto
REST_JOBS ?= 2
KERNELS := setup.py $(shell find kafkalog -name 'kernels.py' -o -path '*/kernels/*.py' -o -name '*.pxd')
KERNEL_TESTS := tests/unit/storage_engine/test_kernels.py \
    tests/unit/cleaner/test_kernels.py tests/unit/cleaner/test_merge_kernels.py
# Files, locks, and what dies between two of their calls.
PLATFORM_TESTS := $(addprefix tests/unit/storage_engine/test_, broker_directory.py commit.py cut.py engine.py files.py \
    host.py journal.py partition.py partition_snapshot.py pins.py platform.py preallocation.py processes.py \
    relaxed_commits.py release.py retention.py staging.py topic_deletion.py) \
    $(addprefix tests/unit/cleaner/test_, clean.py manager.py pause.py swap.py thread.py) \
    $(addprefix tests/unit/rules/test_, clean.py manager.py retention.py)
# One fault of a disk will do.
PLATFORM_CASES := not (any_act and 28-)
# A test that waits for ever ends its process after 20 minutes. Another process takes the rest.
HANGS := -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true --max-worker-restart=3
KERNEL_BUILDS := sanitized mutated python
export KAFKALOG_REQUIRE_COMPILER = 1

.DEFAULT_GOAL := help
.PHONY: help setup peers demo-setup demo test test-rest test-all test-platform test-aarch64 test-kernels $(KERNEL_BUILDS:%=test-kernels-%) damage-test twin-test groups-test test-peers kill-test moment-test tables-test connect-test cluster-test store-test store-suite nfs-test image-test torture-cleaner torture torture-quick torture-quick-kernels lint docs release bench bench-quick clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## install what is missing: gcc, Java and venv (as root), then .venv and the package

peers: $(PEERS) ## fetch Kafka, Spark's connector, Delta, Iceberg, a schema registry, older releases of Spark, versitygw, azurite into .peers/ (Maven, Go, npm; root installs the first two)

demo-setup: $(DEMO_READY) ## install what the demo needs: gcc, Java and venv (as root), then .venv and the package

demo: $(DEMO_READY) ## a git repository's history, compacted while it streams; ARGS="--repo DIR --path DIR"
	$(BIN)/python -m examples.git_table $(ARGS)

test: $(READY) ## the unit tests that are not slow, and chosen ones with Spark, on all cores (JOBS); ARGS are pytest's
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m chosen tests/spark tests/unit $(ARGS)

test-rest: $(READY) ## the tests that `make test` leaves out, in REST_JOBS (2) processes, each with its own Spark
	$(BIN)/python -m pytest -n $(REST_JOBS) --dist loadfile --no-loadscope-reorder -m "not chosen" --durations=40 $(HANGS) $(ARGS)

test-all: test test-rest ## both of them

test-platform: $(READY) ## unit tests of files, locks and cleaning without the names that only Linux has, as on macOS
	KAFKALOG_PLATFORM=darwin $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m chosen -k '$(PLATFORM_CASES)' $(PLATFORM_TESTS) $(ARGS)

test-aarch64: $(READY) ## kernels, codec and golden bytes on an emulated aarch64, minutes; Debian's cross gcc and qemu (root installs them)
	$(BIN)/python -m tests.acceptance.aarch64 $(ARGS)

test-kernels: $(READY) ## the kernels' tests with bounds checks and sanitizers, as Python, and with wrong types
	$(MAKE) --jobs=2 --output-sync $(KERNEL_BUILDS:%=test-kernels-%)

test-kernels-sanitized: $(READY)
	$(BIN)/python -m tests.kernel_builds sanitized -m pytest $(KERNEL_TESTS)

test-kernels-python: $(READY)
	$(BIN)/python -m tests.kernel_builds python -m coverage run --include='*/kernels.py,*/kernels/*.py' -m pytest $(KERNEL_TESTS)
	$(BIN)/python -m tests.kernel_builds python -m coverage report --show-missing --fail-under=97

test-kernels-mutated: $(READY)
	$(BIN)/python -m tests.mutated_sheets

damage-test: $(READY) ## every file of a log cut and flipped at every byte, counted; takes a while
	KAFKALOG_DAMAGE=full $(BIN)/python -m pytest -s tests/unit/storage_engine/test_damage*.py $(ARGS)

twin-test: $(READY) $(PEERS) ## 300 logs, and 300 topics, cleaned by Kafka and by us; jobs of Spark with both formats; 100,000 framed values
	KAFKALOG_TWIN=full $(BIN)/python -m pytest -s tests/conformance/test_cleaner_twin.py tests/conformance/test_spark_twin.py \
	    tests/conformance/test_sink_twin.py tests/conformance/test_schema_registry.py $(ARGS)

groups-test: $(READY) $(PEERS) ## the groups of 30 brokers' worth of traffic, all messages, and 30 deaths of a cluster, next to Kafka's own tools
	KAFKALOG_GROUPS=full $(BIN)/python -m pytest -s tests/conformance/test_groups.py tests/conformance/test_messages.py \
	    tests/conformance/test_dead_cluster.py $(ARGS)

test-peers: $(READY) $(if $(filter docker,$(KAFKALOG_PEER)),,$(PEERS)) ## what a real Kafka makes of our files, and we of its files
	$(BIN)/python -m pytest -m peers tests/conformance $(ARGS)

kill-test: $(READY) ## queries killed KILLS times (20), upserts UPSERT_KILLS (40), their workers WORKER_KILLS (100), one on a full disk
	KAFKALOG_KILLS=$(KILLS) $(BIN)/python -m pytest -s tests/acceptance/test_killed_query.py \
	    tests/spark/examples/test_orders_pipeline.py $(ARGS)
	KAFKALOG_STEPS=every $(BIN)/python -m pytest -s tests/acceptance/test_killed_steps.py \
	    tests/acceptance/test_killed_cleaning.py $(ARGS)
	KAFKALOG_KILLS=$(UPSERT_KILLS) KAFKALOG_WORKER_KILLS=$(WORKER_KILLS) \
	    $(BIN)/python -m pytest -s tests/acceptance/test_killed_upserts.py $(ARGS)
	KAFKALOG_DISK=full $(BIN)/python -m pytest -s tests/acceptance/test_full_disk.py $(ARGS)

moment-test: $(READY) ## 100 reads and 20 joins during commits and cleanings; values of 100 MiB in a worker
	KAFKALOG_MOMENTS=full KAFKALOG_LARGE=full $(BIN)/python -m pytest -s tests/acceptance/test_one_moment.py \
	    tests/acceptance/test_large_values.py $(ARGS)

tables-test: $(READY) ## 1000 histories of materialized tables by their rule, and as many in Spark; 500 of restored tables; 200 each of lookups and of rows out of order
	KAFKALOG_TABLES=full $(BIN)/python -m pytest tests/unit/rules/test_table_moment.py \
	    tests/unit/rules/test_key_lookup.py tests/unit/rules/test_restored_tables.py \
	    tests/spark/sink/test_spark_versions.py tests/spark/sink/test_spark_delta.py \
	    tests/spark/datasource/test_materialized_table.py \
	    tests/spark/datasource/test_materialized_versions.py $(ARGS)

connect-test: $(READY) ## each feature in a session of Spark Connect, of a local server and of a started one
	KAFKALOG_CONNECT=full $(BIN)/python -m pytest tests/spark/connect $(ARGS)

cluster-test: $(READY) ## a stream of 100 micro-batches on a standalone cluster, a worker killed three times
	KAFKALOG_CLUSTER=full $(BIN)/python -m pytest -s tests/acceptance/test_standalone_cluster.py $(ARGS)

store-test: $(READY) $(PEERS) ## a log in an object store: every kill and fault, writers and cleaners for STORE_SECONDS (600), a cluster
	KAFKALOG_STORE=full $(BIN)/python -m pytest -s tests/acceptance/test_store_kills.py $(ARGS)
	KAFKALOG_SECONDS=$(STORE_SECONDS) $(BIN)/python -m pytest -s tests/acceptance/test_store_writers.py $(ARGS)
	KAFKALOG_SECONDS=$(STORE_SECONDS) $(BIN)/python -m pytest -s tests/acceptance/test_store_torture.py $(ARGS)
	KAFKALOG_CLUSTER=full $(BIN)/python -m pytest -s tests/acceptance/test_store_cluster.py $(ARGS)

store-suite: $(READY) $(if $(KAFKALOG_TEST_PATH),,$(PEERS)) ## Spark's suites of source and sink on an object store: KAFKALOG_TEST_PATH, or versitygw
	$(BIN)/python -m tests.store_suite $(ARGS)

nfs-test: $(READY) ## two writers, two cleaners, kills and readers on two mounts of NFS; root, and Debian's user-mode-linux
	$(BIN)/python -m tests.acceptance.nfs_machine $(ARGS)

image-test: $(READY) ## the Dockerfile's commands in a chroot of a bare Debian, minutes; root, and Debian's debootstrap
	test -x .peers/debian/usr/bin/apt-get || debootstrap --variant=minbase bookworm .peers/debian
	$(BIN)/python -m tests.acceptance.dockerfile_chroot --base .peers/debian

torture-cleaner: $(READY) ## a log written, deleted from, followed by Spark and cleaned, TORTURE seconds each (300)
	KAFKALOG_SECONDS=$(TORTURE) $(BIN)/python -m pytest -s tests/acceptance/test_cleaner_torture.py $(ARGS)

torture: $(READY) $(FUZZ) ## break the log in every way there is, hours, as root; writes docs/reliability.md (ARGS: names, --seed N)
	$(BIN)/python -m tests.torture --write $(ARGS)

torture-quick: $(READY) ## a sample of each way, in minutes
	$(BIN)/python -m tests.torture --quick $(ARGS)

torture-quick-kernels: $(READY) ## samples with kernels that have bounds checks and sanitizers
	$(BIN)/python -m tests.kernel_builds sanitized -m tests.torture --quick fuzz model failed_calls kills damage

lint: $(READY) ## ruff's format and rules, mypy --strict
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY) ## the documents as a site, in site/; every link is checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

release: $(READY) ## check, build and try out a release of what is committed, into dist/; ARGS=--publish pushes its tag
	$(BIN)/python .ci/release.py $(ARGS)

bench: $(READY) $(PEERS) ## every benchmark next to its peer, hours; writes docs/benchmarks.md (ARGS: names, --path DIR)
	$(BIN)/python -m bench --write $(ARGS)

bench-quick: $(READY) $(PEERS) ## every benchmark on small inputs: they work, and measure nothing
	$(BIN)/python -m bench --quick $(ARGS)

clean: ## remove .venv, .peers and every cache
	rm -rf .venv .peers .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build site spark-warehouse
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find kafkalog -name '*.so' -delete

# Stamps, so that it is done once; a change of the dependencies or of a kernel does it again.
# The demo needs the package, Spark and aiokafka.
$(DEMO_READY): pyproject.toml $(KERNELS)
	@sh ./.ci/system-packages "$(PYTHON)" demo
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -e '.[demo]'
	@touch $@

$(READY): pyproject.toml $(KERNELS)
	@sh ./.ci/system-packages "$(PYTHON)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile -e '.[dev]'
	@touch $(DEMO_READY) $@

# What Java keeps of Spark's classes: half of the time in which a Spark starts. Tests run without it too.
test-rest bench-quick twin-test kill-test moment-test tables-test connect-test cluster-test store-test store-suite torture-cleaner: $(CLASSES)
$(CLASSES): pyproject.toml tests/class_archives.py | $(READY)
	@$(BIN)/python -m tests.class_archives spark >.venv/spark.log 2>&1 || { echo "no archive of Spark's classes: see .venv/spark.log"; touch $@; }

# Coverage-guided fuzzing, which nothing else needs; where it cannot be had, `fuzz` says so.
$(FUZZ): $(READY)
	@$(BIN)/python -m pip install --quiet -e '.[fuzz]' && touch $@ || echo "atheris cannot be installed here"

$(PEERS): tests/conformance/pom.xml .ci/peers | $(READY)
	@sh ./.ci/peers
	@$(BIN)/python -m tests.class_archives broker >.peers/broker.log 2>&1 || echo "no archive of Kafka's classes: see .peers/broker.log"
	@touch $@
