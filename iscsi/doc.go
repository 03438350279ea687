// Package iscsi is the core of an iSCSI target: login, sessions, the CmdSN window, tasks, task
// management, discovery and error recovery (RFC 7143, 7144 and 7145). It knows neither sockets nor
// RDMA: a Datamover carries PDUs and data. SCSI itself is in package lun.
//
// # Objects
//
//	Node        an iSCSI target node: targets, portals, sessions. A process has one.
//	Portal      a listening address. Its Serve runs one connection from login to its end.
//	session     an I_T nexus, or a discovery session. Its shared has what its connections have
//	            in common: the CmdSN window, the task table, and the lock over both.
//	conn        a connection: Datamover, phase, StatSN, task slots, buffers, timer.
//	Task        the slot of one request, from its PDU to its response. Slots are used again.
//	Datamover   the seam to the transport (RFC 5047). Package iser implements it over RDMA,
//	            package iscsi/tcp over plain TCP.
//
// # The serve loop
//
// A connection has no reader goroutine that hands work to others. Its goroutines pass a baton: the
// holder receives one PDU, makes sure that another goroutine can receive, gives the baton away, and
// executes what it has received itself.
//
//	serve:    take the baton
//	          receive -> dispatch -> takeRequest -> judge -> admit     (serve.go, admit.go)
//	          give the baton away
//	          Task.run -> runCommand -> read or write -> complete      (command.go)
//	                   -> respond -> leave, sendStatus, flush          (respond.go)
//	          start again
//
// While a goroutine executes a command that will end soon, no other one receives: see brief.go.
//
// A write that has to fetch data leaves its goroutine: GetData queues the request, and the goroutine
// that receives the end of it continues in afterFetch.
//
// Read the files in this order: node, session, login, conn, serve, admit, task, command, dataout,
// respond, slots, buffer, timers, overdue, unexpected, logout, tmf, detach. Recovery (recovery, reassign) and
// order between connections and sessions (fence, ordered) come last: their fields are zero in the
// normal case.
//
// # The phases of a connection
//
//	            login succeeds                Logout Request,
//	            or step-up has ended          closeGently
//	phaseLogin ---------------> phaseFullFeature ----------> phaseLogout
//	    |                              |                          |
//	    | refused, lost, replaced      | lost, stopped            | initiator closes,
//	    v                              v                          v or LogoutWait is over
//	phaseEnded <------------------------------------------------- +
//
// conn.enterPhase is the only way to change the phase.
//
// # The states of a task
//
//	              CmdSN or data is missing     the goroutine that receives takes it
//	taskFree --> taskWaiting --> taskReady --> taskRunning --> taskFree (respond, answer, drop)
//	                                            |  ^    |
//	                                   GetData  |  |    | a fence is before the response
//	                                            v  |    v
//	                                    taskFetching   taskHeld --> taskFree
//
//	The connection of a task at ErrorRecoveryLevel 2 is lost:
//	taskWaiting, taskReady, taskRunning, taskHeld --> taskParked --> taskRunning (TASK REASSIGN)
//
//	The answer to one that another session has taken away:
//	taskReady --> taskFree, or taskHeld if a fence is before it
//
// Task.become is the only way to change the state; taskMoves has all moves.
//
// # What ends what
//
//	connection
//	  conn.end            it failed, or the initiator closed it: shut, then the session's part
//	  keeper.look         its timer has found that the initiator owes something for too long
//	  conn.stop           the target closes it now
//	  conn.shut           does both: phaseEnded, tasks aborted or suspended, mover closed
//	  conn.dismiss        tells the initiator first, then closeGently or stop
//	  conn.closeGently    as after a logout: the initiator has some time to close it
//	  conn.halfClose      sends what is queued, and FIN on TCP
//	  conn.linger         after a refused login: waits for the initiator to close
//	  conn.finish         after all of these: waits for its goroutines, leaves the session
//	session
//	  Node.EndSession     asks for a logout, then dismisses its connections
//	  session.end         stops its connections
//	  session.close       lets no connection join, and ends it if it has none
//	  session.connFailed  a connection failed: session recovery, the session ends
//	  session.connLost    a connection failed: the session continues (ErrorRecoveryLevel 2)
//	  session.leave       a connection has finished
//	  session.finishIdle  nothing is left: finish, once
//	  session.finish      closes the nexus, forgets the session
//	lost connection (reassign.go)
//	  session.remove      it was logged out for recovery: its tasks may be reassigned
//	  session.keepAnswers it was closed: its answers stay for reassignment
//	  session.expire      no logout or reassignment in time: drop
//	  session.drop        ends the tasks that it has left
//	  session.dropUnclaimed  the last connection logs out: drops those without tasks
//	task
//	  Task.complete       ends a command with its status
//	  Task.failTransfer   the same, its data did not come
//	  conn.respond        the last PDU of any request
//	  conn.endTransfer    its data is overdue
//	  Task.abandon        an aborted task ends without a response or with TASK ABORTED, or is parked
//	  Task.settle         one that another session has taken away has ended with TASK ABORTED
//	  conn.answer         sends that if no goroutine runs the task
//	  Task.settleParked   keeps that for reassignment
//	  Task.park           its connection is lost: waits for reassignment
//	  conn.dropParked     ends a parked task
//	  conn.drop           ends a task without a response: leave and discard
//	  conn.leave          takes it from the task table, opens the window
//	  Task.endBegun       gives back what the data phase has taken
//	  conn.discard        unbinds it, gives back Buffer and slot
//	  conn.freeTask       empties the slot
//	tasks of others
//	  session.takeAway    on behalf of another session: TASK ABORTED
//	  shared.abortTasks   marks tasks as aborted; those that have not begun end at once
//	  shared.terminate    the same because a connection or session ends
//	  shared.callOff      ends GetDatas of aborted tasks
//	  shared.awaitAborted waits until they have ended
//	  conn.detach         ends one that its store does not let go; see detach.go
//	  conn.answerFor      answers for that one
//	kept answers (recovery.go)
//	  conn.unstore        takes one from the store of unacknowledged PDUs
//	  conn.release        the store does not need the slot any longer
//	  conn.endUse         the store or the mover does not: frees the slot after the last
//	node
//	  Node.Shutdown       ends everything
package iscsi
