package main

import "bytes"

const (
	maxQueryBytes = 256
	maxRank       = 65535
)

// Query is what a client asks. A rank above 65535 reads as 65536, which no listener serves.
type Query struct {
	PP, TP int
	Clock  bool // three fields: the reply has a clock frame
}

func encodeQuery(dialect, pp, tp int) []byte {
	if dialect < 5 {
		return pack([]any{[]byte("get_meta_msg"), tp})
	}
	return pack([]any{[]byte("get_meta_msg"), pp, tp})
}

func decodeQuery(frame []byte) (*Query, error) {
	if len(frame) > maxQueryBytes {
		return nil, fault("oversized-query", "%d bytes, at most %d", len(frame), maxQueryBytes)
	}
	value, err := unpack(frame)
	fields, isArray := value.([]any)
	if err != nil || !isArray || len(fields) == 0 || !isSound(value) {
		return nil, fault("malformed-query", "not one MessagePack array")
	}
	if command, _ := fields[0].([]byte); !bytes.Equal(command, []byte("get_meta_msg")) {
		return nil, fault("unknown-command", "%v", fields[0])
	}
	return decodeRanks(fields[1:])
}

func decodeRanks(fields []any) (*Query, error) {
	if len(fields) != 1 && len(fields) != 2 {
		return nil, fault("wrong-arity", "%d fields, expected 2 or 3", len(fields)+1)
	}
	query := &Query{Clock: len(fields) == 2}
	for _, field := range fields {
		switch rank := field.(type) {
		case int64:
			if rank < 0 {
				return nil, fault("wrong-type", "rank %d", rank)
			}
			query.PP, query.TP = query.TP, int(min(rank, maxRank+1))
		case uint64:
			query.PP, query.TP = query.TP, maxRank+1
		default:
			return nil, fault("wrong-type", "a rank is a %T", field)
		}
	}
	return query, nil
}
