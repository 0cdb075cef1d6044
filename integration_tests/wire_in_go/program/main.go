// The wire of docs/wire in Go, by the standard library alone, written from these pages: one request per line of JSON on
// standard input, one answer per line on standard output. It proves that the pages are enough; it is not a product.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
)

// answers is what the program can do, by the key "do" of a request.
var answers = map[string]func(request) (any, error){
	"query":          doQuery,
	"make-query":     doMakeQuery,
	"envelope":       doEnvelope,
	"make-refusal":   doMakeRefusal,
	"clock":          doClock,
	"notification":   doNotification,
	"hash":           doHash,
	"sealed-bytes":   doSealedBytes,
	"seal":           doSeal,
	"verify":         doVerify,
	"digest":         doDigest,
	"checksum-agent": doChecksumAgent,
	"check-agent":    doCheckAgent,
	"geometry":       doGeometry,
	"ask":            doAsk,
	"ask-query":      doAskQuery,
	"answer":         doAnswer,
	"listen":         doListen,
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(make([]byte, 1<<16), 64<<20)
	out := bufio.NewWriter(os.Stdout)
	encoder := json.NewEncoder(out)
	for lines.Scan() {
		if err := encoder.Encode(respond(lines.Bytes())); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		out.Flush()
	}
}

func respond(line []byte) map[string]any {
	var sent request
	if err := json.Unmarshal(line, &sent); err != nil {
		return map[string]any{"code": "bad-request", "message": err.Error()}
	}
	do, known := answers[sent.Do]
	if !known {
		return map[string]any{"code": "bad-request", "message": sent.Do}
	}
	result, err := do(sent)
	if err != nil {
		return map[string]any{"code": codeOf(err), "message": err.Error()}
	}
	return map[string]any{"ok": result}
}
