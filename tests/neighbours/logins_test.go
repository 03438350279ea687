package neighbours

import (
	"context"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// loginText are the texts that a dialog chooses from.
var loginText = [...]string{
	"InitiatorName=" + rivalA, "InitiatorName=" + honest, "InitiatorName=", "TargetName=" + iqn, "TargetName=" + locked,
	"TargetName=" + iqn + "x", "SessionType=Normal", "SessionType=Discovery", "SessionType=Other", "AuthMethod=CHAP,None",
	"AuthMethod=None", "CHAP_A=5,7", "CHAP_N=somebody", "CHAP_R=0x00112233445566778899aabbccddeeff", "CHAP_I=1", "CHAP_C=0x00",
	"HeaderDigest=CRC32C,None", "DataDigest=None", "MaxConnections=4", "ErrorRecoveryLevel=2", "RDMAExtensions=Yes",
	"MaxRecvDataSegmentLength=512", "FirstBurstLength=0", "InitialR2T=No", "X-com.example=1", "TaskReporting=FastAbort",
	"iSCSIProtocolLevel=2", "DefaultTime2Wait=3600", "DefaultTime2Retain=3600", "OFMarker=Yes", "no key", "=",
}

// A dialog is the login of one connection, as the fuzzer says.
type dialog struct{ *peer }

// request sends a Login Request: flags are those of its BHS, ids choose ISID, TSIH and CID, and texts
// are indices into loginText.
func (d dialog) request(flags, ids byte, texts ...byte) {
	var text []byte
	for _, i := range texts {
		text = append(append(text, loginText[int(i)%len(loginText)]...), 0)
	}
	if d.ITT == 0 {
		d.ITT = 1
	}
	req := pdu.LoginRequest{ISID: [6]byte{0: 0x80, 5: ids & 3}, TSIH: uint16(ids >> 2 & 7), CID: uint16(ids >> 5), ITT: d.ITT, CmdSN: d.CmdSN}
	h := pdu.BHS(req.Append(nil))
	h[1] = flags
	d.send(h, text)
}

// FuzzLogins lets up to three connections at a time carry on login dialogs of several requests: stages
// and their changes, CHAP, sessions to join or to replace, those of the neighbour among them, whose
// initiator has another name. Whatever comes, the neighbour is answered within a second, and nothing is
// left when the connections have gone.
func FuzzLogins(f *testing.F) {
	const toOperational, toFull, stay = 0x81, 0x87, 0x04 // T, CSG and NSG
	f.Add([]byte{0, toFull, 1, 0, 3, 6})
	f.Add([]byte{0, 0x00, 1, 0, 4, 9, 0, toOperational, 1, 11, 12, 13, 0, toFull, 1, 6, 6, 6})
	f.Add([]byte{0, stay, 1, 0, 3, 6, 1, toFull, 1, 0, 3, 6, 0, toFull, 1, 16, 17, 18})
	f.Add([]byte{0, toFull, 1 | 1<<2, 0, 3, 18, 1, toFull, 1 | 1<<2 | 1<<5, 0, 3, 18, 2, toFull, 1, 1, 3, 6})
	a := newArena(f)
	addLocked(f, a)
	third, err := a.login(f.Context(), honest, iqn, 1)
	if err != nil {
		f.Fatal(err)
	}
	read := &command{cdb: cdb.Read16(0, 1), read: true, edtl: 512, id: own}

	f.Fuzz(func(t *testing.T, b []byte) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var dialogs [3]dialog
		for n := 0; len(b) >= 6 && n < maxOps; n++ {
			d := &dialogs[int(b[0])%len(dialogs)]
			if d.peer == nil || b[0]&0x80 != 0 {
				nc, err := a.connect(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if d.peer != nil {
					d.Close()
				}
				d.peer = newPeer(nc, rivalA)
				go d.drain()
			}
			d.request(b[1], b[2], b[3], b[4], b[5])
			b = b[6:]
		}
		begun := time.Now()
		third.SetReadDeadline(begun.Add(testkit.Patience))
		if _, err := third.do(read); err != nil {
			t.Fatal("the neighbour: ", err)
		}
		if took := time.Since(begun); took > soon {
			t.Errorf("the neighbour waited %v, want at most %v", took, soon)
		}
		for _, d := range dialogs {
			if d.peer != nil {
				d.Close()
			}
		}
		testkit.Eventually(t, "nothing is left of the dialogs", func() bool {
			st := a.node.Stats()
			return st.Connections == 1 && st.TasksInFlight == 0 && st.BuffersOut == 0
		})
	})
}

// addLocked adds a target that asks for CHAP.
func addLocked(t testing.TB, a *arena) {
	t.Helper()
	who, err := security.Compile([]string{"*"})
	if err != nil {
		t.Fatal(err)
	}
	auth, err := security.NewCHAP(security.CHAPConfig{
		Algorithms: []security.CHAPAlgorithm{security.CHAPSHA256},
		Users:      []security.CHAPUser{{CHAPIdentity: security.CHAPIdentity{Name: "somebody", Secret: "0123456789abcdef"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.node.AddTarget(iscsi.TargetConfig{Name: locked, Initiators: who, Auth: auth, LUNs: a.luns}); err != nil {
		t.Fatal(err)
	}
}
