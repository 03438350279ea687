package keys

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// names begins every first Login Request of a normal session.
var names = []Pair{{"InitiatorName", "iqn.1993-08.org.debian:01:a"}, {"TargetName", "iqn.2026-11.io.example:t"}}

// login starts a login with l and declares names.
func login(t *testing.T, l Limits) *Negotiation {
	t.Helper()
	n := NewLogin(l)
	if got := offer(t, n, Operational, names...); len(got) != 0 {
		t.Fatalf("names answered with %q", got)
	}
	return n
}

func offer(t *testing.T, n *Negotiation, s Stage, pairs ...Pair) []Pair {
	t.Helper()
	var answers []Pair
	for _, p := range pairs {
		var err error
		if answers, err = n.Offer(s, p, answers); err != nil {
			t.Fatalf("%s=%s: %v", p.Key, p.Value, err)
		}
	}
	return answers
}

func finish(t *testing.T, n *Negotiation) Params {
	t.Helper()
	p, err := n.Finish()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func wantStatus(t *testing.T, err error, status uint16) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) || e.Status != status {
		t.Fatalf("error %v, want status %04x", err, status)
	}
}

// defaults holds the defaults of RFC 7143, section 13, and RFC 7145, section 6.
var defaults = Params{
	InitiatorName: names[0].Value, TargetName: names[1].Value,
	InitialR2T: true, ImmediateData: true,
	MaxBurstLength: 262144, FirstBurstLength: 65536, MaxOutstandingR2T: 1, MaxConnections: 1,
	DefaultTime2Wait: 2, DefaultTime2Retain: 20,
	DataPDUInOrder: true, DataSequenceInOrder: true,
	MaxRecvDataSegmentLength: 8192, InitiatorRecvDataSegmentLength: 8192, TargetRecvDataSegmentLength: 8192,
	MaxAHSLength: 256, TaskReporting: "RFC3720", ISCSIProtocolLevel: 1,
	Declared: 262144,
}

// ISCSI-6.2-5: a key without an offer keeps its default.
func TestDefaults(t *testing.T) {
	if got := finish(t, login(t, Limits{})); got != defaults {
		t.Errorf("%+v\nwant %+v", got, defaults)
	}
}

func TestTable(t *testing.T) {
	names := map[string]bool{}
	for _, k := range table {
		if names[k.name] {
			t.Errorf("%s has two rows", k.name)
		}
		names[k.name] = true
		if checkKey(k.name) != "" {
			t.Errorf("%s %s", k.name, checkKey(k.name))
		}
		if k.refuse == "" && k.kind == nil {
			t.Errorf("%s has no kind", k.name)
		}
		if k.kind != nil && k.def != "" {
			if _, ok := k.kind.parse(k, k.def); !ok {
				t.Errorf("%s: default %s is not admissible", k.name, k.def)
			}
		}
		if (k.result == nil) != (k.own == nil) {
			t.Errorf("%s has a result without a choice, or a choice without a result", k.name)
		}
		negotiated := k.refuse == "" && k.flags&(declared|targetSends) == 0 && k.kind != nothing
		if negotiated && (k.result == nil || k.kind.format == nil) {
			t.Errorf("%s cannot be answered", k.name)
		}
	}
}

// Every row of the table has offers and the answers to them. "" is no answer, "!" an error with the status after it.
func TestAnswers(t *testing.T) {
	tcp, rdma, no := Limits{}, Limits{RDMA: true, Digests: true}, false
	stepUp := Limits{StepUp: true, Digests: true}
	for _, tc := range []struct {
		id           string
		l            Limits
		stage        Stage
		key          string
		offerAnswers string // offer>answer ...
	}{
		{"ISCSI-6.3.2-1", tcp, Security, "AuthMethod",
			"None>None CHAP,None>None KRB5,CHAP,None>None SRP>!0201 CHAP>!0201"},
		{"ISCSI-6.3-4", tcp, Security, "CHAP_A", "5> Reject>!0200"},
		{"ISCSI-12.1.3-3", tcp, Security, "CHAP_C", long("0x", 2050) + ">"},
		{"ISCSI-6.3-4", tcp, Operational, "CHAP_A", "5>!0200"},
		{"ISCSI-6.3-4", tcp, Operational, "CHAP_I", "5>!0200"},
		{"ISCSI-6.3-4", tcp, Operational, "CHAP_C", "0x00>!0200"},
		{"ISCSI-6.3-4", tcp, Operational, "CHAP_N", "n>!0200"},
		{"ISCSI-6.3-4", tcp, Operational, "CHAP_R", "0x00>!0200"},
		{"ISCSI-6.3-4", tcp, Operational, "AuthMethod", "None>!0200"},
		{"ISCSI-6.3-4", tcp, Security, "InitiatorAlias", "x> Reject>"},
		{"ISCSI-6.3-4", tcp, Security, "InitialR2T", "Yes>!0200"},
		{"ISCSI-4.2.7-1", tcp, Operational, "InitiatorName",
			long("iqn.2026-11.io.example:", 223) + "> " + long("iqn.2026-11.io.example:", 224) + ">!0200 >!0200"},
		{"ISCSI-4.2.7-1", tcp, Operational, "TargetName",
			long("iqn.2026-11.io.example:", 223) + "> " + long("iqn.2026-11.io.example:", 224) + ">!0200"},
		{"ISCSI-13.21-1", tcp, Operational, "SessionType",
			"Normal> Discovery> Foo>!0209 Foo,Normal>!0209 Normal,Discovery>!0209"},
		{"ISCSI-13.6-1", tcp, Operational, "TargetAlias", "x>!0200"},
		{"ISCSI-13.8-1", tcp, Operational, "TargetAddress", "192.0.2.1>!0200"},
		{"ISCSI-13.9-1", tcp, Operational, "TargetPortalGroupTag", "1>!0200"},
		{"SendTargets", tcp, Operational, "SendTargets", "All>!0200"},
		{"ISCSI-13.26-1", tcp, Operational, "X#NodeArchitecture",
			"a/1,b/2> " + long("", 255) + "> " + long("", 256) + ">!0200"},

		{"ISCSI-6.2.1-1", Limits{Digests: true}, Operational, "HeaderDigest",
			"Foo,CRC32C,None>CRC32C None,CRC32C>None CRC32C>CRC32C None>None Foo>Reject"},
		{"ISCSI-13.1-1", Limits{Digests: true}, Operational, "DataDigest", "CRC32C>CRC32C None>None"},
		{"ISCSI-6.2.1-2", tcp, Operational, "HeaderDigest", "CRC32C>Reject CRC32C,None>None None>None"},
		{"ISCSI-6.2.1-2", tcp, Operational, "DataDigest",
			"CRC32C>Reject CRC32C,None>None " + long("", 256) + ",None>Reject"},
		{"ISER-6.1-1", rdma, Operational, "HeaderDigest", "CRC32C,None>None None>None CRC32C>Reject"},
		{"ISER-5.1-10", rdma, Operational, "DataDigest", "CRC32C,None>None None>None"},

		{"ISCSI-4.2.1-1", tcp, Operational, "MaxConnections", "1>1 4>1 65535>1"},
		{"ISCSI-6.2.2-2", tcp, Operational, "MaxConnections", "0>Reject 70000>Reject"},
		{"ISCSI-6.2.2-4", tcp, Operational, "InitialR2T", "Yes>Yes No>Yes Maybe>Reject >Reject None>Reject"},
		{"ISCSI-6.2.2-4", Limits{InitialR2T: &no}, Operational, "InitialR2T", "Yes>Yes No>No"},
		{"ISCSI-6.2.2-4", tcp, Operational, "ImmediateData", "Yes>Yes No>No yes>Reject"},
		{"ISCSI-6.2.2-4", Limits{ImmediateData: &no}, Operational, "ImmediateData", "Yes>No No>No"},
		{"ISCSI-6.2.2-4", tcp, Operational, "DataPDUInOrder", "Yes>Yes No>Yes"},
		{"ISCSI-6.2.2-4", tcp, Operational, "DataSequenceInOrder", "Yes>Yes No>Yes"},
		{"ISCSI-6.1-4", tcp, Operational, "MaxBurstLength",
			"0x10000>65536 0X10000>65536 65536>65536 065536>Reject 0x>Reject +65536>Reject 65_536>Reject " +
				"-1>Reject 65536k>Reject 18446744073709551616>Reject 0x10000000000010000>Reject"},
		{"ISCSI-6.2.2-1", tcp, Operational, "MaxBurstLength",
			"16777215>1048576 1048577>1048576 1048576>1048576 65536>65536 511>Reject 16777216>Reject >Reject"},
		{"ISCSI-6.2.2-3", tcp, Operational, "MaxBurstLength", "512~1024>Reject"},
		{"ISCSI-6.1-4", tcp, Operational, "MaxBurstLength", "0x" + long("", 254) + ">!0200"},
		{"ISCSI-6.2.2-1", tcp, Operational, "FirstBurstLength",
			"16777215>65536 65535>65535 512>512 511>Reject 16777216>Reject"},
		{"ISCSI-6.2.2-1", tcp, Operational, "DefaultTime2Wait", "0>2 2>2 3>3 3600>3600 3601>Reject"},
		{"ISCSI-6.2.2-1", tcp, Operational, "DefaultTime2Retain", "0>0 20>20 3600>20 3601>Reject"},
		{"ISCSI-6.2.2-1", Limits{DefaultTime2Retain: 5}, Operational, "DefaultTime2Retain", "0>0 5>5 6>5 3600>5 3601>Reject"},
		{"ISCSI-6.2.2-1", Limits{DefaultTime2Retain: 3600}, Operational, "DefaultTime2Retain", "20>20 3600>3600 3601>Reject"},
		{"ISCSI-6.2.2-1", tcp, Operational, "MaxOutstandingR2T", "1>1 65535>1 0>Reject 65536>Reject"},
		{"ISER-10.2-1", tcp, Operational, "ErrorRecoveryLevel", "0>0 1>0 2>0 3>Reject"},
		{"ISCSI-13.19-1", Limits{ErrorRecoveryLevel: 2}, Operational, "ErrorRecoveryLevel", "0>0 1>1 2>2"},
		{"ISCSI-13.19-1", Limits{ErrorRecoveryLevel: 2}, Operational, "MaxOutstandingR2T", "1>1 2>1 16>1"},
		{"ISCSI-13.19-1", Limits{ErrorRecoveryLevel: 1, MaxOutstandingR2T: 8}, Operational, "MaxOutstandingR2T", "1>1 2>1 16>1"},
		{"ISCSI-6.2.2-1", Limits{MaxOutstandingR2T: 8}, Operational, "MaxOutstandingR2T", "1>1 8>8 9>8 65535>8 0>Reject"},
		{"ISCSI-6.2.2-1", tcp, Operational, "MaxRecvDataSegmentLength",
			"512> 16777215> 511>!0200 16777216>!0200 x>!0200"},
		{"ISCSI-13.23-1", tcp, Operational, "TaskReporting",
			"RFC3720>RFC3720 RFC3720,FastAbort>RFC3720 FastAbort,ResponseFence,RFC3720>FastAbort " +
				"ResponseFence,RFC3720>ResponseFence Fast,RFC3720>RFC3720 Fast>Reject"},
		{"ISCSI-13.24-1", tcp, Operational, "iSCSIProtocolLevel", "0>0 1>1 2>2 31>2 32>Reject"},
		{"ISCSI-13.25-1", tcp, Operational, "IFMarker", "No>Reject Yes>Reject"},
		{"ISCSI-13.25-1", tcp, Operational, "OFMarker", "No>Reject Yes>Reject"},
		{"ISCSI-13.25-1", tcp, Operational, "IFMarkInt", "2048>Reject 1~65535>Reject"},
		{"ISCSI-13.25-1", tcp, Operational, "OFMarkInt", "2048>Reject 1~65535>Reject"},
		{"ISER-6.6-1", rdma, Operational, "IFMarker", "No>Reject Yes>Reject"},
		{"ISER-6.6-1", rdma, Operational, "OFMarker", "No>Reject Yes>Reject"},

		{"ISER-5.1-3", rdma, Operational, "RDMAExtensions", "Yes>Yes"},
		{"ISER-6.3-1", rdma, Operational, "RDMAExtensions", "Yes>Yes No>No Maybe>Reject"},
		{"ISER-6.3-2", tcp, Operational, "RDMAExtensions", "Yes>No No>No"},
		{"ISER-5.1-2", rdma, Security, "RDMAExtensions", "Yes>!0200"},
		{"ISER-6.3-1", stepUp, Operational, "RDMAExtensions", "Yes>Yes No>No Maybe>Reject"},
		{"ISER-5.1-2", stepUp, Security, "RDMAExtensions", "Yes>!0200"},
		{"ISCSI-6.2.1-1", stepUp, Operational, "HeaderDigest", "CRC32C,None>CRC32C"},
		{"ISER-6.4-1", rdma, Operational, "TargetRecvDataSegmentLength",
			"512>512 8192>8192 16777215>65536 511>Reject 16777216>Reject"},
		{"ISER-6.4-1", Limits{RDMA: true, TargetRecvDataSegmentLength: 8192}, Operational,
			"TargetRecvDataSegmentLength", "512>512 16777215>8192"},
		{"ISER-6.5-1", rdma, Operational, "InitiatorRecvDataSegmentLength",
			"512>512 8192>8192 262144>8192 128>Reject 16777216>Reject"},
		{"ISER-6.7-1", rdma, Operational, "MaxOutstandingUnexpectedPDUs", "0> 2> 4294967295> 1>!0200 4294967296>!0200"},
		{"ISER-6.8-1", rdma, Operational, "MaxAHSLength", "0> 2> 256> 4294967295> 1>!0200"},
		{"ISER-6.9-1", rdma, Operational, "TaggedBufferForSolicitedDataOnly", "Yes> No> 1>!0200"},
		{"ISER-6.10-1", rdma, Operational, "iSERHelloRequired", "Yes> No> yes>!0200"},

		{"ISCSI-6.2-6", tcp, Operational, "X-com.example.foo", "1>NotUnderstood"},
		{"ISCSI-6.2-6", tcp, Security, "X-com.example.foo", "1>NotUnderstood"},
		{"ISCSI-6.1-1", tcp, Operational, "initialr2t", "yes>NotUnderstood"},
		{"ISCSI-6.4-6", tcp, FullFeature, "MaxBurstLength", "512>!0200"},
		{"ISCSI-6.4-6", tcp, FullFeature, "HeaderDigest", "None>!0200"},
		{"ISCSI-6.4-6", tcp, FullFeature, "TargetName", "iqn.2026-11.io.example:t>!0200"},
		{"ISCSI-6.4-6", tcp, FullFeature, "InitiatorAlias", "x>"},
		{"ISCSI-6.4-6", tcp, FullFeature, "MaxRecvDataSegmentLength", "65536>"},
		{"ISCSI-6.4-6", tcp, FullFeature, "X-com.example.foo", "1>NotUnderstood"},
		{"no such stage", tcp, 2, "InitiatorAlias", "x>!0200"},
	} {
		t.Run(fmt.Sprintf("%s/%s", tc.id, tc.key), func(t *testing.T) {
			for _, oa := range strings.Split(tc.offerAnswers, " ") {
				offer, want, _ := strings.Cut(oa, ">")
				n := NewLogin(tc.l)
				if tc.stage == FullFeature {
					n = NewText(tc.l, defaults)
				}
				before := n.Params()
				answers, err := n.Offer(tc.stage, Pair{tc.key, offer}, nil)
				if status, isErr := strings.CutPrefix(want, "!"); isErr {
					code, _ := strconv.ParseUint(status, 16, 16)
					wantStatus(t, err, uint16(code))
					if _, err2 := n.Finish(); err2 != err {
						t.Errorf("%s: Finish after %v: %v", offer, err, err2)
					}
					continue
				}
				got := ""
				if len(answers) > 0 {
					got = answers[0].Value
				}
				if err != nil || got != want || len(answers) > 1 {
					t.Errorf("%s=%s answered %q, %v; want %q", tc.key, offer, answers, err, want)
				}
				// ISCSI-6.2-9: after Reject the key keeps its value.
				if want == "Reject" && n.Params() != before {
					t.Errorf("%s=%s, rejected, changed %+v to %+v", tc.key, offer, before, n.Params())
				}
			}
		})
	}
}

func long(prefix string, n int) string { return prefix + strings.Repeat("0", n-len(prefix)) }

// ISCSI-6.3.2-1: the Reject of AuthMethod is sent before the login fails.
func TestAuthMethodReject(t *testing.T) {
	answers, err := NewLogin(Limits{}).Offer(Security, Pair{"AuthMethod", "CHAP"}, nil)
	wantStatus(t, err, 0x0201)
	if !slices.Equal(answers, []Pair{{"AuthMethod", "Reject"}}) {
		t.Errorf("answers %q", answers)
	}
}

// ISCSI-6.3.2-1, ISCSI-9.2-1: where CHAP is required, no other AuthMethod is accepted.
func TestRequireCHAP(t *testing.T) {
	for offer, want := range map[string]string{"CHAP": "CHAP", "CHAP,None": "CHAP", "KRB5,CHAP,None": "CHAP",
		"None": "Reject", "SRP": "Reject"} {
		n := NewLogin(Limits{})
		n.RequireCHAP()
		answers, err := n.Offer(Security, Pair{"AuthMethod", offer}, nil)
		if !slices.Equal(answers, []Pair{{"AuthMethod", want}}) || (err != nil) != (want == "Reject") {
			t.Errorf("AuthMethod=%s answered %q, %v", offer, answers, err)
		}
		if want == "Reject" {
			wantStatus(t, err, 0x0201)
		}
	}
}

// ISCSI-12.1.3-1: no step of CHAP comes twice. ISCSI-9.2-5: every further connection authenticates itself, too.
func TestCHAPKeys(t *testing.T) {
	for _, key := range []string{"CHAP_A", "CHAP_I", "CHAP_C", "CHAP_N", "CHAP_R"} {
		n := login(t, Limits{})
		offer(t, n, Security, Pair{key, "1"})
		_, err := n.Offer(Security, Pair{key, "1"}, nil)
		wantStatus(t, err, 0x0200)
	}
	n := login(t, Limits{})
	offer(t, n, Security, Pair{"CHAP_N", "alice"})
	p := finish(t, n)
	if p.CHAPName != "alice" {
		t.Errorf("%+v", p)
	}
	if name := joining(Limits{}, p).Params().CHAPName; name != "" {
		t.Errorf("new connection begins as %q", name)
	}
}

// ISCSI-6.2-7: no key of the table gets the answer NotUnderstood.
func TestAllKeysAreUnderstood(t *testing.T) {
	for _, k := range table {
		for _, s := range []Stage{Security, Operational, FullFeature} {
			for _, v := range []string{"", "x", "0", "Yes", "None"} {
				n := NewLogin(Limits{})
				if s == FullFeature {
					n = NewText(Limits{}, defaults)
				}
				answers, _ := n.Offer(s, Pair{k.name, v}, nil)
				if slices.Contains(answers, Pair{k.name, "NotUnderstood"}) {
					t.Errorf("%s=%s in the %s is not understood", k.name, v, s)
				}
			}
		}
	}
}

// ISCSI-6.2-8: Reject, Irrelevant and NotUnderstood are not offers.
func TestReservedWords(t *testing.T) {
	for _, word := range []string{"Reject", "Irrelevant", "NotUnderstood"} {
		for _, k := range append(slices.Clone(table), &key{name: "X-com.example.foo"}) {
			if k.kind == text {
				continue // an alias may be any text
			}
			s := Operational
			if k.flags&securityOnly != 0 {
				s = Security
			}
			_, err := NewLogin(Limits{}).Offer(s, Pair{k.name, word}, nil)
			wantStatus(t, err, 0x0200)
		}
	}
	_, err := NewLogin(Limits{}).Offer(Operational, Pair{"HeaderDigest", "None,Reject"}, nil)
	wantStatus(t, err, 0x0200)
}

// ISCSI-6.3-9, ISCSI-6.4-5, ISCSI-13.4-1: a key comes once.
func TestTwice(t *testing.T) {
	for _, p := range []Pair{{"InitialR2T", "Yes"}, {"MaxRecvDataSegmentLength", "512"}, {"X-com.example.foo", "1"},
		{"IFMarker", "No"}, {"InitiatorName", names[0].Value}, {"TargetName", names[1].Value}} {
		n := NewLogin(Limits{})
		offer(t, n, Operational, p)
		_, err := n.Offer(Operational, p, nil)
		wantStatus(t, err, 0x0200)
	}
	n := NewText(Limits{}, defaults)
	offer(t, n, FullFeature, Pair{"MaxRecvDataSegmentLength", "512"})
	_, err := n.Offer(FullFeature, Pair{"MaxRecvDataSegmentLength", "512"}, nil)
	wantStatus(t, err, 0x0200)
}

// libiscsi declares its name in the first request of each stage.
func TestNamesInBothStages(t *testing.T) {
	who := append(slices.Clone(names), Pair{"SessionType", "Normal"}, Pair{"InitiatorAlias", "a"})
	n := NewLogin(Limits{})
	offer(t, n, Security, who...)
	if err := n.FirstRequest(); err != nil {
		t.Fatal(err)
	}
	offer(t, n, Operational, who...)
	_, err := n.Offer(Operational, who[0], nil)
	wantStatus(t, err, 0x0200) // ISCSI-13.4-1: not a third time

	for _, p := range []Pair{{"InitiatorName", "iqn.1993-08.org.debian:01:b"},
		{"TargetName", "iqn.2026-11.io.example:u"}, {"SessionType", "Discovery"}, {"InitiatorAlias", "b"}} {
		n := NewLogin(Limits{})
		offer(t, n, Security, who...)
		_, err := n.Offer(Operational, p, nil)
		wantStatus(t, err, 0x0200)
	}
}

// ISCSI-4.2.7-2: both names in the first Login Request, TargetName not in
// discovery.
func TestFirstRequest(t *testing.T) {
	for _, tc := range []struct {
		pairs []Pair
		ok    bool
	}{
		{names, true},
		{names[:1], false},
		{names[1:], false},
		{nil, false},
		{[]Pair{names[0], {"SessionType", "Discovery"}}, true},
		{[]Pair{{"SessionType", "Discovery"}}, false},
	} {
		n := NewLogin(Limits{})
		offer(t, n, Operational, tc.pairs...)
		err := n.FirstRequest()
		if tc.ok != (err == nil) {
			t.Errorf("%q: %v", tc.pairs, err)
		}
		if !tc.ok {
			wantStatus(t, err, 0x0207)
		}
	}
	// Access control has used these values: they must not change now.
	for _, p := range []Pair{{"SessionType", "Discovery"}, {"TargetName", names[1].Value}} {
		n := NewLogin(Limits{})
		offer(t, n, Operational, names[0])
		if p.Key == "SessionType" {
			offer(t, n, Operational, names[1])
		} else {
			offer(t, n, Operational, Pair{"SessionType", "Discovery"})
		}
		if err := n.FirstRequest(); err != nil {
			t.Fatal(err)
		}
		was := n.Params()
		_, err := n.Offer(Operational, p, nil)
		wantStatus(t, err, 0x0200)
		if n.Params() != was {
			t.Errorf("%q changed %+v", p, was)
		}
	}
}

// The offers of open-iscsi in the first request of a normal iSER session. Every value gets a value as its answer, in
// the order of the offers, and nothing else is sent (ISCSI-6.3-7, ISER-6.3-4). The answer to RDMAExtensions is in the
// same Response (ISER-6.3-5).
func TestOpenISCSI(t *testing.T) {
	n := login(t, Limits{RDMA: true})
	answers := offer(t, n, Operational,
		Pair{"DefaultTime2Retain", "0"}, Pair{"DefaultTime2Wait", "2"}, Pair{"IFMarker", "No"}, Pair{"OFMarker", "No"},
		Pair{"ErrorRecoveryLevel", "0"}, Pair{"InitialR2T", "No"}, Pair{"ImmediateData", "Yes"},
		Pair{"MaxBurstLength", "16776192"},
		Pair{"FirstBurstLength", "262144"}, Pair{"MaxOutstandingR2T", "1"}, Pair{"MaxConnections", "1"},
		Pair{"DataPDUInOrder", "Yes"},
		Pair{"DataSequenceInOrder", "Yes"}, Pair{"InitiatorRecvDataSegmentLength", "262144"},
		Pair{"TargetRecvDataSegmentLength", "8192"},
		Pair{"RDMAExtensions", "Yes"})
	answers = n.Declare(answers)
	want := []Pair{
		{"DefaultTime2Retain", "0"}, {"DefaultTime2Wait", "2"}, {"IFMarker", "Reject"}, {"OFMarker", "Reject"},
		{"ErrorRecoveryLevel", "0"}, {"InitialR2T", "Yes"}, {"ImmediateData", "Yes"}, {"MaxBurstLength", "1048576"},
		{"FirstBurstLength", "65536"}, {"MaxOutstandingR2T", "1"}, {"MaxConnections", "1"}, {"DataPDUInOrder", "Yes"},
		{"DataSequenceInOrder", "Yes"}, {"InitiatorRecvDataSegmentLength", "8192"},
		{"TargetRecvDataSegmentLength", "8192"},
		{"RDMAExtensions", "Yes"},
	}
	if !slices.Equal(answers, want) {
		t.Errorf("answers %q\nwant %q", answers, want)
	}
	p := defaults
	p.DefaultTime2Retain, p.MaxBurstLength, p.RDMAExtensions = 0, 1<<20, true
	if got := finish(t, n); got != p {
		t.Errorf("%+v\nwant %+v", got, p)
	}
	// ISER-6.2-1: MaxRecvDataSegmentLength does not change the two keys of iSER.
	n = login(t, Limits{RDMA: true})
	offer(t, n, Operational, Pair{"RDMAExtensions", "Yes"}, Pair{"MaxRecvDataSegmentLength", "512"})
	if got := finish(t, n); got.InitiatorRecvDataSegmentLength != 8192 || got.TargetRecvDataSegmentLength != 8192 {
		t.Errorf("%+v", got)
	}
}

// ISER-6.2-2: the two limits are independent of each other.
func TestSegmentLengths(t *testing.T) {
	n := login(t, Limits{RDMA: true})
	offer(t, n, Operational, Pair{"RDMAExtensions", "Yes"}, Pair{"InitiatorRecvDataSegmentLength", "512"},
		Pair{"TargetRecvDataSegmentLength", "4096"})
	if got := finish(t, n); got.InitiatorRecvDataSegmentLength != 512 || got.TargetRecvDataSegmentLength != 4096 {
		t.Errorf("%+v", got)
	}
}

// ISER-5.1-5, ISCSI-13.21-1: discovery over RDMA by open-iscsi and libiscsi. Keys that are irrelevant there get answers
// but keep their defaults.
func TestDiscovery(t *testing.T) {
	n := NewLogin(Limits{RDMA: true, Digests: true})
	answers := offer(t, n, Operational, names[0], Pair{"SessionType", "Discovery"},
		Pair{"HeaderDigest", "None"}, Pair{"DataDigest", "None"}, Pair{"MaxRecvDataSegmentLength", "32768"},
		Pair{"RDMAExtensions", "Yes"}, Pair{"InitialR2T", "No"}, Pair{"ImmediateData", "No"},
		Pair{"MaxBurstLength", "512"}, Pair{"FirstBurstLength", "512"}, Pair{"MaxConnections", "4"},
		Pair{"ErrorRecoveryLevel", "2"})
	answers = n.Declare(answers)
	want := []Pair{{"HeaderDigest", "None"}, {"DataDigest", "None"}, {"RDMAExtensions", "Irrelevant"},
		{"InitialR2T", "Yes"}, {"ImmediateData", "No"}, {"MaxBurstLength", "512"}, {"FirstBurstLength", "512"},
		{"MaxConnections", "1"}, {"ErrorRecoveryLevel", "0"}}
	if !slices.Equal(answers, want) {
		t.Errorf("answers %q\nwant %q", answers, want)
	}
	p := defaults
	p.TargetName, p.Discovery, p.MaxRecvDataSegmentLength = "", true, 32768
	if got := finish(t, n); got != p {
		t.Errorf("%+v\nwant %+v", got, p)
	}

	// ISCSI-13.22-1: no vendor key is understood, also here.
	got := offer(t, n, Operational, Pair{"X-com.example.foo", "1"})
	if !slices.Equal(got, []Pair{{"X-com.example.foo", "NotUnderstood"}}) {
		t.Errorf("%q", got)
	}

	n = NewLogin(Limits{ErrorRecoveryLevel: 2})
	got = offer(t, n, Operational, names[0], Pair{"SessionType", "Discovery"}, Pair{"ErrorRecoveryLevel", "2"})
	if !slices.Equal(got, []Pair{{"ErrorRecoveryLevel", "0"}}) {
		t.Errorf("%q", got)
	}
}

// ISCSI-6.2-11: the rules between keys, with all values known.
func TestIntegrity(t *testing.T) {
	for _, tc := range []struct {
		name  string
		pairs []Pair
		ok    bool
		first uint32
	}{
		{"MaxBurstLength first", []Pair{{"MaxBurstLength", "4096"}, {"FirstBurstLength", "65536"}}, true, 4096},
		{"FirstBurstLength first", []Pair{{"FirstBurstLength", "1048576"}, {"MaxBurstLength", "65536"}}, true, 65536},
		{"the agreed value exceeds MaxBurstLength",
			[]Pair{{"FirstBurstLength", "65536"}, {"MaxBurstLength", "4096"}}, false, 0},
		{"the default exceeds MaxBurstLength", []Pair{{"MaxBurstLength", "4096"}}, true, 65536}, // as boot ROMs offer it
		{"irrelevant", []Pair{{"ImmediateData", "No"}, {"MaxBurstLength", "4096"}}, true, 65536},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := login(t, Limits{})
			offer(t, n, Operational, tc.pairs...)
			got, err := n.Finish()
			if !tc.ok {
				wantStatus(t, err, 0x0200)
			} else if err != nil || got.FirstBurstLength != tc.first {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}

// ISER-5.1-2: the login fails without RDMAExtensions=Yes, because the connection can carry only iSER.
func TestRDMAExtensionsMissing(t *testing.T) {
	for _, pairs := range [][]Pair{nil, {{"RDMAExtensions", "No"}}} {
		n := login(t, Limits{RDMA: true})
		offer(t, n, Operational, pairs...)
		_, err := n.Finish()
		wantStatus(t, err, 0x0200)
	}
	// ISER-6.3-3: the key may come in a later request, too.
	n := login(t, Limits{RDMA: true})
	if err := n.FirstRequest(); err != nil {
		t.Fatal(err)
	}
	offer(t, n, Operational, Pair{"RDMAExtensions", "Yes"})
	if p := finish(t, n); !p.RDMAExtensions {
		t.Error("no RDMAExtensions")
	}
	// ISER-5.1-4: without RDMA a refused offer leaves a plain session.
	n = login(t, Limits{})
	offer(t, n, Operational, Pair{"RDMAExtensions", "Yes"})
	if p := finish(t, n); p.RDMAExtensions {
		t.Error("RDMAExtensions on TCP")
	}
}

// joining returns the negotiation of a connection that joins a session which has agreed on cur.
func joining(l Limits, cur Params) *Negotiation {
	n := NewJoin(l)
	n.Join(cur)
	return n
}

// ISCSI-13-1, ISER-5.1-8, ISER-5.1-9: a connection that joins a session inherits the values of the session, and
// negotiates those of a connection.
func TestJoin(t *testing.T) {
	cur := defaults
	cur.RDMAExtensions, cur.MaxBurstLength, cur.InitiatorRecvDataSegmentLength = true, 524288, 512
	for _, k := range table {
		if k.use != leading {
			continue
		}
		n := joining(Limits{RDMA: true}, cur)
		_, err := n.Offer(Operational, Pair{k.name, "1"}, nil)
		wantStatus(t, err, 0x0200)
	}
	n := joining(Limits{RDMA: true}, cur)
	offer(t, n, Operational,
		append(slices.Clone(names), Pair{"SessionType", "Normal"}, Pair{"TargetRecvDataSegmentLength", "4096"})...)
	want := cur
	want.InitiatorRecvDataSegmentLength, want.TargetRecvDataSegmentLength = 8192, 4096
	if got := finish(t, n); got != want {
		t.Errorf("%+v\nwant %+v", got, want)
	}
	n = joining(Limits{RDMA: true}, cur)
	offer(t, n, Operational, append(slices.Clone(names), Pair{"SessionType", "Discovery"})...)
	_, err := n.Finish()
	wantStatus(t, err, 0x0200)
	_, err = joining(Limits{RDMA: true}, cur).Finish()
	wantStatus(t, err, 0x0207)
}

// ISCSI-6.2-10: a text negotiation applies as a whole or not at all. ISCSI-13.12-1: a new declaration applies.
func TestText(t *testing.T) {
	n := NewText(Limits{}, defaults)
	offer(t, n, FullFeature, Pair{"MaxRecvDataSegmentLength", "65536"})
	if got := n.Declare(nil); got != nil {
		t.Errorf("declared %q", got)
	}
	want := defaults
	want.MaxRecvDataSegmentLength = 65536
	if got := finish(t, n); got != want {
		t.Errorf("%+v", got)
	}
	n = NewText(Limits{}, defaults)
	offer(t, n, FullFeature, Pair{"MaxRecvDataSegmentLength", "65536"})
	if _, err := n.Offer(FullFeature, Pair{"MaxBurstLength", "512"}, nil); err == nil {
		t.Fatal("MaxBurstLength was taken")
	}
	if got, err := n.Finish(); err == nil || got != (Params{}) {
		t.Errorf("%+v, %v", got, err)
	}
	_, err := NewText(Limits{}, defaults).Offer(Operational, Pair{"InitiatorAlias", "x"}, nil)
	wantStatus(t, err, 0x0200)
	_, err = NewLogin(Limits{}).Offer(FullFeature, Pair{"InitiatorAlias", "x"}, nil)
	wantStatus(t, err, 0x0200)
}

// ISER-6.2-1: the target declares MaxRecvDataSegmentLength once, where it has a meaning, and nothing else.
func TestDeclare(t *testing.T) {
	n := NewLogin(Limits{})
	if got := n.Declare(nil); !slices.Equal(got, []Pair{{"MaxRecvDataSegmentLength", "262144"}}) {
		t.Errorf("declared %q", got)
	}
	if got := n.Declare(nil); got != nil {
		t.Errorf("declared %q again", got)
	}
	if got := NewLogin(Limits{RDMA: true}).Declare(nil); got != nil {
		t.Errorf("declared %q over RDMA", got)
	}
}

// ISCSI-6.2-12: a login may take six exchanges and more. ISCSI-6.1-5: the text has a limit.
func TestBound(t *testing.T) {
	n := login(t, Limits{})
	var err error
	i := 0
	for ; err == nil && i < 100000; i++ {
		_, err = n.Offer(Operational, Pair{"X-" + strconv.Itoa(i), ""}, nil)
	}
	wantStatus(t, err, 0x0200)
	if i < 8192/10 || len(n.unknown) > MaxText/4 {
		t.Errorf("ended after %d keys, %d kept", i, len(n.unknown))
	}
}

func TestLimits(t *testing.T) {
	for _, l := range []Limits{
		{FirstBurstLength: 511}, {FirstBurstLength: 1 << 24}, {FirstBurstLength: 2 << 20}, {MaxBurstLength: 512},
		{TargetRecvDataSegmentLength: 1}, {InitiatorRecvDataSegmentLength: 1 << 24}, {MaxRecvDataSegmentLength: 1},
		{ErrorRecoveryLevel: 3},
	} {
		if l.Validate() == nil {
			t.Errorf("%+v is valid", l)
		}
		_, err := NewLogin(l).Offer(Operational, names[0], nil)
		wantStatus(t, err, 0x0300)
	}
	if err := (Limits{}).Validate(); err != nil {
		t.Error(err)
	}
}

// RFC 7145, sections 5.1 and 6.3: with RDMAExtensions=Yes no connection of the session has digests, and the target
// declares nothing that has no meaning.
func TestStepUp(t *testing.T) {
	l := Limits{StepUp: true, Digests: true}
	yes := Pair{"RDMAExtensions", "Yes"}
	pairs := []Pair{{"HeaderDigest", "CRC32C,None"}, yes, {"SessionType", "Normal"}, {"DataDigest", "CRC32C"}}
	Arrange(pairs)
	if want := []Pair{{"SessionType", "Normal"}, yes, {"HeaderDigest", "CRC32C,None"},
		{"DataDigest", "CRC32C"}}; !slices.Equal(pairs, want) {
		t.Errorf("arranged: %q", pairs)
	}
	n := login(t, l)
	if got := offer(t, n, Operational,
		pairs...); !slices.Equal(got, []Pair{yes, {"HeaderDigest", "None"}, {"DataDigest", "Reject"}}) {
		t.Errorf("ISER-5.1-10: %q", got)
	}
	if got := n.Declare(nil); len(got) != 0 {
		t.Errorf("ISER-6.2-1: declared %q", got)
	}
	p := finish(t, n)
	if !p.RDMAExtensions || p.HeaderDigest || p.DataDigest || p.ISERHelloDeclared || p.TaggedBufferDeclared {
		t.Errorf("%+v", p)
	}
	t.Run("ISER-5.1-8 ISER-5.1-10 another connection", func(t *testing.T) {
		n := joining(l, p)
		if got := offer(t, n, Operational,
			append(names, Pair{"HeaderDigest", "CRC32C,None"})...); !slices.Equal(got,
			[]Pair{{"HeaderDigest", "None"}}) {
			t.Errorf("%q", got)
		}
		if p := finish(t, n); !p.RDMAExtensions || p.HeaderDigest {
			t.Errorf("%+v", p)
		}
		n = joining(Limits{}, p)
		offer(t, n, Operational, names...)
		_, err := n.Finish()
		wantStatus(t, err, 0x0200) // a portal without iSER
	})
	t.Run("ISER-5.1-9 another connection of a session without iSER", func(t *testing.T) {
		_, err := joining(l, defaults).Offer(Operational, yes, nil)
		wantStatus(t, err, 0x0200)
	})
	t.Run("ISER-5.1-10 a digest was agreed on before", func(t *testing.T) {
		for _, key := range []string{"HeaderDigest", "DataDigest"} {
			n := login(t, l)
			offer(t, n, Operational, Pair{key, "CRC32C"})
			if got := offer(t, n, Operational, yes); !slices.Equal(got, []Pair{{"RDMAExtensions", "No"}}) {
				t.Errorf("%s: %q", key, got)
			}
		}
	})
	t.Run("ISER-6.9-1 ISER-6.10-1 declared or by default", func(t *testing.T) {
		for _, value := range []string{"Yes", "No"} {
			n := login(t, l)
			offer(t, n, Operational, yes, Pair{"iSERHelloRequired", value},
				Pair{"TaggedBufferForSolicitedDataOnly", value})
			p := finish(t, n)
			if want := value == "Yes"; p.ISERHelloRequired != want || p.TaggedBufferForSolicitedDataOnly != want ||
				!p.ISERHelloDeclared || !p.TaggedBufferDeclared {
				t.Errorf("%s: %+v", value, p)
			}
		}
	})
}
