// Package ipsec decides whether IPsec protects a connection as a profile requires (RFC 7146, RFC 3723, RFC 7143, section
// 9.3).
//
// The kernel does ESP, and an IKE daemon or an administrator makes the keys. A Driver knows which security associations (SAs)
// and policies cover a Flow, and reports when they change. Judge compares them with a Profile and gives a Verdict. A Guard
// asks both at each Moment of a connection: when it is accepted, when its initiator logs in, and when keys change.
package ipsec
