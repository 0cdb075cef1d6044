package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

var hashedAlways = []string{
	"vllm_version", "nixl_connector_version", "model", "dtype", "num_kv_heads", "head_size", "num_hidden_layers",
	"attn_backend_name", "cache_dtype", "is_hma_enabled",
}

// factors of the compatibility id, in the order of docs/wire/compatibility.md.
var identifying = []string{
	"vllm_version", "nixl_connector_version", "model", "dtype", "num_kv_heads", "head_size", "num_hidden_layers",
	"cache_dtype", "speculative_config", "transfer_mode", "model_identity", "model_revision", "quantization",
	"sliding_window", "kv_cache_groups", "mamba_conv_dtype", "mamba_ssm_dtype", "mamba_layout", "draft_model",
}

// hashedFactors returns the factors that the hash of a dialect covers; all of them if one is missing.
func hashedFactors(factors *Map, dialect int) *Map {
	names := slices.Clone(hashedAlways)
	if dialect <= 8 {
		names = append(names, "cross_layers_blocks")
	}
	if dialect >= 6 {
		names = append(names, "speculative_config")
	}
	if dialect >= 7 {
		names = append(names, "transfer_mode")
	}
	chosen := newMap()
	for _, name := range names {
		value, found := factors.get(name)
		if !found {
			return factors
		}
		chosen.set(name, value)
	}
	return chosen
}

func hashOf(factors *Map) string {
	sum := sha256.Sum256([]byte(sortedJSON(factors)))
	return hex.EncodeToString(sum[:])
}

// comparable returns a factor's value; of `vllm_version` major and minor, "0.32" of "0.32.1".
func comparable(name string, factors *Map) any {
	value, _ := factors.get(name)
	if text, isText := value.(string); isText && name == "vllm_version" {
		parts := strings.SplitN(text, ".", 3)
		return strings.Join(parts[:min(2, len(parts))], ".")
	}
	return value
}

// mayDiffer holds the factors that the transfer plan deals with, and those that mean nothing.
var mayDiffer = []string{
	"attn_backend_name", "block_size", "kv_cache_layout", "tp_size", "pp_size", "dcp_size", "pcp_size",
	"is_hma_enabled", "cross_layers_blocks", "lora", "engine_name", "engine_version", "model_path",
}

// ifBoth holds the factors of vllm-adapter that count where both sides send them.
var ifBoth = []string{"model_config", "model_weights", "draft_config", "draft_weights"}

// differingFactor returns a factor that must match and does not, or "". Factors that no table names must match.
func differingFactor(ours, theirs *Map) string {
	names := slices.Clone(identifying)
	for _, key := range slices.Concat(ours.Keys, theirs.Keys) {
		name, _ := key.(string)
		_, isOurs := ours.get(name)
		_, isTheirs := theirs.get(name)
		counts := isOurs && isTheirs || !slices.Contains(ifBoth, name)
		if counts && !slices.Contains(names, name) && !slices.Contains(mayDiffer, name) {
			names = append(names, name)
		}
	}
	isIdentified := ours.Values["model_identity"] != nil && theirs.Values["model_identity"] != nil ||
		isShared("model_config", ours, theirs) && isShared("model_weights", ours, theirs)
	for _, name := range names {
		if name == "model" && isIdentified {
			continue
		}
		if sortedJSON(comparable(name, ours)) != sortedJSON(comparable(name, theirs)) {
			return name
		}
	}
	return ""
}

// isShared returns whether both send a factor, with one value.
func isShared(name string, ours, theirs *Map) bool {
	return ours.Values[name] != nil && sortedJSON(ours.Values[name]) == sortedJSON(theirs.Values[name])
}

// sortedJSON writes a value as Python's json.dumps(value, sort_keys=True) does.
func sortedJSON(value any) string {
	switch v := value.(type) {
	case nil:
		return "null"
	case bool:
		return strconv.FormatBool(v)
	case string:
		return quoted(v)
	case float64:
		return pythonFloat(v)
	case []any:
		items := make([]string, len(v))
		for number, item := range v {
			items[number] = sortedJSON(item)
		}
		return "[" + strings.Join(items, ", ") + "]"
	case *Map:
		keys := slices.Clone(v.Keys)
		slices.SortFunc(keys, func(one, other any) int { return strings.Compare(one.(string), other.(string)) })
		items := make([]string, len(keys))
		for number, key := range keys {
			items[number] = quoted(key.(string)) + ": " + sortedJSON(v.Values[key])
		}
		return "{" + strings.Join(items, ", ") + "}"
	}
	return fmt.Sprint(value)
}

func quoted(text string) string {
	short := map[rune]string{'"': `\"`, '\\': `\\`, '\n': `\n`, '\r': `\r`, '\t': `\t`, '\f': `\f`, '\b': `\b`}
	var out strings.Builder
	out.WriteByte('"')
	for _, each := range text {
		escape, isShort := short[each]
		switch {
		case isShort:
			out.WriteString(escape)
		case each >= ' ' && each <= '~':
			out.WriteRune(each)
		case each < 0x10000:
			fmt.Fprintf(&out, `\u%04x`, each)
		default: // a surrogate pair: U+1F600 is \ud83d\ude00
			each -= 0x10000
			fmt.Fprintf(&out, `\u%04x\u%04x`, 0xd800+each>>10, 0xdc00+each&0x3ff)
		}
	}
	out.WriteByte('"')
	return out.String()
}

// pythonFloat writes the shortest digits: 2.5, 30.0, 1e+16, 1e-05; exponents below -4 and from 16 on.
func pythonFloat(number float64) string {
	switch size := math.Abs(number); {
	case math.IsNaN(number):
		return "NaN"
	case math.IsInf(number, 0):
		return strings.TrimPrefix(strconv.FormatFloat(number, 'f', -1, 64), "+") + "inity"
	case size != 0 && (size < 1e-4 || size >= 1e16):
		return strconv.FormatFloat(number, 'e', -1, 64)
	}
	text := strconv.FormatFloat(number, 'f', -1, 64)
	if strings.Contains(text, ".") {
		return text
	}
	return text + ".0"
}

// valueOf turns what encoding/json read (with numbers as text) into values as MessagePack gives them.
func valueOf(read any) any {
	switch v := read.(type) {
	case json.Number:
		if whole, err := strconv.ParseInt(v.String(), 10, 64); err == nil {
			return whole
		}
		real, _ := v.Float64()
		return real
	case []any:
		items := make([]any, len(v))
		for number, item := range v {
			items[number] = valueOf(item)
		}
		return items
	case map[string]any:
		table := newMap()
		for key, item := range v {
			table.set(key, valueOf(item))
		}
		return table
	}
	return read
}
