package main

import (
	"encoding/json"
	"net/netip"
	"regexp"
	"strings"
	"unicode/utf8"
)

const maxAdvertisementBytes = 16 << 10

// Advertisement is an engine in short, as a router needs it.
type Advertisement struct {
	Engine     string   `json:"engine_id"`
	Host       string   `json:"host"`
	Port       int64    `json:"port"`
	Dialect    int64    `json:"dialect"`
	ID         string   `json:"compatibility_id"`
	Hash       string   `json:"compatibility_hash"`
	Generation int64    `json:"generation"`
	Modes      []string `json:"modes"`
	TP         int64    `json:"tp_size"`
	PP         int64    `json:"pp_size"`
	DCP        int64    `json:"dcp_size"`
	PCP        int64    `json:"pcp_size"`
	Protocol   []int64  `json:"protocol"`
}

const neededKeys = 5

var advertisementKeys = []string{
	"engine_id", "host", "port", "dialect", "compatibility_id", // the needed ones
	"compatibility_hash", "generation", "modes", "tp_size", "pp_size", "dcp_size", "pcp_size", "protocol",
}

var (
	hexDigits = regexp.MustCompile(`^[0-9a-f]*$`)
	hostName  = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?$`)

	// Resolvers read 2852039166 and 0xa9fea9fe as addresses, so no name ends in a number.
	hostNumber = regexp.MustCompile(`(^|\.)(0[xX][0-9A-Fa-f]*|[0-9]+)\.?$`)
)

func decodeAdvertisement(data []byte) (*Advertisement, error) {
	bad := func(why string) (*Advertisement, error) { return nil, fault("malformed-advertisement", "%s", why) }
	if len(data) > maxAdvertisementBytes {
		return bad("too long")
	}
	var sent map[string]json.RawMessage
	if err := json.Unmarshal(data, &sent); err != nil {
		return bad("not a JSON object")
	}
	// Go matches keys without regard to case, so only the exact ones go on.
	known := map[string]json.RawMessage{}
	for number, key := range advertisementKeys {
		raw, found := sent[key]
		if !found && number < neededKeys {
			return bad(key + " is missing")
		}
		if found {
			known[key] = raw
		}
		if string(raw) == "null" || !utf8.Valid(raw) {
			return bad(key + " is null or no text")
		}
	}
	made := &Advertisement{Modes: []string{"pull"}, TP: 1, PP: 1, DCP: 1, PCP: 1, Protocol: []int64{1, 1}}
	exact, err := json.Marshal(known)
	if err != nil || json.Unmarshal(exact, made) != nil {
		return bad("a value of another type")
	}
	if why := made.problem(); why != "" {
		return bad(why)
	}
	return made, nil
}

func (a *Advertisement) problem() string {
	characters := utf8.RuneCountInString(a.Engine)
	switch {
	case characters < 1 || characters > maxEngineChars:
		return "engine_id"
	case !isHost(a.Host) || a.Port < 1 || a.Port > 65535:
		return "host or port"
	case a.Dialect < 2 || a.Dialect > 15:
		return "dialect"
	case !hexDigits.MatchString(a.ID) || !hexDigits.MatchString(a.Hash):
		return "a digest"
	case a.Generation < 0:
		return "generation"
	case len(a.Protocol) != 2 || a.Protocol[0] < 1 || a.Protocol[0] > a.Protocol[1]:
		return "protocol"
	}
	for _, mode := range a.Modes {
		if mode != "pull" && mode != "push" {
			return "modes"
		}
	}
	for _, size := range []int64{a.TP, a.PP, a.DCP, a.PCP} {
		if size < 1 || size > maxRank+1 {
			return "a size"
		}
	}
	return ""
}

// isHost tells if a host can be connected to: a name, or an address that is not 0.0.0.0 or ::.
func isHost(host string) bool {
	if address, err := netip.ParseAddr(host); err == nil {
		return !address.IsUnspecified() && address.Zone() == ""
	}
	return len(host) <= 253 && hostName.MatchString(host) && !strings.Contains(host, "..") && !hostNumber.MatchString(host)
}
