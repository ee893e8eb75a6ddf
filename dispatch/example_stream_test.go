package dispatch_test

import (
	"context"
	"fmt"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
)

// The stream may as well be one of package dispatch/pgmq or of adapter/amqp.
func ExampleStreamSource() {
	ctx, p, end := openProvider()
	defer end()
	var stream = dispatch.ProviderStream(p)
	done := make(chan string)
	c := dispatch.NewCoordinators(dispatch.StreamSource(stream, nil), &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{{
		Namespaces: []string{"tenant-*"},
		Handlers: func(d *dispatch.Dispatcher) {
			d.Handle("invoice.send", func(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
				done <- item.Namespace + " " + string(item.Input)
				return nil, nil
			})
		},
	}}})
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- c.Run(ctx) }()
	check(stream.Publish(ctx, "tenant-a", dispatch.StreamMessage{Name: "invoice.send", Payload: []byte(`{"number": 1}`)}))
	fmt.Println(<-done)
	stop()
	check(<-ended)
	// Output: tenant-a {"number": 1}
}
