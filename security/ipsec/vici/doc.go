// Package vici asks strongSwan which IKE identity has the keys of an SA. The kernel says which SAs and policies cover a connection; strongSwan
// adds what only a key exchange knows: the IKE identities of both ends, that keys were negotiated, and lifetimes.
//
// The protocol is strongSwan's vici, over the Unix socket of charon. Messages and packets are those of
// github.com/strongswan/govici; this package bounds their size and the time of each request.
package vici
