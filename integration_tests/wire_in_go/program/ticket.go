package main

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"hash/crc32"
	"math"
	"strconv"
)

// ticketReader takes values out of a ticket and writes the bytes under its seal; the first fault stays.
type ticketReader struct {
	ticket map[string]any
	out    []byte
	err    error
}

const maxTicketNumber = 1 << 53

// sealedBytes returns the bytes that the seal of a ticket covers; see docs/wire/ticket.md.
func sealedBytes(text []byte) ([]byte, error) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	reader := &ticketReader{out: []byte("kv-ticket-1\x00")}
	if err := decoder.Decode(&reader.ticket); err != nil || reader.ticket == nil {
		return nil, fault("ticket-seal", "no JSON object")
	}
	reader.integer(reader.direction())
	reader.integer(reader.number(reader.ticket["remote_port"], -1))
	for _, key := range []string{"tp_size", "pp_size", "dcp_size"} {
		reader.integer(reader.number(reader.ticket[key], 1))
	}
	generation := reader.number(reader.ticket["kv_generation"], -1)
	if generation < 0 {
		generation = reader.number(reader.ticket["remote_registration_generation"], -1)
	}
	reader.integer(generation)
	reader.integer(reader.number(reader.ticket["kv_dialect"], -1))
	reader.integer(reader.number(reader.ticket["remote_num_tokens"], -1))
	reader.fence()
	reader.mode()
	reader.seconds("kv_lease_s")
	reader.seconds("remote_blocks_expiry_time")
	for _, key := range []string{"remote_engine_id", "remote_host", "remote_request_id"} {
		reader.text(key, nil)
	}
	reader.text("kv_nonce", "")
	reader.text("kv_prompt", nil)
	reader.groups()
	return reader.out, reader.err
}

func (r *ticketReader) bad(key string) { r.err = fault("ticket-seal", "%s cannot be read", key) }

func (r *ticketReader) integer(number int64) {
	r.out = binary.LittleEndian.AppendUint64(r.out, uint64(number))
}

// number reads an integer, also one that a router wrote as 5600.0.
func (r *ticketReader) number(value any, absent int64) int64 {
	if value == nil {
		return absent
	}
	number, isNumber := value.(json.Number)
	if whole, err := strconv.ParseInt(string(number), 10, 64); isNumber && err == nil {
		return whole
	}
	real, err := strconv.ParseFloat(string(number), 64)
	if !isNumber || err != nil || real != math.Trunc(real) || math.Abs(real) > maxTicketNumber {
		r.bad("a number")
		return absent
	}
	return int64(real)
}

func (r *ticketReader) direction() int64 {
	handOff, _ := r.ticket["do_remote_prefill"].(bool)
	readback, _ := r.ticket["do_remote_decode"].(bool)
	if handOff == readback {
		r.bad("do_remote_prefill")
	}
	if handOff {
		return 1
	}
	return 2
}

func (r *ticketReader) fence() {
	pair := r.list("kv_fence")
	if len(pair) == 0 {
		pair = []any{nil, nil}
	}
	if len(pair) != 2 {
		r.bad("kv_fence")
		return
	}
	r.integer(r.number(pair[0], -1))
	r.integer(r.number(pair[1], -1))
}

func (r *ticketReader) mode() {
	switch r.ticket["transfer_mode"] {
	case nil:
		r.integer(0)
	case "pull":
		r.integer(1)
	default:
		r.bad("transfer_mode")
	}
}

func (r *ticketReader) seconds(key string) {
	value := -1.0
	if number, isNumber := r.ticket[key].(json.Number); isNumber {
		value, _ = number.Float64()
	} else if r.ticket[key] != nil {
		r.bad(key)
	}
	r.out = binary.LittleEndian.AppendUint64(r.out, math.Float64bits(value))
}

func (r *ticketReader) text(key string, absent any) {
	value := r.ticket[key]
	if value == nil {
		value = absent
	}
	text, isText := value.(string)
	if !isText {
		if value != nil {
			r.bad(key)
		}
		r.integer(-1)
		return
	}
	r.integer(int64(len(text)))
	r.out = append(r.out, text...)
}

func (r *ticketReader) list(key string) []any {
	items, isList := r.ticket[key].([]any)
	if !isList && r.ticket[key] != nil {
		r.bad(key)
	}
	return items
}

func (r *ticketReader) groups() {
	groups, firsts, spans := r.list("remote_block_ids"), r.list("kv_first_tokens"), r.list("kv_span_tokens")
	null := r.number(r.ticket["kv_null_block"], -1)
	r.integer(int64(len(groups)))
	for number, group := range groups {
		ids, isList := group.([]any)
		if !isList {
			r.bad("remote_block_ids")
		}
		first := int64(-1)
		if number < len(firsts) {
			first = r.number(firsts[number], -1)
		}
		r.integer(first)
		r.integer(null)
		r.integer(int64(len(ids)))
		for _, id := range ids {
			r.block(r.number(id, -1))
		}
	}
	r.integer(int64(len(spans)))
	for _, span := range spans {
		r.integer(r.number(span, -1))
	}
}

func (r *ticketReader) block(id int64) {
	if id < 0 || id > math.MaxUint32 {
		r.bad("a block id")
	}
	r.out = binary.LittleEndian.AppendUint32(r.out, uint32(id))
}

func sealTicket(text, secret []byte) (string, error) {
	covered, err := sealedBytes(text)
	if err != nil {
		return "", err
	}
	mac := hmac.New(sha256.New, secret)
	mac.Write(covered)
	return hex.EncodeToString(mac.Sum(nil)), nil
}

// verifyTicket tries every secret, each in constant time.
func verifyTicket(text []byte, secrets []string) error {
	var sent struct {
		Seal string `json:"kv_seal"`
	}
	if err := json.Unmarshal(text, &sent); err != nil {
		return fault("ticket-seal", "no JSON object")
	}
	for _, secret := range secrets {
		seal, err := sealTicket(text, []byte(secret))
		if err != nil {
			return err
		}
		if hmac.Equal([]byte(seal), []byte(sent.Seal)) {
			return nil
		}
	}
	return fault("ticket-seal", "no secret fits")
}

var agentMark = []byte{0xab, 'K', 'V', 'S', 'E', 'A', 'L', 0x01}

// addChecksum appends the 16 bytes that show if agent metadata was damaged.
func addChecksum(blob []byte) []byte {
	sum := crc32.ChecksumIEEE(blob)
	whole := append(bytes.Clone(blob), agentMark...)
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(whole, sum), ^sum)
}

// isAgentSound tells if agent metadata has no checksum trailer (vLLM's) or one that fits. Half a mark is a
// damaged one, and a whole mark elsewhere that of a trailer that was cut or moved.
func isAgentSound(received []byte) bool {
	end := len(received) - 16
	if end <= 0 {
		return !bytes.Contains(received, agentMark)
	}
	fitting := 0
	for number, each := range agentMark {
		if received[end+number] == each {
			fitting++
		}
	}
	if fitting < 4 {
		return !bytes.Contains(received, agentMark)
	}
	return bytes.Equal(addChecksum(received[:end]), received)
}

// promptDigest binds a ticket to what was computed: token ids, adapter, media, cache salt and prompt embeddings.
func promptDigest(prompt Prompt) string {
	sum := sha256.New()
	number := func(value int64) { sum.Write(binary.LittleEndian.AppendUint64(nil, uint64(value))) }
	text := func(value string) {
		number(int64(len(value)))
		sum.Write([]byte(value))
	}
	sum.Write([]byte("kv-prompt-1\x00"))
	number(int64(len(prompt.Tokens)))
	for _, token := range prompt.Tokens {
		number(token)
	}
	number(int64(len(prompt.Media)))
	for _, item := range prompt.Media {
		text(item.Hash)
		number(item.First)
		number(item.Count)
	}
	text(prompt.Lora)
	text(prompt.Salt)
	text(prompt.Embeds)
	return hex.EncodeToString(sum.Sum(nil))
}

// Prompt is what a ticket was written for.
type Prompt struct {
	Tokens             []int64
	Lora, Salt, Embeds string
	Media              []struct {
		Hash         string
		First, Count int64
	}
}
