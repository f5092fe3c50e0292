#!/usr/bin/env bash
# Workers that are killed, frozen and cut off, and servers that crash, for a long time on each store; then what became of the jobs.
# The tests run the short form.
#
#   scripts/chaos.sh [--seconds N] [NAME...]   N seconds of faults on each, by default 600; sqlite postgres mysql mariadb mongodb
#
# Starts servers of its own with scripts/servers.sh, which takes them down afterwards: not beside a run of the tests, unless
# SERVERS_DIR is another folder.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=600
if [ "${1:-}" = --seconds ]; then
  seconds=$2
  shift 2
fi
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(sqlite postgres mysql mariadb mongodb)
for name in "${names[@]}"; do
  case $name in sqlite | postgres | mysql | mariadb | mongodb) ;; *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac
done
cargo build -q -p queue-chaos
program=$(mktemp -d)
# shellcheck disable=SC2329 # the trap calls it
clean_up() {
  rm -rf "$program"
  [ -z "${started:-}" ] || scripts/servers.sh down "$started"
}
trap clean_up EXIT
# A build beside it must not change what runs.
cp target/debug/queue-chaos "$program/queue-chaos"
run() { "$program/queue-chaos" run --seconds "$seconds" --pause 1500 --rate 300 "$@"; }
status=0
for name in "${names[@]}"; do
  echo "$(date -u +%F) $name, $seconds s:"
  if [ "$name" = sqlite ]; then
    run --url "sqlite:$program/queue.db" --faults kill,freeze || status=1
    continue
  fi
  if [ -n "$(scripts/servers.sh env "$name" | grep _URL || true)" ]; then
    echo "$name runs already: this kills servers, and uses none but its own" >&2
    exit 1
  fi
  started=$name
  environment=$(env -u "TEST_${name^^}_URL" scripts/servers.sh up "$name")
  eval "$environment"
  url=TEST_${name^^}_URL
  run --url "${!url}" --faults kill,freeze,cut,lose,silence,crash --crash "scripts/servers.sh crash $name" || status=1
  unset "$url"
  scripts/servers.sh down "$name"
  started=
done
exit $status
