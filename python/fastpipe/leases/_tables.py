"""The tables of a ledger, and every statement that changes them.

Each statement is written once for PostgreSQL and SQLite. `:name` is a parameter, and `{now}` is the database's clock in
seconds since 1970. `{skip_locked}` makes a query skip rows that another transaction is changing, if the database
supports it.

A row of `fastpipe_stretches` is one lease range: the batches `start` to `stop` (exclusive) of an epoch. Batches before
`committed` are done. Up to two workers hold a range: one by `token`, and one by `copy_token`. A range is free when both
leases have expired. `tokens` is the last token that was granted for the range, so no two of its leases share a token.
Token 0 means that the range is not leased.

A worker is `settled` if all batches that it has yielded are committed. The worker sets this when it is flushed, and
clears it before it yields its next batch.
"""

from __future__ import annotations

SCHEMA_VERSION = 2

CREATE = (
    "CREATE TABLE IF NOT EXISTS fastpipe_schema (version INTEGER NOT NULL)",
    """CREATE TABLE IF NOT EXISTS fastpipe_jobs (
        job TEXT PRIMARY KEY,
        identity TEXT NOT NULL,
        batches BIGINT NOT NULL,
        stretch BIGINT NOT NULL,
        first_epoch BIGINT NOT NULL,
        epochs BIGINT,
        barrier INTEGER NOT NULL,
        generation BIGINT NOT NULL,
        created DOUBLE PRECISION NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS fastpipe_epochs (
        job TEXT NOT NULL,
        epoch BIGINT NOT NULL,
        opened DOUBLE PRECISION NOT NULL,
        finished DOUBLE PRECISION,
        PRIMARY KEY (job, epoch)
    )""",
    """CREATE TABLE IF NOT EXISTS fastpipe_stretches (
        job TEXT NOT NULL,
        epoch BIGINT NOT NULL,
        number BIGINT NOT NULL,
        start BIGINT NOT NULL,
        stop BIGINT NOT NULL,
        committed BIGINT NOT NULL,
        done INTEGER NOT NULL,
        tokens BIGINT NOT NULL,
        worker TEXT,
        token BIGINT NOT NULL,
        expires DOUBLE PRECISION NOT NULL,
        copy_worker TEXT,
        copy_token BIGINT NOT NULL,
        copy_expires DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (job, epoch, number)
    )""",
    # `done` changes only once for each range, so other updates don't touch the index.
    """CREATE INDEX IF NOT EXISTS fastpipe_stretches_to_do
        ON fastpipe_stretches (job, epoch, number) WHERE done = 0""",
    """CREATE TABLE IF NOT EXISTS fastpipe_workers (
        job TEXT NOT NULL,
        worker TEXT NOT NULL,
        incarnation TEXT NOT NULL,
        exchange BIGINT NOT NULL,
        answer TEXT NOT NULL,
        joined DOUBLE PRECISION NOT NULL,
        seen DOUBLE PRECISION NOT NULL,
        moved DOUBLE PRECISION NOT NULL,
        departed INTEGER NOT NULL,
        settled INTEGER NOT NULL,
        batches BIGINT NOT NULL,
        row_count BIGINT NOT NULL,
        rate DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (job, worker)
    )""",
)

# Neither lease is valid, and some batches of the range are left.
_FREE = "done = 0 AND expires <= {now} AND copy_expires <= {now}"

DEAL = f"""
    WITH picked AS MATERIALIZED (
        SELECT job AS of_job, epoch AS of_epoch, number AS of_number FROM fastpipe_stretches
        WHERE job = :job AND {_FREE} ORDER BY epoch, number LIMIT :count {{skip_locked}}
    )
    UPDATE fastpipe_stretches
    SET worker = :worker, token = tokens + 1, tokens = tokens + 1, expires = {{now}} + :ttl,
        copy_worker = NULL, copy_token = 0, copy_expires = 0
    FROM picked WHERE job = of_job AND epoch = of_epoch AND number = of_number
    RETURNING epoch, number, token, committed, stop
"""

# If the second copy commits first, it replaces the original lease.
COMMIT = """
    UPDATE fastpipe_stretches
    SET committed = :stop, done = CASE WHEN stop = :stop THEN 1 ELSE 0 END,
        worker = CASE WHEN copy_token = :token THEN copy_worker ELSE worker END,
        token = CASE WHEN copy_token = :token THEN copy_token ELSE token END,
        expires = CASE WHEN copy_token = :token THEN copy_expires ELSE expires END,
        copy_worker = CASE WHEN copy_token = :token THEN NULL ELSE copy_worker END,
        copy_token = CASE WHEN copy_token = :token THEN 0 ELSE copy_token END,
        copy_expires = CASE WHEN copy_token = :token THEN 0 ELSE copy_expires END
    WHERE job = :job AND epoch = :epoch AND number = :number AND committed = :start
        AND :token > 0 AND (token = :token OR copy_token = :token)
    RETURNING committed
"""

HOLDERS = """
    SELECT committed, token, copy_token FROM fastpipe_stretches
    WHERE job = :job AND epoch = :epoch AND number = :number
"""

RENEW = """
    UPDATE fastpipe_stretches
    SET expires = CASE WHEN token = :token THEN {now} + :ttl ELSE expires END,
        copy_expires = CASE WHEN copy_token = :token THEN {now} + :ttl ELSE copy_expires END
    WHERE job = :job AND epoch = :epoch AND number = :number AND done = 0
        AND :token > 0 AND (token = :token OR copy_token = :token)
    RETURNING committed, copy_token
"""

# The second copy replaces the original lease after that was given up or has expired.
PROMOTE = """
    UPDATE fastpipe_stretches
    SET worker = copy_worker, token = copy_token, expires = copy_expires,
        copy_worker = NULL, copy_token = 0, copy_expires = 0
    WHERE job = :job AND epoch = :epoch AND number = :number AND copy_token > 0 AND expires <= {now}
"""

ABANDON = """
    UPDATE fastpipe_stretches
    SET worker = CASE WHEN token = :token THEN NULL ELSE worker END,
        expires = CASE WHEN token = :token THEN 0 ELSE expires END,
        token = CASE WHEN token = :token THEN 0 ELSE token END,
        copy_worker = CASE WHEN copy_token = :token THEN NULL ELSE copy_worker END,
        copy_expires = CASE WHEN copy_token = :token THEN 0 ELSE copy_expires END,
        copy_token = CASE WHEN copy_token = :token THEN 0 ELSE copy_token END
    WHERE job = :job AND epoch = :epoch AND number = :number AND :token > 0 AND (token = :token OR copy_token = :token)
"""

# Gives up the ranges that an earlier worker of that name held.
ABANDON_ALL = """
    UPDATE fastpipe_stretches
    SET token = CASE WHEN worker = :worker THEN 0 ELSE token END,
        expires = CASE WHEN worker = :worker THEN 0 ELSE expires END,
        worker = CASE WHEN worker = :worker THEN NULL ELSE worker END,
        copy_token = CASE WHEN copy_worker = :worker THEN 0 ELSE copy_token END,
        copy_expires = CASE WHEN copy_worker = :worker THEN 0 ELSE copy_expires END,
        copy_worker = CASE WHEN copy_worker = :worker THEN NULL ELSE copy_worker END
    WHERE job = :job AND done = 0 AND (worker = :worker OR copy_worker = :worker)
"""

COPY = """
    UPDATE fastpipe_stretches
    SET copy_worker = :worker, copy_token = tokens + 1, tokens = tokens + 1, copy_expires = {now} + :ttl
    WHERE job = :job AND epoch = :epoch AND number = :number AND done = 0 AND token = :seen AND copy_expires <= {now}
    RETURNING epoch, number, copy_token, committed, stop
"""

# Unfinished ranges of an epoch, with the rates of their holders.
LEASED = """
    SELECT s.number, s.committed, s.stop, s.worker, s.token, s.copy_expires > {now},
        coalesce(w.rate, 0), {now} - coalesce(w.moved, 0)
    FROM fastpipe_stretches s LEFT JOIN fastpipe_workers w ON w.job = s.job AND w.worker = s.worker
    WHERE s.job = :job AND s.epoch = :epoch AND s.done = 0
    ORDER BY s.number
"""

LOCK_WORKER = """
    SELECT incarnation, exchange, answer, departed, {now} - seen FROM fastpipe_workers
    WHERE job = :job AND worker = :worker {for_update}
"""

ANSWERED = """
    UPDATE fastpipe_workers
    SET exchange = :exchange, answer = :answer, seen = {now}, moved = CASE WHEN :moved = 1 THEN {now} ELSE moved END,
        batches = batches + :batches, row_count = row_count + :row_count, rate = :rate, departed = :departed,
        settled = coalesce(:settled, settled)
    WHERE job = :job AND worker = :worker
"""

OPEN_EPOCH = """
    INSERT INTO fastpipe_epochs (job, epoch, opened) VALUES (:job, :epoch, {now}) ON CONFLICT DO NOTHING
    RETURNING epoch
"""

INSERT_STRETCHES = """
    WITH RECURSIVE numbers(n) AS (
        SELECT CAST(0 AS BIGINT) UNION ALL SELECT n + 1 FROM numbers WHERE (n + 1) * :stretch < :batches
    )
    INSERT INTO fastpipe_stretches (job, epoch, number, start, stop, committed, done, tokens, token, expires,
        copy_token, copy_expires)
    SELECT :job, :epoch, n, n * :stretch, CASE WHEN (n + 1) * :stretch < :batches THEN (n + 1) * :stretch ELSE :batches
        END, n * :stretch, 0, :tokens, 0, 0, 0, 0
    FROM numbers
"""

OPEN_EPOCHS = """
    SELECT e.epoch, e.finished, (SELECT count(*) FROM fastpipe_stretches s
        WHERE s.job = e.job AND s.epoch = e.epoch AND s.done = 0)
    FROM fastpipe_epochs e WHERE e.job = :job AND (e.finished IS NULL OR e.epoch = (
        SELECT max(epoch) FROM fastpipe_epochs WHERE job = :job))
    ORDER BY e.epoch
"""

# Finished epochs no longer need their ranges. A late commit finds no range and is refused.
DELETE_DONE = "DELETE FROM fastpipe_stretches WHERE job = :job AND epoch < :epoch"

SHARES = """
    SELECT (SELECT count(*) FROM fastpipe_stretches WHERE job = :job AND done = 0 AND expires <= {now}),
        (SELECT count(*) FROM fastpipe_workers WHERE job = :job AND departed = 0 AND seen > {now} - :ttl)
"""

# Number of active workers.
PRESENT = "SELECT count(*) FROM fastpipe_workers WHERE job = :job AND departed = 0 AND seen > {now} - :ttl"

JOIN_WORKER = """
    INSERT INTO fastpipe_workers (job, worker, incarnation, exchange, answer, joined, seen, moved, departed, settled,
        batches, row_count, rate)
    VALUES (:job, :worker, :incarnation, 0, '', {now}, {now}, {now}, 0, 0, 0, 0, 0)
    ON CONFLICT (job, worker) DO UPDATE SET incarnation = :incarnation, exchange = 0, answer = '', joined = {now},
        seen = {now}, moved = {now}, departed = 0, settled = 0, rate = 0
"""

# Locks all workers before a checkpoint, so that no exchange changes the ledger while it is read.
LOCK_WORKERS = "SELECT worker FROM fastpipe_workers WHERE job = :job ORDER BY worker {for_update}"

# Workers that hold leases and may have used batches that they haven't committed.
UNSETTLED = """
    SELECT w.worker FROM fastpipe_workers w
    WHERE w.job = :job AND w.departed = 0 AND w.settled = 0 AND EXISTS (
        SELECT 1 FROM fastpipe_stretches s WHERE s.job = w.job AND s.done = 0
            AND ((s.worker = w.worker AND s.expires > {now}) OR (s.copy_worker = w.worker AND s.copy_expires > {now})))
    ORDER BY w.worker
"""

FORGET_WORKERS = "DELETE FROM fastpipe_workers WHERE job = :job AND seen < {now} - :seconds"

STORE_VERSION = """
    INSERT INTO fastpipe_schema (version) SELECT :version WHERE NOT EXISTS (SELECT 1 FROM fastpipe_schema)
"""

# Number of uncommitted batches, and how many of them are leased.
PROGRESS = """
    SELECT CAST(coalesce(sum(stop - committed), 0) AS BIGINT),
        CAST(coalesce(sum(CASE WHEN expires > {now} OR copy_expires > {now} THEN stop - committed ELSE 0 END), 0) AS
            BIGINT)
    FROM fastpipe_stretches WHERE job = :job AND epoch = :epoch AND done = 0
"""

WORKERS = """
    SELECT w.worker, w.departed, {now} - w.seen, {now} - w.moved,
        (SELECT count(*) FROM fastpipe_stretches s WHERE s.job = w.job AND s.done = 0
            AND ((s.worker = w.worker AND s.expires > {now}) OR (s.copy_worker = w.worker AND s.copy_expires > {now}))),
        w.batches, w.row_count, w.rate
    FROM fastpipe_workers w WHERE w.job = :job ORDER BY w.worker
"""
