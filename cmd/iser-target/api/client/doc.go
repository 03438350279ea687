// Package client is the Go client of the control API. Programs use it to manage a running target: targets, LUNs, snapshots, initiators,
// CHAP users, portals, sessions, reservations, limits, events, and the whole configuration. The commands of iser-target use it,
// too, so it can do what they can.
//
// The package is next to the server and its openapi.yaml, because a change of the API changes all three. It imports package schema,
// whose types are the bodies of requests and answers, and of the target only RDMA, for control through a portal. It imports no
// package of the configuration file and no library of the command line.
//
// # Addresses
//
// [New] takes the path of a Unix socket: control.socket of the configuration. The target knows the caller by its user.
// [NewTLS] takes host:port, which is control.listen, or rdma://host:port, which is a portal with control: true. Both require
// a certificate (mutual TLS 1.3). Neither function connects; the first request does.
//
// # Time
//
// Each method ends with its context, which is the only bound of a short request: give it a deadline, or call [Client.Limit]. That
// bounds the time in which the target answers, or shows that it works on a change. Long work (MakeLUN, GrowLUN, Capture) and streams (Events
// with follow, Follow) may take as long as they make progress, and Limit bounds the time without any. A stream has a heartbeat every few
// seconds and ends after a minute without one.
//
// # Shapes and units
//
// Names and addresses are strings as in the configuration file: iqn.2026-11.io.example:store, 192.0.2.1:3260. LUNs and
// sessions (by TSIH) have numbers. In answers, sizes are bytes, durations are seconds, and counters only grow. In requests, sizes
// and durations are text as in the file: 10GiB, 30s. Times are RFC 3339.
//
// A change returns a [schema.Plan]: its steps, and the sessions that each disturbs. With [schema.Options].DryRun nothing
// is changed, and the plan says what would be, including the steps that would be refused. Without it, either all steps are done and in the
// configuration file, or none is.
//
// # Errors
//
// An error is a [*schema.Error]. Its Code says what went wrong, and errors.Is finds it:
//
//	code              meaning                                                what a program does
//	schema.NotFound   the target, LUN, portal, session or user is not there  give up, or create it
//	schema.Exists     it is there already                                    compare it
//	schema.Refused    the change would disturb sessions or lose data         see Needs and Plan, ask, repeat with Options
//	schema.Edited     a conflict: somebody edited the configuration file     let a person apply the edit
//	schema.Invalid    the request is wrong; Problems names the keys          mend it
//	schema.Forbidden  the caller's role does not suffice                     give up
//	schema.Busy       another change, or a limit, took too long              try again
//	schema.Unreached  no answer; after a change, it may have been made       try again; after a change, look first
//	schema.Failed     the target, or the client, could not do it             report it
//
// Only Unreached, and Failed because of a canceled context, leave open whether a change was made. Every other error means that nothing was changed.
// Where a context ended, errors.Is also finds context.Canceled or context.DeadlineExceeded. Message and Hint are for people. Hint speaks of the
// flags of the command line.
package client
