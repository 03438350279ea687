// Package static is the driver that installs SAs and policies from the configuration, with keys from files. Look and Watch are those of the driver xfrm.
//
// RFC 7146, section 3, forbids keys that are set by hand, so connections under them need a profile with ManualKeys. Suites on counter modes are
// refused at all: the sequence numbers of an SA begin again when it is installed again, and a second packet with the same key and number
// breaks them (RFC 3723, section 5.9).
//
// SAs and templates that the driver installs have a ReqID from ReqIDBase to ReqIDBase + MaxReqID. That is how it recognises what a process left
// that crashed. It touches nothing else. One process per network namespace can have the driver.
package static
