#!/usr/bin/env bash
# Measures the stores: see benches/stores/main.rs. Arguments are handed on; --help lists them.
#
#   scripts/bench.sh [--stores NAME,NAME..] [--quick] [--only calls|growth|worker] [--drain JOBS]
#
# Starts the servers as scripts/test.sh does, and stops those that it started.
set -euo pipefail
cd "$(dirname "$0")/.."
before=$(scripts/servers.sh env)
# shellcheck disable=SC2329 # the trap calls it
clean_up() { grep -q _URL <<<"$before" || scripts/servers.sh down; }
trap clean_up EXIT
names=(postgres mariadb mysql mongodb)
environment=$(scripts/servers.sh up "${names[@]}")
eval "$environment"
cargo bench -q --features full --bench stores -- "$@"
