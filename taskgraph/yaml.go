package taskgraph

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"

	"github.com/pgwake/pgwake"
	"go.yaml.in/yaml/v3"
)

// This file answers: how are definitions read from YAML, and written?

// Limits of ParseDefinitions.
const (
	MaxYAML         = 4 << 20 // bytes
	maxExpandedYAML = 4 * MaxYAML
)

// ParseDefinitions reads definitions from YAML, one a document, and validates them:
//
//	namespace: shop
//	name: fulfil_order
//	version: 1.0.0
//	description: Gets an order out of the door.
//	on_failure: fail_fast           # or drain
//	lifecycle:                      # all optional
//	  max_waiting_for_dependencies: 60m
//	  max_waiting_for_retry: 30m
//	  max_steps_in_process: 30m
//	  max_lifetime: 24h
//	steps:
//	  - name: reserve
//	    handler: inventory.reserve
//	    max_attempts: 5
//	    timeout: 1m
//	  - name: charge
//	    handler: payments.charge
//	    after: [reserve]
//	    retryable: false
//	  - name: ship
//	    handler: shipping.ship
//	    after:
//	      - step: charge
//	        if: $.status == "paid"
//	    retry_every: 7s
//	    tag: gpu
//	    limit_key: carrier
//	    inputs: {carrier: ACME, parcels: 1}
//	  - name: refund
//	    sub_task_name: refund_order
//	    sub_task_version: 1.0.0
//	    after: [charge]
//	  - name: notify
//	    handler: mail.send
//	    on_demand: true
//
// Fails with pgwake.ErrInvalid, and says in which line a field is unknown or of the wrong type; what else is wrong it says as
// Validate does, of all documents at once.
func ParseDefinitions(text []byte) ([]*Definition, error) {
	if len(text) > MaxYAML {
		return nil, fmt.Errorf("%w: YAML of %d bytes is more than %d", pgwake.ErrInvalid, len(text), MaxYAML)
	}
	// The documents are read twice: first to see how large they are, since what an alias stands for counts each time.
	looking, reading := yaml.NewDecoder(bytes.NewReader(text)), yaml.NewDecoder(bytes.NewReader(text))
	reading.KnownFields(true)
	var definitions []*Definition
	var problems []error
	seen := make(map[[3]string]int)
	for {
		var document yaml.Node
		err := looking.Decode(&document)
		if err == io.EOF {
			break
		}
		if err == nil {
			err = checkExpansion(&document)
		}
		if err != nil { // there is no telling where the next document begins
			return nil, errors.Join(append(problems, yamlError(err))...)
		}
		var form definitionForm
		err = reading.Decode(&form)
		if isNull(&document) {
			continue
		}
		if err == nil {
			err = checkElements(member(document.Content[0], "steps"))
		}
		if err != nil {
			problems = append(problems, yamlError(err))
			continue
		}
		d := form.definition()
		definitions = append(definitions, d)
		if err := d.Validate(); err != nil {
			problems = append(problems, err)
		}
		id := [...]string{d.Namespace, d.Name, d.Version}
		if seen[id]++; seen[id] == 2 {
			problems = append(problems, fmt.Errorf("%w: definition %s is there more than once", pgwake.ErrInvalid, d.title()))
		}
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	if len(definitions) == 0 {
		return nil, fmt.Errorf("%w: YAML holds no definition", pgwake.ErrInvalid)
	}
	return definitions, nil
}

// isNull reports whether nothing is between two "---".
func isNull(document *yaml.Node) bool {
	return len(document.Content) == 1 && document.Content[0].Kind == yaml.ScalarNode && document.Content[0].ShortTag() == "!!null"
}

// checkExpansion refuses a document that is much larger than it looks. What each node stands for is counted once; nothing
// contains itself.
func checkExpansion(document *yaml.Node) error {
	sizes := make(map[*yaml.Node]int)
	const underWay = -1
	var size func(n *yaml.Node) (int, error)
	size = func(n *yaml.Node) (int, error) {
		if s, known := sizes[n]; s == underWay {
			return 0, fmt.Errorf("line %d: %s contains itself", n.Line, quoteShort(n.Anchor))
		} else if known {
			return s, nil
		}
		sizes[n] = underWay
		s := 1 + len(n.Value)
		parts := n.Content
		if n.Alias != nil {
			parts = []*yaml.Node{n.Alias}
		}
		for _, part := range parts {
			of, err := size(part)
			if err != nil {
				return 0, err
			}
			if s += of; s > maxExpandedYAML {
				return 0, fmt.Errorf("line %d: with what its aliases stand for, this is more than %d bytes", n.Line, maxExpandedYAML)
			}
		}
		sizes[n] = s
		return s, nil
	}
	_, err := size(document)
	return err
}

// goTypes are what the library says of the types that it reads into, and what a reader of YAML makes more of.
var goTypes = []struct {
	pattern *regexp.Regexp
	words   string
}{
	{regexp.MustCompile(` not found in type \S+`), " is unknown"},
	{regexp.MustCompile(` into \[\]\S+`), " into a list"},
	{regexp.MustCompile(` into taskgraph\.\w+Form`), " into a mapping"},
	{regexp.MustCompile(` into taskgraph\.FailurePolicy`), " into a text"},
}

// yamlError returns the library's error as one of a caller's.
func yamlError(err error) error {
	var many *yaml.TypeError
	lines := []string{strings.TrimPrefix(err.Error(), "yaml: ")}
	if errors.As(err, &many) {
		lines = many.Errors
	}
	if more := len(lines) - maxListed; more > 0 {
		lines = append(lines[:maxListed:maxListed], fmt.Sprintf("and %d more", more))
	}
	text := strings.Join(lines, "\n\t")
	for _, t := range goTypes {
		text = t.pattern.ReplaceAllString(text, t.words)
	}
	return fmt.Errorf("%w: YAML: %s", pgwake.ErrInvalid, text)
}

func lineError(n *yaml.Node, format string, args ...any) error {
	return &yaml.TypeError{Errors: []string{fmt.Sprintf("line %d: ", n.Line) + fmt.Sprintf(format, args...)}}
}

// checkElements refuses a list with an element that is empty: the library leaves it out.
func checkElements(list *yaml.Node) error {
	if list.Kind == yaml.AliasNode {
		list = list.Alias
	}
	for _, e := range list.Content {
		if list.Kind == yaml.SequenceNode && e.ShortTag() == "!!null" {
			return lineError(e, "an element of the list is empty")
		}
	}
	return nil
}

// UnmarshalYAML is for YAML.
func (a *afterForm) UnmarshalYAML(n *yaml.Node) error {
	if err := checkElements(n); err != nil {
		return err
	}
	return n.Decode((*[]dependencyForm)(a))
}

// UnmarshalYAML refuses fractions, which the library cuts off.
func (w *wholeForm) UnmarshalYAML(n *yaml.Node) error {
	var number float64
	if n.ShortTag() == "!!float" && n.Decode(&number) == nil && number != math.Trunc(number) {
		return lineError(n, "%s is not a whole number", quoteShort(n.Value))
	}
	return n.Decode((*int)(w))
}

// UnmarshalYAML is for YAML.
func (d *durationForm) UnmarshalYAML(n *yaml.Node) error {
	if err := d.UnmarshalText([]byte(n.Value)); err != nil {
		return lineError(n, "%v", err)
	}
	return nil
}

// UnmarshalYAML reads the name of a step, or that and a condition.
func (d *dependencyForm) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind == yaml.ScalarNode {
		return n.Decode(&d.Step)
	}
	var fields map[string]yaml.Node
	if err := n.Decode(&fields); err != nil {
		return err
	}
	for key, value := range fields {
		var err error
		switch key {
		case "step":
			err = value.Decode(&d.Step)
		case "if":
			if err = value.Decode(&d.If); err == nil && d.If == "" {
				err = lineError(&value, "if is empty")
			}
		default:
			err = lineError(&value, "field %s is unknown", quoteShort(key))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// UnmarshalYAML reads any value that JSON has as well.
func (i *inputsForm) UnmarshalYAML(n *yaml.Node) error {
	v, err := jsonOfYAML(n)
	if err != nil || v == nil {
		return err
	}
	i.RawMessage, err = json.Marshal(v)
	return err
}

// jsonOfYAML returns the value of a node, for json.Marshal. Numbers that JSON writes alike remain as they are written.
func jsonOfYAML(n *yaml.Node) (any, error) {
	switch n.Kind {
	case yaml.AliasNode:
		return jsonOfYAML(n.Alias)
	case yaml.SequenceNode:
		values := make([]any, len(n.Content))
		for i, part := range n.Content {
			var err error
			if values[i], err = jsonOfYAML(part); err != nil {
				return nil, err
			}
		}
		return values, nil
	case yaml.MappingNode:
		var fields map[string]yaml.Node
		if err := n.Decode(&fields); err != nil {
			return nil, err
		}
		values := make(map[string]any, len(fields))
		for key, part := range fields {
			var err error
			if values[key], err = jsonOfYAML(&part); err != nil {
				return nil, err
			}
		}
		return values, nil
	}
	return jsonOfScalar(n)
}

func jsonOfScalar(n *yaml.Node) (any, error) {
	switch n.ShortTag() {
	case "!!null":
		return nil, nil
	case "!!str", "!!timestamp":
		return n.Value, nil
	case "!!bool":
		var v bool
		err := n.Decode(&v)
		return v, err
	case "!!int", "!!float":
		if json.Valid([]byte(n.Value)) {
			return json.Number(n.Value), nil
		}
		var v any // in another base, with a sign or with underscores
		if err := n.Decode(&v); err != nil {
			return nil, err
		}
		if _, err := json.Marshal(v); err != nil {
			return nil, lineError(n, "%s is not a number of JSON", quoteShort(n.Value))
		}
		return v, nil
	}
	return nil, lineError(n, "%s of type %s has no like in JSON", quoteShort(n.Value), n.ShortTag())
}

// YAML returns the definition in the form that ParseDefinitions reads. It fails if inputs are not JSON; see Validate for all
// else.
func (d *Definition) YAML() ([]byte, error) {
	data, err := d.MarshalJSON()
	if err != nil {
		return nil, err
	}
	tokens := json.NewDecoder(bytes.NewReader(data))
	tokens.UseNumber()
	document, err := nextNode(tokens)
	if err != nil {
		return nil, err
	}
	for _, step := range member(document, "steps").Content {
		for i, after := range member(step, "after").Content {
			if len(after.Content) == 2 { // there is no condition
				*member(step, "after").Content[i] = *after.Content[1]
			}
		}
	}
	var b bytes.Buffer
	encoder := yaml.NewEncoder(&b)
	encoder.SetIndent(2)
	if err := encoder.Encode(document); err != nil {
		return nil, err
	}
	return b.Bytes(), encoder.Close()
}

// member returns what is under the key of a mapping; an empty node if there is nothing.
func member(n *yaml.Node, key string) *yaml.Node {
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return new(yaml.Node)
}

// nextNode returns the next value of JSON as the node that reads as the same, with keys in the same order; nil where an array or
// an object ends.
func nextNode(tokens *json.Decoder) (*yaml.Node, error) {
	token, err := tokens.Token()
	if err != nil {
		return nil, err
	}
	scalar := func(tag, text string) *yaml.Node { return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: text} }
	switch t := token.(type) {
	case nil:
		return scalar("!!null", "null"), nil
	case bool:
		return scalar("!!bool", strconv.FormatBool(t)), nil
	case json.Number:
		if strings.ContainsAny(string(t), ".eE") {
			return scalar("!!float", string(t)), nil
		}
		return scalar("!!int", string(t)), nil
	case string:
		n := scalar("!!str", t)
		if !unquoted.MatchString(t) || t == "<<" {
			n.Style = yaml.DoubleQuotedStyle
		}
		return n, nil
	case json.Delim:
		switch t {
		case '{':
			return nextParts(tokens, &yaml.Node{Kind: yaml.MappingNode})
		case '[':
			return nextParts(tokens, &yaml.Node{Kind: yaml.SequenceNode})
		}
	}
	return nil, nil
}

// unquoted are texts that the library can be left to write in the way that reads best: lines of letters and marks.
var unquoted = regexp.MustCompile(`^[\pL\pN\pP\pS]+( [\pL\pN\pP\pS]+)*(\n[\pL\pN\pP\pS]+( [\pL\pN\pP\pS]+)*)*\n?$`)

func nextParts(tokens *json.Decoder, n *yaml.Node) (*yaml.Node, error) {
	for {
		part, err := nextNode(tokens)
		if part == nil || err != nil {
			return n, err
		}
		n.Content = append(n.Content, part)
	}
}
