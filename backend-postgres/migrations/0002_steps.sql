-- Schema 2: what jobs have done and wait for. Programs of schema 1 work on beside it: they know the state `suspended`, and the
-- foreign key deletes steps for them. Settings are those of `jobs`, for the same reasons.

CREATE TABLE "{schema}".steps (
    job_id   uuid           NOT NULL,
    revision uuid,                                   -- which suspension of the job a wait is
    fence    bigint         NOT NULL,
    until    timestamptz(3),                         -- a wait's deadline
    state    text           COLLATE "C" NOT NULL,    -- begun, waiting, done, timed_out
    name     text           COLLATE "C" NOT NULL,
    event    text           COLLATE "C",             -- what a wait is for; none if for the time alone
    value    text           COLLATE "C",
    CONSTRAINT steps_name PRIMARY KEY (job_id, name),
    CONSTRAINT steps_job FOREIGN KEY (job_id) REFERENCES "{schema}".jobs (id) ON DELETE CASCADE
) WITH (
    fillfactor = 80,
    vacuum_truncate = false,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05
);

-- Whom an event wakes, in the order in which jobs are locked.
CREATE INDEX steps_waiting ON "{schema}".steps (event, job_id)
    WHERE state = 'waiting';

CREATE TABLE "{schema}".events (
    kept_until timestamptz(3) NOT NULL,
    key        text           COLLATE "C" NOT NULL,
    payload    text           COLLATE "C",           -- none: no event, only a place to lock for who begins to wait for it
    CONSTRAINT events_key PRIMARY KEY (key)
) WITH (
    vacuum_truncate = false,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05
);

-- What a purge walks.
CREATE INDEX events_old ON "{schema}".events (kept_until);

UPDATE "{schema}".schema SET version = 2;
