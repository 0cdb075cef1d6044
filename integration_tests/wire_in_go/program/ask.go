package main

import (
	"bytes"
	"math"
	"unicode/utf8"
)

const (
	maxAskBytes    = 4096
	maxAnswerBytes = 1 << 20
	askOverhead    = 32
	maxCodeLength  = 64
	numberEnd      = 1 << 53
)

var (
	askHead    = []byte("\x93\xc4\x03ask")
	cancelHead = []byte("\x92\xc4\x0acancel_ask")
)

// Ask is a question with a payload of the engine's own; without one it takes the ask of this number back.
type Ask struct {
	Number  int64
	Payload []byte
	Cancels bool
}

// Answer is the reply to an ask: a payload, or a code and a time.
type Answer struct {
	Number  int64
	Payload []byte
	Code    string
	Wait    float64
}

func encodeAsk(ask *Ask) []byte {
	if ask.Cancels {
		return pack([]any{[]byte("cancel_ask"), ask.Number})
	}
	return pack([]any{[]byte("ask"), ask.Number, ask.Payload})
}

func encodeAnswer(answer *Answer) []byte {
	if answer.Code == "" {
		return pack([]any{[]byte("ask"), answer.Number, answer.Payload})
	}
	return pack([]any{[]byte("ask"), answer.Number, answer.Code, answer.Wait})
}

func decodeAsk(frame []byte) (*Ask, error) {
	cancels := bytes.HasPrefix(frame, cancelHead)
	if !cancels && !bytes.HasPrefix(frame, askHead) {
		return nil, fault("unknown-command", "no ask")
	}
	most := maxQueryBytes
	if !cancels {
		most = maxAskBytes + askOverhead
	}
	if len(frame) > most {
		return nil, fault("oversized-query", "%d bytes, at most %d", len(frame), most)
	}
	value, err := unpack(frame)
	fields, isArray := value.([]any)
	if err != nil || !isArray || !isSound(value) {
		return nil, fault("malformed-query", "not one MessagePack array")
	}
	number, isNumber := fields[1].(int64)
	if !isNumber || number < 1 || number >= numberEnd {
		return nil, fault("wrong-type", "number %v", fields[1])
	}
	if cancels {
		return &Ask{Number: number, Cancels: true}, nil
	}
	payload, isBytes := fields[2].([]byte)
	if !isBytes || len(payload) > maxAskBytes {
		return nil, fault("wrong-type", "a payload is a %T", fields[2])
	}
	return &Ask{Number: number, Payload: payload}, nil
}

func decodeAnswer(frame []byte) (*Answer, error) {
	value, err := unpack(frame)
	fields, isArray := value.([]any)
	isLong := len(frame) > maxAnswerBytes+askOverhead
	if isLong || err != nil || !isArray || !isSound(value) || len(fields) < 3 || len(fields) > 4 {
		return nil, fault("malformed-answer", "not one array of three or four")
	}
	command, _ := fields[0].([]byte)
	number, isNumber := fields[1].(int64)
	if !bytes.Equal(command, []byte("ask")) || !isNumber || number < 1 || number >= numberEnd {
		return nil, fault("malformed-answer", "no answer to a numbered ask")
	}
	if len(fields) == 3 {
		if payload, isBytes := fields[2].([]byte); isBytes {
			return &Answer{Number: number, Payload: payload}, nil
		}
		return nil, fault("malformed-answer", "a payload is a %T", fields[2])
	}
	code, isText := fields[2].(string)
	wait, isFloat := fields[3].(float64)
	length := utf8.RuneCountInString(code)
	if !isText || !isFloat || length < 1 || length > maxCodeLength || math.IsInf(wait, 0) || !(wait >= 0) {
		return nil, fault("malformed-answer", "no code and time")
	}
	return &Answer{Number: number, Code: code, Wait: wait}, nil
}
