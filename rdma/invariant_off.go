//go:build !invariants

package rdma

const invariants = false
