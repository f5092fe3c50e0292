-- Schema 1: jobs, and which programs may work on them.
--
-- Times are whole milliseconds: the programs cut them before they store them, since timestamptz(3) by itself would round.
-- Texts are compared byte for byte (COLLATE "C"). Payload and result are the texts that they were given as: jsonb would change
-- them, and json refuses what is nested deeply. The state has no CHECK: a newer version may add states, and the programs of this
-- one keep running beside it.

-- Whoever may not create schemas can be given one: CREATE SCHEMA IF NOT EXISTS asks for the right also where it does nothing.
DO $$
BEGIN
    IF to_regnamespace('"{schema}"') IS NULL THEN
        CREATE SCHEMA "{schema}";
    END IF;
END
$$;

CREATE TABLE "{schema}".jobs (
    id               uuid           NOT NULL,
    revision         uuid           NOT NULL,
    fence            bigint         NOT NULL,
    attempt          bigint         NOT NULL,
    max_attempts     bigint         NOT NULL,
    available_at     timestamptz(3) NOT NULL,
    created_at       timestamptz(3) NOT NULL,
    claimed_at       timestamptz(3),
    attempted_at     timestamptz(3),
    lease_expires_at timestamptz(3),
    finished_at      timestamptz(3),
    priority         smallint       NOT NULL,
    state            text           COLLATE "C" NOT NULL,
    queue            text           COLLATE "C" NOT NULL,
    kind             text           COLLATE "C" NOT NULL,
    claimed_by       text           COLLATE "C",
    unique_key       text           COLLATE "C",
    limit_key        text           COLLATE "C",     -- reserved
    tags             text           COLLATE "C",     -- reserved
    errors           json           NOT NULL DEFAULT '[]',
    result           text           COLLATE "C",
    payload          text           COLLATE "C" NOT NULL,
    CONSTRAINT jobs_id PRIMARY KEY (id)
) WITH (
    -- Room for the next version of a row beside it. An update that changes no column of an index, in its predicate too, then
    -- writes to no index (a heap-only update). A heartbeat is one, as long as no index names lease_expires_at: 165 bytes of
    -- write-ahead log for each, 255 on full pages, 490 with an index by lease. Claims and settles change the state, and so
    -- are none (470 bytes each); less than 80 saves nothing more.
    fillfactor = 80,
    -- A queue that drains must not shrink to no page, for which the server would plan to read whole what then grows again;
    -- nor lock out everybody while it shrinks.
    vacuum_truncate = false,
    -- Every job leaves versions of itself behind. A fifth of a table of a million would be too many of them.
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05
);

-- What a claim walks, level by level. The kind is no part of it: the server would look it up per kind and then sort.
CREATE INDEX jobs_due ON "{schema}".jobs (queue, priority, available_at, id)
    WHERE state = 'waiting';

-- What a worker looks its orphans up by, and a sweep reads whole to find what is stale: as many rows as jobs are held, that is
-- a few thousand. An index by lease_expires_at would cost every heartbeat more than it saves the sweep.
CREATE INDEX jobs_held ON "{schema}".jobs (claimed_by, id)
    WHERE state IN ('claimed', 'running');

-- What a purge walks.
CREATE INDEX jobs_ended ON "{schema}".jobs (state, finished_at, id)
    WHERE finished_at IS NOT NULL;

-- One active job per key. A state that this version does not know counts as active.
CREATE UNIQUE INDEX jobs_unique ON "{schema}".jobs (queue, unique_key)
    WHERE unique_key IS NOT NULL AND state NOT IN ('completed', 'failed', 'canceled');

-- One row: the schema's version, and the oldest version that programs may have that work on it.
CREATE TABLE "{schema}".schema (
    only_row       boolean NOT NULL PRIMARY KEY CHECK (only_row),
    version        bigint  NOT NULL,
    oldest_version bigint  NOT NULL,
    oldest_release text    NOT NULL
);

INSERT INTO "{schema}".schema (only_row, version, oldest_version, oldest_release) VALUES (true, 1, 1, '0.1.0');
