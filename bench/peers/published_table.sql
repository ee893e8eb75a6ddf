-- The queue of the published design. It says nothing about the table but the trigger, so the rest is the bare table that
-- pgwake is measured against: one index, and claiming moves visible_at.
CREATE TABLE queue (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    visible_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    lock_token uuid,
    input      json
) WITH (fillfactor = 80);
CREATE INDEX ON queue (visible_at, id);
