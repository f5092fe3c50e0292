#!/usr/bin/env bash
# All tests of the workspace, on every store that it supports, with a summary of what ran where.
#
#   scripts/test.sh              everything
#   scripts/test.sh ARGUMENT...  handed to `cargo test`, such as `-p queue-core`
#
# Needs Rust (https://rustup.rs) and a C compiler for the bundled SQLite; on Debian and Ubuntu a missing compiler is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v cargo >/dev/null || { echo "cargo is missing: install Rust from https://rustup.rs" >&2; exit 1; }
if ! command -v cc >/dev/null; then
  if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    echo "installing a C compiler" >&2
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends gcc libc6-dev >/dev/null
  else
    echo "a C compiler is missing: install gcc or clang" >&2
    exit 1
  fi
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
started=$SECONDS
# Without --no-fail-fast the first failing binary would hide the others.
if [ $# -eq 0 ]; then set -- --workspace; fi
status=0
cargo test --no-fail-fast "$@" 2>&1 | tee "$log" || status=$?

echo
echo "what ran ($((SECONDS - started)) s, $(rustc --version)):"
# The suites name the store and the number of cases themselves.
grep -aE '^(conformance|matrix) ' "$log" | sed 's/^/  /' || true
grep -aE '^test result: ' "$log" | awk '
  { for (i = 1; i < NF; i++) { if ($(i+1) ~ /^passed/) p += $i; if ($(i+1) ~ /^failed/) f += $i; if ($(i+1) ~ /^ignored/) g += $i } }
  END { printf "  %d passed, %d failed, %d ignored (each with its reason above)\n", p, f, g }'
if [ "$status" -ne 0 ]; then
  echo "  FAILED:"
  grep -aE '^test .*FAILED$|^error: ' "$log" | sed 's/^/    /' || true
fi
exit "$status"
