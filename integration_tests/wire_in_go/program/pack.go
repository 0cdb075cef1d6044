package main

import (
	"encoding/binary"
	"fmt"
	"math"
)

// pack writes a value in its shortest encoding; floats as float64.
func pack(value any) []byte { return appendPacked(nil, value) }

func appendPacked(out []byte, value any) []byte {
	switch v := value.(type) {
	case nil:
		return append(out, 0xc0)
	case bool:
		if v {
			return append(out, 0xc3)
		}
		return append(out, 0xc2)
	case int:
		return appendInteger(out, int64(v))
	case int64:
		return appendInteger(out, v)
	case uint64:
		return appendNatural(out, v)
	case float64:
		return binary.BigEndian.AppendUint64(append(out, 0xcb), math.Float64bits(v))
	case string:
		return append(appendLength(out, len(v), 0xa0, 31, 0xd9), v...)
	case []byte:
		return append(appendLength(out, len(v), 0, -1, 0xc4), v...)
	case []any:
		out = appendCount(out, len(v), 0x90, 0xdc)
		for _, item := range v {
			out = appendPacked(out, item)
		}
		return out
	case *Map:
		out = appendCount(out, len(v.Keys), 0x80, 0xde)
		for _, key := range v.Keys {
			out = appendPacked(appendPacked(out, key), v.Values[key])
		}
		return out
	}
	panic(fmt.Sprintf("no MessagePack for %T", value))
}

func appendInteger(out []byte, v int64) []byte {
	switch {
	case v >= 0:
		return appendNatural(out, uint64(v))
	case v >= -32:
		return append(out, byte(v))
	case v >= math.MinInt8:
		return append(out, 0xd0, byte(v))
	case v >= math.MinInt16:
		return binary.BigEndian.AppendUint16(append(out, 0xd1), uint16(v))
	case v >= math.MinInt32:
		return binary.BigEndian.AppendUint32(append(out, 0xd2), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(out, 0xd3), uint64(v))
}

func appendNatural(out []byte, v uint64) []byte {
	switch {
	case v < 0x80:
		return append(out, byte(v))
	case v <= math.MaxUint8:
		return append(out, 0xcc, byte(v))
	case v <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(out, 0xcd), uint16(v))
	case v <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(out, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(out, 0xcf), v)
}

// appendLength writes the length of a text or of bytes: inside the mark if short, else in 1, 2 or 4 bytes.
func appendLength(out []byte, length int, small byte, smallMax int, mark byte) []byte {
	switch {
	case length <= smallMax:
		return append(out, small|byte(length))
	case length <= math.MaxUint8:
		return append(out, mark, byte(length))
	case length <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(out, mark+1), uint16(length))
	}
	return binary.BigEndian.AppendUint32(append(out, mark+2), uint32(length))
}

// appendCount writes the length of an array or a map: inside the mark up to 15, else in 2 or 4 bytes.
func appendCount(out []byte, count int, small, mark byte) []byte {
	switch {
	case count <= 15:
		return append(out, small|byte(count))
	case count <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(out, mark), uint16(count))
	}
	return binary.BigEndian.AppendUint32(append(out, mark+1), uint32(count))
}
