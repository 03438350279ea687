package httpd

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"sync"
	"time"
)

const (
	// rereadEvery is the shortest time between two looks at the files of a Web.
	rereadEvery = time.Second
	// answerTime bounds the wait for a file system that does not answer.
	answerTime = time.Second
)

// A Certificate is one that a Web uses, or one by which it checks those of clients.
type Certificate struct {
	File    string // that has it
	Subject string
	Expires time.Time
}

// expiries has the certificates of a Web, as of the last time that its files could be read.
type expiries struct {
	mu      sync.Mutex
	looked  time.Time
	reading chan struct{} // closed at the end of the look in progress; nil: none is
	list    []Certificate
}

// Certificates returns the certificates that w uses now, with those that sign the ones of clients. It reads the files
// again if that was a second ago or more. While they cannot be read, it returns what they had before. It takes a second
// at most. A nil *Web has none.
func (w *Web) Certificates() []Certificate {
	if w == nil || w.tls == nil {
		return nil
	}
	x := &w.expiries
	x.mu.Lock()
	if x.reading == nil && time.Since(x.looked) >= rereadEvery {
		x.reading = make(chan struct{})
		go func() {
			list, err := webCertificates(w.file)
			x.mu.Lock()
			defer x.mu.Unlock()
			if x.looked = time.Now(); err == nil {
				x.list = list
			}
			close(x.reading)
			x.reading = nil
		}()
	}
	reading := x.reading
	x.mu.Unlock()
	if reading != nil {
		limit := time.NewTimer(answerTime)
		defer limit.Stop()
		select {
		case <-reading:
		case <-limit.C:
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.list
}

// webCertificates returns the certificates in a web configuration file, and in the files that it names.
func webCertificates(file string) (list []Certificate, err error) {
	c, err := readWeb(file)
	if err != nil {
		return nil, err
	}
	t := &c.TLSConfig
	for _, part := range []struct{ text, path string }{{t.TLSCert, t.TLSCertPath}, {t.ClientCAsText, t.ClientCAs}} {
		b, from := []byte(part.text), file
		if part.path != "" {
			if b, err = readLimited(part.path); err != nil {
				return nil, err
			}
			from = part.path
		}
		for {
			var block *pem.Block
			if block, b = pem.Decode(b); block == nil {
				break
			}
			if block.Type != "CERTIFICATE" {
				continue
			}
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", from, err)
			}
			list = append(list, Certificate{from, cert.Subject.String(), cert.NotAfter})
		}
	}
	return list, nil
}

// readLimited reads a regular file of at most maxWeb bytes.
func readLimited(file string) ([]byte, error) {
	fi, err := os.Stat(file)
	if err != nil {
		return nil, err // names the file
	}
	if !fi.Mode().IsRegular() || fi.Size() > maxWeb {
		return nil, fmt.Errorf("%s: must be a regular file of at most %d bytes", file, maxWeb)
	}
	return os.ReadFile(file)
}
