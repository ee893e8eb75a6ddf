-- Namespaces that transactions add at the same time are bounded, and so is what one statement adds.

-- +goose Up

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION check_namespaces() RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_top bigint;
BEGIN
    -- Ids are given once and ascend, and those of transactions that are open are given too: so while they are few nothing need be counted.
    IF (SELECT max(n.id) FROM namespaces n) > max_namespaces() THEN
        IF (SELECT count(*) FROM namespaces) > max_namespaces() THEN
            RAISE EXCEPTION 'there are % namespaces, and no more can be added', max_namespaces() USING ERRCODE = 'PW008';
        END IF;
        -- What others add and have not committed was not counted, and nobody waits for them: each adds a few at most. What is seen and is in
        -- progress is of this transaction, its subtransactions included; xmin has the lower 32 bits of which.
        v_top := pg_current_xact_id()::text::bigint;
        IF (SELECT count(*)
              FROM namespaces n
             WHERE n.id > max_namespaces()
               AND CASE WHEN n.created_at >= transaction_timestamp() THEN -- for of an older one nobody could tell the other 32 bits
                   pg_xact_status((v_top + (n.xmin::text::bigint - v_top % 4294967296 + 6442450944) % 4294967296 - 2147483648)::text::xid8) = 'in progress'
                   END) > 1000 THEN
            RAISE EXCEPTION 'a transaction adds at most 1000 namespaces once % were to be added, by whomever, also if they are gone, or never came', max_namespaces()
                USING ERRCODE = 'PW008', HINT = 'Add them in several transactions.';
        END IF;
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION check_namespaces IS 'Internal: PW008 if there are more namespaces than there may be, or the transaction adds too many for others to do so unseen.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION register_namespaces(p_namespaces text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO namespaces (name)
    SELECT DISTINCT n.name FROM unnest(p_namespaces) AS n (name)
     WHERE n.name IS NOT NULL AND NOT EXISTS (SELECT FROM namespaces known WHERE known.name = n.name)
     LIMIT max_namespaces() + 1;
    IF FOUND THEN -- which few enqueues come to
        PERFORM check_namespaces();
    END IF;
END
$$;
-- +goose StatementEnd

COMMENT ON FUNCTION max_namespaces IS 'How many namespaces there may be. One more is refused with PW008. Transactions that add some at the same time do not see those of each other, nor wait: they may add up to as many once more, and beyond that 1,000 each.';

-- +goose Down

-- Here, where nothing is gone yet; the lock waits for transactions that have enqueued and not committed.
LOCK TABLE namespaces, worker_queue, orchestrator_queue, dedup_keys, limits, instances, executions, history, kv_store, kv_delta, dead_letters, archive
    IN ACCESS EXCLUSIVE MODE;
SELECT require_empty();

COMMENT ON FUNCTION max_namespaces IS 'How many namespaces there may be. One more is refused with PW008; but transactions that each add one at the same time do not wait for each other, and so there may be as many more as they are.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION register_namespaces(p_namespaces text[])
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO namespaces (name)
    SELECT DISTINCT n.name FROM unnest(p_namespaces) AS n (name)
     WHERE n.name IS NOT NULL AND NOT EXISTS (SELECT FROM namespaces known WHERE known.name = n.name);
    IF FOUND THEN -- which few enqueues come to
        PERFORM check_namespaces();
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION check_namespaces() RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    -- Ids are given once and ascend, so while they are few nothing need be counted.
    IF (SELECT max(n.id) FROM namespaces n) > max_namespaces() AND (SELECT count(*) FROM namespaces) > max_namespaces() THEN
        RAISE EXCEPTION 'there are % namespaces, and no more can be added', max_namespaces() USING ERRCODE = 'PW008';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION check_namespaces IS 'Internal: PW008 if there are more namespaces than there may be.';
