package eventbus

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: which nodes are there?

// NodeInfo is what is known of a node.
type NodeInfo struct {
	ID, Namespace            string
	DisplayName, Description string
	Metadata                 json.RawMessage
	RegisteredAt             time.Time // for the first time
	LastHeartbeat            time.Time
	StoppedAt                time.Time // when it ended as it should; zero: it has not

	// Live says that the node was not stopped, that its latest heartbeat is not older than three of its intervals, and that the LISTEN
	// connection of its Provider is there. So a process that dies is not live from that moment on. A Provider that has lost this connection
	// alone has its node live again within a round trip, by heartbeats; the same goes for one that has none.
	Live bool
}

// Nodes returns the nodes of the namespace, also those that have ended.
func (b *Bus) Nodes(ctx context.Context) ([]NodeInfo, error) {
	return query(ctx, b, verb{op: "list nodes", function: "list_nodes",
		columns: "node_id, namespace, display_name, description, metadata::pg_catalog.text, registered_at, last_heartbeat, stopped_at, live", args: []any{b.namespace}},
		func(row pgx.CollectableRow) (n NodeInfo, err error) {
			var metadata string
			var stopped *time.Time
			err = row.Scan(&n.ID, &n.Namespace, &n.DisplayName, &n.Description, &metadata, &n.RegisteredAt, &n.LastHeartbeat, &stopped, &n.Live)
			if n.Metadata = json.RawMessage(metadata); stopped != nil {
				n.StoppedAt = *stopped
			}
			return n, err
		})
}

var notInNodeID = regexp.MustCompile(`[^A-Za-z0-9._:-]+`)

const longestNodeID = 128

// nodeID returns what an id becomes that a node is to have: other characters than letters, digits, '.', '_', ':' and '-' become '-'. Of "" it is
// the name of the machine and something random.
func nodeID(wish string) string {
	id := strings.TrimLeft(notInNodeID.ReplaceAllString(wish, "-"), "._:-")
	if id != "" {
		return id[:min(len(id), longestNodeID)]
	}
	host, _ := os.Hostname()
	host = strings.TrimLeft(notInNodeID.ReplaceAllString(host, "-"), "._:-")
	if host == "" {
		host = "node"
	}
	return host[:min(len(host), longestNodeID/2)] + "-" + strings.ToLower(rand.Text())
}
