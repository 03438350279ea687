package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// List the LUNs of the target on this machine, add one, and make it larger.
func Example() {
	socket, stop := serveExample() // a target, as iser-target serve runs it
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c := client.New(socket)
	defer c.Close()

	if _, err := c.AddLUN(ctx, store, schema.LUN{Backend: "memory", Size: "1GiB"}, schema.Options{}); err != nil {
		log.Fatal(err)
	}
	plan, err := c.SetLUN(ctx, store, 1, schema.Values{"size": "2GiB"}, schema.Options{})
	if err != nil {
		log.Fatal(err)
	}
	for _, step := range plan.Steps {
		fmt.Println(step.Change)
	}
	luns, err := c.LUNs(ctx, store)
	if err != nil {
		log.Fatal(err)
	}
	for _, l := range luns {
		fmt.Printf("LUN %d: %d bytes, %s\n", l.ID, l.Size, l.State)
	}
	// Output:
	// set size of LUN 1 of iqn.2026-11.io.example:store: 1GiB -> 2GiB
	// LUN 0: 16777216 bytes, ready
	// LUN 1: 2147483648 bytes, ready
}

// A target on another machine requires a certificate. Its address is control.listen, or rdma:// and a portal.
func ExampleNewTLS() {
	c, err := client.NewTLS("rdma://storage.example:3260", client.TLSFiles{
		Cert: "/etc/ssl/admin.pem", Key: "/etc/ssl/private/admin.key", CA: "/etc/ssl/storage-ca.pem",
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()
	// Output: /etc/ssl/admin.pem: no such file or directory
}

// Errors have codes. A refusal says which option allows the change.
func Example_errors() {
	socket, stop := serveExample()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c := client.New(socket)
	defer c.Close()

	_, err := c.LUN(ctx, store, 7)
	fmt.Println(errors.Is(err, schema.NotFound), err)

	_, err = c.AddTarget(ctx, schema.Target{Name: store}, schema.Options{})
	fmt.Println(errors.Is(err, schema.Exists))

	_, err = c.SetLUN(ctx, store, 0, schema.Values{"size": "8MiB"}, schema.Options{})
	var e *schema.Error
	if errors.As(err, &e) && e.Code == schema.Refused {
		fmt.Println("requires", e.Needs)
	}

	late, cancel := context.WithTimeout(ctx, time.Nanosecond)
	defer cancel()
	_, err = c.State(late)
	fmt.Println(errors.Is(err, schema.Unreached), errors.Is(err, context.DeadlineExceeded))
	// Output:
	// true LUN 7 of target iqn.2026-11.io.example:store: not found
	// true
	// requires [allow_shrink]
	// true true
}

// Let initiators log in, and see what a login would do.
func ExampleClient_Explain() {
	socket, stop := serveExample()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c := client.New(socket)
	defer c.Close()

	const host = "iqn.1993-08.org.debian:01:host"
	before, err := c.Explain(ctx, host, store, "", "")
	if err != nil {
		log.Fatal(err)
	}
	if _, err := c.Allow(ctx, store, host, schema.Options{}); err != nil {
		log.Fatal(err)
	}
	after, err := c.Explain(ctx, host, store, "", "")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(before.Admitted, after.Admitted)
	// Output: false true
}

// See what a change of the whole configuration would do, and then make it.
func ExampleClient_Apply() {
	socket, stop := serveExample()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c := client.New(socket)
	defer c.Close()

	text, err := c.Export(ctx)
	if err != nil {
		log.Fatal(err)
	}
	text = append(text, "log: {level: debug}\n"...)
	plan, err := c.Plan(ctx, "mine.yaml", text)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(plan.Steps[0].Change, plan.Steps[0].Done)
	plan, err = c.Apply(ctx, "mine.yaml", text, schema.Options{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(plan.Steps[0].Change, plan.Steps[0].Done, plan.Persisted)
	// Output:
	// set level of log: info -> debug false
	// set level of log: info -> debug true true
}

// Follow events until the first change of the configuration.
func ExampleClient_Follow() {
	socket, stop := serveExample()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c := client.New(socket)
	defer c.Close()

	if _, err := c.AddUser(ctx, store, schema.User{Name: "host", Secret: "known-to-few-people"}, schema.Options{}); err != nil {
		log.Fatal(err)
	}
	found := errors.New("found")
	err := c.Follow(ctx, 0, func(e schema.Event) error {
		if e.Event != "config" {
			return nil
		}
		fmt.Println(e.Level, e.Text)
		return found
	})
	fmt.Println(errors.Is(err, found))
	// Output:
	// INFO change
	// true
}
