package main

import (
	"math"
	"unicode/utf8"
)

// A kind checks one value and returns "" if it fits, "malformed" for a wrong type, "invalid" for a number out of range.
type kind func(value any) string

func worse(one, other string) string {
	if one == "malformed" || other == "" {
		return one
	}
	return other
}

func isText(value any) string {
	if text, fits := value.(string); fits && utf8.ValidString(text) {
		return ""
	}
	return "malformed"
}

func isBytes(value any) string {
	if _, fits := value.([]byte); fits {
		return ""
	}
	return "malformed"
}

func isInteger(value any) string {
	switch value.(type) {
	case int64, uint64:
		return ""
	}
	return "malformed"
}

// from returns the kind of integers that are at least `least`.
func from(least int64) kind {
	return func(value any) string {
		number, isSmall := value.(int64)
		if isSmall && number < least {
			return "invalid"
		}
		return isInteger(value)
	}
}

func optional(inner kind) kind {
	return func(value any) string {
		if value == nil {
			return ""
		}
		return inner(value)
	}
}

// listOf returns the kind of lists of any length.
func listOf(inner kind) kind {
	return func(value any) string {
		items, isList := value.([]any)
		if !isList {
			return "malformed"
		}
		verdict := ""
		for _, item := range items {
			verdict = worse(verdict, inner(item))
		}
		return verdict
	}
}

// exactly returns the kind of lists with this many entries.
func exactly(count int, inner kind) kind {
	return func(value any) string {
		if items, isList := value.([]any); !isList || len(items) != count {
			return "malformed"
		}
		return listOf(inner)(value)
	}
}

// mapOf returns the kind of maps from texts.
func mapOf(inner kind) kind {
	return func(value any) string {
		table, isMap := value.(*Map)
		if !isMap {
			return "malformed"
		}
		verdict := ""
		for _, key := range table.Keys {
			verdict = worse(worse(verdict, isText(key)), inner(table.Values[key]))
		}
		return verdict
	}
}

func isAny(any) string { return "" }

// field is a row of a table of docs/wire/protocol.md.
type field struct {
	key     string
	kind    kind
	since   int  // first dialect; 0: ours, written in every dialect if set
	needed  bool // refused without it
	unset   any  // read if it is absent
	regions bool // one entry per region
}

// metadataFields are the rows of "Agent metadata", in the order of writing.
var metadataFields = []field{
	{key: "engine_id", kind: isText, since: 2, needed: true},
	{key: "agent_metadata", kind: isBytes, since: 2, needed: true},
	{key: "kv_caches_base_addr", kind: listOf(from(0)), since: 2, needed: true},
	{key: "device_id", kind: from(0), since: 2, needed: true},
	{key: "num_blocks", kind: from(1), since: 2, needed: true},
	{key: "block_lens", kind: listOf(from(1)), since: 2, needed: true, regions: true},
	{key: "block_strides", kind: optional(listOf(from(1))), since: 9, regions: true},
	{key: "kv_cache_layout", kind: isText, since: 2, needed: true},
	{key: "block_size", kind: from(1), since: 2, needed: true},
	{key: "ssm_sizes", kind: exactly(2, from(0)), since: 2, needed: true},
	{key: "attn_backend_name", kind: isText, since: 2, needed: true},
	{key: "physical_blocks_per_logical_kv_block", kind: from(0), since: 3, unset: int64(0)},
	{key: "region_num_blocks", kind: optional(listOf(from(0))), since: 11, regions: true},
	{key: "region_group_ids", kind: optional(listOf(isInteger)), since: 11, regions: true},
	{key: "region_names", kind: optional(listOf(isText)), since: 11, regions: true},
	{key: "region_mem_types", kind: optional(listOf(isText)), since: 11, regions: true},
	{key: "dcp_size", kind: from(1), since: 8, unset: int64(1)},
	{key: "pcp_size", kind: from(1), since: 8, unset: int64(1)},
	{key: "ple_block_len", kind: optional(from(1)), since: 14},
	{key: "region_members", kind: listOf(listOf(isText)), since: 12, unset: []any{}},
	{key: "packed_member_layouts", kind: mapOf(exactly(2, isInteger)), since: 13, unset: newMap()},
	{key: "kvh_fence", kind: optional(exactly(3, isInteger))},
	{key: "kvh_geometry", kind: optional(isBytes)},
	{key: "kvh_streams", kind: optional(exactly(4, isInteger))},
}

// envelopeFields are the rows of "Envelope".
var envelopeFields = []field{
	{key: "compatibility_hash", kind: isText, since: 2, needed: true},
	{key: "agent_metadata_bytes", kind: isBytes, since: 2, needed: true},
	{key: "kvh_protocol", kind: optional(exactly(2, isInteger))},
	{key: "kvh_rank", kind: optional(exactly(2, isInteger))},
	{key: "kvh_generation", kind: optional(isInteger)},
	{key: "kvh_factors", kind: mapOf(isAny), unset: newMap()},
	{key: "kvh_checksum", kind: optional(isInteger)},
	{key: "kvh_capabilities", kind: mapOf(isText), unset: newMap()},
	{key: "kvh_refusal", kind: optional(isRefusal)},
}

func isRefusal(value any) string {
	table, isMap := value.(*Map)
	if !isMap || isTextKeyed(table) != nil {
		return "malformed"
	}
	code, found := table.get("code")
	verdict := isText(code)
	if message, given := table.get("message"); given {
		verdict = worse(verdict, isText(message))
	}
	if wait, given := table.get("retry_after_s"); given {
		if _, isNumber := asFloat(wait); !isNumber {
			verdict = "malformed"
		}
	}
	if !found {
		return "malformed"
	}
	return verdict
}

func isTextKeyed(table *Map) error {
	for _, key := range table.Keys {
		if _, isText := key.(string); !isText {
			return errPack
		}
	}
	return nil
}

func asFloat(value any) (float64, bool) {
	switch number := value.(type) {
	case float64:
		return number, true
	case int64:
		return float64(number), true
	case uint64:
		return float64(number), true
	}
	return math.NaN(), false
}

// readFields returns the value of every key of a table, defaults included, and the verdict about them.
func readFields(frame []byte, fields []field) (map[string]any, string) {
	value, err := unpack(frame)
	table, isMap := value.(*Map)
	if err != nil || !isMap || isTextKeyed(table) != nil {
		return nil, "malformed"
	}
	values, verdict := map[string]any{}, ""
	for _, row := range fields {
		sent, found := table.get(row.key)
		switch {
		case found:
			values[row.key] = sent
			verdict = worse(verdict, row.kind(sent))
		case row.needed:
			return nil, "malformed"
		default:
			values[row.key] = row.unset
		}
	}
	return values, verdict
}

// writeFields packs the keys that a dialect has; keys of ours are left out where they are not set.
func writeFields(values map[string]any, fields []field, dialect int) []byte {
	table := newMap()
	for _, row := range fields {
		value, given := values[row.key]
		if row.since > dialect || (row.since == 0 && isUnset(value)) {
			continue
		}
		if !given {
			value = row.unset
		}
		table.set(row.key, value)
	}
	return pack(table)
}

func isUnset(value any) bool {
	table, isMap := value.(*Map)
	return value == nil || (isMap && len(table.Keys) == 0)
}
