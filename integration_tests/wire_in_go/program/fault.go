package main

import "fmt"

// Fault is a coded refusal; its code is one of the tables in docs/wire.
type Fault struct {
	Code    string
	Message string
}

func (f *Fault) Error() string { return f.Code + ": " + f.Message }

func fault(code, format string, values ...any) *Fault {
	return &Fault{Code: code, Message: fmt.Sprintf(format, values...)}
}

// codeOf returns the code of an error, "" for none.
func codeOf(err error) string {
	if err == nil {
		return ""
	}
	if coded, ok := err.(*Fault); ok {
		return coded.Code
	}
	return "transport-failed"
}
