-- Schema 2: what jobs have done and wait for. Programs of schema 1 work on beside it: they know the state `suspended`, and
-- the trigger deletes steps for them.

CREATE TABLE {prefix}steps (
    job_id   BLOB    NOT NULL,
    name     TEXT    NOT NULL,
    fence    INTEGER NOT NULL,
    state    TEXT    NOT NULL,                   -- begun, waiting, done, timed_out
    event    TEXT,                               -- what a wait is for; none if for the time alone
    until    INTEGER,                            -- its deadline
    revision BLOB,                               -- which suspension of the job it is
    value    TEXT
) STRICT;

CREATE UNIQUE INDEX {prefix}steps_name ON {prefix}steps (job_id, name);

-- Whom an event wakes.
CREATE INDEX {prefix}steps_waiting ON {prefix}steps (event, job_id)
    WHERE state = 'waiting';

CREATE TRIGGER {prefix}steps_gone AFTER DELETE ON {prefix}jobs BEGIN
    DELETE FROM {prefix}steps WHERE job_id = OLD.id;
END;

-- What the sweep of overdue waits walks.
CREATE INDEX {prefix}jobs_suspended ON {prefix}jobs (available_at, id)
    WHERE state = 'suspended';

CREATE TABLE {prefix}events (
    key        TEXT    NOT NULL,
    kept_until INTEGER NOT NULL,
    payload    TEXT    NOT NULL
) STRICT;

CREATE UNIQUE INDEX {prefix}events_key ON {prefix}events (key);

-- What a purge walks.
CREATE INDEX {prefix}events_old ON {prefix}events (kept_until);

UPDATE {prefix}schema SET version = 2;
