package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"time"
)

// ZMTP 3.1 (rfc.zeromq.org/spec/37): greeting, READY, then frames of flags, length, body. The mechanism is NULL, or CURVE with keys.

const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// Peer is one open connection.
type Peer struct {
	net.Conn
	reader   *bufio.Reader
	maxFrame uint64
	curve    *curve // nil without encryption
}

// greeting names the mechanism; with CURVE it also says which end the listener is.
func greeting(socket string, keys *Keys) []byte {
	out := make([]byte, 64)
	copy(out, []byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1})
	if keys == nil {
		copy(out[12:], "NULL")
		return out
	}
	copy(out[12:], "CURVE")
	if socket == "ROUTER" {
		out[32] = 1
	}
	return out
}

// openPeer exchanges greetings and READY. A peer below version 3 or with another mechanism is refused.
func openPeer(connection net.Conn, socket string, maxFrame int, keys *Keys) (*Peer, error) {
	peer := &Peer{connection, bufio.NewReader(connection), uint64(maxFrame), nil}
	ours := greeting(socket, keys)
	if _, err := connection.Write(ours); err != nil {
		return nil, err
	}
	theirs := make([]byte, 64)
	if _, err := io.ReadFull(peer.reader, theirs); err != nil {
		return nil, fault("authentication-refused", "no greeting: %v", err)
	}
	if theirs[0] != 0xff || theirs[9]&1 == 0 || theirs[10] < 3 || !bytes.Equal(theirs[12:32], ours[12:32]) {
		return nil, fault("authentication-refused", "no ZMTP 3 with the mechanism of this end")
	}
	properties := appendProperty(appendProperty(nil, "Socket-Type", socket), "Identity", "")
	return peer, peer.introduce(socket, keys, properties)
}

func (p *Peer) introduce(socket string, keys *Keys, properties []byte) error {
	if keys != nil && socket == "ROUTER" {
		return p.meetClient(keys, properties)
	}
	if keys != nil {
		return p.meetServer(keys, properties)
	}
	ready := append([]byte("\x05READY"), properties...)
	if err := p.send(flagCommand, ready); err != nil {
		return err
	}
	flags, body, err := p.receive()
	if err != nil {
		return err
	}
	if flags&flagCommand == 0 || !bytes.HasPrefix(body, ready[:6]) {
		return fault("authentication-refused", "no READY")
	}
	return nil
}

func appendProperty(out []byte, name, value string) []byte {
	out = append(append(out, byte(len(name))), name...)
	return append(binary.BigEndian.AppendUint32(out, uint32(len(value))), value...)
}

// send writes one frame, in a MESSAGE once the connection is encrypted.
func (p *Peer) send(flags byte, body []byte) error {
	_, err := p.Write(p.appendFrame(nil, flags, body))
	return err
}

func (p *Peer) appendFrame(out []byte, flags byte, body []byte) []byte {
	if p.curve != nil {
		flags, body = 0, p.curve.seal(flags, body)
	}
	return appendFrame(out, flags, body)
}

func appendFrame(out []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		out = binary.BigEndian.AppendUint64(append(out, flags|flagLong), uint64(len(body)))
	} else {
		out = append(out, flags, byte(len(body)))
	}
	return append(out, body...)
}

// receive reads one frame, out of its MESSAGE once the connection is encrypted.
func (p *Peer) receive() (byte, []byte, error) {
	flags, body, err := p.receivePlain()
	if err != nil || p.curve == nil {
		return flags, body, err
	}
	return p.curve.open(body)
}

// receivePlain reads one frame as it lies on the wire. Memory grows with what came, not with what the length promises.
func (p *Peer) receivePlain() (byte, []byte, error) {
	flags, err := p.reader.ReadByte()
	if err != nil {
		return 0, nil, err
	}
	head := make([]byte, 1)
	if flags&flagLong != 0 {
		head = make([]byte, 8)
	}
	if _, err := io.ReadFull(p.reader, head); err != nil {
		return 0, nil, err
	}
	var padded [8]byte
	copy(padded[8-len(head):], head)
	length := binary.BigEndian.Uint64(padded[:])
	if flags&^(flagMore|flagLong|flagCommand) != 0 || length > p.maxFrame {
		return 0, nil, fault("transport-failed", "frame of %d bytes, flags %#x", length, flags)
	}
	var body bytes.Buffer
	if _, err := io.CopyN(&body, p.reader, int64(length)); err != nil {
		return 0, nil, err
	}
	return flags, body.Bytes(), nil
}

func (p *Peer) sendMessage(frames ...[]byte) error {
	var out []byte
	for number, frame := range frames {
		flags := byte(flagMore)
		if number == len(frames)-1 {
			flags = 0
		}
		out = p.appendFrame(out, flags, frame)
	}
	_, err := p.Write(out)
	return err
}

// receiveMessage reads frames up to the last one of a message, answering PING on the way.
func (p *Peer) receiveMessage(maxFrames int) ([][]byte, error) {
	var frames [][]byte
	for {
		flags, body, err := p.receive()
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			if err := p.obey(body); err != nil {
				return nil, err
			}
			continue
		}
		if frames = append(frames, body); len(frames) > maxFrames {
			return nil, fault("transport-failed", "more than %d frames", maxFrames)
		}
		if flags&flagMore == 0 {
			return frames, nil
		}
	}
}

// obey answers a PING with its context; other commands are skipped, ERROR ends the connection.
func (p *Peer) obey(command []byte) error {
	if bytes.HasPrefix(command, []byte("\x05ERROR")) {
		return fault("authentication-refused", "%q", command)
	}
	if context, isPing := bytes.CutPrefix(command, []byte("\x04PING")); isPing && len(context) >= 2 {
		return p.send(flagCommand, append([]byte("\x04PONG"), context[2:]...))
	}
	return nil
}

func (p *Peer) within(limit time.Duration) error { return p.SetDeadline(time.Now().Add(limit)) }
