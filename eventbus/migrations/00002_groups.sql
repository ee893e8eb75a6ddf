-- Who gets which event: groups, their subscriptions, and the routes that follow from them.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION pattern_regex(p_pattern text)
RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path FROM CURRENT
AS $$
    SELECT '^' || string_agg(CASE s.segment WHEN '*' THEN '\.[^.]+' WHEN '#' THEN '(\.[^.]+)*'
                                            ELSE '\.' || regexp_replace(s.segment, '[][\\^$+?(){}]', '\\\&', 'g') END, '' ORDER BY s.place) || '$'
      FROM unnest(string_to_array(p_pattern, '.')) WITH ORDINALITY AS s (segment, place)
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION pattern_regex IS 'Internal: the pattern of a subscription as a regular expression, for types with a dot before them.';

-- +goose StatementBegin
CREATE FUNCTION pattern_specificity(p_pattern text)
RETURNS integer
LANGUAGE sql IMMUTABLE
SET search_path FROM CURRENT
AS $$
    -- Of two patterns of which one is for some of the types that the other is for, and for no others, it has at least as many names, at
    -- least as many segments besides #, and, if both are equal, fewer #. No pattern has more than 90 segments.
    SELECT (10000 * count(*) FILTER (WHERE s.segment NOT IN ('*', '#')) + 100 * count(*) FILTER (WHERE s.segment <> '#')
            + 99 - count(*) FILTER (WHERE s.segment = '#'))::integer
      FROM unnest(string_to_array(p_pattern, '.')) AS s (segment)
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION pattern_specificity IS 'Internal: orders patterns that are for the same type. The one with more names is more specific, or with more segments besides #, or with fewer #, in this order.';

-- +goose StatementBegin
CREATE FUNCTION event_tag(p_group text, p_pattern text)
RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path FROM CURRENT
AS $$
    SELECT 'eventbus/' || p_group || '|' || p_pattern
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION event_tag IS 'Tag of the work items that are the deliveries of a group, as far as the subscription to this pattern has routed them. For a pattern of '''': what the tags of the group begin with.';

-- +goose StatementBegin
CREATE FUNCTION routes(p_namespace text, p_event_type text)
RETURNS TABLE (group_id bigint, tag text)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT DISTINCT ON (m.group_id) m.group_id, m.tag
      FROM (SELECT s.group_id, s.tag, s.specificity, s.pattern FROM event_subscriptions s
             WHERE s.namespace = p_namespace AND s.pattern = p_event_type AND s.regex IS NULL
             UNION ALL
            SELECT s.group_id, s.tag, s.specificity, s.pattern FROM event_subscriptions s
             WHERE s.namespace = p_namespace AND s.regex IS NOT NULL AND '.' || p_event_type ~ s.regex) AS m
     ORDER BY m.group_id, m.specificity DESC, m.pattern COLLATE "C";
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION routes IS 'Groups that get events of a type, and by which tag: each once, by the most specific of its patterns that match.';

-- +goose StatementBegin
CREATE FUNCTION notify_group(p_namespace text, p_group text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM notify_instance(concat_ws('/', 'eventbus', p_namespace, p_group));
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION notify_group IS 'Internal: tells the nodes of a group that its patterns have changed. What is silenced, or goes unheard, they find with a heartbeat.';

-- +goose StatementBegin
CREATE FUNCTION subscribe(p_namespace text, p_group text, p_patterns text[], p_from_beginning boolean DEFAULT false)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_namespace text := coalesce(p_namespace, 'default');
    v_group     text := coalesce(p_group, 'default');
    v_id        bigint;
    v_new       boolean;
    v_bad       text;
BEGIN
    SELECT p.pattern INTO v_bad FROM unnest(p_patterns) AS p (pattern)
     WHERE (octet_length(p.pattern) <= 180 AND p.pattern ~ '^([^.*#|[:space:][:cntrl:]]+|[*#])(\.([^.*#|[:space:][:cntrl:]]+|[*#]))*$') IS NOT TRUE LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'a pattern must have up to 180 bytes, in segments with dots between them, each a name, * or #: not %', quote_nullable(v_bad) USING ERRCODE = 'PW003';
    END IF;
    -- Its row is locked: from here on nobody changes what the group is subscribed to.
    INSERT INTO event_groups AS g (namespace, name, behind) VALUES (v_namespace, v_group, p_from_beginning)
    ON CONFLICT (namespace, name) DO UPDATE SET name = excluded.name
    RETURNING g.group_id, g.xmax = 0 INTO v_id, v_new;
    PERFORM register_namespaces(ARRAY[v_namespace]);
    INSERT INTO event_subscriptions (group_id, namespace, pattern, regex, specificity, tag)
    SELECT DISTINCT v_id, v_namespace, p.pattern, CASE WHEN p.pattern ~ '[*#]' THEN pattern_regex(p.pattern) END, pattern_specificity(p.pattern), event_tag(v_group, p.pattern)
      FROM unnest(p_patterns) AS p (pattern)
    ON CONFLICT (group_id, pattern) DO NOTHING;
    IF FOUND THEN
        PERFORM notify_group(v_namespace, v_group);
    END IF;
    DELETE FROM event_retirements r WHERE r.namespace = v_namespace AND r.tag IN (SELECT event_tag(v_group, p.pattern) FROM unnest(p_patterns) AS p (pattern));
    IF v_new AND p_from_beginning THEN
        PERFORM begin_replay(v_id, p_undelivered => true);
    END IF;
    RETURN v_id;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION subscribe IS 'Has a group (null: default) get the events whose types match one of these patterns, from now on, and returns its id. The group is made if there is none; then, with p_from_beginning, it gets what is in the log as well, each event once, and those of a key in order. To say it again changes nothing.';

-- +goose StatementBegin
CREATE FUNCTION retire_tag(p_group_id bigint, p_namespace text, p_tag text)
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_item record;
    v_tag  text;
    v_gone bigint[] := '{}';
BEGIN
    FOR v_item IN SELECT q.id, q.name FROM worker_queue q WHERE q.namespace = p_namespace AND q.tag = p_tag AND q.session_id IS NULL ORDER BY q.id FOR UPDATE LOOP
        SELECT r.tag INTO v_tag FROM routes(p_namespace, v_item.name) AS r WHERE r.group_id = p_group_id;
        IF FOUND THEN
            UPDATE worker_queue q SET tag = v_tag WHERE q.id = v_item.id;
        ELSE
            v_gone := v_gone || v_item.id;
        END IF;
    END LOOP;
    PERFORM remove_work(v_gone);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION retire_tag IS 'Internal: the deliveries of a subscription that is removed go by another of the group that is for them, or else away.';

-- +goose StatementBegin
CREATE FUNCTION unsubscribe(p_namespace text, p_group text, p_pattern text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_namespace text := coalesce(p_namespace, 'default');
    v_group     bigint;
    v_tag       text;
BEGIN
    SELECT g.group_id INTO v_group FROM event_groups g WHERE g.namespace = v_namespace AND g.name = coalesce(p_group, 'default') FOR UPDATE;
    DELETE FROM event_subscriptions s WHERE s.group_id = v_group AND s.pattern = p_pattern RETURNING s.tag INTO v_tag;
    IF v_tag IS NULL THEN
        RETURN false;
    END IF;
    INSERT INTO event_retirements (namespace, tag) VALUES (v_namespace, v_tag) ON CONFLICT (namespace, tag) DO UPDATE SET horizon = NULL;
    PERFORM retire_tag(v_group, v_namespace, v_tag);
    PERFORM notify_group(v_namespace, coalesce(p_group, 'default'));
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION unsubscribe IS 'Ends a subscription of a group (null: default), and returns whether there was one. What it has routed, and is not handled yet, is routed by another subscription of the group that is for it, or else dropped.';

-- +goose StatementBegin
CREATE FUNCTION delete_group(p_namespace text, p_group text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_namespace text := coalesce(p_namespace, 'default');
    v_group     bigint;
    v_tags      text[];
BEGIN
    SELECT g.group_id INTO v_group FROM event_groups g WHERE g.namespace = v_namespace AND g.name = coalesce(p_group, 'default') FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    v_tags := ARRAY(SELECT s.tag FROM event_subscriptions s WHERE s.group_id = v_group);
    DELETE FROM event_groups g WHERE g.group_id = v_group; -- its subscriptions, and replays, go with it
    INSERT INTO event_retirements (namespace, tag) SELECT v_namespace, t.tag FROM unnest(v_tags) AS t (tag)
    ON CONFLICT (namespace, tag) DO UPDATE SET horizon = NULL;
    DELETE FROM event_lines l WHERE l.group_id = v_group;
    DELETE FROM event_keys k WHERE k.group_id = v_group AND k.item_id IS NULL; -- the others go with their items
    PERFORM retire_tag(v_group, v_namespace, t.tag) FROM unnest(v_tags) AS t (tag);
    PERFORM notify_group(v_namespace, coalesce(p_group, 'default'));
    RETURN true;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION delete_group IS 'Removes a group (null: default) with its subscriptions and with what it has not handled yet, and returns whether there was one. Its dead letters stay.';

-- +goose StatementBegin
CREATE FUNCTION horizon()
RETURNS xid8
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    -- Whoever emits has his transaction's number before he reads what is subscribed to (emit_many). So if he has not seen what
    -- was committed before this snapshot, his number is below its upper end, and he has ended once its lower end has got there.
    RETURN log_xact(pg_snapshot_xmax(pg_current_snapshot()));
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION horizon IS 'Internal: transactions from this one on know of every subscription that this call sees, and of the end of those that it does not.';

-- +goose StatementBegin
CREATE FUNCTION remove_strays()
RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_tag record;
BEGIN
    UPDATE event_retirements r SET horizon = horizon() WHERE r.horizon IS NULL;
    FOR v_tag IN DELETE FROM event_retirements r WHERE r.horizon <= log_xact(pg_snapshot_xmin(pg_current_snapshot())) RETURNING r.namespace, r.tag LOOP
        PERFORM retire_tag((SELECT g.group_id FROM event_groups g
                             WHERE g.namespace = v_tag.namespace AND g.name = split_part(substr(v_tag.tag, 10), '|', 1)), v_tag.namespace, v_tag.tag);
    END LOOP;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION remove_strays IS 'Internal: deals with what was delivered by subscriptions after they were removed, by transactions that did not know of that, once all of these have ended.';

-- +goose StatementBegin
CREATE FUNCTION list_groups(p_namespace text)
RETURNS TABLE (group_name text, pattern text, created_at timestamptz)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY
    SELECT g.name, s.pattern, coalesce(s.created_at, g.created_at) FROM event_groups g LEFT JOIN event_subscriptions s USING (group_id)
     WHERE g.namespace = coalesce(p_namespace, 'default') ORDER BY g.name, s.pattern;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_groups IS 'The groups of a namespace with their patterns, a row for each; null: a group without any.';

-- +goose StatementBegin
CREATE FUNCTION list_patterns(p_namespace text, p_group text)
RETURNS SETOF text
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_namespace text := coalesce(p_namespace, 'default');
    v_first     text := event_tag(coalesce(p_group, 'default'), '');
BEGIN
    RETURN QUERY
    SELECT s.pattern FROM event_groups g JOIN event_subscriptions s ON s.group_id = ANY (ARRAY[g.group_id])
     WHERE g.namespace = v_namespace AND g.name = coalesce(p_group, 'default')
    UNION -- of a subscription that was removed there may be a dead letter that was redriven
    SELECT substr(l.tag, length(v_first) + 1) FROM work_lists(ARRAY[v_namespace], NULL) AS l WHERE starts_with(l.tag, v_first);
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION list_patterns IS 'Patterns by which deliveries to a group (null: default) are routed, or were that wait to be handled.';

-- +goose Down

DROP FUNCTION list_patterns, list_groups, remove_strays, horizon, delete_group, unsubscribe, retire_tag, subscribe, notify_group, routes, event_tag, pattern_specificity, pattern_regex;
