-- Schema 1: jobs, and which programs may work on them.
--
-- Times are whole milliseconds since 1970 in UTC. JSON is kept as the text that it was given as. The state has no CHECK:
-- a newer version may add states, and the programs of this one keep running beside it.

CREATE TABLE {prefix}jobs (
    id               BLOB    NOT NULL CHECK (length(id) = 16),
    queue            TEXT    NOT NULL,
    kind             TEXT    NOT NULL,
    state            TEXT    NOT NULL,
    priority         INTEGER NOT NULL,
    attempt          INTEGER NOT NULL,
    max_attempts     INTEGER NOT NULL,
    fence            INTEGER NOT NULL,
    revision         BLOB    NOT NULL,
    available_at     INTEGER NOT NULL,
    created_at       INTEGER NOT NULL,
    claimed_by       TEXT,
    claimed_at       INTEGER,
    attempted_at     INTEGER,
    lease_expires_at INTEGER,
    finished_at      INTEGER,
    unique_key       TEXT,
    limit_key        TEXT,                       -- reserved
    tags             TEXT,                       -- reserved
    errors           TEXT    NOT NULL DEFAULT '[]',
    result           TEXT,
    payload          TEXT    NOT NULL            -- last: whoever reads the other columns reads none of its pages
) STRICT;

-- The statements name the index that they use (INDEXED BY): SQLite plans by statistics that may be as old as the last
-- ANALYZE, and would read the whole of what was a small table then. So an index that is dropped or renamed raises
-- oldest_version below.

CREATE UNIQUE INDEX {prefix}jobs_id ON {prefix}jobs (id);

-- What a claim walks, level by level; id and kind make it covering.
CREATE INDEX {prefix}jobs_due ON {prefix}jobs (queue, priority, available_at, id, kind)
    WHERE state = 'waiting';

-- What a sweep walks.
CREATE INDEX {prefix}jobs_leased ON {prefix}jobs (lease_expires_at, id)
    WHERE state IN ('claimed', 'running');

-- What a worker looks its orphans up by.
CREATE INDEX {prefix}jobs_held ON {prefix}jobs (claimed_by, id)
    WHERE state IN ('claimed', 'running');

-- What a purge walks.
CREATE INDEX {prefix}jobs_ended ON {prefix}jobs (state, finished_at, id)
    WHERE finished_at IS NOT NULL;

-- One active job per key. A state that this version does not know counts as active.
CREATE UNIQUE INDEX {prefix}jobs_unique ON {prefix}jobs (queue, unique_key)
    WHERE unique_key IS NOT NULL AND state NOT IN ('completed', 'failed', 'canceled');

-- One row: the schema's version, and the oldest version that programs may have that work on it.
CREATE TABLE {prefix}schema (
    only_row       INTEGER NOT NULL PRIMARY KEY CHECK (only_row = 1),
    version        INTEGER NOT NULL,
    oldest_version INTEGER NOT NULL,
    oldest_release TEXT    NOT NULL
) STRICT;

INSERT INTO {prefix}schema (only_row, version, oldest_version, oldest_release) VALUES (1, 1, 1, '0.1.0');
