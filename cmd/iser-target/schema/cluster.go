package schema

// A ClusterState is the group of gateways that the target is in, as the target knows it.
type ClusterState struct {
	Name     string           `json:"name"`               // of this gateway
	Reason   string           `json:"reason,omitempty"`   // why it serves no shared LUN
	Conflict string           `json:"conflict,omitempty"` // what is wrong with the portal groups
	Gateways []GatewayState   `json:"gateways"`           // that are there
	LUNs     []SharedLUNState `json:"luns"`               // that this gateway has a part in
	Config   int64            `json:"config,omitempty"`   // newest revision of the targets of the cluster that this gateway has seen
}

// A GatewayState is a gateway of a group.
type GatewayState struct {
	Name     string `json:"name"`
	Version  string `json:"version"`
	Draining bool   `json:"draining,omitempty"` // it takes no LUN
	LUNs     int    `json:"luns"`               // that it serves, of those in ClusterState
	Unable   int    `json:"unable,omitempty"`   // LUNs of those that it could not open, or has no part in
	// Config is the revision of the targets of the cluster that it runs, and ConfigReason why it does not run a newer one.
	Config       int64  `json:"config,omitempty"`
	ConfigReason string `json:"config_reason,omitempty"`
}

// A ClusterConfig is what the gateways of a cluster have in common: its targets, as they run on one gateway.
type ClusterConfig struct {
	Revision int64  `json:"revision"`         // 0: etcd has none
	Newest   int64  `json:"newest"`           // of the text that etcd has
	Reason   string `json:"reason,omitempty"` // why the newest does not run there
	Text     string `json:"text"`             // YAML, with the key targets
}

// A SharedLUNState is a LUN that gateways share.
type SharedLUNState struct {
	Target    string `json:"target"`
	ID        int    `json:"id"`
	NAA       string `json:"naa"`                 // of the identity
	Owner     string `json:"owner"`               // the gateway that serves it; empty: none
	Favorite  string `json:"favorite"`            // the gateway that should
	Preferred string `json:"preferred,omitempty"` // that somebody has chosen
	Here      bool   `json:"here"`                // this gateway serves it
}

// A HandOverRequest makes another gateway the owner of a shared LUN. An empty To ends an earlier one.
type HandOverRequest struct {
	To string `json:"to"`
}

// A ClusterMove is a LUN that goes to another gateway. Target is empty if this gateway has no part in it.
type ClusterMove struct {
	Target string `json:"target,omitempty"`
	ID     int    `json:"id"`
	NAA    string `json:"naa"`
	From   string `json:"from"`
	To     string `json:"to"`
}
