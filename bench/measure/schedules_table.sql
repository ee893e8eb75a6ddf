-- A table of next runs, each so long after the one before it as all others, and evenly apart from each other.
CREATE TABLE next_runs (id integer PRIMARY KEY, next_at timestamptz NOT NULL);
CREATE INDEX ON next_runs (next_at)
