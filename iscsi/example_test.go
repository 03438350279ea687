package iscsi_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iscsi/tcp"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/security"
)

// A target with one LUN in memory, served over TCP. An initiator logs in and sends an INQUIRY.
func Example() {
	store, err := backend.OpenMemory(backend.MemoryConfig{Size: 64 << 20, BlockSize: 512})
	check(err)
	identity, err := state.Ephemeral().Get("disk")
	check(err)
	unit, err := lun.New(store, lun.Options{Identity: identity})
	check(err)
	luns := lun.NewInventory()
	defer luns.Close()
	check(luns.Add(0, unit))

	all, err := security.Compile([]string{"iqn.*"})
	check(err)
	node := iscsi.NewNode(iscsi.Options{Logger: slog.New(slog.DiscardHandler)})
	defer node.Shutdown(context.Background())
	check(node.AddTarget(iscsi.TargetConfig{Name: "iqn.2026-11.io.example:disk", Initiators: all, LUNs: luns}))

	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	defer l.Close()
	portal := node.AddPortal(iscsi.PortalConfig{Listen: l.Addr().String(), TPGT: 1})
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return // closed
			}
			go portal.Serve(tcp.New(nc, tcp.Options{}), iscsi.ServeOptions{})
		}
	}()

	// The initiator.
	nc, err := net.Dial("tcp", l.Addr().String())
	check(err)
	defer nc.Close()
	login := pdu.LoginRequest{Transit: true, CSG: pdu.LoginOperationalNegotiation, NSG: pdu.FullFeaturePhase, CmdSN: 1}
	text := keys.AppendPair(nil, keys.Pair{Key: "InitiatorName", Value: "iqn.2026-11.io.example:host"})
	text = keys.AppendPair(text, keys.Pair{Key: "TargetName", Value: "iqn.2026-11.io.example:disk"})
	h, _ := exchange(nc, login.Append(nil), text)
	fmt.Printf("%v: %v\n", h.Opcode(), pdu.ParseLoginResponse(h).Status)

	inquiry := make(pdu.BHS, pdu.BHSLen)
	inquiry.Reset(pdu.SCSICommand, pdu.FlagF|pdu.FlagR)
	inquiry.SetITT(1)
	inquiry.SetCmdSN(1)
	inquiry.SetEDTL(36)
	inquiry.SetCDB([]byte{0x12, 0, 0, 0, 36, 0})
	h, data := exchange(nc, inquiry, nil)
	fmt.Printf("%v: %s\n", h.Opcode(), data[8:32])
	// Output:
	// Login Response: success (0x0000)
	// SCSI Data-In: ISERTGT VIRTUAL-DISK
}

// exchange sends a PDU and returns the next one that comes.
func exchange(nc net.Conn, h pdu.BHS, data []byte) (pdu.BHS, []byte) {
	h.SetDataSegmentLength(len(data))
	_, err := nc.Write(append(append(h, data...), make([]byte, -len(data)&3)...))
	check(err)
	answer := make(pdu.BHS, pdu.BHSLen)
	_, err = io.ReadFull(nc, answer)
	check(err)
	segment := make([]byte, (answer.DataSegmentLength()+3)&^3)
	_, err = io.ReadFull(nc, segment)
	check(err)
	return answer, segment
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
