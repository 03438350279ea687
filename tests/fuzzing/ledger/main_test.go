package main

import (
	"os"
	"strings"
	"testing"
)

const sample = "# Fuzzing\n\n" + tableBegin +
	"| `iscsi` | `FuzzA` | 1 999 | 0 |\n| `rdma` | `FuzzOld` | 7 | 1 |\n| | **all: 2 007** | **2 006** | **1** |\n\nMore text | with a bar.\n"

// The executions of a log are added, new targets get a row, and those of the past keep their sum.
func TestAdd(t *testing.T) {
	const log = `== ./iscsi FuzzA
fuzz: elapsed: 0s, gathering baseline coverage: 0/3 completed
fuzz: elapsed: 3s, execs: 500 (167/sec), new interesting: 0 (total: 3)
fuzz: elapsed: 10s, execs: 1001 (50/sec), new interesting: 0 (total: 3)
PASS
== ./iscsi/tcp FuzzB
fuzz: elapsed: 10s, execs: 1000000 (50/sec), new interesting: 0 (total: 3)
== ./iscsi/tcp FuzzB
blind: elapsed: 1s, execs: 20 (20/sec), corpus: 3, seed: 1
`
	ran, err := executions(strings.NewReader(log))
	if err != nil {
		t.Fatal(err)
	}
	got, err := add(sample, []target{{"iscsi", "FuzzA"}, {"iscsi/tcp", "FuzzB"}}, ran)
	if err != nil {
		t.Fatal(err)
	}
	want := "# Fuzzing\n\n" + tableBegin + "| `iscsi` | `FuzzA` | 3 000 | 0 |\n| `iscsi/tcp` | `FuzzB` | 1 000 000 | 20 |\n" +
		"| | targets of the past | 7 | 1 |\n| | **all: 1 003 028** | **1 003 007** | **21** |\n\nMore text | with a bar.\n"
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if again, err := add(got, []target{{"iscsi", "FuzzA"}, {"iscsi/tcp", "FuzzB"}}, nil); err != nil || again != got {
		t.Errorf("%v: without a run the table becomes\n%s", err, again)
	}
	if _, err := executions(strings.NewReader("PASS\n")); err == nil {
		t.Error("an empty log is accepted")
	}
	if _, err := add("# Fuzzing\n", nil, nil); err == nil {
		t.Error("a document without a table is accepted")
	}
}

// docs/fuzzing.md has each fuzz target of the tree, and its total is the sum.
func TestFuzzLedger(t *testing.T) {
	targets, err := targetsOf("../../..")
	if err != nil || len(targets) < 20 {
		t.Fatalf("%d targets, %v", len(targets), err)
	}
	document, err := os.ReadFile("../../../docs/fuzzing.md")
	if err != nil {
		t.Fatal(err)
	}
	if want, err := add(string(document), targets, nil); err != nil || want != string(document) {
		t.Errorf("docs/fuzzing.md is not up to date, %v: run go run ./tests/fuzzing/ledger docs/fuzzing.md after make fuzz", err)
	}
}
