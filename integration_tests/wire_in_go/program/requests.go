package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"net"
)

// request is one line on standard input; which keys count depends on "do".
type request struct {
	Do        string            `json:"do"`
	Hex       string            `json:"hex"`
	Dialect   int               `json:"dialect"`
	PP        int               `json:"pp"`
	TP        int               `json:"tp"`
	Ranks     [][2]int          `json:"ranks"`
	Code      string            `json:"code"`
	Message   string            `json:"message"`
	Wait      float64           `json:"wait"`
	Factors   json.RawMessage   `json:"factors"`
	IsExact   bool              `json:"exact"`
	Supported map[string]string `json:"capabilities"`
	Ticket    json.RawMessage   `json:"ticket"`
	Secrets   []string          `json:"secrets"`
	Layer     string            `json:"layer"`
	Field     string            `json:"field"`
	Page      int64             `json:"page"`
	Indices   map[string]int64  `json:"indices"`
	Address   string            `json:"address"`
	Serve     map[string]string `json:"serve"`
	Prompt    Prompt            `json:"prompt"`
	Own       string            `json:"own"`
	Others    []string          `json:"others"`
}

func (r request) frame() []byte {
	frame, err := hex.DecodeString(r.Hex)
	if err != nil {
		panic(err) // the test's own mistake
	}
	return frame
}

// keys reads the certificates of an encrypted side channel; nil without.
func (r request) keys() (*Keys, error) {
	if r.Own == "" {
		return nil, nil
	}
	_, own, err := readCertificate(r.Own)
	if err == nil && own == nil {
		err = fault("invalid-key-file", "no secret key")
	}
	keys := &Keys{Own: own}
	for _, text := range r.Others {
		var public []byte
		if err == nil {
			public, _, err = readCertificate(text)
			keys.Others = append(keys.Others, public)
		}
	}
	return keys, err
}

func (r request) factors() *Map {
	decoder := json.NewDecoder(bytes.NewReader(r.Factors))
	decoder.UseNumber()
	var read any
	if err := decoder.Decode(&read); err != nil {
		return newMap()
	}
	table, isTable := valueOf(read).(*Map)
	if !isTable {
		return newMap()
	}
	return table
}

func (r request) offer() Offer {
	return Offer{Factors: r.factors(), IsExact: r.IsExact, Protocol: [2]int64{1, 1}, Supported: r.Supported}
}

// plain turns decoded values into what JSON can show: bytes as hexadecimal digits.
func plain(value any) any {
	switch v := value.(type) {
	case []byte:
		return hex.EncodeToString(v)
	case []any:
		items := make([]any, len(v))
		for number, item := range v {
			items[number] = plain(item)
		}
		return items
	case *Map:
		table := map[string]any{}
		for _, key := range v.Keys {
			table[key.(string)] = plain(v.Values[key])
		}
		return table
	case map[string]any:
		table := map[string]any{}
		for key, item := range v {
			table[key] = plain(item)
		}
		return table
	case Extension:
		return "extension"
	}
	return value
}

func doQuery(r request) (any, error) {
	query, err := decodeQuery(r.frame())
	if err != nil {
		return nil, err
	}
	return map[string]any{"command": "metadata", "pp": query.PP, "tp": query.TP, "clock": query.Clock}, nil
}

func doMakeQuery(r request) (any, error) {
	return hex.EncodeToString(encodeQuery(r.Dialect, r.PP, r.TP)), nil
}

// doEnvelope reads an envelope and its metadata, and writes both again.
func doEnvelope(r request) (any, error) {
	envelope, err := decodeEnvelope(r.frame())
	if err != nil {
		return nil, err
	}
	shown := map[string]any{"envelope": plain(envelope.Values)}
	if envelope.Values["kvh_refusal"] != nil {
		code, message, wait := envelope.refusal()
		shown["refusal"] = map[string]any{"code": code, "message": message, "retry_after_s": wait}
		return shown, nil
	}
	metadata, err := decodeMetadata(envelope)
	if err != nil {
		return nil, err
	}
	shown["metadata"] = plain(metadata)
	shown["again"] = hex.EncodeToString(encodeEnvelope(envelope.Values, metadata, r.Dialect))
	return shown, nil
}

func doMakeRefusal(r request) (any, error) {
	return hex.EncodeToString(encodeRefusal(r.Code, r.Message, r.Wait)), nil
}

func doClock(r request) (any, error) {
	seconds, err := decodeClock(r.frame())
	if err != nil {
		return nil, err
	}
	return map[string]any{"clock_s": seconds, "again": hex.EncodeToString(encodeClock(seconds))}, nil
}

func doNotification(r request) (any, error) {
	found := parseNotification(r.frame())
	shown := map[string]any{"notification": found}
	switch found.Kind {
	case "read-complete":
		again := encodeRead(found.Requests[0], found.Nonces[0], found.Consumer, found.Readers)
		shown["again"] = hex.EncodeToString(again)
	case "heartbeat":
		shown["again"] = hex.EncodeToString(encodeHeartbeats(found.Requests, found.Nonces))
	}
	return shown, nil
}

func doHash(r request) (any, error) {
	factors := r.factors()
	chosen := factors
	if r.Dialect != 0 {
		chosen = hashedFactors(factors, r.Dialect)
	}
	return map[string]any{"json": hex.EncodeToString([]byte(sortedJSON(chosen))), "hash": hashOf(chosen)}, nil
}

func doSealedBytes(r request) (any, error) {
	covered, err := sealedBytes(r.Ticket)
	return hex.EncodeToString(covered), err
}

func doSeal(r request) (any, error) { return sealTicket(r.Ticket, []byte(r.Secrets[0])) }

func doVerify(r request) (any, error) { return true, verifyTicket(r.Ticket, r.Secrets) }

func doDigest(r request) (any, error) { return promptDigest(r.Prompt), nil }

func doChecksumAgent(r request) (any, error) {
	return hex.EncodeToString(addChecksum(r.frame())), nil
}

func doCheckAgent(r request) (any, error) { return isAgentSound(r.frame()), nil }

func doGeometry(r request) (any, error) {
	document, err := decodeGeometry(r.frame())
	if err != nil {
		return nil, err
	}
	return document.address(r.Layer, r.Field, r.Page, r.Indices)
}

func doAsk(r request) (any, error) {
	keys, err := r.keys()
	if err != nil {
		return nil, err
	}
	replies, err := ask(r.Address, r.Dialect, r.Ranks, r.offer(), keys)
	if err != nil {
		return nil, err
	}
	shown := []any{}
	for _, reply := range replies {
		agent := reply.Metadata["agent_metadata"].([]byte)
		shown = append(shown, map[string]any{
			"metadata": plain(reply.Metadata), "clock": reply.Clock, "is_agent_sound": isAgentSound(agent),
		})
	}
	return shown, nil
}

// doAskQuery reads an ask and writes it again.
func doAskQuery(r request) (any, error) {
	ask, err := decodeAsk(r.frame())
	if err != nil {
		return nil, err
	}
	shown := map[string]any{"number": ask.Number, "payload": nil, "again": hex.EncodeToString(encodeAsk(ask))}
	if !ask.Cancels {
		shown["payload"] = hex.EncodeToString(ask.Payload)
	}
	return shown, nil
}

// doAnswer reads the reply to an ask and writes it again.
func doAnswer(r request) (any, error) {
	answer, err := decodeAnswer(r.frame())
	if err != nil {
		return nil, err
	}
	return map[string]any{
		"number": answer.Number, "payload": hex.EncodeToString(answer.Payload), "code": answer.Code,
		"retry_after_s": answer.Wait, "again": hex.EncodeToString(encodeAnswer(answer)),
	}, nil
}

// doListen serves envelopes ("pp,tp" -> hexadecimal) on a port of loopback until the program ends.
func doListen(r request) (any, error) {
	keys, err := r.keys()
	if err != nil {
		return nil, err
	}
	listener := &Listener{Envelopes: map[[2]int][]byte{}, Keys: keys}
	for rank, text := range r.Serve {
		frame, err := hex.DecodeString(text)
		if err != nil {
			return nil, err
		}
		var pair [2]int
		if err := json.Unmarshal([]byte("["+rank+"]"), &pair); err != nil {
			return nil, err
		}
		listener.Envelopes[pair] = frame
	}
	socket, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	go listener.serve(socket)
	return socket.Addr().(*net.TCPAddr).Port, nil
}
