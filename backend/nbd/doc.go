// Package nbd is a backend.Store on an export of a server of the NBD protocol (https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md),
// like qemu-nbd, qemu-storage-daemon and nbdkit.
//
// A Store has one connection, which carries any number of requests at a time. When it breaks, the Store connects again, and calls wait meanwhile:
// nothing fails, and nothing that a caller was told is lost. For that the Store keeps a copy of what it has changed since the last flush, in a
// bounded journal, and changes it again on the new connection, before it sends what the server has not answered. So a server that is
// restarted, or killed, costs time only. What the server itself does not keep, like the memory of nbdkit, it cannot bring back.
package nbd
