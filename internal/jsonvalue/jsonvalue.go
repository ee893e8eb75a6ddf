// Package jsonvalue decodes JSON that others have written, so that nothing of it gets into errors, and says how long its numbers are.
package jsonvalue

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
)

// This file answers: what may be said of a value that does not fit?

// Unmarshal is json.Unmarshal of what others have written. Its error goes to logs, and into failures that are kept: it says where something
// does not fit, and what it was to be, but not what is there. So it wraps none of those that do: package encoding/json quotes numbers, and
// types quote what they cannot be made of.
func Unmarshal(data []byte, v any) error { return without(json.Unmarshal(data, v), v) }

// UnmarshalStrict is Unmarshal of an object that may have no members but those of v.
func UnmarshalStrict(data []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	return without(d.Decode(v), v)
}

// without is an error of package encoding/json about v, without what was there.
func without(err error, v any) error {
	var (
		unfit  *json.UnmarshalTypeError
		syntax *json.SyntaxError
		target *json.InvalidUnmarshalError
	)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &unfit):
		where := fmt.Sprintf("what is at byte %d", unfit.Offset)
		if unfit.Field != "" {
			where = fmt.Sprintf("field %s, at byte %d,", unfit.Field, unfit.Offset)
		}
		return fmt.Errorf("%s does not fit %v", where, unfit.Type)
	case errors.As(err, &syntax):
		return fmt.Errorf("not JSON from byte %d on", syntax.Offset)
	case errors.As(err, &target):
		return target // which says what v is, and no more
	}
	return fmt.Errorf("something in it does not fit %v (%T)", reflect.TypeOf(v).Elem(), err)
}
