// Package vectors has requests that a target must refuse, and the answers that RFC 7143 names. The tests of the target
// and the command `iser-target selftest` send them.
package vectors

import (
	"slices"
	"strings"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// A LoginRefusal is a login of one Login Request, from the operational stage to the full feature phase, that is refused.
type LoginRefusal struct {
	ID     string // ids of docs/requirements, and the fault in words
	Status pdu.LoginStatus
	Change func(r *pdu.LoginRequest) // what is wrong with the header; nil: nothing
	// Pairs returns the keys of the request, from InitiatorName, TargetName and SessionType as they should be.
	Pairs func(names []string) []string
}

// asIs returns the names.
func asIs(names []string) []string { return names }

// plus returns the function that adds pairs to the names.
func plus(pairs ...string) func([]string) []string {
	return func(names []string) []string { return append(slices.Clone(names), pairs...) }
}

// without returns the function that removes the pair of a key from the names, and adds pairs.
func without(key string, pairs ...string) func([]string) []string {
	return func(names []string) []string {
		return append(Without(names, key), pairs...)
	}
}

// Without returns pairs without those of the given keys.
func Without(pairs []string, keys ...string) []string {
	return slices.DeleteFunc(slices.Clone(pairs), func(p string) bool {
		k, _, _ := strings.Cut(p, "=")
		return slices.Contains(keys, k)
	})
}

// LoginRefusals contains logins that are refused on every transport. The target does not admit iqn.2001-04.com.example:x.
var LoginRefusals = []LoginRefusal{
	{"ISCSI-4.2.7-2 no InitiatorName", pdu.LoginMissingParameter, nil, without("InitiatorName")},
	{"ISCSI-4.2.7-2 no TargetName", pdu.LoginMissingParameter, nil, without("TargetName")},
	{"ISCSI-4.2.7-2 nothing at all", pdu.LoginMissingParameter, nil, func([]string) []string { return nil }},
	{"unknown target", pdu.LoginNotFound, nil, without("TargetName", "TargetName=iqn.2001-04.com.example:none")},
	{"TargetName that is none", pdu.LoginNotFound, nil, without("TargetName", "TargetName=store")},
	{"initiator not admitted", pdu.LoginAuthorization, nil, without("InitiatorName", "InitiatorName=iqn.2001-04.com.example:x")},
	{"ISCSI-11.12-1 version", pdu.LoginVersion, func(r *pdu.LoginRequest) { r.VersionMin, r.VersionMax = 1, 1 }, asIs},
	{"ISCSI-6.3-6 NSG 2", pdu.LoginInitiatorError, func(r *pdu.LoginRequest) { r.NSG = 2 }, asIs},
	{"ISCSI-6.3-6 NSG is CSG", pdu.LoginInitiatorError, func(r *pdu.LoginRequest) { r.NSG = 1 }, asIs},
	{"ISCSI-6.3-6 CSG 3", pdu.LoginInitiatorError, func(r *pdu.LoginRequest) { r.CSG, r.Transit = 3, false }, asIs},
	{"ISCSI-6.3-6 CSG 2", pdu.LoginInitiatorError, func(r *pdu.LoginRequest) { r.CSG = 2 }, asIs},
	{"ISCSI-6.2-1 C and T", pdu.LoginInitiatorError, func(r *pdu.LoginRequest) { r.Continue = true }, asIs},
	{"ISCSI-6.3.1-1 unknown TSIH", pdu.LoginNoSession, func(r *pdu.LoginRequest) { r.TSIH = 0xfff7 }, plus("RDMAExtensions=Yes")},
	{"ISCSI-13.21-1 session type", pdu.LoginSessionType, nil, without("SessionType", "SessionType=Backup")},
	{"ISCSI-6.3-9 renegotiation", pdu.LoginInitiatorError, nil, plus("InitialR2T=No", "InitialR2T=No")},
	{"ISCSI-6.2-8 Reject as offer", pdu.LoginInitiatorError, nil, plus("InitialR2T=Reject")},
	{"ISCSI-6.3-4 security key", pdu.LoginInitiatorError, nil, plus("CHAP_A=5")},
}

// IserLoginRefusals contains logins that are refused over iSER only.
var IserLoginRefusals = []LoginRefusal{
	{"ISER-3.3-2 no RDMAExtensions", pdu.LoginInitiatorError, nil, asIs},
}

// A Refused is an immediate request without data, in the full feature phase at ErrorRecoveryLevel 0 or over iSER, that gets a Reject.
type Refused struct {
	ID     string // ids of docs/requirements, and the fault in words
	Op     pdu.Opcode
	Flags  byte
	Reason pdu.RejectReason
}

// Rejects contains requests that get a Reject on every transport.
var Rejects = []Refused{
	{"ISER-7.3.11-2 ISER-7.3.11-3 ISER-10.1.4.4-1 ISER-10.2.1-1 SNACK data", pdu.SNACK, pdu.FlagF, pdu.RejectProtocolError},
	{"ISER-7.3.11-3 SNACK status", pdu.SNACK, pdu.FlagF | pdu.SNACKStatus, pdu.RejectProtocolError},
	{"ISER-7.3.11-3 SNACK DataACK", pdu.SNACK, pdu.FlagF | pdu.SNACKDataACK, pdu.RejectProtocolError},
	{"ISER-7.3.9-2 ISER-7.3.9-3 ISER-7.3.9-4 late Login Request", pdu.LoginReq, 0x87, pdu.RejectProtocolError},
	{"unknown opcode", 0x1c, pdu.FlagF, pdu.RejectNotSupported},
	{"opcode of a target", pdu.SCSIResponse, pdu.FlagF, pdu.RejectProtocolError},
}

// IserRejects contains requests that get a Reject over iSER only.
var IserRejects = []Refused{
	{"ISER-7.3.4-4 solicited Data-Out", pdu.DataOut, pdu.FlagF, pdu.RejectProtocolError},
}
