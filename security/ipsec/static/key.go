package static

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/iser-target/iser-target/security/ipsec"
	"golang.org/x/sys/unix"
)

// maxKeyFile bounds a key file, in bytes.
const maxKeyFile = 4096

// keys are those of one SA.
type keys struct{ encryption, integrity []byte }

func (k keys) equal(o keys) bool {
	return bytes.Equal(k.encryption, o.encryption) && bytes.Equal(k.integrity, o.integrity)
}

func (k keys) wipe() {
	clear(k.encryption)
	clear(k.integrity)
}

// readKeys reads the keys of a suite. Like the key material of IKE, that of the encryption comes first (RFC 4303, section 2.7; RFC 7296, section
// 2.17). The file must belong to root or to the user of the process, and nobody else may have any right to it.
func readKeys(path string, suite ipsec.Suite) (keys, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		if errors.Is(err, unix.ELOOP) {
			return keys{}, fmt.Errorf("key file %s: it is a symbolic link. Name the file itself", path)
		}
		return keys{}, fmt.Errorf("key file: %w", err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return keys{}, fmt.Errorf("key file %s: %w", path, err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return keys{}, fmt.Errorf("key file %s: it is not a regular file", path)
	case st.Mode&0o077 != 0:
		return keys{}, fmt.Errorf("key file %s: others may use it: mode %04o. Run: chmod 0600 %s", path, st.Mode&0o7777, path)
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return keys{}, fmt.Errorf("key file %s: user %d owns it. Run: chown root %s", path, st.Uid, path)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxKeyFile+1))
	defer clear(text)
	if err != nil {
		return keys{}, fmt.Errorf("key file %s: %w", path, err)
	}
	digits := bytes.TrimSpace(text)
	digits = bytes.TrimPrefix(digits, []byte("0x"))
	encryption, integrity := suite.Encryption.KeyBits/8, suite.Authentication.KeyBits/8
	if len(text) > maxKeyFile || len(digits) != 2*(encryption+integrity) {
		// Neither the length of a wrong key nor a part of it is told.
		return keys{}, fmt.Errorf("key file %s: it must have one line with %d hexadecimal digits: %d bytes for the encryption and %d for the integrity of %s. "+
			"Run: openssl rand -hex %d > %s", path, 2*(encryption+integrity), encryption, integrity, suite.Name, encryption+integrity, path)
	}
	key := make([]byte, encryption+integrity)
	if _, err := hex.Decode(key, digits); err != nil {
		return keys{}, fmt.Errorf("key file %s: it has characters other than hexadecimal digits", path)
	}
	if allSame(key) {
		clear(key)
		return keys{}, fmt.Errorf("key file %s: all bytes are the same. Run: openssl rand -hex %d > %s", path, encryption+integrity, path)
	}
	return keys{key[:encryption:encryption], key[encryption:]}, nil
}

func allSame(b []byte) bool {
	return len(b) == 0 || bytes.Count(b, b[:1]) == len(b)
}
