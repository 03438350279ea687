package config

import _ "embed"

// Schema returns the JSON Schema (draft 7) of a configuration file, for editors. Each file that Load accepts is valid by
// it. Load also checks what a schema cannot say: names that are used twice, and keys that depend on others. The caller
// must not change the result.
func Schema() []byte { return schema }

// "make schema" writes schema.json from the types of this package and from docs/config.md.
//
//go:embed schema.json
var schema []byte
