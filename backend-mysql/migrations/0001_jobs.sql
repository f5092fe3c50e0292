-- Schema 1: jobs, and which programs may work on them.
--
-- Everything that depends on a default of the server, the database or the session is said here. Names, keys and JSON are
-- kept and compared as bytes: of the collations of text, some ignore case and accents, and most ignore trailing spaces.
-- Times are in UTC (DATETIME knows no zone, and nothing moves it by itself). The state has no CHECK: a newer version may
-- add states, and the programs of this one keep running beside it.
--
-- Statements of this kind end the transaction that they are run in, so the order matters: the table of versions first,
-- which marks the tables as ours, its row last. Run again after an interruption, the text completes itself.

CREATE TABLE IF NOT EXISTS {prefix}schema (
    only_row       TINYINT       NOT NULL,
    version        BIGINT        NOT NULL,
    oldest_version BIGINT        NOT NULL,
    oldest_release VARBINARY(64) NOT NULL,
    PRIMARY KEY (only_row),
    CONSTRAINT {prefix}schema_one CHECK (only_row = 1)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS {prefix}jobs (
    id               BINARY(16)       NOT NULL,
    queue            VARBINARY(255)   NOT NULL,
    kind             VARBINARY(255)   NOT NULL,
    state            VARBINARY(32)    NOT NULL,
    priority         TINYINT UNSIGNED NOT NULL,
    attempt          INT UNSIGNED     NOT NULL,
    max_attempts     INT UNSIGNED     NOT NULL,
    fence            BIGINT UNSIGNED  NOT NULL,
    revision         BINARY(16)       NOT NULL,
    available_at     DATETIME(3)      NOT NULL,
    created_at       DATETIME(3)      NOT NULL,
    claimed_by       VARBINARY(272)   NULL,
    claimed_at       DATETIME(3)      NULL,
    attempted_at     DATETIME(3)      NULL,
    lease_expires_at DATETIME(3)      NULL,
    finished_at      DATETIME(3)      NULL,
    unique_key       VARBINARY(255)   NULL,
    -- The key while the job counts for it. A state that this version does not know counts as active.
    active_key       VARBINARY(255)   GENERATED ALWAYS AS
        (CASE WHEN state IN ('completed', 'failed', 'canceled') THEN NULL ELSE unique_key END) STORED,
    limit_key        VARBINARY(255)   NULL,      -- reserved
    tags             LONGBLOB         NULL,      -- reserved
    errors           LONGBLOB         NOT NULL,
    result           LONGBLOB         NULL,
    payload          LONGBLOB         NOT NULL,
    PRIMARY KEY (id),
    -- One active job per key; no key never conflicts.
    UNIQUE KEY jobs_unique (queue, active_key),
    -- What a claim walks, level by level; with the kind in it, jobs of other kinds are passed without reading their rows.
    KEY jobs_due (queue, state, priority, available_at, id, kind),
    -- What a sweep walks.
    KEY jobs_leased (state, lease_expires_at, id),
    -- What a worker looks its orphans up by.
    KEY jobs_held (claimed_by, state, id),
    -- What a purge walks.
    KEY jobs_ended (state, finished_at, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The statements name the index that they use (FORCE INDEX), since statistics would have them lock other workers' rows. So
-- an index that is dropped or renamed raises oldest_version.
INSERT INTO {prefix}schema (only_row, version, oldest_version, oldest_release) VALUES (1, 1, 1, '0.1.0');
