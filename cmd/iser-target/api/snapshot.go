package api

import (
	"cmp"
	"net/http"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

func (s *Server) snapshots(r *http.Request) (any, error) {
	target := r.URL.Query().Get("target")
	if target != "" {
		target = normalized(target)
	}
	return s.d.Snapshots(r.Context(), target)
}

// snapshotOf returns the number of the LUN in the path of r, and whether nothing is to be changed. The caller must be one that may name the
// file of the snapshot.
func (s *Server) snapshotOf(r *http.Request, snapshot string) (id int, dry bool, err error) {
	if id, err = lunID(r); err != nil {
		return 0, false, err
	}
	if err = flag(r.URL.Query(), "dry_run", &dry); err != nil {
		return 0, false, err
	}
	path, err := s.d.SnapshotPath(r.Context(), name(r), id, snapshot)
	if err == nil {
		err = s.checkPath(r, path, unix.S_IFREG)
	}
	return id, dry, err
}

func (s *Server) makeSnapshot(r *http.Request) (any, error) {
	var req schema.SnapshotRequest
	if err := body(r, &req); err != nil {
		return nil, err
	}
	id, dry, err := s.snapshotOf(r, req.Name)
	if err != nil {
		return nil, err
	}
	return s.d.Snapshot(r.Context(), name(r), id, req.Name, dry)
}

func (s *Server) deleteSnapshot(r *http.Request) (any, error) {
	snapshot := r.PathValue("snapshot")
	id, dry, err := s.snapshotOf(r, snapshot)
	if err != nil {
		return nil, err
	}
	return s.d.DeleteSnapshot(r.Context(), name(r), id, snapshot, dry)
}

// checkSource completes the source of a clone, and returns an error unless the caller of r may name its file.
func (s *Server) checkSource(r *http.Request, from *schema.CloneSource) error {
	from.Target = normalized(cmp.Or(from.Target, name(r)))
	if from.Snapshot == "" {
		return nil // of a LUN that is served, a caller that makes LUNs can let anybody read anyway
	}
	path, err := s.d.SnapshotPath(r.Context(), from.Target, from.LUN, from.Snapshot)
	if err != nil {
		return err
	}
	return s.checkPath(r, path, unix.S_IFREG)
}
