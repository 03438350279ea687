// Command ceph brings a small Ceph cluster up on this machine, from Debian's packages, and keeps it until it is interrupted. Its daemons
// listen on the loopback only, and all files are in one directory, which is removed at the end. It needs no root. The
// tests of this directory use such clusters.
//
//	go run ./tests/ceph [-osds 3 -copies 2] [-bluestore] [-gib 10]
//
// It prints a line for the shell that makes rbd and ceph use the cluster.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/tests/testkit/cephcluster"
)

func main() {
	var o cephcluster.Options
	flag.IntVar(&o.OSDs, "osds", 1, "number of OSDs")
	flag.IntVar(&o.Copies, "copies", 1, "copies of each object")
	flag.IntVar(&o.GiB, "gib", 4, "GiB of each OSD")
	flag.BoolVar(&o.BlueStore, "bluestore", false, "objects are in a sparse file, not in memory")
	flag.Parse()
	if err := serve(o); err != nil {
		fmt.Fprintln(os.Stderr, "ceph:", err)
		os.Exit(1)
	}
}

// serve keeps a cluster until a signal comes.
func serve(o cephcluster.Options) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	dir, err := os.MkdirTemp("", "ceph")
	if err != nil {
		return err
	}
	begun := time.Now()
	c, err := cephcluster.Start(ctx, dir, o)
	if err != nil {
		return fmt.Errorf("%w. Its logs are in %s", err, dir)
	}
	defer os.RemoveAll(dir)
	fmt.Fprintf(os.Stderr, "up after %v, with pool %s. Ctrl-C ends it.\n", time.Since(begun).Round(100*time.Millisecond), cephcluster.Pool)
	fmt.Printf("export CEPH_CONF=%s\n", c.Conf)
	<-ctx.Done()
	return c.Stop()
}
