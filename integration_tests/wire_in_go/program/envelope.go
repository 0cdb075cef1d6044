package main

import (
	"hash/crc32"
	"math"
	"math/big"
	"unicode/utf8"
)

const (
	maxReplyBytes    = 4 << 20
	maxEnvelopeBytes = 256 << 10
	maxListEntries   = 16384
	maxListBytes     = 512 << 10
	maxFactors       = 256
	maxFactorDepth   = 8
	maxEngineChars   = 512
)

// Envelope is the outer message of a reply, by wire name; its metadata is not opened yet.
type Envelope struct {
	Values map[string]any
}

func (e *Envelope) hash() string     { return e.Values["compatibility_hash"].(string) }
func (e *Envelope) metadata() []byte { return e.Values["agent_metadata_bytes"].([]byte) }
func (e *Envelope) factors() *Map    { return e.Values["kvh_factors"].(*Map) }

// refusal returns the code of a refusal, its message and the seconds to wait; "" if the reply is none.
func (e *Envelope) refusal() (string, string, float64) {
	table, isMap := e.Values["kvh_refusal"].(*Map)
	if !isMap {
		return "", "", 0
	}
	code, _ := table.Values["code"].(string)
	message, _ := table.Values["message"].(string)
	wait, given := asFloat(table.Values["retry_after_s"])
	if !given {
		wait = 0
	}
	return code, message, wait
}

func decodeEnvelope(frame []byte) (*Envelope, error) {
	if len(frame) > maxReplyBytes {
		return nil, fault("oversized-reply", "%d bytes", len(frame))
	}
	values, verdict := readFields(frame, envelopeFields)
	if verdict != "" {
		return nil, fault("malformed-envelope", "not a map of the documented types")
	}
	envelope := &Envelope{Values: values}
	if len(frame)-len(envelope.metadata()) > maxEnvelopeBytes {
		return nil, fault("malformed-envelope", "too many bytes besides the metadata")
	}
	if err := checkFactors(envelope.factors()); err != nil {
		return nil, err
	}
	if sum := values["kvh_checksum"]; sum != nil && !isEqualNumber(sum, crc32.ChecksumIEEE(envelope.metadata())) {
		return nil, fault("checksum-mismatch", "the metadata was altered")
	}
	return envelope, nil
}

func isEqualNumber(value any, wanted uint32) bool {
	number, isSmall := value.(int64)
	return isSmall && number == int64(wanted)
}

func checkFactors(factors *Map) error {
	if len(factors.Keys) > maxFactors || len(pack(factors)) > maxListBytes {
		return fault("malformed-envelope", "%d factors", len(factors.Keys))
	}
	for _, key := range factors.Keys {
		if isText(key) != "" || !isJSON(factors.Values[key], maxFactorDepth) {
			return fault("malformed-envelope", "factor %v is not a JSON value", key)
		}
	}
	return nil
}

// isJSON returns whether a value can be written as JSON and nests at most so many levels.
func isJSON(value any, levels int) bool {
	switch v := value.(type) {
	case []byte, Extension:
		return false
	case string:
		return utf8.ValidString(v)
	case []any:
		for _, item := range v {
			if levels == 0 || !isJSON(item, levels-1) {
				return false
			}
		}
		return levels > 0
	case *Map:
		for _, key := range v.Keys {
			if levels == 0 || isTextKeyed(v) != nil || !isJSON(v.Values[key], levels-1) {
				return false
			}
		}
		return levels > 0
	}
	return true
}

// decodeMetadata opens an envelope that was accepted.
func decodeMetadata(envelope *Envelope) (map[string]any, error) {
	values, verdict := readFields(envelope.metadata(), metadataFields)
	if verdict == "malformed" || values == nil {
		return nil, fault("malformed-metadata", "not a map of the documented types")
	}
	for _, row := range metadataFields {
		if !isShort(values[row.key]) {
			return nil, fault("malformed-metadata", "%s is too long", row.key)
		}
	}
	if verdict != "" {
		return nil, fault("invalid-metadata", "a number is out of range")
	}
	if values["physical_blocks_per_logical_kv_block"] == int64(0) {
		values["physical_blocks_per_logical_kv_block"] = blocksRatio(values)
	}
	if err := checkMetadata(values); err != nil {
		return nil, err
	}
	return values, nil
}

func isShort(value any) bool {
	switch v := value.(type) {
	case []any:
		return len(v) <= maxListEntries && len(pack(v)) <= maxListBytes
	case *Map:
		return len(v.Keys) <= maxListEntries && len(pack(v)) <= maxListBytes
	}
	return true
}

// blocksRatio returns ceil((sum of ssm_sizes) / block_lens[0]), 1 without Mamba.
func blocksRatio(values map[string]any) any {
	sizes, lengths := values["ssm_sizes"].([]any), values["block_lens"].([]any)
	sum := new(big.Int).Add(bigOf(sizes[0]), bigOf(sizes[1]))
	if sum.Sign() == 0 || len(lengths) == 0 {
		return int64(1)
	}
	quotient, rest := new(big.Int).QuoRem(sum, bigOf(lengths[0]), new(big.Int))
	if rest.Sign() > 0 {
		quotient.Add(quotient, big.NewInt(1))
	}
	if quotient.IsInt64() {
		return quotient.Int64()
	}
	return quotient.Uint64()
}

func bigOf(value any) *big.Int {
	switch number := value.(type) {
	case int64:
		return big.NewInt(number)
	case uint64:
		return new(big.Int).SetUint64(number)
	}
	return new(big.Int)
}

func checkMetadata(values map[string]any) error {
	if characters := utf8.RuneCountInString(values["engine_id"].(string)); characters < 1 || characters > maxEngineChars {
		return fault("invalid-metadata", "engine_id of %d characters", characters)
	}
	if fence, isSet := values["kvh_fence"].([]any); isSet && !isWordArray(fence) {
		return fault("invalid-metadata", "kvh_fence is not an aligned array of words")
	}
	if streams, isSet := values["kvh_streams"].([]any); isSet && !isStreamMemory(streams) {
		return fault("invalid-metadata", "kvh_streams is not an aligned array of words")
	}
	regions := len(values["kv_caches_base_addr"].([]any))
	for _, row := range metadataFields {
		if items, isSet := values[row.key].([]any); isSet && row.regions && len(items) != regions {
			return fault("invalid-metadata", "%s has %d entries for %d regions", row.key, len(items), regions)
		}
	}
	if members := len(values["region_members"].([]any)); members != 0 && members != regions {
		return fault("invalid-metadata", "region_members has %d entries for %d regions", members, regions)
	}
	return checkMemory(values)
}

// checkMemory refuses blocks beyond 2^64 and packed members without bytes.
func checkMemory(values map[string]any) error {
	highest, longest := new(big.Int), new(big.Int)
	for _, address := range values["kv_caches_base_addr"].([]any) {
		if bigOf(address).Cmp(highest) > 0 {
			highest = bigOf(address)
		}
	}
	for _, length := range values["block_lens"].([]any) {
		if bigOf(length).Cmp(longest) > 0 {
			longest = bigOf(length)
		}
	}
	if new(big.Int).Add(highest, longest).BitLen() > 64 && !isPowerOf64(new(big.Int).Add(highest, longest)) {
		return fault("invalid-metadata", "memory beyond 2^64")
	}
	packed := values["packed_member_layouts"].(*Map)
	for _, layer := range packed.Keys {
		pair := packed.Values[layer].([]any)
		if bigOf(pair[0]).Sign() < 0 || bigOf(pair[1]).Sign() < 1 {
			return fault("invalid-metadata", "packed member %v", layer)
		}
	}
	return nil
}

func isPowerOf64(number *big.Int) bool {
	return number.Cmp(new(big.Int).Lsh(big.NewInt(1), 64)) == 0
}

// isWordArray tells if [address, device, words] is an 8-byte aligned array inside 2^64.
func isWordArray(fence []any) bool {
	address, device, words := bigOf(fence[0]), bigOf(fence[1]), bigOf(fence[2])
	end := new(big.Int).Add(address, new(big.Int).Lsh(words, 3))
	if address.Sign() < 0 || device.Sign() < 0 || words.Sign() < 1 {
		return false
	}
	return new(big.Int).And(address, big.NewInt(7)).Sign() == 0 && (end.BitLen() <= 64 || isPowerOf64(end))
}

// isStreamMemory tells if [address, device, slots, entries] has room for a progress word and a table of each slot.
func isStreamMemory(streams []any) bool {
	address, device, slots, entries := bigOf(streams[0]), bigOf(streams[1]), bigOf(streams[2]), bigOf(streams[3])
	words := new(big.Int).Mul(slots, new(big.Int).Add(entries, big.NewInt(1)))
	end := new(big.Int).Add(address, new(big.Int).Lsh(words, 3))
	if address.Sign() < 0 || device.Sign() < 0 || slots.Sign() < 1 || entries.Sign() < 1 {
		return false
	}
	return new(big.Int).And(address, big.NewInt(7)).Sign() == 0 && (end.BitLen() <= 64 || isPowerOf64(end))
}

// encodeEnvelope packs metadata, checksum included.
func encodeEnvelope(values map[string]any, metadata map[string]any, dialect int) []byte {
	packed := writeFields(metadata, metadataFields, dialect)
	outer := map[string]any{}
	for key, value := range values {
		outer[key] = value
	}
	outer["agent_metadata_bytes"] = packed
	if outer["kvh_protocol"] != nil {
		outer["kvh_checksum"] = int64(crc32.ChecksumIEEE(packed))
	}
	return writeFields(outer, envelopeFields, dialect)
}

// encodeRefusal packs an envelope that says why nothing is served.
func encodeRefusal(code, message string, wait float64) []byte {
	if math.IsNaN(wait) || wait < 0 {
		wait = 0
	}
	table := newMap().set("code", code).set("message", message).set("retry_after_s", wait)
	return writeFields(map[string]any{
		"compatibility_hash":   "refused (" + code + ": " + message + ")",
		"agent_metadata_bytes": []byte{},
		"kvh_refusal":          table,
	}, envelopeFields, 15)
}
