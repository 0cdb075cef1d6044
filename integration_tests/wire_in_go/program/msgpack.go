package main

import (
	"encoding/binary"
	"errors"
	"math"
	"unicode/utf8"
)

// Decoded values: nil, bool, int64, uint64 (above 2^63-1 only), float64, string, []byte, []any, *Map, Extension.
// A string may hold bytes that are no UTF-8, since parts that a reader skips are not judged; see isSound.

// Map keeps the order in which keys first came; the last value of a key counts.
type Map struct {
	Keys   []any
	Values map[any]any
}

// Extension is a MessagePack extension: read, never used.
type Extension struct{ Kind int8 }

// bytesKey is a key of bytes: a slice cannot be one in Go.
type bytesKey string

func newMap() *Map { return &Map{Values: map[any]any{}} }

func (m *Map) set(key, value any) *Map {
	if _, known := m.Values[key]; !known {
		m.Keys = append(m.Keys, key)
	}
	m.Values[key] = value
	return m
}

func (m *Map) get(key string) (any, bool) {
	value, found := m.Values[key]
	return value, found
}

const maxDepth = 64

var errPack = errors.New("not one complete MessagePack value")

type unpacker struct {
	data []byte
	at   int
}

// unpack reads exactly one value; bytes after it are an error.
func unpack(data []byte) (any, error) {
	reader := &unpacker{data: data}
	value, err := reader.value(0)
	if err == nil && reader.at != len(data) {
		err = errPack
	}
	return value, err
}

func (u *unpacker) take(count int) ([]byte, error) {
	if count < 0 || count > len(u.data)-u.at {
		return nil, errPack
	}
	u.at += count
	return u.data[u.at-count : u.at], nil
}

// number reads a big-endian unsigned number of 1, 2, 4 or 8 bytes.
func (u *unpacker) number(width int) (uint64, error) {
	raw, err := u.take(width)
	if err != nil {
		return 0, err
	}
	var padded [8]byte
	copy(padded[8-width:], raw)
	return binary.BigEndian.Uint64(padded[:]), nil
}

func (u *unpacker) value(depth int) (any, error) {
	first, err := u.take(1)
	if err != nil || depth > maxDepth {
		return nil, errPack
	}
	mark := first[0]
	switch {
	case mark < 0x80:
		return int64(mark), nil
	case mark >= 0xe0:
		return int64(int8(mark)), nil
	case mark < 0x90:
		return u.mapping(uint64(mark&0x0f), depth)
	case mark < 0xa0:
		return u.array(uint64(mark&0x0f), depth)
	case mark < 0xc0:
		return u.text(uint64(mark & 0x1f))
	}
	return u.marked(mark, depth)
}

func (u *unpacker) marked(mark byte, depth int) (any, error) {
	switch mark {
	case 0xc0:
		return nil, nil
	case 0xc2, 0xc3:
		return mark == 0xc3, nil
	case 0xca, 0xcb, 0xcc, 0xcd, 0xce, 0xcf, 0xd0, 0xd1, 0xd2, 0xd3:
		return u.scalar(mark)
	case 0xd4, 0xd5, 0xd6, 0xd7, 0xd8:
		return u.extension(1 << (mark - 0xd4))
	case 0xc1:
		return nil, errPack
	}
	width, kind := u.lengthOf(mark)
	count, err := u.number(width)
	if err != nil {
		return nil, err
	}
	switch kind {
	case 'b':
		return u.take(int(count))
	case 's':
		return u.text(count)
	case 'a':
		return u.array(count, depth)
	case 'm':
		return u.mapping(count, depth)
	}
	return u.extension(int(count))
}

// lengthOf returns the width of the length after a mark, and what follows it.
func (u *unpacker) lengthOf(mark byte) (int, byte) {
	switch {
	case mark >= 0xc4 && mark <= 0xc6:
		return 1 << (mark - 0xc4), 'b'
	case mark >= 0xc7 && mark <= 0xc9:
		return 1 << (mark - 0xc7), 'e'
	case mark >= 0xd9 && mark <= 0xdb:
		return 1 << (mark - 0xd9), 's'
	case mark == 0xdc || mark == 0xdd:
		return 2 << (mark - 0xdc), 'a'
	}
	return 2 << (mark - 0xde), 'm'
}

func (u *unpacker) scalar(mark byte) (any, error) {
	widths := map[byte]int{0xca: 4, 0xcb: 8, 0xcc: 1, 0xcd: 2, 0xce: 4, 0xcf: 8, 0xd0: 1, 0xd1: 2, 0xd2: 4, 0xd3: 8}
	width := widths[mark]
	raw, err := u.number(width)
	if err != nil {
		return nil, err
	}
	switch {
	case mark == 0xca:
		return float64(math.Float32frombits(uint32(raw))), nil
	case mark == 0xcb:
		return math.Float64frombits(raw), nil
	case mark >= 0xd0: // signed: move the sign bit to the top and back
		shift := 64 - 8*width
		return int64(raw<<shift) >> shift, nil
	case raw > math.MaxInt64:
		return raw, nil
	}
	return int64(raw), nil
}

func (u *unpacker) text(count uint64) (any, error) {
	raw, err := u.take(int(count))
	return string(raw), err
}

func (u *unpacker) extension(count int) (any, error) {
	kind, err := u.take(1)
	if err != nil {
		return nil, err
	}
	_, err = u.take(count)
	return Extension{Kind: int8(kind[0])}, err
}

// array reads `count` values. A length that promises more than the bytes that are left costs nothing.
func (u *unpacker) array(count uint64, depth int) (any, error) {
	if count > uint64(len(u.data)-u.at) {
		return nil, errPack
	}
	items := make([]any, 0, count)
	for range count {
		item, err := u.value(depth + 1)
		if err != nil {
			return nil, err
		}
		items = append(items, item)
	}
	return items, nil
}

func (u *unpacker) mapping(count uint64, depth int) (any, error) {
	if count > uint64(len(u.data)-u.at)/2 {
		return nil, errPack
	}
	made := newMap()
	for range count {
		key, err := u.value(depth + 1)
		if err != nil {
			return nil, err
		}
		switch each := key.(type) {
		case []byte:
			key = bytesKey(each)
		case []any, *Map:
			return nil, errPack
		}
		value, err := u.value(depth + 1)
		if err != nil {
			return nil, err
		}
		made.set(key, value)
	}
	return made, nil
}

// isSound tells if every text in a value is UTF-8.
func isSound(value any) bool {
	switch v := value.(type) {
	case string:
		return utf8.ValidString(v)
	case []any:
		for _, item := range v {
			if !isSound(item) {
				return false
			}
		}
	case *Map:
		for _, key := range v.Keys {
			if !isSound(key) || !isSound(v.Values[key]) {
				return false
			}
		}
	}
	return true
}
