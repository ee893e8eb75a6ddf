package model

import (
	"go/ast"
	"go/parser"
	gotoken "go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// This file answers: is what the model speaks of there?

func TestImplementation_EachFunction_IsThere(t *testing.T) {
	sql, code := sqlFunctions(t), goFunctions(t)
	for what := range Transition(transitionCount) {
		named := Implementation[what]
		require.NotZero(t, len(named.SQL)+len(named.Go)+len(named.Note), "what implements %v?", what)
		for _, name := range named.SQL {
			if !sql[name] {
				t.Errorf("%v: migrations have no function %s", what, name)
			}
		}
		for _, name := range named.Go {
			if !code[name] {
				t.Errorf("%v: the root package has no function %s", what, name)
			}
		}
	}
	require.Len(t, Implementation, transitionCount)
}

func sqlFunctions(t *testing.T) map[string]bool {
	created := regexp.MustCompile(`(?m)^CREATE (?:OR REPLACE )?FUNCTION (?:%1\$I\.)?(\w+)`)
	names := make(map[string]bool)
	files, err := filepath.Glob("../../migrations/*.sql")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, match := range created.FindAllStringSubmatch(string(text), -1) {
			names[match[1]] = true
		}
	}
	return names
}

func goFunctions(t *testing.T) map[string]bool {
	names := make(map[string]bool)
	files, err := filepath.Glob("../../*.go")
	require.NoError(t, err)
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(gotoken.NewFileSet(), file, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, decl := range parsed.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok {
				names[receiver(f)+f.Name.Name] = true
			}
		}
	}
	require.NotEmpty(t, names)
	return names
}

// receiver returns that of a method as it is written in its name: "(*lane)." or "look.".
func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	star, name := "", ast.Expr(f.Recv.List[0].Type)
	if pointer, ok := name.(*ast.StarExpr); ok {
		star, name = "*", pointer.X
	}
	if generic, ok := name.(*ast.IndexExpr); ok {
		name = generic.X
	}
	ident, ok := name.(*ast.Ident)
	if !ok {
		return ""
	}
	if star == "" {
		return ident.Name + "."
	}
	return "(*" + ident.Name + ")."
}
