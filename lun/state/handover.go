package state

import "os"

// Lock returns the locked file of the document, which belongs to it: see package handed. It is nil after Close.
func (d *Document[T]) Lock() *os.File { return d.file.lock }

// Lock returns the locked file: see Document.Lock.
func (k *Keeper[T]) Lock() *os.File { return k.doc.Lock() }

// Lock returns the locked file: see Document.Lock. It is nil if the identities are in memory.
func (ids *Identities) Lock() *os.File { return ids.doc.Lock() }
