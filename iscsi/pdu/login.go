package pdu

// Version is the Version-max, -min and -active of RFC 7143.
const Version = 0

// A Stage is CSG or NSG of a Login PDU (section 11.12.3).
type Stage uint8

// Login stages; 2 is reserved.
const (
	SecurityNegotiation         Stage = 0
	LoginOperationalNegotiation Stage = 1
	FullFeaturePhase            Stage = 3
)

var stageNames = [4]string{"security", "operational", "reserved", "full feature"}

// String returns the name of the stage in logs.
func (s Stage) String() string { return stageNames[s&3] }

// LoginRequest is the header of a Login Request (section 11.12). It is a struct and not
// a view, because logins are rare.
type LoginRequest struct {
	Transit, Continue      bool
	CSG, NSG               Stage // NSG counts only with Transit
	VersionMax, VersionMin uint8
	ISID                   [6]byte
	TSIH                   uint16
	ITT                    uint32
	CID                    uint16
	CmdSN, ExpStatSN       uint32
}

// ParseLoginRequest decodes b, whose opcode the caller has checked. Every bit has a
// meaning or is reserved and ignored, so it cannot fail.
func ParseLoginRequest(b BHS) LoginRequest {
	return LoginRequest{
		Transit: b[1]&FlagT != 0, Continue: b[1]&FlagC != 0,
		CSG: Stage(b[1] >> 2 & 3), NSG: Stage(b[1] & 3),
		VersionMax: b[2], VersionMin: b[3],
		ISID: [6]byte(b[8:14]), TSIH: b.u16(14),
		ITT: b.ITT(), CID: b.CID(),
		CmdSN: b.CmdSN(), ExpStatSN: b.ExpStatSN(),
	}
}

// Append appends the 48 bytes of the request to dst. It sets the I bit, because every
// Login Request is immediate.
func (r LoginRequest) Append(dst []byte) []byte {
	n := len(dst)
	dst = append(dst, make([]byte, BHSLen)...)
	b := BHS(dst[n:])
	b.Reset(LoginReq, loginFlags(r.Transit, r.Continue, r.CSG, r.NSG))
	b.SetImmediate()
	b[2], b[3] = r.VersionMax, r.VersionMin
	copy(b[8:14], r.ISID[:])
	b.put16(14, r.TSIH)
	b.SetITT(r.ITT)
	b.SetCID(r.CID)
	b.SetCmdSN(r.CmdSN)
	b.SetExpStatSN(r.ExpStatSN)
	return dst
}

// LoginResponse is the header of a Login Response (section 11.13). Both of its versions are 0.
type LoginResponse struct {
	Transit, Continue          bool
	CSG, NSG                   Stage
	ISID                       [6]byte
	TSIH                       uint16
	ITT                        uint32
	StatSN, ExpCmdSN, MaxCmdSN uint32
	Status                     LoginStatus
	DataSegmentLength          int
}

// Put writes the response over the 48 bytes of b.
func (r LoginResponse) Put(b BHS) {
	b.Reset(LoginResp, loginFlags(r.Transit, r.Continue, r.CSG, r.NSG))
	b.SetDataSegmentLength(r.DataSegmentLength)
	copy(b[8:14], r.ISID[:])
	b.put16(14, r.TSIH)
	b.SetITT(r.ITT)
	b.SetStatSN(r.StatSN)
	b.SetExpCmdSN(r.ExpCmdSN)
	b.SetMaxCmdSN(r.MaxCmdSN)
	b.put16(36, uint16(r.Status))
}

// ParseLoginResponse decodes b, whose opcode the caller has checked.
func ParseLoginResponse(b BHS) LoginResponse {
	return LoginResponse{
		Transit: b[1]&FlagT != 0, Continue: b[1]&FlagC != 0,
		CSG: Stage(b[1] >> 2 & 3), NSG: Stage(b[1] & 3),
		ISID: [6]byte(b[8:14]), TSIH: b.u16(14), ITT: b.ITT(),
		StatSN: b.StatSN(), ExpCmdSN: b.ExpCmdSN(), MaxCmdSN: b.MaxCmdSN(),
		Status:            LoginStatus(b.u16(36)),
		DataSegmentLength: b.DataSegmentLength(),
	}
}

func loginFlags(transit, cont bool, csg, nsg Stage) byte {
	f := byte(csg&3)<<2 | byte(nsg&3)
	if transit {
		f |= FlagT
	}
	if cont {
		f |= FlagC
	}
	return f
}
