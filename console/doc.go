// Package console shows what goes on in a database of package pgwake, in a browser: queues and who fetches from them, nodes, instances,
// tasks, events, dead letters and schedules, live.
//
//	mux.Handle("/console/", http.StripPrefix("/console", console.Handler(p, &console.Options{
//		Tasks:     engine.Graph, // of a taskgraph.Engine, if there is one
//		Events:    bus,          // of package eventbus, likewise
//		Authorize: onlyOperators,
//	})))
//
// It is one http.Handler with all that it needs in it: no files beside the program, nothing to build, and no request to anybody else.
// It can be mounted anywhere.
//
// # Who may look, and who may act
//
// The console asks nobody for a password: put the handler that your program has for that around it. Without Options.Authorize nothing can be
// changed. With it, it is asked before each action; requests of other sites are refused before that (http.CrossOriginProtection).
// Options.Redact decides what of a payload is shown.
//
// # What it costs
//
// Nothing while nobody looks. Pages that are open hear of changes by server-sent events, which the engine feeds (Provider.Observe): when something has
// happened, and as long as it goes on, one place looks at the queues every 0.8 seconds, in one statement, for everybody who watches; a page of something
// particular, such as a task, is read about once a second. While nothing happens each looks once in 15 seconds. Where looking takes long, since there
// is much in the queues, it looks so seldom that it takes a fifth of a connection. Lists are read page by page, by keys, by half of the connections of the
// pool at most.
//
// A stream ends with its request. http.Server.Shutdown waits for streams, as for any request: have http.Server.BaseContext return a context
// that you cancel before.
package console
