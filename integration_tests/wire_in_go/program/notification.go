package main

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	maxRequestBytes      = 4096
	maxReaders           = 65536
	maxNotificationBytes = 1 << 20
	maxHeartbeatIDs      = 8192
)

// Notification is what a reader reports to the worker that it reads from.
type Notification struct {
	Kind     string   `json:"kind"`
	Requests []string `json:"request_ids"`
	Nonces   []string `json:"nonces"`
	Readers  int      `json:"reader_count"`
	Consumer string   `json:"consumer"`
	Reason   string   `json:"reason"`
	Surplus  int      `json:"surplus,omitempty"`
}

func unknown(reason string) Notification { return Notification{Kind: "unknown", Reason: reason} }

func parseNotification(payload []byte) Notification {
	switch {
	case len(payload) > maxNotificationBytes:
		return unknown("oversized")
	case bytes.HasPrefix(payload, []byte("PUSH_REG:")):
		return unknown("push-registration")
	case !utf8.Valid(payload):
		return unknown("not-utf8")
	}
	text := string(payload)
	if rest, found := strings.CutPrefix(text, "HB:,KVH:"); found {
		return parseLeases(rest)
	}
	if rest, found := strings.CutPrefix(text, "HB:"); found {
		return parseHeartbeat(rest)
	}
	return parseRead(text)
}

func parseHeartbeat(rest string) Notification {
	ids := strings.Split(rest, ",")
	if verbatim, found := strings.CutPrefix(rest, ","); found && strings.Contains(verbatim, ",") {
		ids = []string{verbatim}
	}
	found := Notification{Kind: "heartbeat", Surplus: max(0, len(ids)-maxHeartbeatIDs)}
	ids = ids[:min(len(ids), maxHeartbeatIDs)]
	for _, id := range ids {
		found.add(id, "")
	}
	if len(found.Requests) == 0 {
		return unknown("bad-id")
	}
	return found
}

// add keeps a request under a nonce, once.
func (n *Notification) add(id, nonce string) {
	for number := range n.Requests {
		if n.Requests[number] == id && n.Nonces[number] == nonce {
			return
		}
	}
	if isRequest(id) {
		n.Requests, n.Nonces = append(n.Requests, id), append(n.Nonces, nonce)
	}
}

func parseLeases(rest string) Notification {
	var pairs [][]string
	if strictJSON(rest, &pairs) != nil || pairs == nil {
		return unknown("bad-nonce")
	}
	found := Notification{Kind: "heartbeat", Surplus: max(0, len(pairs)-maxHeartbeatIDs)}
	for _, pair := range pairs[:min(len(pairs), maxHeartbeatIDs)] {
		if len(pair) != 2 {
			return unknown("bad-nonce")
		}
		if isNonce(pair[1]) {
			found.add(pair[0], pair[1])
		}
	}
	if len(found.Requests) == 0 {
		return unknown("bad-id")
	}
	return found
}

func parseRead(text string) Notification {
	colon := strings.LastIndexByte(text, ':')
	if colon < 0 {
		return unknown("no-count")
	}
	id, count := text[:colon], parseCount(text[colon+1:])
	if rest, found := strings.CutPrefix(id, "KVH:"); found && count > 0 {
		return parseLeaseRead(rest, count)
	}
	if !isRequest(id) {
		return unknown("bad-id")
	}
	if count == 0 {
		return unknown("bad-count")
	}
	return Notification{Kind: "read-complete", Requests: []string{id}, Nonces: []string{""}, Readers: count}
}

// parseCount returns 1 to 65536, or 0 for anything else.
func parseCount(text string) int {
	for _, each := range []byte(text) {
		if each < '0' || each > '9' {
			return 0
		}
	}
	count, err := strconv.Atoi(text)
	if err != nil || text[0] == '0' || count > maxReaders {
		return 0
	}
	return count
}

func parseLeaseRead(text string, count int) Notification {
	var parts []string
	if strictJSON(text, &parts) != nil || len(parts) != 3 || !isNonce(parts[1]) || !isConsumer(parts[2]) {
		return unknown("bad-nonce")
	}
	if !isRequest(parts[0]) || isReserved(parts[0]) {
		return unknown("bad-id")
	}
	return Notification{
		Kind: "read-complete", Requests: parts[:1], Nonces: parts[1:2], Readers: count, Consumer: parts[2],
	}
}

func isRequest(id string) bool { return id != "" && len(id) <= maxRequestBytes }

func isReserved(id string) bool {
	return strings.HasPrefix(id, "HB:") || strings.HasPrefix(id, "PUSH_REG:") || strings.HasPrefix(id, "KVH:")
}

func isNonce(text string) bool {
	for _, each := range []byte(text) {
		if each < '!' || each > '~' {
			return false
		}
	}
	return len(text) >= 1 && len(text) <= 64
}

func isConsumer(text string) bool {
	for _, each := range text {
		if !unicode.IsPrint(each) {
			return false
		}
	}
	return utf8.RuneCountInString(text) <= maxEngineChars
}

// strictJSON reads exactly one JSON value into strings; null is not a string.
func strictJSON(text string, into any) error {
	var value any
	if err := json.Unmarshal([]byte(text), &value); err != nil {
		return err
	}
	if hasNull(value) {
		return errPack
	}
	return json.Unmarshal([]byte(text), into)
}

func hasNull(value any) bool {
	items, isList := value.([]any)
	for _, item := range items {
		if hasNull(item) {
			return true
		}
	}
	return !isList && value == nil
}

func encodeRead(id, nonce, consumer string, count int) []byte {
	if nonce == "" {
		return []byte(id + ":" + strconv.Itoa(count))
	}
	return []byte("KVH:" + compactJSON([]string{id, nonce, consumer}) + ":" + strconv.Itoa(count))
}

// encodeHeartbeats returns the payload for leases with nonces, or the one for requests without.
func encodeHeartbeats(ids, nonces []string) []byte {
	if nonces[0] == "" {
		if len(ids) == 1 && strings.Contains(ids[0], ",") {
			return []byte("HB:," + ids[0])
		}
		return []byte("HB:" + strings.Join(ids, ","))
	}
	pairs := make([][]string, len(ids))
	for number, id := range ids {
		pairs[number] = []string{id, nonces[number]}
	}
	return []byte("HB:,KVH:" + compactJSON(pairs))
}

func compactJSON(value any) string {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		panic(err) // texts and lists only
	}
	return strings.TrimSuffix(out.String(), "\n")
}
