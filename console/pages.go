package console

import (
	"html/template"
)

// This file answers: which pages are there?

var (
	overviewPage = newPage("overview", "Overview", loadOverview).fromHub()
	failedPage   = &page{name: "failed", title: "Failed", templates: template.Must(template.Must(shared.Clone()).ParseFS(templateFiles, "templates/failed.html"))}

	pages = byName(
		overviewPage,
		newPage("queues", "Queues", loadQueues).fromHub(),
		newPage("nodes", "Nodes", loadNodes).fromHub(),
		newPage("items", "Queued items", loadItems).below("queues").every(1),
		newPage("item", "Queued item", loadItem).below("queues").every(1),
		newPage("instances", "Instances", loadInstances).every(1),
		newPage("instance", "Instance", loadInstance).below("instances").every(4),
		newPage("tasks", "Tasks", loadTasks).every(1),
		newPage("task", "Task", loadTask).below("tasks").every(2),
		newPage("events", "Events", loadEvents).every(1),
		newPage("event", "Event", loadEvent).below("events"),
		newPage("letters", "Dead letters", loadLetters).every(1),
		newPage("letter", "Dead letter", loadLetter).below("letters"),
		newPage("schedules", "Schedules", loadSchedules).every(1),
	)
)

func byName(all ...*page) map[string]*page {
	names := make(map[string]*page)
	for _, p := range all {
		names[p.name] = p
	}
	return names
}
