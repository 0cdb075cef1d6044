package main

import (
	"net"
	"time"
)

// Offer is what this side compares with: its factors, and whether hashes must be equal.
type Offer struct {
	Factors   *Map
	IsExact   bool
	Protocol  [2]int64
	Supported map[string]string
}

// Reply is one rank's answer; Clock is set from dialect 5 on.
type Reply struct {
	Metadata map[string]any
	Envelope *Envelope
	Clock    float64
}

// readReply judges the frames of a reply as docs/wire/protocol.md says, in that order.
func readReply(frames [][]byte, dialect, pp, tp int, offer Offer) (*Reply, error) {
	if len(frames) == 0 || len(frames) > 2 {
		return nil, fault("unexpected-reply", "%d frames", len(frames))
	}
	envelope, err := decodeEnvelope(frames[0])
	if err != nil {
		return nil, err
	}
	if code, message, _ := envelope.refusal(); envelope.Values["kvh_refusal"] != nil {
		return nil, fault("refused", "%s: %s", code, message)
	}
	if err := judge(envelope, dialect, offer); err != nil {
		return nil, err
	}
	wanted := 1
	if dialect >= 5 {
		wanted = 2
	}
	if len(frames) != wanted {
		return nil, fault("unexpected-reply", "%d frames in dialect %d", len(frames), dialect)
	}
	if rank, given := envelope.Values["kvh_rank"].([]any); given && (rank[0] != int64(pp) || rank[1] != int64(tp)) {
		return nil, fault("rank-mismatch", "about %v", rank)
	}
	metadata, err := decodeMetadata(envelope)
	if err != nil {
		return nil, err
	}
	reply := &Reply{Metadata: metadata, Envelope: envelope}
	if wanted == 2 {
		reply.Clock, err = decodeClock(frames[1])
	}
	return reply, err
}

func judge(envelope *Envelope, dialect int, offer Offer) error {
	if theirs, given := envelope.Values["kvh_protocol"].([]any); given {
		oldest, newest := bigOf(theirs[0]).Int64(), bigOf(theirs[1]).Int64()
		if min(newest, offer.Protocol[1]) < max(oldest, offer.Protocol[0]) {
			return fault("protocol-range", "theirs %v", theirs)
		}
	}
	levels := envelope.Values["kvh_capabilities"].(*Map)
	for _, name := range levels.Keys {
		if _, known := offer.Supported[name.(string)]; levels.Values[name] == "required" && !known {
			return fault("capability-missing", "%v", name)
		}
	}
	for name, level := range offer.Supported {
		if theirs := levels.Values[name]; level == "required" && theirs != "required" && theirs != "supported" {
			return fault("capability-missing", "%s", name)
		}
	}
	return compare(envelope, dialect, offer)
}

func compare(envelope *Envelope, dialect int, offer Offer) error {
	isSame := envelope.hash() == hashOf(hashedFactors(offer.Factors, dialect))
	hasFactors := len(envelope.factors().Keys) > 0
	if !isSame && (offer.IsExact || !hasFactors) {
		return fault("hash-mismatch", "theirs is %.80q", envelope.hash())
	}
	if name := differingFactor(offer.Factors, envelope.factors()); hasFactors && name != "" {
		return fault("factors-differ", "%s", name)
	}
	return nil
}

// ask fetches ranks over one connection, all queries sent ahead; ranks are (pp, tp).
func ask(address string, dialect int, ranks [][2]int, offer Offer, keys *Keys) ([]*Reply, error) {
	connection, err := net.DialTimeout("tcp", address, 5*time.Second)
	if err != nil {
		return nil, fault("connection-refused", "%v", err)
	}
	defer connection.Close()
	if err := connection.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return nil, err
	}
	peer, err := openPeer(connection, "DEALER", maxReplyBytes, keys)
	for _, rank := range ranks {
		if err == nil {
			err = peer.sendMessage(nil, encodeQuery(dialect, rank[0], rank[1]))
		}
	}
	var replies []*Reply
	for _, rank := range ranks {
		if err != nil {
			return nil, err
		}
		var reply *Reply
		reply, err = peer.nextReply(dialect, rank, offer)
		replies = append(replies, reply)
	}
	return replies, err
}

func (p *Peer) nextReply(dialect int, rank [2]int, offer Offer) (*Reply, error) {
	frames, err := p.receiveMessage(4)
	if err != nil {
		return nil, err
	}
	if len(frames[0]) != 0 {
		return nil, fault("unexpected-reply", "no empty frame first")
	}
	return readReply(frames[1:], dialect, rank[0], rank[1], offer)
}
