//! A client and its transaction under way.

use orthodrome_core::id::{ClientId, RegionId, TxnId};
use orthodrome_core::session::Session;
use orthodrome_core::time::{Duration, Time};
use orthodrome_core::txn::{Decision, Key, Kind, Reads, Writes};
use orthodrome_eval::workload::{Request, Step, Workload};

/// Name of the reads by which a general transaction finds its keys, where the protocol runs none.
pub(super) const LOOK: &str = "look";

/// What a client does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Action {
    Begin,
    Read,
    Decide,
    Resolve,
}

/// A general transaction of a protocol that runs none, by reconnaissance, as the client library does it:
/// read-only transactions find the keys; then an interactive one declares all of them, and commits only
/// if it reads what they read. Each has a name of its own.
#[derive(Debug)]
pub(super) struct Ahead {
    /// What the workload asked for.
    pub(super) request: Request,
    /// What was read so far.
    pub(super) seen: Reads,
    /// What follows from it, once that is known.
    pub(super) decision: Option<Decision>,
    /// What was read turned out to be old.
    pub(super) is_stale: bool,
    /// How often all of it was tried before.
    pub(super) tries: u32,
    /// WAN hops of the reads.
    pub(super) hops: u16,
}

impl Ahead {
    pub(super) fn new(request: Request) -> Self {
        let (seen, decision) = (Reads::new(), None);
        Self { request, seen, decision, is_stale: false, tries: 0, hops: 0 }
    }

    /// The next transaction: another look, or the one that commits.
    pub(super) fn next(&mut self, workload: &dyn Workload) -> Request {
        let is_begun = !self.seen.is_empty() || self.request.reads.is_empty();
        let step = if is_begun {
            workload.step(&self.request, &self.seen)
        } else {
            Step::Read(self.request.reads.clone())
        };
        let Request { name, priority, parameter, .. } = self.request;
        match step {
            Step::Read(reads) => {
                let (kind, writes) = (Kind::ReadOnly, Vec::new());
                Request { name: LOOK, kind, reads, writes, priority, parameter }
            }
            Step::Decide(decision) => {
                let none = Writes::new();
                let writes = match &decision {
                    Decision::Commit(writes) => writes,
                    Decision::Abort => &none,
                };
                let (reads, writes) = (self.seen.keys().cloned().collect(), writes.keys().cloned());
                let (kind, writes) = (Kind::Interactive, writes.collect());
                self.decision = Some(decision);
                Request { name, kind, reads, writes, priority, parameter }
            }
        }
    }

    /// What the transaction that commits decides after it has read.
    pub(super) fn decide(&mut self, reads: &Reads) -> Decision {
        let is_as_seen = self
            .seen
            .iter()
            .all(|(key, seen)| reads.get(key).is_some_and(|read| read.version == seen.version));
        self.is_stale = !is_as_seen;
        let decision = self.decision.clone().filter(|_| is_as_seen);
        decision.unwrap_or(Decision::Abort)
    }

    /// From the beginning.
    pub(super) fn again(&mut self) {
        self.seen.clear();
        (self.decision, self.is_stale) = (None, false);
        self.tries = self.tries.saturating_add(1);
    }
}

/// One transaction under way.
#[derive(Debug)]
pub(super) struct Active {
    /// The general transaction that this one is a part of.
    pub(super) ahead: Option<Box<Ahead>>,
    pub(super) request: Request,
    pub(super) txn: TxnId,
    pub(super) began: Time,
    pub(super) attempt_began: Time,
    pub(super) gateway: u32,
    /// What it read, in all rounds.
    pub(super) reads: Option<Reads>,
    /// What it asked for in the round that is under way.
    pub(super) round: Vec<Key>,
    pub(super) decision: Option<Decision>,
    pub(super) hops: u16,
    pub(super) floor: Duration,
    pub(super) next: Action,
    pub(super) is_final: bool,
    /// The client had to ask what became of this attempt: what it read may be gone.
    pub(super) is_resolved: bool,
    /// It read less than its client knew, and was given up (R11).
    pub(super) is_behind: bool,
}

impl Active {
    /// Begins again under this name.
    pub(super) fn start_over(&mut self, txn: TxnId) {
        self.txn = txn;
        self.reads = None;
        self.round.clear();
        self.decision = None;
        self.hops = 0;
        self.is_resolved = false;
        self.is_behind = false;
    }

    /// A procedure that was resolved for a client who never got its reads: they are not known, and
    /// nothing can be said of them.
    pub(super) fn has_lost_reads(&self) -> bool {
        self.is_resolved && self.reads.is_none() && matches!(self.request.kind, Kind::Procedure(_))
    }
}

#[derive(Debug)]
pub(super) struct Client {
    pub(super) id: ClientId,
    pub(super) region: RegionId,
    pub(super) gateway: u32,
    pub(super) counter: u64,
    /// Counts what the client did, so that an outdated wake-up is known as such.
    pub(super) serial: u32,
    pub(super) active: Option<Box<Active>>,
    /// What it was told.
    pub(super) session: Session,
}
