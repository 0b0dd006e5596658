//! A client and its pending transaction.

use orthodrome_core::id::{ClientId, RegionId, TxnId};
use orthodrome_core::session::Session;
use orthodrome_core::time::{Duration, Time};
use orthodrome_core::txn::{Decision, Key, Kind, Reads, Writes};
use orthodrome_eval::workload::{Request, Step, Workload};

use super::ranging::Watched;
use super::scanning::Scanning;

/// Name of the reads of reconnaissance, for protocols that run no general transactions.
pub(super) const LOOK: &str = "look";

/// The next action of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Action {
    Begin,
    Read,
    Decide,
    Resolve,
    /// Asks the servers again that have not answered a scan.
    Ask,
}

/// A general transaction by reconnaissance, for a protocol that runs none, as in the client
/// library. Read-only transactions find the keys. Then an interactive transaction declares all of
/// them, and commits only if it reads the same versions. Each part has a name of its own.
#[derive(Debug)]
pub(super) struct Ahead {
    /// The workload's request.
    pub(super) request: Request,
    /// The values read so far.
    pub(super) seen: Reads,
    /// The decision that follows from them, once it is known.
    pub(super) decision: Option<Decision>,
    /// True if the values read turned out to be old.
    pub(super) is_stale: bool,
    /// The number of earlier tries.
    pub(super) tries: u32,
    /// WAN hops of the reads.
    pub(super) hops: u16,
}

impl Ahead {
    pub(super) fn new(request: Request) -> Self {
        let (seen, decision) = (Reads::new(), None);
        Self { request, seen, decision, is_stale: false, tries: 0, hops: 0 }
    }

    /// The next part: another read, or the transaction that commits.
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
                Request { name: LOOK, kind, reads, writes, priority, parameter, scan: None }
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
                Request { name, kind, reads, writes, priority, parameter, scan: None }
            }
        }
    }

    /// The decision of the transaction that commits, given its reads.
    pub(super) fn decide(&mut self, reads: &Reads) -> Decision {
        let is_as_seen = self.seen.iter().all(|(key, seen)| {
            reads.get(key).is_some_and(|read| read.compared() == seen.compared())
        });
        self.is_stale = !is_as_seen;
        let decision = self.decision.clone().filter(|_| is_as_seen);
        decision.unwrap_or(Decision::Abort)
    }

    /// Starts over.
    pub(super) fn again(&mut self) {
        self.seen.clear();
        (self.decision, self.is_stale) = (None, false);
        self.tries = self.tries.saturating_add(1);
    }
}

/// A pending transaction.
#[derive(Debug)]
pub(super) struct Active {
    /// The general transaction of which this one is a part.
    pub(super) ahead: Option<Box<Ahead>>,
    /// The scan of which this one is a read.
    pub(super) scan: Option<Box<Scanning>>,
    pub(super) request: Request,
    pub(super) txn: TxnId,
    pub(super) began: Time,
    pub(super) attempt_began: Time,
    pub(super) gateway: u32,
    /// What it has read, in all rounds.
    pub(super) reads: Option<Reads>,
    /// The keys of the pending round.
    pub(super) round: Vec<Key>,
    pub(super) decision: Option<Decision>,
    pub(super) hops: u16,
    pub(super) floor: Duration,
    pub(super) next: Action,
    pub(super) is_final: bool,
    /// The client had to resolve this attempt: its reads may be lost.
    pub(super) is_resolved: bool,
    /// It read older versions than its client knew, and was given up (R11).
    pub(super) is_behind: bool,
}

impl Active {
    /// Starts again under this name.
    pub(super) fn start_over(&mut self, txn: TxnId) {
        self.txn = txn;
        self.reads = None;
        self.round.clear();
        self.decision = None;
        self.hops = 0;
        self.is_resolved = false;
        self.is_behind = false;
    }

    /// True for a procedure that was resolved for a client which never received its reads. The
    /// reads are unknown, and nothing can be checked about them.
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
    /// Counts the client's actions, so that an outdated wake-up can be recognized.
    pub(super) serial: u32,
    pub(super) active: Option<Box<Active>>,
    /// The versions that it has seen.
    pub(super) session: Session,
    /// What it has seen of the range that it watches.
    pub(super) watched: Option<Watched>,
}
