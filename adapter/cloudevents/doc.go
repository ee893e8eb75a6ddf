// Package cloudevents says events of package eventbus as CloudEvents 1.0, and the other way round, with the types of the CloudEvents SDK.
//
//	ce, err := cloudevents.FromEvent(e, "https://shop.example") // in a handler, or of the log
//	data, err := json.Marshal(ce)                               // or the SDK sends it, by HTTP say
//
//	var ce event.Event
//	err := json.Unmarshal(data, &ce)
//	emission, err := cloudevents.ToEmission(ce)
//	_, err = bus.EmitMany(ctx, []eventbus.Emission{emission})
//
// # What becomes what
//
//	type                    Event.Type
//	subject                 Event.Key
//	data                    Event.Payload; what is no JSON is a string there: the text, or the base64 of anything else
//	extensions              Event.Headers, by the same names, traceparent and tracestate among them
//	id, source, time        Event.ID; the base that FromEvent is called with, the namespace and the producer; Event.EmittedAt
//	scheduledtaskid         Event.ScheduledTaskID, if there is one; a header on the way back
//	pgwakemetadata          Event.Metadata, if there is any, as the text of a JSON object
//
// What a CloudEvent has and an Event has no place for is kept in its metadata, as MetadataKey: id, source, time, dataschema,
// datacontenttype, what kind of data it is, and which extensions are numbers or booleans. With it FromEvent makes the CloudEvent that
// ToEmission was given. So an event keeps its identity on its way through a bus, or through several; and since source and id
// are what CloudEvents are known by, they are the dedup key of the Emission, which the caller may change.
//
// # What is kept
//
// Both directions and back give the same, but for this. JSON is kept as the value that it is, not as the bytes that it was, as
// everywhere in PostgreSQL; data of a JSON type that comes as data_base64, and is JSON, goes as data. The SDK has JSON
// of other types than application/json, such as application/vnd.shop+json, be a string in its JSON format, and reads it so. Times are instants, in UTC. Extensions
// are what the JSON format has of them: strings, booleans and integers. What the context of an emit propagates, such as its trace, is added
// to the headers unless they have it, and so to the extensions.
//
// What cannot be said on the other side is an [Error], and nothing is left out in silence. Names of extensions are lower-case letters and
// digits, so that headers with other names, or with that of an attribute, have none: rename or delete them before FromEvent. Strings of CloudEvents have no
// control characters. A type or a subject may be longer than those of an Event.
package cloudevents
