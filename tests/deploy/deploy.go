// Package deploy checks the files for container engines, Kubernetes and Ansible against each other, and against the
// program. It has tests only.
package deploy
