-- What a queue needs at the least: one index to find what is due first, and nothing that notifies.
CREATE TABLE bare (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    visible_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    lock_token uuid,
    input      json
) WITH (fillfactor = 80);
CREATE INDEX ON bare (visible_at, id);
