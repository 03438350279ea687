package initiator_test

import (
	"context"
	"fmt"
	"time"

	"github.com/iser-target/iser-target/iscsi/initiator"
	iserinitiator "github.com/iser-target/iser-target/iser/initiator"
)

// The Transport of this package makes a session of iscsi/initiator one over iSER.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	s, err := initiator.Connect(ctx, "192.0.2.10:3260", initiator.Config{
		Target:    "iqn.2026-11.io.example:store",
		Transport: iserinitiator.Transport{},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer s.Close()
	luns, err := s.LUNs(ctx)
	fmt.Println(luns, err)
}
