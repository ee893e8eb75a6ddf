-- What these wait for.
INSERT INTO step_dependencies (task_id, from_step_id, to_step_id)
SELECT ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, ('00000000-0000-7000-9' || lpad(to_hex(e.parent), 3, '0') || '-' || lpad(to_hex(n), 12, '0'))::uuid,
       ('00000000-0000-7000-9' || lpad(to_hex(e.child), 3, '0') || '-' || lpad(to_hex(n), 12, '0'))::uuid
  FROM generate_series($1::bigint, $2::bigint) AS n
 CROSS JOIN (SELECT x.* FROM step_definition_dependencies x JOIN task_definitions d ON d.task_definition_id = x.task_definition_id WHERE d.name = 'many') AS e
