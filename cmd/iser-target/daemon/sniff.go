package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A transport is what an initiator speaks on a connection to a portal.
type transport string

const (
	transportISER transport = "iser"
	transportTCP  transport = "tcp"
)

const (
	firstOfMPA   = 'M'  // of "MPA ID Req Frame" (RFC 5044, section 7.1.1)
	loginRequest = 0x03 // opcode of a Login Request, without the immediate bit
	opcodeMask   = 0x3f
)

// sniff waits for the first byte of a connection, without consuming it, and returns what
// the initiator speaks.
func sniff(ctx context.Context, nc net.Conn, deadline time.Time) (transport, error) {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return "", fmt.Errorf("%T is not a socket", nc)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return "", err
	}
	if err := nc.SetReadDeadline(deadline); err != nil {
		return "", err
	}
	defer context.AfterFunc(ctx, func() { nc.SetReadDeadline(time.Unix(1, 0)) })()
	var (
		first [1]byte
		n     int
		perr  error
	)
	err = raw.Read(func(fd uintptr) bool {
		n, _, perr = unix.Recvfrom(int(fd), first[:], unix.MSG_PEEK)
		return perr != unix.EAGAIN && perr != unix.EINTR
	})
	if err = errors.Join(err, perr); err != nil {
		return "", fmt.Errorf("waiting for the first byte: %w", err)
	}
	if n == 0 {
		return "", fmt.Errorf("the initiator sent nothing: %w", io.EOF)
	}
	if err := nc.SetReadDeadline(time.Time{}); err != nil {
		return "", err
	}
	switch {
	case first[0] == firstOfMPA:
		return transportISER, nil
	case first[0]&opcodeMask == loginRequest:
		return transportTCP, nil
	}
	return "", fmt.Errorf("first byte %#02x begins neither an MPA Request nor an iSCSI Login Request", first[0])
}
