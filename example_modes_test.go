package pgwake_test

import (
	"fmt"
	"time"

	"github.com/pgwake/pgwake"
)

func ExampleProvider_SetModes() {
	ctx, p, end := openProvider()
	defer end()
	mail := &pgwake.FetchOptions{Namespaces: []string{"mail"}, PollTimeout: time.Minute}
	check(p.SetModes(pgwake.ModeHybrid, map[string]pgwake.Mode{"mail": pgwake.ModeDisabled}))
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "mail.send"}, &pgwake.EnqueueOptions{Namespace: "mail"})
	check(err)
	time.AfterFunc(10*time.Millisecond, func() { check(p.SetModes(pgwake.ModeHybrid, nil)) })
	item, err := p.FetchWorkItem(ctx, mail) // it waits, and the change wakes it
	check(err)
	fmt.Println(item.Name)
	// Output: mail.send
}

func ExampleProvider_GetModes() {
	_, p, end := openProvider()
	defer end()
	check(p.SetModes(pgwake.ModeEventDriven, map[string]pgwake.Mode{"mail": pgwake.ModePolling}))
	mode, of := p.GetModes()
	fmt.Println(mode, of)
	// Output: event-driven map[mail:polling]
}
