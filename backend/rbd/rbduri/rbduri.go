// Package rbduri parses URIs of RBD images.
package rbduri

import (
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
)

// An Image says where an image is.
type Image struct {
	Pool, Namespace, Name string // without a namespace it is empty
	Conf                  string // path of ceph.conf, which names the monitors
	User                  string // of Ceph: ID of client.ID
}

// What a URI means that names neither.
const (
	DefaultConf = "/etc/ceph/ceph.conf"
	DefaultUser = "admin"
)

// maxName bounds each name, in bytes, as librbd does for images.
const maxName = 95

var errForm = errors.New("not a URI like rbd:POOL/IMAGE or rbd:POOL/NAMESPACE/IMAGE?conf=/etc/ceph/ceph.conf&id=USER")

// Parse parses rbd:POOL/IMAGE or rbd:POOL/NAMESPACE/IMAGE. The parameter conf is the absolute path of ceph.conf, and id the user of Ceph, without
// client. before it.
func Parse(s string) (*Image, error) {
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "rbd" || u.Opaque == "" || u.Fragment != "" {
		return nil, errForm
	}
	names := strings.Split(u.Opaque, "/")
	if len(names) != 2 && len(names) != 3 {
		return nil, errForm
	}
	for i, kind := range []string{"pool", "image"} {
		if err := checkName(kind, names[i*(len(names)-1)]); err != nil {
			return nil, err
		}
	}
	image := &Image{Pool: names[0], Name: names[len(names)-1], Conf: DefaultConf, User: DefaultUser}
	if len(names) == 3 {
		image.Namespace = names[1]
		if err := checkName("namespace", image.Namespace); err != nil {
			return nil, err
		}
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return nil, fmt.Errorf("parameters of the URI: %w", err)
	}
	for name, values := range query {
		switch {
		case name != "conf" && name != "id":
			return nil, fmt.Errorf("parameter %q of the URI: must be conf or id", name)
		case len(values) > 1:
			return nil, fmt.Errorf("parameter %q of the URI occurs twice", name)
		case name == "conf":
			image.Conf = values[0]
		default:
			image.User = values[0]
		}
	}
	if !filepath.IsAbs(image.Conf) || strings.ContainsAny(image.Conf, ",\x00") {
		return nil, fmt.Errorf("conf: must be an absolute path without commas, not %q", image.Conf)
	}
	return image, checkName("id", image.User)
}

// checkName refuses what Ceph or its programs would understand as more than a name.
func checkName(kind, s string) error {
	bad := strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r >= 0x7f || strings.ContainsRune(`/@%\"'`, r) })
	if s == "" || len(s) > maxName || strings.HasPrefix(s, "-") || bad {
		return fmt.Errorf(`%s %q: must be 1 to %d printable ASCII characters, without spaces and / @ %% \ " ', and must not begin with -`, kind, s, maxName)
	}
	return nil
}

// String returns POOL/IMAGE or POOL/NAMESPACE/IMAGE.
func (i *Image) String() string {
	if i.Namespace == "" {
		return i.Pool + "/" + i.Name
	}
	return i.Pool + "/" + i.Namespace + "/" + i.Name
}
