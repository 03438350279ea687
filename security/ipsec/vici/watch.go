package vici

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/strongswan/govici/vici"
)

const (
	eventQueue     = 1024 // events that wait for changed; more are noticed as Lost
	firstReconnect = 200 * time.Millisecond
	lastReconnect  = 10 * time.Second
)

// events are those that tell of SAs. Their messages have one section for each IKE SA, as list-sas does.
var events = []string{"ike-updown", "child-updown", "ike-rekey", "child-rekey"}

// Watch calls changed after changes of the kernel and events of strongSwan, until ctx ends. It returns the error of the kernel's
// driver. A connection to charon that is lost it restores, and says then that everything may have changed.
func (d *Driver) Watch(ctx context.Context, changed func(ipsec.Change)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changes := make(chan ipsec.Change)
	send := func(c ipsec.Change) {
		select {
		case changes <- c:
		case <-ctx.Done():
		}
	}
	kernel, daemon := make(chan error, 1), make(chan struct{})
	go func() { kernel <- d.kernel.Watch(ctx, send) }()
	go func() {
		defer close(daemon)
		d.listen(ctx, send)
	}()
	defer func() { cancel(); <-daemon }()
	for {
		select {
		case c := <-changes:
			d.forget()
			changed(c)
		case err := <-kernel:
			return err
		}
	}
}

// listen sends the events of charon until ctx ends, over one connection after another.
func (d *Driver) listen(ctx context.Context, send func(ipsec.Change)) {
	wait := firstReconnect
	for first := true; ctx.Err() == nil; first = false {
		begun := time.Now()
		d.note(ctx, d.listenOnce(ctx, first, send))
		if time.Since(begun) > lastReconnect {
			wait = firstReconnect
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
		wait = min(2*wait, lastReconnect)
	}
}

var errEnded = errors.New("charon has ended the connection")

// listenOnce sends the events of one connection, and returns why it has ended.
func (d *Driver) listenOnce(ctx context.Context, first bool, send func(ipsec.Change)) error {
	s, err := dial(ctx, d.socket, d.timeout)
	if err != nil {
		return err
	}
	defer s.end()
	queue := make(chan vici.Event, eventQueue)
	s.NotifyEvents(queue)
	if err := s.within(ctx, d.timeout, func() error { return s.Subscribe(events...) }); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, s.end)()
	if !first { // what happened in between is unknown
		send(ipsec.Change{Kind: ipsec.Lost})
	}
	for e := range queue {
		if len(queue) == eventQueue-1 { // govici drops what does not fit
			send(ipsec.Change{Kind: ipsec.Lost})
		}
		for _, c := range changesOf(e) {
			send(c)
		}
	}
	return errEnded
}

// changesOf returns what an event tells.
func changesOf(e vici.Event) []ipsec.Change {
	if e.Message == nil {
		return nil
	}
	kind := ipsec.Removed
	if text(e.Message, "up") == "yes" || e.Name == "ike-rekey" || e.Name == "child-rekey" {
		kind = ipsec.Added
	}
	var list []ipsec.Change
	for _, name := range e.Message.Keys() {
		ike, ok := e.Message.Get(name).(*vici.Message)
		if !ok {
			continue
		}
		c := ipsec.Change{Kind: kind, Remote: address(ike, "remote-host")}
		if e.Name == "child-updown" {
			c.SPI = spiOf(ike)
		}
		list = append(list, c)
	}
	return list
}

// spiOf returns the SPI of the only child of an event, or 0.
func spiOf(ike *vici.Message) uint32 {
	children, ok := ike.Get("child-sas").(*vici.Message)
	if !ok || len(children.Keys()) != 1 {
		return 0
	}
	child, ok := children.Get(children.Keys()[0]).(*vici.Message)
	if !ok {
		return 0
	}
	spi, err := strconv.ParseUint(text(child, "spi-in"), 16, 32)
	if err != nil {
		return 0
	}
	return uint32(spi)
}
