package vectors

import (
	"fmt"
	"strings"
)

// The keys of startup frames (RFC 5044, section 7.1.1), in hexadecimal digits.
const (
	RequestKey = "4d504120494420526571204672616d65" // "MPA ID Req Frame"
	ReplyKey   = "4d504120494420526570204672616d65" // "MPA ID Rep Frame"
)

// A BadRequest is a startup frame that a Responder must not answer.
type BadRequest struct {
	ID    string // ids of docs/requirements, and the fault in words
	Frame string // in hexadecimal digits
}

// BadRequests returns the frames after which a Responder closes TCP without a Reply (RFC 5044, section 7.1.2; RFC 6581, section 6).
func BadRequests() []BadRequest {
	list := []BadRequest{
		{"MPA-7.1.2-20 two Responders' Reply", ReplyKey + "40010000"},
		{"MPA-7.1.1-14 Rev 0 MPA-C.2-1", RequestKey + "40000000"},
		{"MPA-7.1.1-14 Rev 3 MPA2-10-8", RequestKey + "40030000"},
		{"MPA-7.1.1-15 Rev 255", RequestKey + "40ff0000"},
		{"MPA2-6-2 S with Rev 1", RequestKey + "50010004 00040001"},
		{"MPA2-6-8 S with 0 bytes", RequestKey + "50020000"},
		{"MPA2-6-8 S with 1 byte", RequestKey + "50020001 00"},
		{"MPA2-6-8 S with 3 bytes", RequestKey + "50020003 000000"},
		{"MPA-7.1.1-19 MPA-7.1.2-22 513", RequestKey + "40010201"},
		{"MPA2-9-2 513 enhanced", RequestKey + "50020201"},
	}
	for i := range len(RequestKey) / 2 { // one letter of another case
		at := 2 * i
		digit := fmt.Sprintf("%x", hexDigit(RequestKey[at])^2)
		list = append(list, BadRequest{fmt.Sprintf("MPA-7.1.1-2 key byte %d", i), RequestKey[:at] + digit + RequestKey[at+1:] + "40010000"})
	}
	return list
}

// hexDigit returns the value of a hexadecimal digit in lower case.
func hexDigit(c byte) int { return strings.IndexByte("0123456789abcdef", c) }
