// Package xfrm is the driver that asks the kernel: it reads SAs and policies over netlink, is kept current by the kernel's events, and sets
// the policies of sockets (RFC 4301, RFC 7146). It needs CAP_NET_ADMIN, and knows no IKE identities.
package xfrm
