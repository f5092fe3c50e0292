#!/usr/bin/env bash
# Workers that are killed, frozen and cut off, whose clocks are wrong, and servers that crash, end sessions, refuse writes and change
# their primary, for a long time on each store; then what became of the jobs. The tests run a short form.
#
#   scripts/chaos.sh [--seconds N] [NAME...]   N seconds of faults on each, by default 600; sqlite postgres mysql mariadb mongodb mongoset,
#   and by name only galera
#
# Starts servers of its own with scripts/servers.sh, which takes them down afterwards: not beside a run of the tests, unless
# SERVERS_DIR is another folder. Wrong clocks need libfaketime, and a full disk a file system of its own, which only root may mount; what
# cannot be had is left out, and that is said.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=600
if [ "${1:-}" = --seconds ]; then
  seconds=$2
  shift 2
fi
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(sqlite postgres mysql mariadb mongodb mongoset)
for name in "${names[@]}"; do
  case $name in sqlite | postgres | mysql | mariadb | mongodb | mongoset | galera) ;; *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac
done
cargo build -q -p queue-chaos
program=$(mktemp -d)
mounted=
# shellcheck disable=SC2329 # the trap calls it
clean_up() {
  [ -z "$mounted" ] || umount "$mounted"
  rm -rf "$program"
  [ -z "${started:-}" ] || scripts/servers.sh down "$started"
}
trap clean_up EXIT
# A build beside it must not change what runs.
cp "${CARGO_TARGET_DIR:-target}/debug/queue-chaos" "$program/queue-chaos"
run() { "$program/queue-chaos" run --seconds "$seconds" --pause 1500 --rate 150 "$@"; }

libfaketime() { find /usr/lib /usr/local/lib -name libfaketime.so.1 2>/dev/null | head -n 1; }
clocks=()
case " ${names[*]}" in
  *' '[pm]*)
    if [ -z "$(libfaketime)" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      { apt-get -qq update && apt-get -qq install -y --no-install-recommends libfaketime; } >/dev/null 2>&1 || true
    fi
    clocks=(--clocks "$(libfaketime)")
    [ -n "${clocks[1]}" ] || { clocks=(); echo 'LEFT OUT: wrong clocks, because libfaketime is not installed' >&2; }
    ;;
esac

status=0
for name in "${names[@]}"; do
  echo "$(date -u +%F) $name, $seconds s:"
  if [ "$name" = sqlite ]; then
    mkdir "$program/disk"
    full=()
    if [ "$(id -u)" = 0 ] && mount -t tmpfs -o size=1g tmpfs "$program/disk"; then
      mounted=$program/disk
      # dd fails because the disk is full.
      full=(--do "full disk=dd if=/dev/zero of=$mounted/filler bs=64k status=none 2>/dev/null; sleep 1; rm $mounted/filler")
    else
      echo 'LEFT OUT: a full disk, because no file system can be mounted' >&2
    fi
    run --url "sqlite:$program/disk/queue.db" --faults kill,freeze --one-connection true "${full[@]}" || status=1
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
  faults=kill,freeze,cut,lose,silence
  commands=(crash terminate)
  case $name in
    mongodb) commands+=(stepdown) ;;
    # The driver knows the members, and goes past whatever is put before them.
    mongoset) faults=kill,freeze commands+=(stepdown) ;;
    galera) commands=(crash) ;;
    *) commands+=(readonly) ;;
  esac
  does=()
  for command in "${commands[@]}"; do does+=(--do "$command=scripts/servers.sh $command $name"); done
  # As an administrator MariaDB's root may write to a server that is read-only.
  [ "$name" != mariadb ] || export "$url=${!url/root@/plain@}"
  # A cluster has one for each node.
  # shellcheck disable=SC2046,SC2086
  run $(printf -- '--url %s ' ${!url}) --faults "$faults" "${does[@]}" "${clocks[@]}" || status=1
  unset "$url"
  scripts/servers.sh down "$name"
  started=
done
exit $status
