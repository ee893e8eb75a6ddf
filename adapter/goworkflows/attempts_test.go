package goworkflows_test

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/cschleiden/go-workflows/backend/history"
	"github.com/cschleiden/go-workflows/client"
	"github.com/cschleiden/go-workflows/core"
	"github.com/cschleiden/go-workflows/workflow"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/goworkflows"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: what is kept from workers, as they would not survive it?

func (l *lab) letters() []pgwake.DeadLetter {
	l.t.Helper()
	letters, err := l.p.ListDeadLetters(l.within(), nil)
	require.NoError(l.t, err)
	return letters
}

func TestGet_ClaimedOftenAndNeverCompleted_IsPutAsideAtTheBound(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ turns, activities, wantTurns, wantActivities int }{{0, 0, 10, 25}, {1, 1, 1, 1}, {-1, -1, 30, 30}} {
		t.Run(fmt.Sprint(c.turns), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.Backend = l.WithMaxAttempts(c.turns, c.activities)
			lost := l.create("lost")
			in := &pgwake.FetchOptions{NoWait: true, Namespaces: []string{goworkflows.Namespace}, WithoutHistory: true}
			for range 3 { // free of charge
				item, err := l.p.FetchOrchestrationItem(l.within(), in)
				require.NoError(t, err)
				require.NoError(t, l.p.AbandonOrchestrationItem(l.within(), item.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true}))
			}
			for range c.wantTurns {
				require.Equal(t, lost, l.workflowTask().WorkflowInstance)
				pgwaketest.Advance(t, l.p, time.Hour)
			}
			if c.turns < 0 {
				require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateFinished))
				require.Empty(t, l.letters())
			}
			l.create("next")
			next := l.workflowTask()
			require.Equal(t, "next", next.WorkflowInstance.InstanceID)
			if c.turns >= 0 {
				letters := l.letters()
				require.Len(t, letters, 1)
				require.Equal(t, "max attempts", letters[0].Reason)
				require.Equal(t, "no worker has completed the turn", letters[0].Error)
				state, err := l.GetWorkflowInstanceState(l.within(), lost)
				require.NoError(t, err)
				require.Equal(t, core.WorkflowInstanceStateActive, state)
				_, err = l.p.PurgeDeadLetters(l.within(), nil)
				require.NoError(t, err)
			}

			require.NoError(t, l.complete(next, core.WorkflowInstanceStateActive, activity(1)))
			for range 3 {
				item, err := l.p.FetchWorkItem(l.within(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{goworkflows.Namespace}, Tags: pgwake.Tags(string(workflow.QueueDefault))})
				require.NoError(t, err)
				require.NoError(t, l.p.AbandonWorkItem(l.within(), item.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true}))
			}
			for range c.wantActivities {
				l.activityTask()
				pgwaketest.Advance(t, l.p, time.Hour)
			}
			if c.activities < 0 {
				l.activityTask()
				return
			}
			l.create("another")
			require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateActive, activity(2)))
			require.Equal(t, "another", l.activityTask().WorkflowInstance.InstanceID)
			letters := l.letters()
			require.Len(t, letters, 1)
			require.Equal(t, "max attempts", letters[0].Reason)
			require.Equal(t, int64(1), letters[0].ActivityID)

			// What somebody has mended goes on.
			_, err := l.p.RedriveDeadLetters(l.within(), nil)
			require.NoError(t, err)
			redriven := l.activityTask()
			require.NoError(t, l.CompleteActivityTask(l.within(), redriven, result(redriven)))
			require.Equal(t, history.EventType_ActivityCompleted, l.workflowTask().NewEvents[0].Type)
		})
	}
}

// openingOf is the message that opens an instance.
func openingOf(t *testing.T, to, of string) pgwake.Message {
	t.Helper()
	data, err := json.Marshal(map[string]any{"instance": core.NewWorkflowInstance(of, "1"), "event": started("w")})
	require.NoError(t, err)
	return pgwake.Message{Instance: to + "/1", Kind: pgwake.MessageStart, Name: "w", Queue: string(workflow.QueueDefault), Data: data}
}

const signal = `{"t":17,"attr":{"name":"s"}}`

func TestGetWorkflowTask_WhatNobodySendsToAWorkflow_IsPutAside(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	var sent []pgwake.MessageEnqueue
	send := func(m pgwake.Message) {
		sent = append(sent, pgwake.MessageEnqueue{Message: m, EnqueueOptions: pgwake.EnqueueOptions{Namespace: goworkflows.Namespace}})
	}
	comes := map[history.EventType]bool{
		history.EventType_WorkflowExecutionCanceled: true, history.EventType_SignalReceived: true, history.EventType_TimerFired: true,
		history.EventType_ActivityCompleted: true, history.EventType_ActivityFailed: true,
		history.EventType_SubWorkflowCompleted: true, history.EventType_SubWorkflowFailed: true,
	}
	// Each to a workflow of its own, as all of a turn is put aside.
	var open []string
	opened := func() string {
		instance := l.create(fmt.Sprint("open", len(open)))
		require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateActive, activity(1)))
		open = append(open, instance.InstanceID)
		return instance.InstanceID + "/" + instance.ExecutionID
	}
	for kind := history.EventType_WorkflowExecutionStarted; kind <= history.EventType_TraceStarted; kind++ {
		if !comes[kind] {
			send(pgwake.Message{Instance: opened(), Kind: pgwake.MessageQueued, Data: fmt.Appendf(nil, `{"t":%d,"seid":1,"attr":{}}`, kind)})
		}
	}
	again := openingOf(t, "", "")
	again.Instance = opened()
	send(again)
	send(pgwake.Message{Instance: opened(), Kind: pgwake.MessageContinueAsNew, Name: "w", Data: []byte(signal)})
	second := openingOf(t, "second", "second")
	second.ExecutionID = 2
	send(second)
	send(openingOf(t, "one", "another"))
	send(openingOf(t, "twice", "twice"))
	send(openingOf(t, "twice", "twice"))
	_, err := l.p.EnqueueForOrchestratorMany(l.within(), sent)
	require.NoError(t, err)
	const readings = 10
	for range readings {
		require.Empty(t, l.letters())
		l.create("fine")
		task := l.workflowTask()
		require.Equal(t, "fine", task.WorkflowInstance.InstanceID)
		require.NoError(t, l.complete(task, core.WorkflowInstanceStateFinished))
		pgwaketest.Advance(t, l.p, 5*time.Minute)
	}
	letters := l.letters()
	require.Len(t, letters, len(sent))
	for _, letter := range letters {
		require.Equal(t, "unreadable", letter.Reason)
		require.NotEmpty(t, letter.Error)
	}
	for _, id := range open { // they go on
		require.NoError(t, client.New(l.Backend).SignalWorkflow(l.within(), id, "s", 1))
		task := l.workflowTask()
		require.Equal(t, id, task.WorkflowInstance.InstanceID)
		require.NoError(t, l.complete(task, core.WorkflowInstanceStateFinished))
	}
}

func TestGetWorkflowTask_WhatIsForAWorkflowComesBeforeItsOpening_IsAfterIt(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	in := pgwake.EnqueueOptions{Namespace: goworkflows.Namespace}
	opening := openingOf(t, "w", "w")
	early := pgwake.Message{Instance: opening.Instance, Kind: pgwake.MessageQueued, Data: []byte(signal), Queue: opening.Queue}
	_, err := l.p.EnqueueForOrchestratorMany(l.within(), []pgwake.MessageEnqueue{{Message: early, EnqueueOptions: in}, {Message: opening, EnqueueOptions: in}})
	require.NoError(t, err)
	task := l.workflowTask()
	require.Len(t, task.NewEvents, 2)
	require.Equal(t, history.EventType_WorkflowExecutionStarted, task.NewEvents[0].Type)
	require.Equal(t, history.EventType_SignalReceived, task.NewEvents[1].Type)
}
