package main

import (
	"crypto/ecdh"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"math/big"
	"math/bits"
	"slices"
)

// NaCl's box (nacl.cr.yp.to/box.html): X25519, XSalsa20 and Poly1305. The standard library has the first; the other two are
// written for being read, not for speed, and with no care for side channels.

const boxOverhead = 16

type (
	nonce  [24]byte
	boxKey [32]byte
)

// newPair returns a fresh secret key.
func newPair() *ecdh.PrivateKey {
	secret, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		panic(err) // no random numbers on this machine
	}
	return secret
}

// sharedKey is the key of boxes between the owner of a secret key and that of a public one.
func sharedKey(secret *ecdh.PrivateKey, public []byte) (boxKey, error) {
	theirs, err := ecdh.X25519().NewPublicKey(public)
	if err != nil {
		return boxKey{}, err
	}
	product, err := secret.ECDH(theirs)
	if err != nil {
		return boxKey{}, err
	}
	return hsalsa(boxKey(product), make([]byte, 16)), nil
}

// sealBox returns the tag, 16 bytes, then the text under the key's stream.
func sealBox(key boxKey, at nonce, text []byte) []byte {
	stream := xsalsa(key, at, 32+len(text))
	cipher := make([]byte, len(text))
	subtle.XORBytes(cipher, text, stream[32:])
	return append(poly1305(stream[:32], cipher), cipher...)
}

// openBox returns the text, or false for a box that another key, another nonce or another text made.
func openBox(key boxKey, at nonce, box []byte) ([]byte, bool) {
	if len(box) < boxOverhead {
		return nil, false
	}
	tag, cipher := box[:boxOverhead], box[boxOverhead:]
	stream := xsalsa(key, at, 32+len(cipher))
	text := make([]byte, len(cipher))
	subtle.XORBytes(text, cipher, stream[32:])
	return text, subtle.ConstantTimeCompare(poly1305(stream[:32], cipher), tag) == 1
}

var salsaWords = [4]uint32{0x61707865, 0x3320646e, 0x79622d32, 0x6b206574} // "expand 32-byte k"

// salsaState lays out constants on the diagonal, the key around it, and 16 bytes of nonce and counter in the middle.
func salsaState(key boxKey, middle []byte) [16]uint32 {
	var x [16]uint32
	for number, word := range salsaWords {
		x[5*number] = word
	}
	for number := range 4 {
		x[1+number] = binary.LittleEndian.Uint32(key[4*number:])
		x[6+number] = binary.LittleEndian.Uint32(middle[4*number:])
		x[11+number] = binary.LittleEndian.Uint32(key[16+4*number:])
	}
	return x
}

var salsaQuarters = [8][4]int{
	{0, 4, 8, 12}, {5, 9, 13, 1}, {10, 14, 2, 6}, {15, 3, 7, 11},
	{0, 1, 2, 3}, {5, 6, 7, 4}, {10, 11, 8, 9}, {15, 12, 13, 14},
}

func salsaRounds(x [16]uint32) [16]uint32 {
	for range 10 {
		for _, q := range salsaQuarters {
			a, b, c, d := q[0], q[1], q[2], q[3]
			x[b] ^= bits.RotateLeft32(x[a]+x[d], 7)
			x[c] ^= bits.RotateLeft32(x[b]+x[a], 9)
			x[d] ^= bits.RotateLeft32(x[c]+x[b], 13)
			x[a] ^= bits.RotateLeft32(x[d]+x[c], 18)
		}
	}
	return x
}

func hsalsa(key boxKey, middle []byte) boxKey {
	x := salsaRounds(salsaState(key, middle))
	var out boxKey
	for number, at := range []int{0, 5, 10, 15, 6, 7, 8, 9} {
		binary.LittleEndian.PutUint32(out[4*number:], x[at])
	}
	return out
}

func xsalsa(key boxKey, at nonce, length int) []byte {
	key = hsalsa(key, at[:16])
	middle := make([]byte, 16)
	copy(middle, at[16:])
	stream := make([]byte, 0, length+64)
	for counter := uint64(0); len(stream) < length; counter++ {
		binary.LittleEndian.PutUint64(middle[8:], counter)
		state := salsaState(key, middle)
		for number, word := range salsaRounds(state) {
			stream = binary.LittleEndian.AppendUint32(stream, word+state[number])
		}
	}
	return stream[:length]
}

var (
	polyPrime = new(big.Int).Sub(new(big.Int).Lsh(big.NewInt(1), 130), big.NewInt(5))
	polyClamp = []byte{255, 255, 255, 15, 252, 255, 255, 15, 252, 255, 255, 15, 252, 255, 255, 15}
)

func littleEndian(data []byte) *big.Int {
	reversed := slices.Clone(data)
	slices.Reverse(reversed)
	return new(big.Int).SetBytes(reversed)
}

func poly1305(key, text []byte) []byte {
	clamped := make([]byte, 16)
	subtle.XORBytes(clamped, key[:16], clamped)
	for number := range clamped {
		clamped[number] &= polyClamp[number]
	}
	factor, sum := littleEndian(clamped), new(big.Int)
	for chunk := range slices.Chunk(text, 16) {
		sum.Add(sum, littleEndian(append(slices.Clone(chunk), 1)))
		sum.Mod(sum.Mul(sum, factor), polyPrime)
	}
	sum.Add(sum, littleEndian(key[16:]))
	tag := make([]byte, 32)
	sum.FillBytes(tag)
	slices.Reverse(tag)
	return tag[:16]
}
