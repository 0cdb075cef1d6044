package main

import (
	"bytes"
	"encoding/json"
)

// Geometry is the document `kvh_geometry`; docs/wire/geometry.md. Lists of mixed types are kept as they came.
type Geometry struct {
	Schema  string           `json:"schema"`
	Version int              `json:"version"`
	TP      [2]int64         `json:"tp"`
	PP      [2]int64         `json:"pp"`
	Null    *int64           `json:"null_block"`
	Groups  []GeometryGroup  `json:"groups"`
	Layouts [][]Tensor       `json:"layouts"`
	Regions []GeometryRegion `json:"regions"`
}

// GeometryGroup is how block ids turn into pages and tokens.
type GeometryGroup struct {
	Kind        string `json:"kind"`
	BlockTokens int64  `json:"block_tokens"`
	Pages       int64  `json:"pages_per_block"`
}

// Tensor is one field of a layout.
type Tensor struct {
	Name    string `json:"name"`
	Element int64  `json:"element_bytes"`
	Offset  int64  `json:"offset_bytes"`
	Packing string `json:"packing"`
	Axes    []Axis `json:"axes"`
}

// Axis is [name, size, start, stop, stride, split].
type Axis struct {
	Name                      string
	Size, Start, Stop, Stride int64
	Split                     string
}

// UnmarshalJSON reads the list of six.
func (a *Axis) UnmarshalJSON(data []byte) error {
	return readList(data, &a.Name, &a.Size, &a.Start, &a.Stop, &a.Stride, &a.Split)
}

// GeometryRegion is registered memory, cut into pages.
type GeometryRegion struct {
	Base    uint64           `json:"base_address"`
	Page    int64            `json:"page_bytes"`
	Stride  int64            `json:"page_stride_bytes"`
	Count   int64            `json:"page_count"`
	Memory  string           `json:"memory_kind"`
	Device  int64            `json:"device"`
	Members []GeometryMember `json:"members"`
}

// GeometryMember is [layer, layout number, group number, offset].
type GeometryMember struct {
	Layer                 string
	Layout, Group, Offset int64
}

// UnmarshalJSON reads the list of four.
func (m *GeometryMember) UnmarshalJSON(data []byte) error {
	return readList(data, &m.Layer, &m.Layout, &m.Group, &m.Offset)
}

func readList(data []byte, into ...any) error {
	var parts []json.RawMessage
	if err := json.Unmarshal(data, &parts); err != nil {
		return err
	}
	if len(parts) != len(into) {
		return fault("document-malformed", "a list of %d, expected %d", len(parts), len(into))
	}
	for number, part := range parts {
		if err := json.Unmarshal(part, into[number]); err != nil {
			return err
		}
	}
	return nil
}

func decodeGeometry(data []byte) (*Geometry, error) {
	var made Geometry
	var version struct {
		Schema  string `json:"schema"`
		Version int    `json:"version"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return nil, fault("document-malformed", "%v", err)
	}
	if version.Schema != "kv-topology/geometry" || version.Version != 1 {
		return nil, fault("document-version", "%q version %d", version.Schema, version.Version)
	}
	if err := json.NewDecoder(bytes.NewReader(data)).Decode(&made); err != nil {
		return nil, fault("document-malformed", "%v", err)
	}
	for _, region := range made.Regions {
		for _, member := range region.Members {
			if member.Layout < 0 || member.Layout >= int64(len(made.Layouts)) ||
				member.Group < 0 || member.Group >= int64(len(made.Groups)) {
				return nil, fault("document-malformed", "layer %q names no layout or group", member.Layer)
			}
		}
	}
	return &made, nil
}

// address returns where an element lies: of a layer's field, on a page, at global indices by axis name.
func (g *Geometry) address(layer, name string, page int64, indices map[string]int64) (uint64, error) {
	for _, region := range g.Regions {
		for _, member := range region.Members {
			for _, tensor := range g.Layouts[member.Layout] {
				offset, holds := tensor.offset(indices)
				if member.Layer == layer && tensor.Name == name && holds && page >= 0 && page < region.Count {
					return region.Base + uint64(page*region.Stride+member.Offset+offset), nil
				}
			}
		}
	}
	return 0, fault("not-held", "%s of %s", name, layer)
}

// offset returns the place of an element relative to the member, and whether this rank holds it.
func (t Tensor) offset(indices map[string]int64) (int64, bool) {
	place := t.Offset
	for _, axis := range t.Axes {
		index := indices[axis.Name]
		if index < axis.Start || index >= axis.Stop {
			return 0, false
		}
		place += (index - axis.Start) * axis.Stride
	}
	return place, true
}
