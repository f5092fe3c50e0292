-- Schema 2: what jobs have done and wait for. Programs of schema 1 work on beside it: they know the state `suspended`, and
-- the foreign key deletes steps for them. (A trigger would need a privilege of its own where there is a binary log.)
--
-- Run again after an interruption at any place, the text completes itself. The selects end it where a table of the same name
-- is somebody else's.

CREATE TABLE IF NOT EXISTS {prefix}events (
    event_key  VARBINARY(255) NOT NULL,
    kept_until DATETIME(3)    NOT NULL,
    payload    LONGBLOB       NULL,             -- none: it is no event, but a place to lock for those who come at once
    is_event   TINYINT        GENERATED ALWAYS AS (payload IS NOT NULL) STORED,
    PRIMARY KEY (event_key),
    -- What a purge walks.
    KEY events_old (is_event, kept_until, event_key)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

SELECT 1 FROM {prefix}events FORCE INDEX (events_old) WHERE FALSE;

CREATE TABLE IF NOT EXISTS {prefix}steps (
    job_id   BINARY(16)      NOT NULL,
    name     VARBINARY(255)  NOT NULL,
    fence    BIGINT UNSIGNED NOT NULL,
    state    VARBINARY(32)   NOT NULL,          -- begun, waiting, done, timed_out
    event    VARBINARY(255)  NULL,              -- what a wait is for; none if for the time alone
    until    DATETIME(3)     NULL,              -- its deadline
    revision BINARY(16)      NULL,              -- which suspension of the job it is
    value    LONGBLOB        NULL,
    PRIMARY KEY (job_id, name),
    -- Whom an event wakes, in the order in which jobs are locked.
    KEY steps_waiting (state, event, job_id, name),
    CONSTRAINT {prefix}steps_job FOREIGN KEY (job_id) REFERENCES {prefix}jobs (id) ON DELETE CASCADE
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

SELECT 1 FROM {prefix}steps FORCE INDEX (steps_waiting) WHERE FALSE;

-- What the sweep of overdue waits walks. Jobs are worked on while it is being made; only its beginning and its end wait for
-- the transactions that are open. One of the servers has no IF NOT EXISTS for it.
SET @fenced_queue = IF(
    (SELECT COUNT(*) FROM information_schema.statistics
     WHERE table_schema = DATABASE() AND table_name = '{prefix}jobs' AND index_name = 'jobs_suspended') = 0,
    'ALTER TABLE {prefix}jobs ADD KEY jobs_suspended (state, available_at, id), ALGORITHM = INPLACE, LOCK = NONE',
    'DO 0');

PREPARE fenced_queue FROM @fenced_queue;

EXECUTE fenced_queue;

DEALLOCATE PREPARE fenced_queue;

UPDATE {prefix}schema SET version = 2 WHERE version < 2;
