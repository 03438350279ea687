package api

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

type openAPIDocument struct {
	Paths      map[string]map[string]yaml.Node
	Components struct {
		Schemas map[string]struct{ Properties map[string]yaml.Node }
	}
}

func described(t *testing.T) *openAPIDocument {
	var doc openAPIDocument
	if err := yaml.Unmarshal(openAPI, &doc); err != nil {
		t.Fatal(err)
	}
	return &doc
}

// openapi.yaml has each route, and no other.
func TestOpenAPIHasEachRoute(t *testing.T) {
	var want, got []string
	for _, r := range routes {
		want = append(want, r.pattern)
	}
	for path, methods := range described(t).Paths {
		for m := range methods {
			if m != "parameters" {
				got = append(got, strings.ToUpper(m)+" "+path)
			}
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("openapi.yaml has\n%s\nthe server has\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// Each schema of openapi.yaml has the fields of its type.
func TestOpenAPISchemasAreThoseOfTheTypes(t *testing.T) {
	schemas := described(t).Components.Schemas
	delete(schemas, "Values") // its properties are free
	for _, v := range []any{
		schema.Error{}, schema.Target{}, schema.LUN{}, schema.ChangeUpdate{}, schema.Progress{}, schema.Portal{}, schema.Pattern{}, schema.Reservation{},
		schema.State{}, schema.CertificateState{}, schema.User{}, schema.UserState{}, schema.PortalState{}, schema.TargetState{}, schema.LoginState{}, schema.LUNState{}, schema.ReservationState{}, schema.RegistrationState{}, schema.SettingState{}, schema.SpaceState{}, schema.ThresholdState{},
		schema.SessionState{}, schema.CounterState{}, schema.PhaseState{}, schema.OperationState{}, schema.ConnectionState{}, schema.FramingState{}, schema.Explanation{}, schema.Rule{}, schema.LUNView{}, schema.Event{},
		schema.Plan{}, schema.Step{}, config.Change{}, schema.Summary{}, schema.LimitState{}, schema.Rate{}, schema.InitiatorRate{},
		schema.DrainRequest{}, schema.DrainState{}, schema.ClusterState{}, schema.GatewayState{}, schema.SharedLUNState{}, schema.HandOverRequest{}, schema.ClusterConfig{}, schema.ClusterMove{}, schema.Upgrade{}, schema.Recovery{}, schema.Snapshot{}, schema.SnapshotRequest{}, schema.CloneSource{}, schema.ChecksumState{}, schema.ScrubRequest{}, schema.Scrub{}, schema.Faults{}, schema.FaultState{},
		schema.ConnectionProtection{}, schema.IPsecState{}, schema.IPsecPortal{}, schema.IPsecTarget{}, schema.IPsecConnection{}, schema.IPsecSA{}, schema.IPsecDenials{},
	} {
		typ := reflect.TypeOf(v)
		var want, got []string
		for _, f := range reflect.VisibleFields(typ) {
			if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
				want = append(want, name)
			}
		}
		schema, ok := schemas[typ.Name()]
		if !ok {
			t.Errorf("no schema of %s", typ.Name())
		}
		for p := range schema.Properties {
			got = append(got, p)
		}
		slices.Sort(want)
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%s: openapi.yaml has %v, want %v", typ.Name(), got, want)
		}
		delete(schemas, typ.Name())
	}
	delete(schemas, "Done")
	for name := range schemas {
		t.Errorf("schema %s without a type", name)
	}
}
