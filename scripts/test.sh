#!/usr/bin/env bash
# All tests of the workspace, on every store that it supports, with a summary of what ran where.
#
#   scripts/test.sh                           everything
#   scripts/test.sh --without NAME...         leaves out a server, by name: postgres pgbouncer mariadb mysql mongodb; or strace
#   scripts/test.sh [--without NAME].. -- ARGUMENT...   the arguments go to `cargo test`, such as `-p queue-core`
#
# Starts the servers with scripts/servers.sh, which installs what is missing, and stops those that it started. One whose
# variable TEST_POSTGRES_URL, TEST_PGBOUNCER_URL, TEST_MARIADB_URL, TEST_MYSQL_URL or TEST_MONGODB_URL is set is used as it is: the tests
# make databases and schemas of their own in it, and drop them. Needs Rust (https://rustup.rs), a C compiler for the bundled
# SQLite, and strace, by which processes are killed at each of their writes; on Debian and Ubuntu what is missing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

without=()
while [ $# -gt 0 ]; do
  case $1 in
    --without)
      [ $# -ge 2 ] || { echo '--without needs the name of a server' >&2; exit 2; }
      without+=("$2")
      shift 2
      ;;
    --) shift; break ;;
    *) sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done
left_out() { [[ " ${without[*]} " == *" $1 "* ]]; }
servers=()
for name in postgres pgbouncer mariadb mysql mongodb; do left_out $name || servers+=("$name"); done
for name in "${without[@]}"; do
  case $name in postgres | pgbouncer | mariadb | mysql | mongodb | strace) ;; *) echo "unknown: $name" >&2; exit 2 ;; esac
done

command -v cargo >/dev/null || { echo 'cargo is missing: install Rust from https://rustup.rs' >&2; exit 1; }
missing=()
command -v cc >/dev/null || missing+=(gcc libc6-dev)
left_out strace || command -v strace >/dev/null || missing+=(strace)
if [ ${#missing[@]} -gt 0 ]; then
  if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    echo "installing ${missing[*]}" >&2
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "missing: ${missing[*]} (any C compiler will do; \`--without strace\` leaves out what needs strace, which is Linux's)" >&2
    exit 1
  fi
fi

work=$(mktemp -d)
log=$work/log
started=()
# shellcheck disable=SC2329 # the trap calls it
clean_up() {
  rm -rf "$work"
  [ ${#started[@]} -eq 0 ] || scripts/servers.sh down "${started[@]}"
}
trap clean_up EXIT
begun=$SECONDS
for name in "${servers[@]}"; do
  # Those that run already are left running.
  [ -n "$(scripts/servers.sh env "$name" | grep _URL || true)" ] || started+=("$name")
  scripts/servers.sh up "$name" >/dev/null && continue
  # MySQL comes from a source that moves, and most of what is tested on it is tested on MariaDB too.
  if [ "$name" = mysql ] && ! left_out mariadb; then
    without+=(mysql)
    echo 'MARIADB ONLY: MySQL cannot be had, so nothing is tested on it' >&2
    continue
  fi
  echo "$name is needed; \`--without $name\` leaves it out" >&2
  exit 1
done
environment=$(scripts/servers.sh env "${servers[@]}")
eval "$environment"
TEST_WITHOUT=$(IFS=,; echo "${without[*]}")
export TEST_WITHOUT
echo "servers are ready after $((SECONDS - begun)) s"

status=0
if [ $# -gt 0 ]; then
  cargo test --no-fail-fast "$@" 2>&1 | tee "$log" || status=$?
else
  set -- --workspace --features full,metrics
  if left_out postgres; then set -- "$@" --exclude backend-postgres; fi
  if left_out mariadb && left_out mysql; then set -- "$@" --exclude backend-mysql; fi
  if left_out mongodb; then set -- "$@" --exclude backend-mongo; fi
  # Cargo runs one program after the other, and each of them waits for a server most of the time. So cargo only notes what it
  # would run, and four run side by side. Those whose workers must be in time come last: the facade's, with its short leases, by
  # themselves, and then those that are killed, most of which wait.
  export NOTED=$work/noted
  cat >"$work/note" <<'NOTE'
#!/usr/bin/env bash
# An example of the documentation is deleted afterwards.
[[ $1 = */deps/* ]] || exec "$@"
mkdir -p "$NOTED/$CARGO_PKG_NAME"
{ export -p; printf 'cd %q; exec' "$PWD"; printf ' %q' "$@"; } >"$NOTED/$CARGO_PKG_NAME/$(basename "$1")"
NOTE
  chmod +x "$work/note"
  # Says where the output of a program is once it has ended.
  run_noted() {
    local program=$1 package
    package=$(basename "$(dirname "$program")")
    printf '\n     Running %s %s\n' "$package" "${program##*/}" >"$program.out"
    bash "$program" >>"$program.out" 2>&1 || echo "$package: ${program##*/} ended with $?" >>"$NOTED.failed"
    echo "$program.out"
  }
  export -f run_noted
  at_once() {
    local output
    xargs -P "$1" -I '{}' bash -c 'run_noted {}' | while read -r output; do cat "$output"; done | tee -a "$log"
  }
  runner="target.'cfg(all())'.runner='$work/note'"
  cargo test --no-fail-fast --config "$runner" "$@" -- --test-threads=$(($(getconf _NPROCESSORS_ONLN) * 3 / 2)) 2>&1 | tee "$log" || status=$?
  # Cargo says itself what does not compile.
  if [ -d "$NOTED" ]; then
    programs=$(find "$NOTED" -type f | sort)
    alone='/(fenced-queue|queue-chaos)/'
    # The longest first, so that none is left to run by itself.
    { grep /conformance- <<<"$programs"; grep -v /conformance- <<<"$programs"; } | grep -vE "$alone" | at_once 4
    grep /fenced-queue/ <<<"$programs" | at_once 1
    grep /queue-chaos/ <<<"$programs" | at_once 3
    if [ -e "$NOTED.failed" ]; then status=101; fi
  fi
  # By themselves: with the feature, all connections of all tests would be encrypted.
  encrypted=()
  left_out postgres || encrypted+=(-p backend-postgres)
  if ! left_out mariadb || ! left_out mysql; then encrypted+=(-p backend-mysql); fi
  if [ ${#encrypted[@]} -gt 0 ]; then
    cargo test --no-fail-fast "${encrypted[@]}" --features tls --test tls 2>&1 | tee -a "$log" || status=$?
  fi
fi

echo
echo "what ran ($((SECONDS - begun)) s, $(rustc --version)):"
# The suites name the store and the number of cases themselves.
grep -aE '^(conformance|matrix) ' "$log" | sed 's/^/  /' || true
for name in "${without[@]}"; do echo "  WITHOUT $name"; done
grep -aE '^test result: ' "$log" | awk '
  { for (i = 1; i < NF; i++) { if ($(i+1) ~ /^passed/) p += $i; if ($(i+1) ~ /^failed/) f += $i; if ($(i+1) ~ /^ignored/) g += $i } }
  END { printf "  %d passed, %d failed, %d ignored (each with its reason above)\n", p, f, g }'
if [ "$status" -ne 0 ]; then
  echo '  FAILED:'
  grep -aE '^test .*FAILED$|^error: ' "$log" | sed 's/^/    /' || true
  if [ -e "$work/noted.failed" ]; then sed 's/^/    /' "$work/noted.failed"; fi
fi
exit "$status"
