package pgwake_test

import (
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

func ExampleProvider_RegisterNamespace() {
	ctx, p, end := openProvider()
	defer end()
	check(p.RegisterNamespace(ctx, "billing"))
	fmt.Println(p.RegisterNamespace(ctx, "Not a name"))
	// Output: pgwake: register namespace: invalid argument: namespace "Not a name" does not match ^[a-z][a-z0-9_-]{0,39}$
}

func ExampleProvider_RegisterNamespaceTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return p.RegisterNamespaceTx(ctx, tx, "billing") }))
	added, err := p.WaitForNamespaces(ctx, []string{pgwake.DefaultNamespace})
	check(err)
	fmt.Println(added)
	// Output: [billing]
}

func ExampleProvider_ListNamespaces() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "mail.send"}, &pgwake.EnqueueOptions{Namespace: "mail"})
	check(err)
	all, err := p.ListNamespaces(ctx)
	check(err)
	for _, n := range all {
		fmt.Println(n.Name)
	}
	// Output:
	// default
	// mail
}

func ExampleProvider_WaitForNamespaces() {
	ctx, p, end := openProvider()
	defer end()
	var known []string
	for len(known) < 2 {
		added, err := p.WaitForNamespaces(ctx, known)
		check(err)
		fmt.Println(added)
		known = append(known, added...)
		_, err = p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "mail.send"}, &pgwake.EnqueueOptions{Namespace: "mail"})
		check(err)
	}
	// Output:
	// [default]
	// [mail]
}
