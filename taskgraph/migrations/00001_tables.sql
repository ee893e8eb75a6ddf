-- The tables of the task graph: definitions, tasks made of steps, and what became of them.
-- Runs with search_path = <schema>, pg_temp, after the migrations of the Provider, whose functions it calls.

-- +goose Up

CREATE TABLE task_definitions (
    task_definition_id uuid        PRIMARY KEY,
    namespace          text        NOT NULL
                       CONSTRAINT task_definitions_namespace_check CHECK (namespace ~ '^[a-z][a-z0-9_-]{0,39}$'),
    name               text        NOT NULL CONSTRAINT task_definitions_name_check CHECK (octet_length(name) BETWEEN 1 AND 255),
    version            text        NOT NULL DEFAULT '0.1.0' CONSTRAINT task_definitions_version_check CHECK (octet_length(version) BETWEEN 1 AND 255),
    description        text,
    configuration      jsonb       NOT NULL DEFAULT '{}',
    drain              boolean     NOT NULL GENERATED ALWAYS AS (coalesce(configuration ->> 'on_failure' = 'drain', false)) STORED,
    created_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (namespace, name, version)
);
COMMENT ON TABLE task_definitions IS 'What tasks of a name and version are made of. A version never changes once it is registered: tasks of it may be under way.';
COMMENT ON COLUMN task_definitions.configuration IS 'The definition as it was registered, in the form of its YAML; lifecycle and failure policy are read from here.';
COMMENT ON COLUMN task_definitions.drain IS 'The failure policy, for turns: they do not unpack all of the configuration for it.';

CREATE TABLE step_definitions (
    step_definition_id uuid        PRIMARY KEY,
    task_definition_id uuid        NOT NULL REFERENCES task_definitions,
    position           integer     NOT NULL,
    name               text        NOT NULL CONSTRAINT step_definitions_name_check CHECK (octet_length(name) BETWEEN 1 AND 255),
    description        text,
    handler            text        CONSTRAINT step_definitions_handler_check CHECK (octet_length(handler) BETWEEN 1 AND 255),
    retryable          boolean     NOT NULL DEFAULT true,
    max_attempts       integer     NOT NULL DEFAULT 3 CONSTRAINT step_definitions_max_attempts_check CHECK (max_attempts >= 0),
    backoff_seconds    integer     CONSTRAINT step_definitions_backoff_check CHECK (backoff_seconds >= 0),
    timeout            interval    CONSTRAINT step_definitions_timeout_check CHECK (timeout > interval '0'),
    tag                text        NOT NULL DEFAULT '' CONSTRAINT step_definitions_tag_check CHECK (octet_length(tag) <= 200),
    limit_key          text        CONSTRAINT step_definitions_limit_key_check CHECK (octet_length(limit_key) BETWEEN 1 AND 255),
    inputs             jsonb,
    parents            integer     NOT NULL DEFAULT 0,
    on_demand          boolean     NOT NULL DEFAULT false,
    sub_task_name      text,
    sub_task_version   text,
    created_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (task_definition_id, name),
    UNIQUE (task_definition_id, position),
    CONSTRAINT step_definitions_kind_check CHECK ((handler IS NULL) = (sub_task_name IS NOT NULL) AND (sub_task_name IS NULL) = (sub_task_version IS NULL))
);
-- advance_task: whether tasks of a definition have steps that are tasks of their own
CREATE INDEX step_definitions_sub_task_idx ON step_definitions (task_definition_id) WHERE handler IS NULL;
COMMENT ON TABLE step_definitions IS 'The steps of a task definition.';
COMMENT ON COLUMN step_definitions.position IS 'Place in the definition, from 1; its steps have it too.';
COMMENT ON COLUMN step_definitions.handler IS 'Name of the function that runs the step. Null for one that is a task of its own.';
COMMENT ON COLUMN step_definitions.max_attempts IS 'Attempts in all, the first included; that one is always made.';
COMMENT ON COLUMN step_definitions.backoff_seconds IS 'How long to wait after each failure, instead of the exponential backoff.';
COMMENT ON COLUMN step_definitions.tag IS 'What a worker has to ask for, such as hardware; empty: nothing.';
COMMENT ON COLUMN step_definitions.limit_key IS 'With which other steps of the namespace it shares limits (see limits); null: with none.';
COMMENT ON COLUMN step_definitions.parents IS 'How many dependencies it has.';
COMMENT ON COLUMN step_definitions.on_demand IS 'Not part of a new task: steps of it are added while the task runs (add_steps).';

CREATE TABLE step_definition_dependencies (
    task_definition_id uuid    NOT NULL,
    parent             integer NOT NULL,
    child              integer NOT NULL,
    condition          jsonpath,
    PRIMARY KEY (task_definition_id, child, parent),
    FOREIGN KEY (task_definition_id, parent) REFERENCES step_definitions (task_definition_id, position),
    FOREIGN KEY (task_definition_id, child) REFERENCES step_definitions (task_definition_id, position),
    CONSTRAINT step_definition_dependencies_self_check CHECK (parent <> child)
);
-- the children of steps: register_task_definition
CREATE INDEX step_definition_dependencies_parent_idx ON step_definition_dependencies (task_definition_id, parent);
COMMENT ON TABLE step_definition_dependencies IS 'Which steps of a definition wait for which, by position.';
COMMENT ON COLUMN step_definition_dependencies.condition IS 'A predicate on the parent''s result without which the child is skipped; null: none.';

CREATE TABLE tasks (
    task_id               uuid        PRIMARY KEY,
    task_definition_id    uuid        NOT NULL REFERENCES task_definitions,
    namespace             text        NOT NULL,
    state                 text        NOT NULL DEFAULT 'pending'
                          CONSTRAINT tasks_state_check CHECK (state IN (
                              'pending', 'initializing', 'enqueuing_steps', 'steps_in_process', 'evaluating_results',
                              'waiting_for_dependencies', 'waiting_for_retry', 'blocked_by_failures',
                              'complete', 'error', 'cancelled', 'resolved_manually')),
    sort_key              integer     NOT NULL DEFAULT 1,
    state_entered_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    processor_id          uuid,
    complete              boolean     NOT NULL GENERATED ALWAYS AS (state = 'complete') STORED,
    priority              integer     NOT NULL DEFAULT 0,
    priority_key          float8      NOT NULL DEFAULT 0,
    deadline              timestamptz,
    retries               integer     NOT NULL DEFAULT 0,
    total_steps           integer     NOT NULL DEFAULT 0,
    completed_steps       integer     NOT NULL DEFAULT 0,
    start_at              timestamptz NOT NULL DEFAULT clock_timestamp(),
    next_ready_at         timestamptz,
    timer_at              timestamptz,
    requested_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    completed_at          timestamptz,
    initiator             text,
    source_system         text,
    reason                text,
    tags                  jsonb,
    context               jsonb       NOT NULL DEFAULT '{}',
    idempotency_key       text        UNIQUE CONSTRAINT tasks_idempotency_key_check CHECK (octet_length(idempotency_key) BETWEEN 1 AND 255),
    correlation_id        uuid        NOT NULL,
    parent_correlation_id uuid,
    parent_task_id        uuid,
    parent_step_id        uuid,
    depth                 integer     NOT NULL DEFAULT 0,
    created_at            timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at            timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (
    fillfactor = 70, -- a task changes state with each turn, and its row with that
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);
COMMENT ON TABLE tasks IS 'Tasks. A task is an instance of the Provider with the same id: a turn of it evaluates the task.';
COMMENT ON COLUMN tasks.state IS 'Current state; what compare-and-swap locks and compares. Every change is a row of task_transitions.';
COMMENT ON COLUMN tasks.sort_key IS 'That of the latest transition.';
COMMENT ON COLUMN tasks.processor_id IS 'Who brought it into its state, if that is an active one. It keeps others out only while the lease of its turn holds.';
COMMENT ON COLUMN tasks.priority_key IS 'Priority as of an instant that is the same for all, see task_priority_key: tasks are in the order of this whatever the time.';
COMMENT ON COLUMN tasks.start_at IS 'Before this instant it stays pending.';
COMMENT ON COLUMN tasks.retries IS 'How often a step of it went to wait for another attempt.';
COMMENT ON COLUMN tasks.completed_steps IS 'Of its steps, those that have passed_on.';
COMMENT ON COLUMN tasks.next_ready_at IS 'When it has, or will have, steps that are ready and not enqueued; null: as far as is known, not before something else happens to it. Whoever makes a step ready sets it.';
COMMENT ON COLUMN tasks.timer_at IS 'When the message is due that wakes it to begin, or for the next attempt of a step; null: there is none. The message has the dedup key retry/<task_id>.';
COMMENT ON COLUMN tasks.parent_step_id IS 'Step of parent_task_id that waits for the end of this task.';
COMMENT ON COLUMN tasks.depth IS 'How many tasks it is within: its parent, the parent of that, and so on.';

-- get_next_ready_tasks
CREATE INDEX tasks_ready_idx ON tasks (priority_key DESC, created_at, task_id) WHERE next_ready_at IS NOT NULL;
-- get_next_ready_tasks, for what is past its deadline
CREATE INDEX tasks_deadline_idx ON tasks (deadline) WHERE next_ready_at IS NOT NULL AND deadline IS NOT NULL;
-- stale and stuck tasks, recover_tasks, lists by state
CREATE INDEX tasks_state_idx ON tasks (state, state_entered_at) WHERE state NOT IN ('complete', 'cancelled', 'resolved_manually');
-- analytics, purge_tasks
CREATE INDEX tasks_completed_idx ON tasks (completed_at) WHERE completed_at IS NOT NULL;
-- analytics
CREATE INDEX tasks_created_idx ON tasks (created_at);
-- list_tasks and analytics by definition
CREATE INDEX tasks_definition_idx ON tasks (task_definition_id, created_at);
-- children of a task
CREATE INDEX tasks_parent_idx ON tasks (parent_task_id) WHERE parent_task_id IS NOT NULL;
-- end_sub_task: the latest task that a step was; cancel_sub_tasks
CREATE INDEX tasks_parent_step_idx ON tasks (parent_step_id, created_at, task_id) WHERE parent_step_id IS NOT NULL;

CREATE TABLE steps (
    step_id                 uuid        PRIMARY KEY,
    task_id                 uuid        NOT NULL REFERENCES tasks,
    step_definition_id      uuid        NOT NULL REFERENCES step_definitions,
    position                integer     NOT NULL,
    name                    text        NOT NULL CONSTRAINT steps_name_check CHECK (octet_length(name) BETWEEN 1 AND 255),
    state                   text        NOT NULL DEFAULT 'pending'
                            CONSTRAINT steps_state_check CHECK (state IN (
                                'pending', 'enqueued', 'in_progress', 'enqueued_for_orchestration', 'enqueued_as_error_for_orchestration',
                                'waiting_for_retry', 'complete', 'error', 'cancelled', 'resolved_manually')),
    sort_key                integer     NOT NULL DEFAULT 1,
    processor_id            uuid,
    retryable               boolean     NOT NULL DEFAULT true,
    max_attempts            integer     NOT NULL DEFAULT 3 CONSTRAINT steps_max_attempts_check CHECK (max_attempts >= 0),
    attempts                integer     NOT NULL DEFAULT 0 CONSTRAINT steps_attempts_check CHECK (attempts >= 0),
    in_process              boolean     NOT NULL GENERATED ALWAYS AS (state IN ('enqueued', 'in_progress', 'enqueued_for_orchestration', 'enqueued_as_error_for_orchestration')) STORED,
    processed               boolean     NOT NULL GENERATED ALWAYS AS (state IN ('complete', 'cancelled', 'resolved_manually')) STORED,
    processed_at            timestamptz,
    last_attempted_at       timestamptz,
    backoff_request_seconds integer     CONSTRAINT steps_backoff_check CHECK (backoff_request_seconds >= 0),
    next_attempt_at         timestamptz,
    inputs                  jsonb,
    results                 jsonb,
    checkpoint              jsonb,
    priority                integer     NOT NULL DEFAULT 0,
    work_item_id            bigint,
    claim                   uuid,
    unmet                   integer     NOT NULL DEFAULT 0,
    skip                    boolean     NOT NULL DEFAULT false,
    passed_on               boolean     NOT NULL DEFAULT false,
    created_at              timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at              timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (task_id, name),
    UNIQUE (task_id, step_id)
) WITH (
    fillfactor = 60, -- five changes of state in the life of a step
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);
COMMENT ON TABLE steps IS 'Steps of tasks. Running a step is a work item of the Provider.';
COMMENT ON COLUMN steps.position IS 'Number within its task, from 1; the activity id of its work item.';
COMMENT ON COLUMN steps.state IS 'Current state; what compare-and-swap locks and compares. Every change is a row of step_transitions.';
COMMENT ON COLUMN steps.in_process IS 'Mirror of the state, for those who know it from the documents.';
COMMENT ON COLUMN steps.processed IS 'The same.';
COMMENT ON COLUMN steps.next_attempt_at IS 'When it may be tried again, with waiting_for_retry, and with pending if somebody asked for that; computed once, when the attempt failed. With in_progress: what somebody asked for meanwhile.';
COMMENT ON COLUMN steps.backoff_request_seconds IS 'What the handler, or set_step_backoff_atomic, asked for.';
COMMENT ON COLUMN steps.results IS 'What its handler returned; with enqueued_as_error_for_orchestration, waiting_for_retry and error what went wrong, as {"error": text, "retryable": boolean}.';
COMMENT ON COLUMN steps.checkpoint IS 'What the handler noted to go on from, should it be called again.';
COMMENT ON COLUMN steps.work_item_id IS 'Work item that runs it; any other is out of date.';
COMMENT ON COLUMN steps.claim IS 'Token of the claim of the work item by which the attempt began that is in progress: to begin it again changes nothing.';
COMMENT ON COLUMN steps.unmet IS 'Dependencies that are not passed on to it yet. Invariant: the number of its rows in step_dependencies whose parent has not passed_on.';
COMMENT ON COLUMN steps.skip IS 'The condition of a dependency did not hold: it will be completed without being run.';
COMMENT ON COLUMN steps.passed_on IS 'It is complete or resolved_manually, and its children know (unmet). Turns of the task alone set it.';

-- advance_task: what a task has in each state
CREATE INDEX steps_state_idx ON steps (task_id, state);
-- advance_task: what can be enqueued, in the order of that
CREATE INDEX steps_ready_idx ON steps (task_id, step_id) WHERE state = 'pending' AND unmet = 0;
-- advance_task: what is not to be run
CREATE INDEX steps_skip_idx ON steps (task_id) WHERE state IN ('pending', 'waiting_for_retry') AND unmet = 0 AND skip;
-- advance_task: whose next attempt is due, or is the next to be
CREATE INDEX steps_next_attempt_idx ON steps (task_id, next_attempt_at) WHERE state IN ('pending', 'waiting_for_retry') AND next_attempt_at IS NOT NULL;
-- advance_task: what is complete, and not passed on
CREATE INDEX steps_unpassed_idx ON steps (task_id) WHERE NOT passed_on AND state IN ('complete', 'resolved_manually');
-- slowest steps, analytics
CREATE INDEX steps_processed_idx ON steps (processed_at) WHERE processed_at IS NOT NULL;
-- steps by definition
CREATE INDEX steps_definition_idx ON steps (step_definition_id);

CREATE TABLE step_dependencies (
    task_id      uuid        NOT NULL,
    from_step_id uuid        NOT NULL,
    to_step_id   uuid        NOT NULL,
    name         text        NOT NULL DEFAULT 'provides' CONSTRAINT step_dependencies_name_check CHECK (octet_length(name) BETWEEN 1 AND 255),
    condition    jsonpath,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (from_step_id, to_step_id, name),
    FOREIGN KEY (task_id, from_step_id) REFERENCES steps (task_id, step_id),
    FOREIGN KEY (task_id, to_step_id) REFERENCES steps (task_id, step_id),
    CONSTRAINT step_dependencies_self_check CHECK (from_step_id <> to_step_id)
);
COMMENT ON TABLE step_dependencies IS 'Which step (to_step_id) waits for which (from_step_id), within a task.';
-- parents of a step
CREATE INDEX step_dependencies_to_idx ON step_dependencies (to_step_id, from_step_id);
-- all of a task
CREATE INDEX step_dependencies_task_idx ON step_dependencies (task_id);

-- The two logs of transitions have no foreign keys: they are written by the functions below alone, with the change that they tell
-- of, and a check for each row would be a tenth of a turn. They share their ids, so that they can be read as one.
CREATE SEQUENCE transition_ids;
COMMENT ON SEQUENCE transition_ids IS 'Numbers of the transitions of tasks and steps.';

CREATE TABLE task_transitions (
    transition_id bigint      NOT NULL DEFAULT nextval('transition_ids'),
    task_id       uuid        NOT NULL,
    sort_key      integer     NOT NULL,
    from_state    text,
    to_state      text        NOT NULL,
    processor_id  uuid,
    metadata      jsonb       NOT NULL DEFAULT '{}',
    xact          xid8        NOT NULL DEFAULT pg_current_xact_id(),
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (task_id, sort_key)
) WITH (autovacuum_vacuum_insert_scale_factor = 0.1);
ALTER TABLE task_transitions ADD CONSTRAINT task_transitions_states_check CHECK ( -- from_state is null in the first one of each
    from_state IN ('pending', 'initializing', 'enqueuing_steps', 'steps_in_process', 'evaluating_results', 'waiting_for_dependencies',
                   'waiting_for_retry', 'blocked_by_failures', 'complete', 'error', 'cancelled', 'resolved_manually')
    AND to_state IN ('pending', 'initializing', 'enqueuing_steps', 'steps_in_process', 'evaluating_results', 'waiting_for_dependencies',
                     'waiting_for_retry', 'blocked_by_failures', 'complete', 'error', 'cancelled', 'resolved_manually'));
COMMENT ON TABLE task_transitions IS 'Every state that tasks came into, append-only. The latest of a task is the one with its sort_key.';
COMMENT ON COLUMN task_transitions.xact IS 'Transaction that wrote it: transitions are read in the order of (xact, transition_id), and only those older than every open transaction, so that none is passed over (read_transitions).';
-- read_transitions
CREATE INDEX task_transitions_cursor_idx ON task_transitions (xact, transition_id);

CREATE TABLE step_transitions (
    transition_id bigint      NOT NULL DEFAULT nextval('transition_ids'),
    step_id       uuid        NOT NULL,
    sort_key      integer     NOT NULL,
    task_id       uuid        NOT NULL,
    from_state    text,
    to_state      text        NOT NULL,
    processor_id  uuid,
    metadata      jsonb       NOT NULL DEFAULT '{}',
    xact          xid8        NOT NULL DEFAULT pg_current_xact_id(),
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (step_id, sort_key)
) WITH (autovacuum_vacuum_insert_scale_factor = 0.1);
ALTER TABLE step_transitions ADD CONSTRAINT step_transitions_states_check CHECK (
    from_state IN ('pending', 'enqueued', 'in_progress', 'enqueued_for_orchestration', 'enqueued_as_error_for_orchestration',
                   'waiting_for_retry', 'complete', 'error', 'cancelled', 'resolved_manually')
    AND to_state IN ('pending', 'enqueued', 'in_progress', 'enqueued_for_orchestration', 'enqueued_as_error_for_orchestration',
                     'waiting_for_retry', 'complete', 'error', 'cancelled', 'resolved_manually'));
COMMENT ON TABLE step_transitions IS 'Every state that steps came into, append-only.';
-- read_transitions
CREATE INDEX step_transitions_cursor_idx ON step_transitions (xact, transition_id);

CREATE TABLE task_dlq (
    dlq_entry_id      uuid        PRIMARY KEY,
    task_id           uuid        NOT NULL REFERENCES tasks,
    original_state    text        NOT NULL,
    reason            text        NOT NULL CONSTRAINT task_dlq_reason_check CHECK (reason IN (
                          'staleness_timeout', 'max_retries_exceeded', 'dependency_cycle_detected', 'worker_unavailable', 'manual_dlq')),
    snapshot          jsonb       NOT NULL DEFAULT '{}',
    resolution_status text        NOT NULL DEFAULT 'pending' CONSTRAINT task_dlq_status_check CHECK (resolution_status IN (
                          'pending', 'manually_resolved', 'permanently_failed', 'cancelled')),
    resolved_at       timestamptz,
    resolved_by       text,
    resolution_notes  text,
    metadata          jsonb       NOT NULL DEFAULT '{}',
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at        timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE task_dlq IS 'Tasks that somebody has to look into. A record of the investigation, and not the queue of dead letters: the task is put right by what is done to its steps.';
CREATE UNIQUE INDEX task_dlq_pending_idx ON task_dlq (task_id) WHERE resolution_status = 'pending';
-- purge_tasks
CREATE INDEX task_dlq_task_idx ON task_dlq (task_id);
-- lists
CREATE INDEX task_dlq_created_idx ON task_dlq (resolution_status, created_at);

CREATE TABLE taskgraph_settings (
    singleton          boolean NOT NULL DEFAULT true PRIMARY KEY CONSTRAINT taskgraph_settings_singleton_check CHECK (singleton),
    outside_channels   boolean NOT NULL DEFAULT false,
    age_weight         float8  NOT NULL DEFAULT 0.1 CONSTRAINT taskgraph_settings_age_check CHECK (age_weight >= 0 AND age_weight <= 1e6),
    retry_weight       float8  NOT NULL DEFAULT 0 CONSTRAINT taskgraph_settings_retry_check CHECK (retry_weight >= 0 AND retry_weight <= 1e6),
    deadline_weight    float8  NOT NULL DEFAULT 0 CONSTRAINT taskgraph_settings_deadline_check CHECK (deadline_weight >= 0 AND deadline_weight <= 1e6),
    namespace_priority jsonb   NOT NULL DEFAULT '{}' CONSTRAINT taskgraph_settings_namespaces_check CHECK (jsonb_typeof(namespace_priority) = 'object')
);
COMMENT ON TABLE taskgraph_settings IS 'What holds for all nodes; one row. See set_taskgraph_settings.';
COMMENT ON COLUMN taskgraph_settings.outside_channels IS 'Whether changes are told on the channels for listeners that know nothing of pgwake.';
COMMENT ON COLUMN taskgraph_settings.age_weight IS 'Levels of priority that a task gains in an hour.';
COMMENT ON COLUMN taskgraph_settings.retry_weight IS 'Levels for each retry of one of its steps.';
COMMENT ON COLUMN taskgraph_settings.deadline_weight IS 'Levels for each hour past its deadline.';
COMMENT ON COLUMN taskgraph_settings.namespace_priority IS 'Levels by namespace.';
INSERT INTO taskgraph_settings DEFAULT VALUES;

-- Settings, and what was added up of the runs of tasks that are gone (run_rollups), go with the tables without being asked for: the
-- ones are set anew in a moment, and the others can be had from nowhere but say nothing that anything depends on.
-- +goose StatementBegin
CREATE FUNCTION require_no_tasks() RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF EXISTS (SELECT FROM task_definitions) OR EXISTS (SELECT FROM tasks) OR EXISTS (SELECT FROM task_transitions) OR EXISTS (SELECT FROM step_transitions) THEN
        RAISE EXCEPTION 'schema % still holds tasks or definitions; remove them before migrating down', current_schema()
            USING ERRCODE = 'PW006';
    END IF;
END
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION require_no_tasks IS 'Internal: fails with PW006 while a task, a definition or a transition would be lost by migrating down.';

-- +goose Down

SELECT require_no_tasks();
DROP FUNCTION require_no_tasks;
DROP TABLE taskgraph_settings, task_dlq, step_transitions, task_transitions, step_dependencies, steps, tasks, step_definition_dependencies,
    step_definitions, task_definitions;
DROP SEQUENCE transition_ids;
