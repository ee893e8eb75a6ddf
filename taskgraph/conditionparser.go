package taskgraph

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/pgwake/pgwake"
)

// This file answers: what can a condition be?

// longestCondition bounds what is parsed, and with that how deep the parser goes. It is more than MaxConditionLength, since a
// condition that comes from the database has more quotes and parentheses.
const longestCondition = 16 * MaxConditionLength

// ParseCondition reads a condition on the result of a step: a predicate of PostgreSQL's SQL/JSON path language, of which it
// knows
//
//	$                        the result
//	$.key  $."quoted key"    a member of an object; of an array: of each object in it
//	$[0]                     an element of an array; other values are arrays of one
//	== != < <= > >=          compare a path with a string, a number, true, false or null, or with a path
//	exists($.key)            whether there is something at the path
//	&& || !( ) ( )           and, or, not; "and" binds tighter than "or"
//
// as in
//
//	$.status == "paid" && ($.total >= 100 || exists($.customer.vip)) && !($.country == "NL")
//
// Keys without quotes are ASCII letters, digits and '_'. Strings are those of JSON, and so are numbers, which are compared
// exactly. Strings compare by code point.
//
// A comparison of an array is one of its elements, and true if it is for any of them. What is not there equals nothing, not
// even null, and is not unequal either. null equals null, and is unequal to all else. What is of different types, or an object,
// cannot be compared: that is unknown, and so is the negation; a condition that is unknown does not hold.
//
// Comparing two arrays takes time in proportion to the product of their lengths. A turn of a task has 10 s, and what takes longer is tried
// again and again: where results may be large, compare with constants.
//
// Fails with pgwake.ErrInvalid, and says at which character.
func ParseCondition(text string) (Condition, error) {
	p := &conditionParser{text: text}
	root, err := p.parse()
	if err != nil {
		return Condition{}, fmt.Errorf("%w: condition %s: %w", pgwake.ErrInvalid, quoteShort(text), err)
	}
	return Condition{root}, nil
}

type conditionParser struct {
	text string
	at   int // in bytes; what is before is read
}

func (p *conditionParser) parse() (predicate, error) {
	switch {
	case len(p.text) > longestCondition:
		return nil, fmt.Errorf("%d bytes are more than %d", len(p.text), longestCondition)
	case !utf8.ValidString(p.text) || strings.ContainsRune(p.text, 0):
		return nil, fmt.Errorf("contains NUL or invalid UTF-8")
	}
	if p.blanks(); p.at == len(p.text) {
		return nil, fmt.Errorf("is empty")
	}
	root, err := p.disjunction()
	if err == nil && p.at < len(p.text) {
		err = p.expected("&&, || or the end")
	}
	return root, err
}

// expected is the error of something else at this place than what can be there.
func (p *conditionParser) expected(what string) error {
	found := "the end"
	if p.at < len(p.text) {
		r, _ := utf8.DecodeRuneInString(p.text[p.at:])
		found = strconv.QuoteRune(r)
	}
	return fmt.Errorf("at character %d: expected %s, found %s", utf8.RuneCountInString(p.text[:p.at])+1, what, found)
}

func (p *conditionParser) blanks() {
	for p.at < len(p.text) && strings.IndexByte(" \t\r\n\f", p.text[p.at]) >= 0 {
		p.at++
	}
}

// skip reads one of the tokens, if one is next, and the blanks after it. Of two that begin alike the longer is to come first.
func (p *conditionParser) skip(tokens ...string) string {
	for _, t := range tokens {
		if strings.HasPrefix(p.text[p.at:], t) {
			p.at += len(t)
			p.blanks()
			return t
		}
	}
	return ""
}

var (
	conditionWord   = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*`)
	conditionIndex  = regexp.MustCompile(`^(?:0|[1-9][0-9]*)`)
	conditionNumber = regexp.MustCompile(`^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?`)
	conditionString = regexp.MustCompile(`^"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"`)
)

// match reads what the pattern matches, and the blanks after it.
func (p *conditionParser) match(pattern *regexp.Regexp) string {
	found := pattern.FindString(p.text[p.at:])
	p.at += len(found)
	if found != "" {
		p.blanks()
	}
	return found
}

func (p *conditionParser) disjunction() (predicate, error) {
	left, err := p.conjunction()
	for err == nil && p.skip("||") != "" {
		var right predicate
		right, err = p.conjunction()
		left = disjunction{left, right}
	}
	return left, err
}

func (p *conditionParser) conjunction() (predicate, error) {
	left, err := p.simple()
	for err == nil && p.skip("&&") != "" {
		var right predicate
		right, err = p.simple()
		left = conjunction{left, right}
	}
	return left, err
}

func (p *conditionParser) simple() (predicate, error) {
	if p.skip("!") != "" {
		if of, err := p.delimited(); of != nil || err != nil {
			return negation{of}, err
		}
		return nil, p.expected("( or exists after !")
	}
	if of, err := p.delimited(); of != nil || err != nil {
		return of, err
	}
	return p.comparison()
}

// delimited reads a predicate that says itself where it ends; nil if what is next is none.
func (p *conditionParser) delimited() (predicate, error) {
	if rest := p.text[p.at:]; strings.HasPrefix(rest, "exists") && conditionWord.FindString(rest) == "exists" {
		p.match(conditionWord)
		if p.skip("(") == "" {
			return nil, p.expected("( after exists")
		}
		path, err := p.path()
		if err != nil {
			return nil, err
		}
		return existence{path}, p.closing()
	}
	if p.skip("(") == "" {
		return nil, nil
	}
	of, err := p.disjunction()
	if err != nil {
		return nil, err
	}
	return of, p.closing()
}

func (p *conditionParser) closing() error {
	if p.skip(")") == "" {
		return p.expected(")")
	}
	return nil
}

func (p *conditionParser) comparison() (predicate, error) {
	var c comparison
	var err error
	if c.left, err = p.operand(); err != nil {
		return nil, err
	}
	if c.operator = p.skip("==", "!=", "<=", ">=", "<", ">"); c.operator == "" {
		return nil, p.expected("one of == != < <= > >=")
	}
	from := p.at
	if c.right, err = p.operand(); err != nil {
		return nil, err
	}
	if c.left.literal != nil && c.right.literal != nil {
		p.at = from
		return nil, p.expected("a path to compare with")
	}
	return c, nil
}

func (p *conditionParser) operand() (operand, error) {
	if strings.HasPrefix(p.text[p.at:], "$") {
		path, err := p.path()
		return operand{path: path}, err
	}
	from := p.at
	switch word := p.match(conditionWord); word {
	case "true", "false", "null":
		return operand{literal: &literal{word, map[string]any{"true": true, "false": false, "null": nil}[word]}}, nil
	default:
		p.at = from
	}
	if number := p.match(conditionNumber); number != "" {
		d := parseDecimal(number)
		if !d.fits() {
			p.at = from
			return operand{}, p.expected("a number that PostgreSQL can hold")
		}
		return operand{literal: &literal{number, d}}, nil
	}
	text, found, err := p.string()
	if err == nil && !found {
		err = p.expected("a path, a string, a number, true, false or null")
	}
	return operand{literal: &literal{quoteJSON(text), text}}, err
}

// string reads a string, if one is next.
func (p *conditionParser) string() (text string, found bool, err error) {
	from := p.at
	if !strings.HasPrefix(p.text[p.at:], `"`) {
		return "", false, nil
	}
	quoted := p.match(conditionString)
	if err := checkJSON([]byte(quoted)); quoted == "" || err != nil {
		p.at = from
		return "", false, p.expected("a string as in JSON, without NUL, halves of surrogate pairs and line breaks")
	}
	return text, true, json.Unmarshal([]byte(quoted), &text)
}

func (p *conditionParser) path() (valuePath, error) {
	if p.skip("$") == "" {
		return nil, p.expected("$")
	}
	path := valuePath{}
	for {
		switch p.skip(".", "[") {
		case ".":
			key, found, err := p.string()
			if err != nil {
				return nil, err
			}
			if !found {
				if key = p.match(conditionWord); key == "" {
					return nil, p.expected("a key, in double quotes if it is not of ASCII letters, digits and _")
				}
			}
			path = append(path, accessor{key: key})
		case "[":
			from := p.at
			index, err := strconv.ParseInt(p.match(conditionIndex), 10, 32)
			if err != nil {
				p.at = from
				return nil, p.expected("a number from 0 to 2147483647")
			}
			if p.skip("]") == "" {
				return nil, p.expected("]")
			}
			path = append(path, accessor{index: int(index), indexed: true})
		default:
			return path, nil
		}
	}
}

// String returns the path in the form that is stored.
func (p valuePath) String() string {
	var b strings.Builder
	b.WriteByte('$')
	for _, a := range p {
		switch {
		case a.indexed:
			b.WriteString("[" + strconv.Itoa(a.index) + "]")
		case conditionWord.FindString(a.key) == a.key && a.key != "":
			b.WriteString("." + a.key)
		default:
			b.WriteString("." + quoteJSON(a.key))
		}
	}
	return b.String()
}

// quoteJSON returns a string as it is written in JSON, with as few escapes as can be.
func quoteJSON(s string) string {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(s) // cannot fail
	return strings.TrimSuffix(b.String(), "\n")
}
