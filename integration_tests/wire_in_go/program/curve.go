package main

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/binary"
	"regexp"
	"strings"
)

// CURVE, the mechanism of an encrypted side channel (rfc.zeromq.org/spec/26): HELLO, WELCOME, INITIATE, READY, then every
// frame in a MESSAGE. The secret keys of a connection are new each time; those of the files only vouch for them.

// Keys are one end's: its pair, and whom it talks to.
type Keys struct {
	Own    *ecdh.PrivateKey
	Others [][]byte // the listener's public key, or those of the clients that a listener admits
}

var certificateLine = regexp.MustCompile(`(?m)^\s*(public|secret)-key\s*=\s*"(.{40})"\s*$`)

// readCertificate returns the public key of a certificate file and, if it has one, the secret key.
func readCertificate(text string) (public []byte, secret *ecdh.PrivateKey, err error) {
	for _, found := range certificateLine.FindAllStringSubmatch(text, -1) {
		raw, err := decodeZ85(found[2])
		if err != nil {
			return nil, nil, err
		}
		if found[1] == "public" {
			public = raw
		} else if secret, err = ecdh.X25519().NewPrivateKey(raw); err != nil {
			return nil, nil, fault("invalid-key-file", "%v", err)
		}
	}
	if public == nil || (secret != nil && !bytes.Equal(secret.PublicKey().Bytes(), public)) {
		return nil, nil, fault("invalid-key-file", "no public key, or not that of the secret one")
	}
	return public, secret, nil
}

const z85Digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"

// decodeZ85 reads five digits of base 85 as four bytes, big-endian (rfc.zeromq.org/spec/32).
func decodeZ85(text string) ([]byte, error) {
	var out []byte
	for ; len(text) >= 5; text = text[5:] {
		value := uint64(0)
		for _, digit := range []byte(text[:5]) {
			at := strings.IndexByte(z85Digits, digit)
			if at < 0 {
				return nil, fault("invalid-key-file", "%q is not a digit of Z85", digit)
			}
			value = 85*value + uint64(at)
		}
		if value > 0xffffffff {
			return nil, fault("invalid-key-file", "more than 32 bits in five digits")
		}
		out = binary.BigEndian.AppendUint32(out, uint32(value))
	}
	return out, nil
}

// curve seals and opens the frames of one connection once it is open.
type curve struct {
	key            boxKey
	sent, received uint64
	ours, theirs   string // prefixes of the nonces of a MESSAGE
	transient      *ecdh.PrivateKey
}

func refusedKeys(what string) error { return fault("authentication-refused", "%s", what) }

func counted(prefix string, number uint64) (at nonce) {
	copy(at[:], prefix)
	binary.BigEndian.PutUint64(at[16:], number)
	return at
}

func long(prefix string, random []byte) (at nonce) {
	copy(at[:], prefix)
	copy(at[8:], random)
	return at
}

func randomBytes(count int) []byte {
	data := make([]byte, count)
	if _, err := rand.Read(data); err != nil {
		panic(err) // no random numbers on this machine
	}
	return data
}

// next returns the number of the next box of this end and its eight bytes.
func (c *curve) next() (uint64, []byte) {
	c.sent++
	return c.sent, binary.BigEndian.AppendUint64(nil, c.sent)
}

// expect sends a command, if there is one, and returns the body of the peer's next one, which must have this name.
func (p *Peer) expect(name string, command []byte, length int) ([]byte, error) {
	if command != nil {
		if err := p.send(flagCommand, command); err != nil {
			return nil, err
		}
	}
	flags, body, err := p.receive()
	if err != nil {
		return nil, refusedKeys("the listener hung up instead of " + name)
	}
	rest, isIt := bytes.CutPrefix(body, append([]byte{byte(len(name))}, name...))
	if flags&flagCommand == 0 || !isIt || len(rest) < length {
		return nil, refusedKeys("no " + name)
	}
	return rest, nil
}

// meetServer opens a connection as a client; properties are those of its READY.
func (p *Peer) meetServer(keys *Keys, properties []byte) error {
	c := &curve{ours: "CurveZMQMESSAGEC", theirs: "CurveZMQMESSAGES", transient: newPair()}
	server := keys.Others[0]
	toServer, err := sharedKey(c.transient, server)
	if err != nil {
		return err
	}
	number, short := c.next()
	hello := append([]byte("\x05HELLO\x01\x00"), make([]byte, 72)...)
	hello = append(append(hello, c.transient.PublicKey().Bytes()...), short...)
	hello = append(hello, sealBox(toServer, counted("CurveZMQHELLO---", number), make([]byte, 64))...)
	welcome, err := p.expect("WELCOME", hello, 16+128+boxOverhead)
	if err != nil {
		return err
	}
	opened, isGood := openBox(toServer, long("WELCOME-", welcome[:16]), welcome[16:])
	if !isGood {
		return refusedKeys("a listener with another key")
	}
	initiate, err := c.initiate(keys.Own, server, opened, properties)
	if err != nil {
		return err
	}
	ready, err := p.expect("READY", initiate, 8+boxOverhead)
	if err != nil {
		return err
	}
	if _, isGood := c.take("CurveZMQREADY---", ready); !isGood {
		return refusedKeys("READY under another key")
	}
	p.curve = c
	return nil
}

// initiate vouches for the transient key with the lasting one; welcome is the listener's transient key and its cookie.
func (c *curve) initiate(own *ecdh.PrivateKey, server, welcome, properties []byte) ([]byte, error) {
	transient, cookie := welcome[:32], welcome[32:]
	key, err := sharedKey(c.transient, transient)
	if err != nil {
		return nil, err
	}
	vouching, err := sharedKey(own, transient)
	if err != nil {
		return nil, err
	}
	c.key = key
	random := randomBytes(16)
	vouch := append(c.transient.PublicKey().Bytes(), server...)
	text := append(own.PublicKey().Bytes(), random...)
	text = append(append(text, sealBox(vouching, long("VOUCH---", random), vouch)...), properties...)
	return append(append([]byte("\x08INITIATE"), cookie...), c.give("CurveZMQINITIATE", text)...), nil
}

// meetClient opens a connection as a listener, for clients whose keys are listed.
func (p *Peer) meetClient(keys *Keys, properties []byte) error {
	c := &curve{ours: "CurveZMQMESSAGES", theirs: "CurveZMQMESSAGEC", transient: newPair()}
	hello, err := p.expect("HELLO", nil, 194)
	if err != nil {
		return err
	}
	client := hello[74:106]
	toClient, err := sharedKey(keys.Own, client)
	if err != nil {
		return err
	}
	at := counted("CurveZMQHELLO---", binary.BigEndian.Uint64(hello[106:]))
	if _, isGood := openBox(toClient, at, hello[114:]); !isGood || hello[0] != 1 {
		return refusedKeys("HELLO to another key")
	}
	// A listener that keeps a connection's keys, as this one does, needs nothing of its cookie but its being echoed.
	random, cookie := randomBytes(16), randomBytes(96)
	box := sealBox(toClient, long("WELCOME-", random), append(c.transient.PublicKey().Bytes(), cookie...))
	initiate, err := p.expect("INITIATE", append(append([]byte("\x07WELCOME"), random...), box...), 96+8+boxOverhead+128)
	if err != nil {
		return err
	}
	if c.key, err = sharedKey(c.transient, client); err != nil {
		return err
	}
	text, isGood := c.take("CurveZMQINITIATE", initiate[96:])
	if !isGood || !bytes.Equal(initiate[:96], cookie) || !c.isVouched(keys, client, text) {
		return refusedKeys("no vouch of a listed client")
	}
	err = p.send(flagCommand, append([]byte("\x05READY"), c.give("CurveZMQREADY---", properties)...))
	p.curve = c
	return err
}

func (c *curve) isVouched(keys *Keys, transient, text []byte) bool {
	lasting, random, box := text[:32], text[32:48], text[48:128]
	key, err := sharedKey(c.transient, lasting)
	if err != nil {
		return false
	}
	vouch, isGood := openBox(key, long("VOUCH---", random), box)
	isListed := false
	for _, each := range keys.Others {
		isListed = isListed || bytes.Equal(each, lasting)
	}
	return isGood && isListed && bytes.Equal(vouch, append(bytes.Clone(transient), keys.Own.PublicKey().Bytes()...))
}

// give seals a text under the next number, which stands before the box.
func (c *curve) give(prefix string, text []byte) []byte {
	number, short := c.next()
	return append(short, sealBox(c.key, counted(prefix, number), text)...)
}

// take opens what give made at the other end; numbers must grow.
func (c *curve) take(prefix string, sealed []byte) ([]byte, bool) {
	if len(sealed) < 8+boxOverhead {
		return nil, false
	}
	number := binary.BigEndian.Uint64(sealed)
	text, isGood := openBox(c.key, counted(prefix, number), sealed[8:])
	if !isGood || number <= c.received {
		return nil, false
	}
	c.received = number
	return text, true
}

// seal returns the MESSAGE that holds a frame: the flags of a frame, which say nothing of its length here, and its body.
func (c *curve) seal(flags byte, body []byte) []byte {
	inner := flags & flagMore
	if flags&flagCommand != 0 {
		inner |= 2
	}
	return append([]byte("\x07MESSAGE"), c.give(c.ours, append([]byte{inner}, body...))...)
}

func (c *curve) open(message []byte) (byte, []byte, error) {
	sealed, isMessage := bytes.CutPrefix(message, []byte("\x07MESSAGE"))
	if !isMessage {
		return 0, nil, fault("transport-failed", "no MESSAGE on an encrypted connection")
	}
	text, isGood := c.take(c.theirs, sealed)
	if !isGood || len(text) == 0 {
		return 0, nil, fault("transport-failed", "a MESSAGE that is forged, repeated or out of order")
	}
	flags := text[0] & flagMore
	if text[0]&2 != 0 {
		flags |= flagCommand
	}
	return flags, text[1:], nil
}
