//! What middleware, agents and sources say to each other, and what a host carries out for them.
//!
//! Everything is generic in [`Work`]: what a source executes and answers. With real sources that is SQL text,
//! parameters and rows; in the simulator it is operations on keys. The machines never look inside.

use std::collections::BTreeMap;
use std::fmt;
use std::fmt::Debug;
use std::str::FromStr;

use orthodrome_core::id::{NodeId, Ticket, TxnId};
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{Key, Outcome};

/// What is executed at a source, and what comes back.
pub trait Work: Copy + Eq + Debug + Send + Sync + 'static {
    /// One statement, or whatever else a source executes in one step.
    type Statement: Clone + Eq + Debug + Send + 'static;
    /// What one statement returned: rows, or how many were changed. A host may keep long results itself and put
    /// a name for them here.
    type Answer: Clone + Eq + Debug + Send + 'static;
    /// The source's own error, passed on as it is: SQLSTATE or error number, and text.
    type Fault: Clone + Eq + Debug + Send + 'static;
}

/// The name of a global transaction: which middleware, in which incarnation, and its count in that incarnation.
/// It is never used again, so nothing of one attempt is taken for another's (`protocol-pitfalls` G5).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Xid {
    /// The middleware that coordinates.
    pub middleware: NodeId,
    /// Its incarnation: counted up durably each time it starts.
    pub epoch: u64,
    /// Its count in that incarnation, from 1.
    pub number: u64,
}

impl Xid {
    /// The name of the branch at `source`, as sources keep it: two databases of one PostgreSQL server share the
    /// names of prepared transactions, so the source is part of it.
    #[must_use]
    pub fn at(self, source: NodeId) -> String {
        format!("orthodrome_{}_{}_{}_{}", self.middleware.0, self.epoch, self.number, source.0)
    }

    /// What [`Xid::at`] wrote; none if something else did.
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

/// A session that sees its own writes: any number that no other session of the same middleware has.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct SessionId(pub u64);

/// How transactions are kept apart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Isolation {
    /// As if one after the other, over all sources: every read locks (G1, G2).
    #[default]
    Serializable,
    /// What each source calls so, at each source; nothing is promised across sources.
    RepeatableRead,
    /// The same of read committed.
    ReadCommitted,
}

/// What a source is, as far as transactions go (`protocol-pitfalls` §7).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    /// PostgreSQL: any error ends the transaction; prepared transactions belong to no session and keep all
    /// their locks over a crash.
    Postgres,
    /// MariaDB or MySQL: a session with a prepared branch is busy with it until it ends; a crash, and the end of
    /// the session, drop every lock except those on modified rows, and branches that only read (G3, G4).
    MariaDb,
}

impl Kind {
    /// A crash of the source, or of its agent, drops locks of prepared branches.
    #[must_use]
    pub fn forgets_locks(self) -> bool {
        match self {
            Self::Postgres => false,
            Self::MariaDb => true,
        }
    }
}

/// One incarnation of a source and of the agent in front of it. Locks taken in one may be gone in the next (G3).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Fence {
    /// The agent's incarnation: any number that is new each time it starts.
    pub agent: u64,
    /// The source's: what it reports of its start.
    pub source: u64,
}

/// What a branch does after its statements.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Then {
    /// It waits for more.
    Wait,
    /// The agent prepares it by itself (GeoTP §IV-A), and the statements and the prepare may go to the source as one query batch.
    Prepare,
    /// It is the only branch: commit, in the same query batch if the source allows.
    Commit,
}

/// Why a branch cannot commit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Reason {
    /// The source chose it as the victim of a deadlock; or its middleware did, across sources.
    Deadlock,
    /// It waited too long for a lock.
    LockTimeout,
    /// The source found that no serial order explains it.
    Serialization,
    /// A statement failed: a constraint, a guard, a type.
    Statement,
    /// The connection to the source broke while it was open.
    Connection,
    /// The source answered `PREPARE` with something else, such as PostgreSQL's tag `ROLLBACK`.
    Unprepared,
    /// The source, or its agent, started again: its locks may be gone (G3).
    Restarted,
    /// A branch at another source failed.
    Peer,
    /// Its middleware is gone, or in a later incarnation (G6).
    Master,
    /// It was ended before this came (G5).
    Ended,
    /// The agent does not know it: it was lost when something started again.
    Unknown,
    /// No answer for too long.
    Timeout,
    /// Hot records: it was held back too often (GeoTP §IV-C).
    Refused,
    /// The session asked for it.
    Session,
    /// A statement came after the one that was marked as the last.
    Marked,
}

/// A failure, with the source's own words if it said any.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure<W: Work> {
    /// What kind it is.
    pub reason: Reason,
    /// What the source said.
    pub fault: Option<W::Fault>,
}

impl<W: Work> From<Reason> for Failure<W> {
    fn from(reason: Reason) -> Self {
        Self { reason, fault: None }
    }
}

/// What one source has to do in one round of a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part<W: Work> {
    /// In this order.
    pub statements: Vec<W::Statement>,
    /// Records that they touch, as far as that is known: the hotspot footprint.
    pub records: Vec<Key>,
    /// Some of them write.
    pub writes: bool,
}

/// What a branch does with its savepoints before the statements of a round.
///
/// Sessions number the savepoints of a transaction from 1, and use no number twice. A branch has a savepoint of its own
/// only where statements run between two savepoints of its session, and names it by the later one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Mark {
    /// Go back to this one: what the branch did since is undone. It keeps its locks, and is no longer failed.
    Back(u32),
    /// Forget this one and those after it; what was done since stays.
    Release(u32),
    /// Set it.
    Set(u32),
}

/// What is known of the rounds that follow.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Last {
    /// Nothing.
    No,
    /// The client marked it as the last, and will say whether to commit.
    Marked,
    /// The client has asked to commit, in the same query batch.
    Commit,
}

/// From a middleware to an agent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ToAgent<W: Work> {
    /// The middleware has started: what it left unprepared in earlier incarnations is rolled back, and what it left
    /// prepared is reported.
    Attach {
        /// Its incarnation.
        epoch: u64,
    },
    /// A measurement, and a sign of life.
    Ping {
        /// Its incarnation.
        epoch: u64,
        /// When it was sent, by its own time; comes back as it is.
        sent: Time,
        /// Every transaction of this incarnation with a smaller number has ended everywhere.
        oldest: u64,
    },
    /// Statements of one round.
    Execute {
        /// Of which transaction.
        xid: Xid,
        /// The round at this source, from 0.
        round: u32,
        /// The incarnation of the agent that this was first sent to. Another one cannot know whether it was executed already.
        life: u64,
        /// Other sources of the transaction, as far as they are known.
        peers: Vec<NodeId>,
        /// For the first round.
        isolation: Isolation,
        /// What is done with savepoints first, in this order.
        marks: Vec<Mark>,
        /// In this order. None: only savepoints and what follows are wanted.
        statements: Vec<W::Statement>,
        /// Some of them write.
        writes: bool,
        /// What follows them.
        then: Then,
    },
    /// The first statements here of a transaction whose session has committed others before: they run when this source
    /// has committed those, so that the session sees its own writes.
    After {
        /// What its session has committed, and this source has not acknowledged.
        earlier: Vec<Xid>,
        /// [`ToAgent::Execute`].
        order: Box<ToAgent<W>>,
    },
    /// Prepare: the round before was the last, or did not touch this source.
    Prepare {
        /// Which transaction.
        xid: Xid,
        /// Its other sources.
        peers: Vec<NodeId>,
    },
    /// Commit: the decision is durable; or it is the only branch.
    Commit {
        /// Which transaction.
        xid: Xid,
        /// The commit timestamp; for an only branch, the least that it may be.
        at: Timestamp,
        /// It is the only branch, and not prepared.
        one_phase: bool,
    },
    /// Roll back.
    Rollback {
        /// Which transaction.
        xid: Xid,
    },
    /// Interrupt what the branch runs; whatever comes of that is answered as always.
    Interrupt {
        /// Which transaction.
        xid: Xid,
    },
    /// Which branches of this middleware are prepared at the source?
    Scan {
        /// Its incarnation.
        epoch: u64,
    },
}

/// From an agent to a middleware.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FromAgent<W: Work> {
    /// To `Attach`: from now on nothing of an earlier incarnation will prepare here.
    Attached {
        /// Which incarnation it attached to.
        epoch: u64,
        /// Which incarnation this is here.
        fence: Fence,
    },
    /// To `Ping`.
    Pong {
        /// As in the ping.
        sent: Time,
        /// Which incarnation this is here.
        fence: Fence,
        /// The agent knows this incarnation of the middleware. If not, it wants `Attach`.
        is_attached: bool,
    },
    /// The statements of a round are done; what was to follow them is reported by itself.
    Answered {
        /// Of which transaction.
        xid: Xid,
        /// Which round.
        round: u32,
        /// One for each statement.
        answers: Vec<W::Answer>,
        /// Which incarnation they were executed in.
        fence: Fence,
        /// How long it took here (LEL of GeoTP §IV-C).
        took: Duration,
    },
    /// A statement failed, alone: the transaction goes on at this source.
    StatementFailed {
        /// Of which transaction.
        xid: Xid,
        /// Which round.
        round: u32,
        /// Which of its statements.
        statement: u32,
        /// How.
        failure: Failure<W>,
    },
    /// The branch failed, and is rolled back. With early abort, its peers have been told.
    Failed {
        /// Of which transaction.
        xid: Xid,
        /// How.
        failure: Failure<W>,
    },
    /// The branch can only commit, or be rolled back on order.
    Prepared {
        /// Of which transaction.
        xid: Xid,
        /// Which incarnation it was executed and prepared in.
        fence: Fence,
        /// It changed something.
        wrote: bool,
        /// The commit timestamp must be above this.
        floor: Timestamp,
    },
    /// The branch has committed, or had, or had nothing to commit.
    Committed {
        /// Which transaction.
        xid: Xid,
        /// When, if it was the only branch.
        at: Timestamp,
    },
    /// The only branch did not say whether it committed: the connection broke.
    Lost {
        /// Which transaction.
        xid: Xid,
    },
    /// Nothing is left of the branch.
    RolledBack {
        /// Which transaction.
        xid: Xid,
    },
    /// To `Scan`: one or several, each with some of the branches.
    Scanned {
        /// As in the request.
        epoch: u64,
        /// Prepared branches of this middleware.
        prepared: Vec<Xid>,
    },
    /// Unasked: who waits for whom at this source now, all that is known, in one or several messages. Sent to the
    /// middlewares of those, and once more when it is nobody of theirs.
    Waits {
        /// The look at the source that this was seen in. What an earlier look saw is no longer so. From 1.
        look: u64,
        /// Some of what it saw.
        waits: Vec<Wait>,
    },
}

/// A branch waits at a source for a lock that another holds, or waits for before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Wait {
    /// Who waits.
    pub waiter: Xid,
    /// For whom.
    pub holder: Xid,
}

/// From an agent to another: early abort (GeoTP §IV-A).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerRollback {
    /// The transaction that failed at the sender.
    pub xid: Xid,
}

/// From an agent to the source that it stands in front of. One at a time for each transaction, except `Rollback`,
/// which interrupts whatever runs (a cancel request, `KILL QUERY`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ToSource<W: Work> {
    /// Run statements in the branch's session; with `begin`, open one first. `End::Prepare` and `End::Commit` may go
    /// in the same query batch, and must not be reached if a statement fails.
    Run {
        /// Of which transaction.
        xid: Xid,
        /// Open a session and begin.
        begin: Option<Isolation>,
        /// What is done with savepoints first, in this order.
        marks: Vec<Mark>,
        /// In this order.
        statements: Vec<W::Statement>,
        /// What follows.
        then: Then,
        /// Some statements of the branch so far write.
        wrote: bool,
    },
    /// Prepare the branch in its session.
    Prepare {
        /// Which transaction.
        xid: Xid,
        /// It changed something.
        wrote: bool,
    },
    /// Commit a prepared branch: in its session, or in any if it has none any more.
    CommitPrepared {
        /// Which transaction.
        xid: Xid,
        /// The commit timestamp.
        at: Timestamp,
    },
    /// Commit the branch in its session, unprepared.
    CommitOnePhase {
        /// Which transaction.
        xid: Xid,
        /// The least commit timestamp.
        at: Timestamp,
    },
    /// Roll the branch back, whatever it is doing, prepared or not; close its session if it is in doubt.
    Rollback {
        /// Which transaction.
        xid: Xid,
    },
    /// Interrupt the statement that the branch runs, if it does.
    Interrupt {
        /// Which transaction.
        xid: Xid,
    },
    /// Name the prepared branches, of every middleware. A branch whose owner session may still be at work must be
    /// waited for, or its session ended, first (G4, G6).
    List,
}

/// What a driver tells an agent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FromSource<W: Work> {
    /// The source can be reached, and this is what it reports of its start.
    Up {
        /// Changes when it starts again.
        start: u64,
    },
    /// It cannot: every session is lost.
    Down,
    /// The statements have been executed. `Prepared` or `Committed` follow if they were asked for.
    Ran {
        /// Of which transaction.
        xid: Xid,
        /// One for each statement.
        answers: Vec<W::Answer>,
    },
    /// A statement failed.
    RunFailed {
        /// Of which transaction.
        xid: Xid,
        /// Which of them.
        statement: u32,
        /// How.
        failure: Failure<W>,
        /// The transaction at the source can go on: at MariaDB after most errors; at PostgreSQL if the branch has a
        /// savepoint, to which it must go back first.
        goes_on: bool,
    },
    /// Prepared, durably.
    Prepared {
        /// Which transaction.
        xid: Xid,
        /// The commit timestamp must be above this.
        floor: Timestamp,
    },
    /// The source refused to prepare or to commit, and has rolled back: it said so.
    Refused {
        /// Which transaction.
        xid: Xid,
        /// How.
        failure: Failure<W>,
    },
    /// Committed, durably.
    Committed {
        /// Which transaction.
        xid: Xid,
        /// When.
        at: Timestamp,
    },
    /// Rolled back, or there was nothing to.
    RolledBack {
        /// Which transaction.
        xid: Xid,
    },
    /// There is no such prepared branch, and no session that may still own it.
    Gone {
        /// Which transaction.
        xid: Xid,
    },
    /// The branch's session broke; whether what it was doing took place is not known.
    SessionLost {
        /// Which transaction.
        xid: Xid,
    },
    /// To `List`.
    Listed {
        /// Names of prepared branches that are ours.
        prepared: Vec<Xid>,
    },
    /// Unasked, when it has changed: who waits for whom, as far as both are ours.
    Waits {
        /// All of them.
        waits: Vec<Wait>,
    },
}

/// What a middleware must remember.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    /// It has begun this incarnation.
    Epoch(u64),
    /// The decision to commit. Without one, a transaction of an earlier incarnation is aborted.
    Commit {
        /// Which transaction.
        xid: Xid,
        /// What its client calls it.
        label: Option<TxnId>,
        /// The commit timestamp.
        at: Timestamp,
        /// Its branches, and which of them wrote (G4).
        branches: BTreeMap<NodeId, bool>,
    },
    /// Every branch of it has committed.
    Ended(Xid),
}

/// What a middleware wants done, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect<W: Work> {
    /// Send to the agent of a source.
    Send {
        /// Of which source.
        to: NodeId,
        /// What.
        msg: ToAgent<W>,
    },
    /// To the session: what a round returned.
    Answers {
        /// Of which transaction.
        xid: Xid,
        /// By source.
        answers: BTreeMap<NodeId, Vec<W::Answer>>,
    },
    /// To the session: a statement failed, and the transaction goes on.
    StatementFailed {
        /// Of which transaction.
        xid: Xid,
        /// Where.
        source: NodeId,
        /// Which statement of the round's part there.
        statement: u32,
        /// How.
        failure: Failure<W>,
    },
    /// To the session: the transaction's outcome.
    Finished {
        /// Which transaction.
        xid: Xid,
        /// What its client calls it.
        label: Option<TxnId>,
        /// Committed only if it is durable and every branch can only commit.
        outcome: Outcome,
        /// Where it failed, and how.
        failure: Option<(NodeId, Failure<W>)>,
        /// Which way it took.
        path: &'static str,
    },
    /// Make a record durable, after all before it.
    Persist {
        /// Reported when it is.
        ticket: Ticket,
        /// What.
        record: Record,
    },
    /// Let these records replace all persisted before.
    Checkpoint {
        /// Reported when it is done.
        ticket: Ticket,
        /// What to remember instead.
        records: Vec<Record>,
    },
    /// Set a timer, or move it.
    SetTimer(Timer, Time),
    /// Stop a timer.
    CancelTimer(Timer),
    /// Something rare.
    Note(Note),
}

/// Timers of a middleware.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// Measure, and tell agents that this middleware lives.
    Ping,
    /// Look for branches that nobody ended.
    Scan,
    /// Statements whose start was postponed (O2).
    Start(Xid, NodeId),
    /// A transaction that was held back (O3).
    Admit(Xid),
    /// Nobody answered for a while.
    Resend(Xid),
}

/// What an agent wants done, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AgentEffect<W: Work> {
    /// Answer a middleware.
    Send {
        /// Which.
        to: NodeId,
        /// What.
        msg: FromAgent<W>,
    },
    /// Tell another source's agent.
    Peer {
        /// Of which source.
        to: NodeId,
        /// What.
        msg: PeerRollback,
    },
    /// Tell the source.
    Source(ToSource<W>),
    /// Set a timer, or move it.
    SetTimer(AgentTimer, Time),
    /// Something rare.
    Note(Note),
}

/// Timers of an agent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum AgentTimer {
    /// Look for middlewares that fell silent.
    Sweep,
    /// Transactions may run again.
    Open,
}

/// Rare events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A branch was prepared by its agent.
    DecentralizedPrepare,
    /// Statements were held back until those of a farther source were under way (O2, O3).
    Postponed,
    /// A transaction on hot records was held back (O3).
    HeldBack,
    /// A transaction on hot records was refused (O3).
    Refused,
    /// An agent told its peers of a failure.
    EarlyAbort,
    /// A branch was ended before its statements came.
    Tombstone,
    /// Statements came for a branch that had been ended.
    LateStatements,
    /// A message came from an earlier incarnation of a middleware.
    OldEpoch,
    /// A middleware fell silent, and its unprepared branches were rolled back.
    MasterLost,
    /// A prepared branch was found that nobody had ended.
    Orphan,
    /// A decision waited for news of a source whose locks may be gone.
    FenceAsked,
    /// Locks were gone before the decision.
    FenceBroken,
    /// Statements waited until their source had committed what their session had committed before.
    OwnCommitAwaited,
    /// A branch went back to a savepoint.
    WentBack,
    /// A request was sent again.
    Resent,
    /// A transaction waited for a lock at a source.
    LockWait,
    /// A deadlock within one source.
    Deadlock,
    /// A deadlock across sources.
    GlobalDeadlock,
    /// A lock was waited for too long.
    LockTimeout,
    /// Nobody can tell what became of a transaction.
    Unknowable,
    /// The log was replaced by what still matters.
    Checkpoint,
}

/// The io between a machine and its host, for one step.
#[derive(Debug)]
pub struct Io<'a, E> {
    /// Monotonic time.
    pub now: Time,
    /// The physical clock, for commit timestamps.
    pub clock: Timestamp,
    /// The machine's own random stream.
    pub rng: &'a mut Rng,
    /// What comes of the step, in order.
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
