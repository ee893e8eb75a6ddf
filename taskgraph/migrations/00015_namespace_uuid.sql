-- Namespaces are told of on servers that have no MD5, since their OpenSSL is one for FIPS: there the first item of each failed. Conditions are read alike
-- in all sessions.

-- +goose Up

-- +goose StatementBegin
CREATE FUNCTION namespace_uuid(p_name text)
RETURNS uuid
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    -- Whoever was told may have kept it. So it stays what it was, where it could be.
    RETURN md5('namespace ' || p_name)::uuid;
EXCEPTION WHEN internal_error OR out_of_memory THEN -- the latter is what PostgreSQL 14 calls it
    RETURN left(encode(sha256(convert_to('namespace ' || p_name, 'UTF8')), 'hex'), 32)::uuid;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION namespace_uuid IS 'Internal: what the channel namespace_created has for a name, always the same on a server that has MD5, and on one that has not.';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION tell_namespace_created()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER -- whoever may enqueue need not be able to read the settings
SET search_path FROM CURRENT
AS $$
BEGIN
    -- Whoever may call it may have it fire for a table of his own. The types of that may have casts that are functions of his, which would be
    -- called as the owner, so before this is known nothing is read of NEW.
    IF TG_RELID <> 'namespaces'::regclass THEN
        RAISE EXCEPTION 'tell_namespace_created is the trigger of the table namespaces of its schema, and of no other' USING ERRCODE = '42501';
    END IF;
    IF EXISTS (SELECT FROM taskgraph_settings s WHERE s.singleton AND s.outside_channels) THEN
        PERFORM pg_notify('namespace_created', json_build_object(
            'namespace_uuid', namespace_uuid(NEW.name), 'namespace_name', NEW.name, 'description', NULL::text, 'created_at', NEW.created_at,
            'triggered_by', 'namespace_creation', 'emitted_at', transaction_timestamp())::text);
    END IF;
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- With standard_conforming_strings off a backslash in a literal is something else.
ALTER FUNCTION check_conditions SET standard_conforming_strings = on;

SELECT revoke_from_public();

-- +goose Down

-- In the newest migration, where nothing is gone yet; the lock waits for transactions that have created tasks and not committed.
LOCK TABLE task_definitions, tasks, task_transitions, step_transitions IN ACCESS EXCLUSIVE MODE;
SELECT require_no_tasks();

ALTER FUNCTION check_conditions RESET standard_conforming_strings;

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION tell_namespace_created()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER -- whoever may enqueue need not be able to read the settings
SET search_path FROM CURRENT
AS $$
BEGIN
    -- Whoever may call it may have it fire for a table of his own. The types of that may have casts that are functions of his, which would be
    -- called as the owner, so before this is known nothing is read of NEW.
    IF TG_RELID <> 'namespaces'::regclass THEN
        RAISE EXCEPTION 'tell_namespace_created is the trigger of the table namespaces of its schema, and of no other' USING ERRCODE = '42501';
    END IF;
    IF EXISTS (SELECT FROM taskgraph_settings s WHERE s.singleton AND s.outside_channels) THEN
        PERFORM pg_notify('namespace_created', json_build_object(
            'namespace_uuid', md5('namespace ' || NEW.name)::uuid, 'namespace_name', NEW.name, 'description', NULL::text, 'created_at', NEW.created_at,
            'triggered_by', 'namespace_creation', 'emitted_at', transaction_timestamp())::text);
    END IF;
    RETURN NULL;
END
$$;
-- +goose StatementEnd

DROP FUNCTION namespace_uuid;
