// Package rpcrdma carries ONC RPC calls over RDMA, in both directions of one connection: RPC-over-RDMA
// version 1 (RFC 8166), calls by the side that has accepted the connection (RFC 8167), and the private
// data by which both ends announce what they support (RFC 8797). Package rdma is the transport below.
//
// # Calls
//
// A Conn is one connection. Dial, Initiate and Accept return one. Conn.Do makes a Call, and Programs
// answer the calls of the peer, at both ends. A Server accepts connections, and a Client connects again
// after a loss and retransmits what was not answered.
//
// The end that has connected makes calls in the forward direction. The other end makes calls in the
// reverse direction after Conn.EnableReverse, because only the program above knows when the peer expects
// them (RFC 8167, section 6).
//
// # Data
//
// An Item of a call moves in a read chunk if the message is too long for one Send: the peer reads it by
// RDMA Read from the memory that the caller named. Results that a caller expects in Call.Into come by RDMA
// Write, straight into that memory. Neither is copied above package rdma. What remains of a message
// moves in a chunk of its own if it is too long.
//
// # Limits
//
// Whatever a peer does costs its own connection at most. Config bounds the calls that it may have
// unanswered, the memory for its chunks, and how long it may stay silent while it owes something.
// A peer that exceeds its credits, or invalidates an STag of another call, loses the connection.
package rpcrdma
