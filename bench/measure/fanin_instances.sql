-- $1 instances, each with one running execution.
WITH added AS (
    INSERT INTO instances (instance_id, namespace, name)
    SELECT 'instance-' || n, 'default', 'fan-in' FROM generate_series(1, $1::int) AS n
    RETURNING instance_id
)
INSERT INTO executions (instance_id, execution_id) SELECT instance_id, 1 FROM added
