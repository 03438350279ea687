package api

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// What is wrong with a body is said in the words of JSON, not of Go.
func TestBodyErrors(t *testing.T) {
	for text, want := range map[string]string{
		`{"size": 5}`:   "body: the value at byte 10 must be a string, not a number",
		`{"size": [5]}`: "body: the value at byte 10 must be a string, not an array",
		`[]`:            "body: the value at byte 1 must be an object, not an array",
		`{`:             "body: unexpected EOF",
		`{} {}`:         "body: data after the JSON value",
	} {
		v := schema.Values{}
		err := body(httptest.NewRequest(http.MethodPatch, "/", strings.NewReader(text)), &v)
		if err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
	for text, want := range map[string]string{
		`{"id": "x"}`:         "body: id: must be a whole number, not a string",
		`{"read_only": 1}`:    "body: read_only: must be true or false, not a number",
		`{"initiators": "*"}`: "body: initiators: must be an array, not a string",
		`{"nope": 1}`:         `body: unknown field "nope"`,
	} {
		var v schema.LUN
		err := body(httptest.NewRequest(http.MethodPost, "/", strings.NewReader(text)), &v)
		if err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}
