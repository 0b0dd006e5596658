//! Messages between middleware, agents and sources, and the effects that a host carries out for
//! them.
//!
//! Everything is generic in [`Work`]: what a source executes and answers. With real sources that is
//! SQL, parameters and rows; in the simulator it is operations on keys. The machines never inspect
//! it.

use std::fmt;
use std::fmt::Debug;
use std::str::FromStr;

use orthodrome_core::id::{NodeId, Ticket, TxnId};
use orthodrome_core::machine::Kind;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{Key, Outcome};

/// The statements that a source executes, and the answers.
pub trait Work: Copy + Eq + Debug + Send + Sync + 'static {
    /// One statement, or anything else that a source executes in one step.
    type Statement: Clone + Eq + Debug + Send + 'static;
    /// The result of one statement: rows, or the number of changed rows. A host may store long
    /// results itself and use a name for them here.
    type Answer: Clone + Eq + Debug + Send + 'static;
    /// The source's own error, passed on unchanged: SQLSTATE or error number, and message.
    type Fault: Clone + Eq + Debug + Send + 'static;
}

/// The name of a global transaction: its middleware, that one's incarnation, and a number within
/// the incarnation. It is never reused, so no message of one attempt is taken for another's
/// (`protocol-pitfalls` G5).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Xid {
    /// The middleware that coordinates.
    pub middleware: NodeId,
    /// The middleware's incarnation: durably incremented at each start.
    pub epoch: u64,
    /// Its number in that incarnation, from 1.
    pub number: u64,
}

impl Xid {
    /// The name of the branch at `source`, as sources store it. Two databases of one PostgreSQL
    /// server share the names of prepared transactions, so the source is part of the name.
    #[must_use]
    pub fn at(self, source: NodeId) -> String {
        format!("orthodrome_{}_{}_{}_{}", self.middleware.0, self.epoch, self.number, source.0)
    }

    /// Parses the output of [`Xid::at`]; none if the text has another form.
    #[must_use]
    pub fn parse(text: &str) -> Option<(Self, NodeId)> {
        let mut parts = text.strip_prefix("orthodrome_")?.split('_');
        let middleware = NodeId(parts.next()?.parse().ok()?);
        let epoch = parts.next()?.parse().ok()?;
        let number = parts.next()?.parse().ok()?;
        let source = NodeId(parts.next()?.parse().ok()?);
        parts.next().is_none().then_some((Self { middleware, epoch, number }, source))
    }
}

impl fmt::Display for Xid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}.{}", self.middleware, self.epoch, self.number)
    }
}

impl Debug for Xid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Xid {
    type Err = String;

    /// The form that operators see: `n1/3.17`.
    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (middleware, rest) = text.split_once('/')?;
            let (epoch, number) = rest.split_once('.')?;
            Some(Self {
                middleware: middleware.parse().ok()?,
                epoch: epoch.parse().ok()?,
                number: number.parse().ok()?,
            })
        };
        parse().ok_or_else(|| {
            format!("{text:?} is not a transaction of the form n<middleware>/<epoch>.<number>")
        })
    }
}

/// A session that must see its own writes: a number that no other session of the same middleware
/// has.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct SessionId(pub u64);

/// The isolation level of a transaction.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Isolation {
    /// Serializable over all sources: every read locks (G1, G2).
    #[default]
    Serializable,
    /// The level of this name at each source; nothing is promised across sources.
    RepeatableRead,
    /// The same for read committed.
    ReadCommitted,
    /// Serializable over all sources, for statements that name and lock each row by its key. A
    /// PostgreSQL source runs them at READ COMMITTED: the locks suffice, and a row that has changed
    /// since the transaction began is no reason to fail.
    Keyed,
}

/// The kind of a source, as far as transactions are concerned (`protocol-pitfalls` §7).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    /// PostgreSQL: any error ends the transaction. Prepared transactions belong to no session, and
    /// keep all their locks over a crash.
    Postgres,
    /// MariaDB or MySQL: a session with a prepared branch is occupied until the branch ends. A
    /// crash, and the end of the session, drop all locks except those on modified rows, and drop
    /// branches that only read (G3, G4).
    MariaDb,
}

impl Kind {
    /// True if a crash of the source or of its agent drops locks of prepared branches.
    #[must_use]
    pub fn forgets_locks(self) -> bool {
        match self {
            Self::Postgres => false,
            Self::MariaDb => true,
        }
    }
}

/// One incarnation of a source together with its agent. Locks taken in one may be lost in the next
/// (G3).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Fence {
    /// The agent's incarnation: a number that is new at each start.
    pub agent: u64,
    /// The source's incarnation: a value that it reports about its start.
    pub source: u64,
}

/// What a branch does after its statements.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Then {
    /// It waits for more statements.
    Wait,
    /// The agent prepares it without a request (GeoTP §IV-A). The statements and the prepare may go
    /// to the source as one query batch.
    Prepare,
    /// It is the only branch: commit, in the same query batch if the source allows it.
    Commit,
}

/// Why a branch cannot commit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Reason {
    /// It was the victim of a deadlock, chosen by the source, or by its middleware if the deadlock
    /// spans sources.
    Deadlock,
    /// It waited too long for a lock.
    LockTimeout,
    /// The source found that no serial order explains it.
    Serialization,
    /// A statement failed: a constraint, a guard, a type.
    Statement,
    /// The connection to the source broke while it was open.
    Connection,
    /// The source did not prepare, as with PostgreSQL's tag `ROLLBACK`.
    Unprepared,
    /// The source or its agent restarted: locks may be lost (G3).
    Restarted,
    /// A branch at another source failed.
    Peer,
    /// Its middleware is gone, or has a later incarnation (G6).
    Master,
    /// It was ended before this message arrived (G5).
    Ended,
    /// The agent does not know it: it was lost in a restart.
    Unknown,
    /// No answer for too long.
    Timeout,
    /// It was held back too often because of hot records (GeoTP §IV-C).
    Refused,
    /// The session requested the rollback.
    Session,
    /// A statement arrived after the one that was marked as the last.
    Marked,
}

/// A failure, with the source's own error if there is one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure<W: Work> {
    /// The kind of failure.
    pub reason: Reason,
    /// The source's error.
    pub fault: Option<W::Fault>,
}

impl<W: Work> From<Reason> for Failure<W> {
    fn from(reason: Reason) -> Self {
        Self { reason, fault: None }
    }
}

/// One source's part of one round of a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part<W: Work> {
    /// The statements, in order.
    pub statements: Vec<W::Statement>,
    /// The records that they access, as far as known: the hotspot footprint.
    pub records: Vec<Key>,
    /// True if some of them write.
    pub writes: bool,
}

/// What a branch does with its savepoints before the statements of a round.
///
/// Sessions number the savepoints of a transaction from 1, and never use a number twice. A branch
/// has a savepoint of its own only where statements run between two savepoints of its session, and
/// gives it the number of the later one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Mark {
    /// Roll back to this savepoint: later changes of the branch are undone. The branch keeps its
    /// locks and is no longer failed.
    Back(u32),
    /// Release this savepoint and those after it; changes since then remain.
    Release(u32),
    /// Set this savepoint.
    Set(u32),
}

/// What is known about later rounds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Last {
    /// Nothing.
    No,
    /// The client marked this round as the last, and will say whether to commit.
    Marked,
    /// The client has asked to commit in the same query batch.
    Commit,
}

/// From a middleware to an agent.
#[derive(Clone, PartialEq, Eq, Debug, Kind)]
pub enum ToAgent<W: Work> {
    /// The middleware has started. The agent rolls back its unprepared branches of earlier
    /// incarnations, and reports the prepared ones.
    Attach {
        /// Its incarnation.
        epoch: u64,
    },
    /// Measures the round trip, and shows that the middleware is alive.
    Ping {
        /// Its incarnation.
        epoch: u64,
        /// When it was sent, by the middleware's own time; returned unchanged.
        sent: Time,
        /// All transactions of this incarnation with a smaller number have ended everywhere.
        oldest: u64,
    },
    /// Statements of one round.
    Execute {
        /// The transaction.
        xid: Xid,
        /// The number of the round at this source, from 0.
        round: u32,
        /// The incarnation of the agent to which this was first sent. Another incarnation cannot
        /// know whether it was executed already.
        life: u64,
        /// The other sources of the transaction, as far as they are known.
        peers: Vec<NodeId>,
        /// The isolation level, used in the first round.
        isolation: Isolation,
        /// Actions on savepoints, which come first, in this order.
        marks: Vec<Mark>,
        /// The statements, in order. Empty if the request is only about savepoints and `then`.
        statements: Vec<W::Statement>,
        /// True if some of them write.
        writes: bool,
        /// What follows them.
        then: Then,
    },
    /// The first statements here of a transaction whose session has committed others before. They
    /// run once this source has committed those, so that the session sees its own writes.
    After {
        /// Transactions that the session has committed and this source has not acknowledged.
        earlier: Vec<Xid>,
        /// The [`ToAgent::Execute`] message.
        order: Box<ToAgent<W>>,
    },
    /// Prepare: the previous round was the last, or did not involve this source.
    Prepare {
        /// The transaction.
        xid: Xid,
        /// Its other sources.
        peers: Vec<NodeId>,
    },
    /// Commit: the decision is durable, or this is the only branch.
    Commit {
        /// The transaction.
        xid: Xid,
        /// The commit timestamp; for an only branch, its lower bound.
        at: Timestamp,
        /// True if it is the only branch, and not prepared.
        one_phase: bool,
    },
    /// Roll back.
    Rollback {
        /// The transaction.
        xid: Xid,
    },
    /// Interrupt the running statement of the branch. Its result is reported as always.
    Interrupt {
        /// The transaction.
        xid: Xid,
    },
    /// Asks which branches of this middleware are prepared at the source.
    Scan {
        /// Its incarnation.
        epoch: u64,
    },
}

/// From an agent to a middleware.
#[derive(Clone, PartialEq, Eq, Debug, Kind)]
pub enum FromAgent<W: Work> {
    /// Answers `Attach`: from now on no branch of an earlier incarnation will prepare here.
    Attached {
        /// The middleware's incarnation.
        epoch: u64,
        /// The incarnations of source and agent.
        fence: Fence,
    },
    /// Answers `Ping`.
    Pong {
        /// The time from the ping.
        sent: Time,
        /// The incarnations of source and agent.
        fence: Fence,
        /// True if the agent knows this incarnation of the middleware. Otherwise it needs `Attach`.
        is_attached: bool,
    },
    /// The statements of a round have been executed. The result of a following prepare or commit is
    /// reported separately.
    Answered {
        /// The transaction.
        xid: Xid,
        /// The round.
        round: u32,
        /// One for each statement.
        answers: Vec<W::Answer>,
        /// The incarnations in which they were executed.
        fence: Fence,
        /// The local execution time (LEL of GeoTP §IV-C).
        took: Duration,
    },
    /// A single statement failed, and the transaction continues at this source.
    StatementFailed {
        /// The transaction.
        xid: Xid,
        /// The round.
        round: u32,
        /// The number of the statement.
        statement: u32,
        /// The failure.
        failure: Failure<W>,
    },
    /// The branch failed and is rolled back. With early abort, its peers have been informed.
    Failed {
        /// The transaction.
        xid: Xid,
        /// The failure.
        failure: Failure<W>,
    },
    /// The branch can only commit, or be rolled back on request.
    Prepared {
        /// The transaction.
        xid: Xid,
        /// The incarnations in which it was executed and prepared.
        fence: Fence,
        /// True if it changed something.
        wrote: bool,
        /// The commit timestamp must be above this.
        floor: Timestamp,
    },
    /// The branch has committed, now or earlier, or had nothing to commit.
    Committed {
        /// The transaction.
        xid: Xid,
        /// The commit timestamp, if it was the only branch.
        at: Timestamp,
    },
    /// The outcome of an only branch is unknown, because the connection broke.
    Lost {
        /// The transaction.
        xid: Xid,
    },
    /// The branch is rolled back, or never existed.
    RolledBack {
        /// The transaction.
        xid: Xid,
    },
    /// Answers `Scan`, in one or several messages with some of the branches each.
    Scanned {
        /// The incarnation from the request.
        epoch: u64,
        /// Prepared branches of this middleware.
        prepared: Vec<Xid>,
    },
    /// Without a request: the current waits at this source, in one or several messages. Sent to the
    /// middlewares of the waiting transactions, and once more when none of theirs waits.
    Waits {
        /// The number of the look at the source, from 1. Results of earlier looks are not valid any
        /// more.
        look: u64,
        /// Some of the waits seen in this look.
        waits: Vec<Wait>,
        /// Further messages of this look follow. Whoever looks for deadlocks waits for the last one.
        more: bool,
    },
}

/// A branch waits at a source for a lock that another one holds, or requested before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Wait {
    /// The waiting transaction.
    pub waiter: Xid,
    /// The transaction for which it waits.
    pub holder: Xid,
}

/// From one agent to another: early abort (GeoTP §IV-A).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerRollback {
    /// The transaction that failed at the sender.
    pub xid: Xid,
}

/// From an agent to its source. At most one is pending for each transaction, except `Rollback`,
/// which interrupts whatever runs (a cancel request, `KILL QUERY`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ToSource<W: Work> {
    /// Run statements in the branch's session; with `begin`, open a session first. A following
    /// prepare or commit may be in the same query batch, and must not be executed if a statement
    /// fails.
    Run {
        /// The transaction.
        xid: Xid,
        /// Open a session and begin, with this isolation level.
        begin: Option<Isolation>,
        /// Actions on savepoints, which come first, in this order.
        marks: Vec<Mark>,
        /// The statements, in order.
        statements: Vec<W::Statement>,
        /// What follows them.
        then: Then,
        /// True if some statement of the branch so far writes.
        wrote: bool,
    },
    /// Prepare the branch in its session.
    Prepare {
        /// The transaction.
        xid: Xid,
        /// True if it changed something.
        wrote: bool,
    },
    /// Commit a prepared branch: in its session, or in any if it has none any more.
    CommitPrepared {
        /// The transaction.
        xid: Xid,
        /// The commit timestamp.
        at: Timestamp,
    },
    /// Commit the branch in its session, unprepared.
    CommitOnePhase {
        /// The transaction.
        xid: Xid,
        /// The lower bound of the commit timestamp.
        at: Timestamp,
    },
    /// Roll the branch back in any state, prepared or not. Close its session if its state is in
    /// doubt.
    Rollback {
        /// The transaction.
        xid: Xid,
    },
    /// Interrupt the statement that the branch runs, if there is one.
    Interrupt {
        /// The transaction.
        xid: Xid,
    },
    /// List the prepared branches of every middleware. If the session that prepared a branch may
    /// still be active, wait for it or end it first (G4, G6).
    List,
}

/// The driver's messages to an agent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FromSource<W: Work> {
    /// The source is reachable, and reports its start.
    Up {
        /// A value that changes when the source restarts.
        start: u64,
    },
    /// The source is not reachable: every session is lost.
    Down,
    /// The statements have been executed. `Prepared` or `Committed` follows, if requested.
    Ran {
        /// The transaction.
        xid: Xid,
        /// One for each statement.
        answers: Vec<W::Answer>,
    },
    /// A statement failed.
    RunFailed {
        /// The transaction.
        xid: Xid,
        /// The number of the statement.
        statement: u32,
        /// The failure.
        failure: Failure<W>,
        /// True if the transaction can continue at the source: at MariaDB after most errors; at
        /// PostgreSQL if the branch has a savepoint, to which it must roll back first.
        goes_on: bool,
    },
    /// Prepared and durable.
    Prepared {
        /// The transaction.
        xid: Xid,
        /// The commit timestamp must be above this.
        floor: Timestamp,
    },
    /// The source refused to prepare or to commit, and has reported a rollback.
    Refused {
        /// The transaction.
        xid: Xid,
        /// The failure.
        failure: Failure<W>,
    },
    /// Committed and durable.
    Committed {
        /// The transaction.
        xid: Xid,
        /// The commit timestamp.
        at: Timestamp,
    },
    /// Rolled back, or there was nothing to roll back.
    RolledBack {
        /// The transaction.
        xid: Xid,
    },
    /// There is no such prepared branch, and no session that may still own it.
    Gone {
        /// The transaction.
        xid: Xid,
    },
    /// The branch's session broke, and it is not known whether its last command took effect.
    SessionLost {
        /// The transaction.
        xid: Xid,
    },
    /// Answers `List`.
    Listed {
        /// Prepared branches whose names have our form.
        prepared: Vec<Xid>,
    },
    /// Without a request, when it has changed: the waits between our branches.
    Waits {
        /// All waits.
        waits: Vec<Wait>,
    },
}

/// Durable records of a middleware.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    /// It has begun this incarnation.
    Epoch(u64),
    /// The decision to commit. Without one, a transaction of an earlier incarnation is aborted.
    Commit {
        /// The transaction.
        xid: Xid,
        /// The client's name for it.
        label: Option<TxnId>,
        /// The commit timestamp.
        at: Timestamp,
        /// Its branches, each with whether it wrote (G4).
        branches: OrdMap<NodeId, bool>,
    },
    /// Every branch of it has committed.
    Ended(Xid),
}

/// The effects that a middleware requests, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect<W: Work> {
    /// Send to the agent of a source.
    Send {
        /// The source.
        to: NodeId,
        /// The message.
        msg: ToAgent<W>,
    },
    /// For the session: the results of a round.
    Answers {
        /// The transaction.
        xid: Xid,
        /// The answers, by source.
        answers: OrdMap<NodeId, Vec<W::Answer>>,
    },
    /// For the session: a statement failed, and the transaction continues.
    StatementFailed {
        /// The transaction.
        xid: Xid,
        /// The source.
        source: NodeId,
        /// The number of the statement in the round's part at that source.
        statement: u32,
        /// The failure.
        failure: Failure<W>,
    },
    /// For the session: the transaction's outcome.
    Finished {
        /// The transaction.
        xid: Xid,
        /// The client's name for it.
        label: Option<TxnId>,
        /// The outcome. It is a commit only if that is durable and every branch can only commit.
        outcome: Outcome,
        /// The source that failed, and its failure.
        failure: Option<(NodeId, Failure<W>)>,
        /// The path of the transaction.
        path: &'static str,
    },
    /// Make a record durable, after all earlier ones.
    Persist {
        /// The ticket that is reported when it is durable.
        ticket: Ticket,
        /// The record.
        record: Record,
    },
    /// Replace all earlier records by these.
    Checkpoint {
        /// The ticket that is reported when it is done.
        ticket: Ticket,
        /// The records.
        records: Vec<Record>,
    },
    /// Set a timer, or move it.
    SetTimer(Timer, Time),
    /// Stop a timer.
    CancelTimer(Timer),
    /// Count a rare event.
    Note(Note),
}

/// Timers of a middleware.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// Measure round trips, and show agents that this middleware is alive.
    Ping,
    /// Look for prepared branches that were not ended.
    Scan,
    /// Start statements that were postponed (O2).
    Start(Xid, NodeId),
    /// Reconsider a transaction that was held back (O3).
    Admit(Xid),
    /// Repeat requests that were not answered in time.
    Resend(Xid),
}

/// The effects that an agent requests, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AgentEffect<W: Work> {
    /// Send a message to a middleware.
    Send {
        /// The middleware.
        to: NodeId,
        /// The message.
        msg: FromAgent<W>,
    },
    /// Send a message to another source's agent.
    Peer {
        /// The source.
        to: NodeId,
        /// The message.
        msg: PeerRollback,
    },
    /// Send a command to the source.
    Source(ToSource<W>),
    /// Set a timer, or move it.
    SetTimer(AgentTimer, Time),
    /// Count a rare event.
    Note(Note),
}

/// Timers of an agent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum AgentTimer {
    /// Look for middlewares that have been silent for too long.
    Sweep,
    /// The quarantine is over.
    Open,
}

/// Rare events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A branch was prepared by its agent.
    DecentralizedPrepare,
    /// Statements were postponed until those of a farther source had started (O2, O3).
    Postponed,
    /// A transaction on hot records was held back (O3).
    HeldBack,
    /// A transaction on hot records was refused (O3).
    Refused,
    /// An agent informed its peers of a failure.
    EarlyAbort,
    /// A branch was ended before its statements arrived.
    Tombstone,
    /// Statements arrived for a branch that had been ended.
    LateStatements,
    /// A message arrived from an earlier incarnation of a middleware.
    OldEpoch,
    /// A middleware was silent for too long, and its unprepared branches were rolled back.
    MasterLost,
    /// A prepared branch was found that had not been ended.
    Orphan,
    /// A decision waited for a message of a source whose locks may be lost.
    FenceAsked,
    /// Locks were lost before the decision.
    FenceBroken,
    /// Statements waited until their source had committed earlier transactions of their session.
    OwnCommitAwaited,
    /// A branch went back to a savepoint.
    WentBack,
    /// A transaction that was answered from copies went to its sources before its commit (`near`).
    SentEarly,
    /// A request was sent again.
    Resent,
    /// A transaction waited for a lock at a source.
    LockWait,
    /// A deadlock within one source.
    Deadlock,
    /// A deadlock across sources.
    GlobalDeadlock,
    /// A transaction waited too long for a lock.
    LockTimeout,
    /// The outcome of a transaction cannot be found out.
    Unknowable,
    /// The log was replaced by the records that are still needed.
    Checkpoint,
}

/// The I/O of a machine for one step.
#[derive(Debug)]
pub struct Io<'a, E> {
    /// Monotonic time.
    pub now: Time,
    /// The physical clock, for commit timestamps.
    pub clock: Timestamp,
    /// The machine's own random stream.
    pub rng: &'a mut Rng,
    /// The effects of the step, in order.
    pub effects: &'a mut Vec<E>,
}

impl<E> Io<'_, E> {
    pub(crate) fn push(&mut self, effect: E) {
        self.effects.push(effect);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_branches_are_read_back() {
        let xid = Xid { middleware: NodeId(5), epoch: 3, number: 17 };
        assert_eq!(xid.at(NodeId(2)), "orthodrome_5_3_17_2");
        assert_eq!(Xid::parse("orthodrome_5_3_17_2"), Some((xid, NodeId(2))));
        for foreign in [
            "",
            "orthodrome_5_3_17",
            "orthodrome_5_3_17_2_1",
            "other_5_3_17_2",
            "orthodrome_5_3_x_2",
        ] {
            assert_eq!(Xid::parse(foreign), None, "{foreign}");
        }
        assert_eq!(xid.to_string().parse(), Ok(xid));
        assert!("5/3.17".parse::<Xid>().is_err());
    }
}
