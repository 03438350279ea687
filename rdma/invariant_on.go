//go:build invariants

package rdma

const invariants = true
