// A sidecar as llm-d's runs beside a decode engine, reduced to what touches tickets: it asks a prefill engine for one token, copies
// kv_transfer_params from that answer into the request, and forwards the request to the decode engine. Bodies are decoded into
// map[string]any, which turns every number into a float64.
//
//	proxy PREFILL_URL DECODE_URL    prints the address that it listens on
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
)

// The limits that the prefill request has set to one token. Source: llm-d-router, pkg/sidecar/proxy, chat completions.
var limits = []string{"max_tokens", "max_completion_tokens", "min_tokens"}

type sidecar struct{ prefill, decode string }

func (s sidecar) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body map[string]any
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	status, answer, err := post(s.prefill+r.URL.Path, r.Header, asked(body))
	if err != nil || status >= 300 {
		http.Error(w, "prefill failed", http.StatusBadGateway)
		return
	}
	var prefilled map[string]any
	if err := json.Unmarshal(answer, &prefilled); err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	body["kv_transfer_params"] = prefilled["kv_transfer_params"]
	status, answer, err = post(s.decode+r.URL.Path, r.Header, body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(answer)
}

// asked returns the prefill request: one token, no stream, and the six keys that ask for a ticket.
func asked(body map[string]any) map[string]any {
	short := map[string]any{}
	for key, value := range body {
		short[key] = value
	}
	delete(short, "stream_options")
	short["stream"] = false
	for _, limit := range limits {
		short[limit] = 1
	}
	short["kv_transfer_params"] = map[string]any{
		"do_remote_decode": true, "do_remote_prefill": false,
		"remote_engine_id": nil, "remote_block_ids": nil, "remote_host": nil, "remote_port": nil,
	}
	return short
}

func post(url string, header http.Header, body map[string]any) (int, []byte, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return 0, nil, err
	}
	request, err := http.NewRequest(http.MethodPost, url, bytes.NewReader(text))
	if err != nil {
		return 0, nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("X-Request-Id", header.Get("X-Request-Id"))
	reply, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer reply.Body.Close()
	answer, err := io.ReadAll(reply.Body)
	return reply.StatusCode, answer, err
}

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("http://" + listener.Addr().String())
	log.Fatal(http.Serve(listener, sidecar{os.Args[1], os.Args[2]}))
}
