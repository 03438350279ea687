// Package rbd is a backend.Store on an image of Ceph's RADOS block device (RBD).
//
// Each Store has a qemu-storage-daemon of its own as a child process. librbd is in that process, so Ceph's libraries cannot take the
// target down, and a cluster that hangs costs this Store only. The daemon is driven by QMP, the protocol of QEMU's monitors, on a pair of
// sockets, and exports the image over NBD on a Unix socket, where package nbd is the client. The target listens on that socket itself, and the daemon
// inherits it. So a connection waits while the daemon is started again, after it was killed or has lost its right to the image.
//
// A client of RBD that dies leaves its exclusive lock on the image behind, which others respect for half a minute. So the Store
// knows its client, breaks that lock, and makes Ceph refuse what the dead client may still have under way.
package rbd
