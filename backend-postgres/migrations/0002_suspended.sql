-- Schema 2, its index on the jobs that are there: what the sweep of overdue waits walks. Built while others go on writing, and
-- so outside a transaction, statement by statement. Whoever died in the middle has left an index that is not valid; it goes.

DROP INDEX CONCURRENTLY IF EXISTS "{schema}".jobs_suspended;

CREATE INDEX CONCURRENTLY jobs_suspended ON "{schema}".jobs (available_at, id)
    WHERE state = 'suspended';
