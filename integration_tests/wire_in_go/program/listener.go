package main

import (
	"net"
	"sync/atomic"
	"time"
)

const (
	maxListenerFrame = 131072
	maxSurplus       = 64
	maxConnections   = 1024
	idleLimit        = 60 * time.Second
)

// Listener serves envelopes by (pp, tp) rank.
type Listener struct {
	Envelopes map[[2]int][]byte
	Keys      *Keys
	open      atomic.Int64
}

func (l *Listener) serve(socket net.Listener) {
	for {
		connection, err := socket.Accept()
		if err != nil {
			return
		}
		if l.open.Add(1) > maxConnections {
			connection.Close()
			l.open.Add(-1)
			continue
		}
		go l.talk(connection)
	}
}

func (l *Listener) talk(connection net.Conn) {
	defer l.open.Add(-1)
	defer connection.Close()
	if connection.SetDeadline(time.Now().Add(10*time.Second)) != nil {
		return
	}
	peer, err := openPeer(connection, "ROUTER", maxListenerFrame, l.Keys)
	for err == nil {
		if err = peer.within(idleLimit); err != nil {
			return
		}
		var frames [][]byte
		if frames, err = peer.receiveMessage(2 + maxSurplus); err == nil {
			err = peer.sendMessage(l.answer(frames)...)
		}
	}
}

// answer returns the frames of a reply, with an empty one first if the query had it.
func (l *Listener) answer(frames [][]byte) [][]byte {
	var head [][]byte
	if len(frames[0]) == 0 && len(frames) > 1 {
		head, frames = [][]byte{{}}, frames[1:]
	}
	if len(frames) != 1 {
		return append(head, encodeRefusal("wrong-frames", "a query is one frame", 0))
	}
	query, err := decodeQuery(frames[0])
	if err != nil {
		return append(head, encodeRefusal(codeOf(err), err.Error(), 0))
	}
	envelope, served := l.Envelopes[[2]int{query.PP, query.TP}]
	if len(l.Envelopes) == 0 {
		envelope = encodeRefusal("not-ready", "ask again", 1)
	} else if !served {
		envelope = encodeRefusal("unknown-rank", "this rank is not served here", 0)
	}
	if !query.Clock {
		return append(head, envelope)
	}
	return append(head, envelope, encodeClock(monotonic()))
}

var started = time.Now()

func monotonic() float64 { return time.Since(started).Seconds() + 1 }
