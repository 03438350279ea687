//go:build !invariants

package iscsi

// poison is on under the invariants build tag only.
const poison = false
