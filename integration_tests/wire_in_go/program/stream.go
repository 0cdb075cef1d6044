package main

import "encoding/binary"

const (
	maxStreamFrames = 4
	maxStreamBytes  = 4 << 20
	moreFrames      = 1 << 31
)

func encodeStream(frames [][]byte) []byte {
	var out []byte
	for number, frame := range frames {
		head := uint32(len(frame))
		if number < len(frames)-1 {
			head |= moreFrames
		}
		out = append(binary.BigEndian.AppendUint32(out, head), frame...)
	}
	return out
}

// decodeStream reads the first message; nil without an error if its end has not come.
func decodeStream(data []byte) ([][]byte, error) {
	var frames [][]byte
	total := 0
	for {
		if len(data) < 4 {
			return nil, nil
		}
		head := binary.BigEndian.Uint32(data)
		length := int(head &^ moreFrames)
		total += length
		if len(frames) == maxStreamFrames || total > maxStreamBytes {
			return nil, fault("malformed-stream", "more than %d frames or %d bytes", maxStreamFrames, maxStreamBytes)
		}
		if len(data)-4 < length {
			return nil, nil
		}
		frames = append(frames, data[4:4+length])
		data = data[4+length:]
		if head&moreFrames == 0 {
			return frames, nil
		}
	}
}
