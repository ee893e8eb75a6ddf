-- What is replicated of an execution can be told from the others.
--
-- Logical replication does not send generated columns, unless the publication says so (PostgreSQL 18), and the primary key is one. A subscription
-- stopped at the first row that changed; since PostgreSQL 18 the publisher refuses to change any.

-- +goose Up

-- Before the index is built, and not after: who is in the way is so then, and nothing is done in vain.
LOCK TABLE gowf_instances IN ACCESS EXCLUSIVE MODE;

-- The execution id first: nothing is looked up by it, so no plan takes this index for gowf_instances_active_idx. Both ids together are shorter than
-- an instance id may be.
CREATE UNIQUE INDEX gowf_instances_identity_idx ON gowf_instances (execution_id, instance_id);
ALTER TABLE gowf_instances REPLICA IDENTITY USING INDEX gowf_instances_identity_idx;

-- +goose Down

-- In the newest migration, where nothing is gone yet.
LOCK TABLE gowf_instances IN ACCESS EXCLUSIVE MODE;
SELECT gowf_require_none();
ALTER TABLE gowf_instances REPLICA IDENTITY DEFAULT;
DROP INDEX gowf_instances_identity_idx;
