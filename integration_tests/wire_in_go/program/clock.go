package main

import "math"

func encodeClock(seconds float64) []byte { return pack(seconds) }

func decodeClock(frame []byte) (float64, error) {
	value, err := unpack(frame)
	var seconds float64
	switch number := value.(type) {
	case float64:
		seconds = number
	case int64:
		seconds = float64(number)
	case uint64:
		seconds = float64(number)
	default:
		return 0, fault("malformed-clock", "not a number")
	}
	if err != nil || math.IsNaN(seconds) || math.IsInf(seconds, 0) {
		return 0, fault("malformed-clock", "not one finite number")
	}
	return seconds, nil
}
