//! A client and its pending transaction.

use orthodrome_core::id::{ClientId, RegionId, TxnId};
use orthodrome_core::session::Session;
use orthodrome_core::time::{Duration, Time};
use orthodrome_core::txn::{Decision, Key, Kind, Reads};
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
/// them, and commits only if it reads the same versions. If it does not, the next attempt declares
/// the same keys at its start, and computes from what that reads. Each part has a name of its own.
#[derive(Debug)]
pub(super) struct Ahead {
    /// The workload's request.
    pub(super) request: Request,
    /// The keys of the attempt before, which this one declares at its start.
    pub(super) declared: Option<Declared>,
    /// The values read so far.
    pub(super) seen: Reads,
    /// The decision that follows from them, once it is known.
    pub(super) decision: Option<Decision>,
    /// True if the values read turned out to be old, or the declared keys to be the wrong ones.
    pub(super) is_stale: bool,
    /// The number of earlier tries.
    pub(super) tries: u32,
    /// WAN hops of the reads.
    pub(super) hops: u16,
}

/// The keys of an attempt that aborted.
#[derive(Debug)]
pub(super) struct Declared {
    reads: Vec<Key>,
    writes: Vec<Key>,
}

impl Ahead {
    pub(super) fn new(request: Request) -> Self {
        let (declared, seen, decision) = (None, Reads::new(), None);
        Self { request, declared, seen, decision, is_stale: false, tries: 0, hops: 0 }
    }

    /// The next part: another read, or the transaction that commits.
    pub(super) fn next(&mut self, workload: &dyn Workload) -> Request {
        let Request { name, priority, parameter, .. } = self.request;
        if let Some(Declared { reads, writes }) = &self.declared {
            let (kind, reads, writes) = (Kind::Interactive, reads.clone(), writes.clone());
            return Request { name, kind, reads, writes, priority, parameter, scan: None };
        }
        match self.step(&self.seen, workload) {
            Step::Read(reads) => {
                let (kind, writes) = (Kind::ReadOnly, Vec::new());
                Request { name: LOOK, kind, reads, writes, priority, parameter, scan: None }
            }
            Step::Decide(decision) => {
                let (reads, writes) = (self.seen.keys().cloned().collect(), written(&decision));
                self.decision = Some(decision);
                let kind = Kind::Interactive;
                Request { name, kind, reads, writes, priority, parameter, scan: None }
            }
        }
    }

    /// What follows from these reads.
    fn step(&self, seen: &Reads, workload: &dyn Workload) -> Step {
        if seen.is_empty() && !self.request.reads.is_empty() {
            Step::Read(self.request.reads.clone())
        } else {
            workload.step(&self.request, seen)
        }
    }

    /// The decision of the transaction that commits, given its reads.
    pub(super) fn decide(&mut self, reads: &Reads, workload: &dyn Workload) -> Decision {
        if let Some(declared) = &self.declared {
            let may_write = |key: &Key| declared.writes.contains(key);
            let (seen, decision) = self.follow(reads, workload);
            self.decision = decision.filter(|it| written(it).iter().all(may_write));
            self.seen = seen;
            self.is_stale = self.decision.is_none();
            return self.decision.clone().unwrap_or(Decision::Abort);
        }
        let is_as_seen = self.seen.iter().all(|(key, seen)| {
            reads.get(key).is_some_and(|read| read.compared() == seen.compared())
        });
        self.is_stale = !is_as_seen;
        let decision = self.decision.clone().filter(|_| is_as_seen);
        decision.unwrap_or(Decision::Abort)
    }

    /// Takes one step after the other from what a transaction has read. Returns the values that were
    /// needed, and the decision, unless another key is needed.
    fn follow(&self, reads: &Reads, workload: &dyn Workload) -> (Reads, Option<Decision>) {
        let mut seen = Reads::new();
        loop {
            let keys = match self.step(&seen, workload) {
                Step::Read(keys) => keys,
                Step::Decide(decision) => return (seen, Some(decision)),
            };
            for key in keys {
                let Some(read) = reads.get(&key) else { return (seen, None) };
                seen.insert(key, read.clone());
            }
        }
    }

    /// Starts over, with the keys of this attempt. If it only lacked a key that it had not declared,
    /// it goes on from what it has read.
    pub(super) fn again(&mut self) {
        let lacks_key = self.declared.take().is_some() && self.decision.is_none();
        if !lacks_key || self.seen.is_empty() {
            let reads: Vec<Key> = std::mem::take(&mut self.seen).into_keys().collect();
            let writes = self.decision.as_ref().map(written).unwrap_or_default();
            self.declared = (!reads.is_empty()).then_some(Declared { reads, writes });
        }
        (self.decision, self.is_stale) = (None, false);
        self.tries = self.tries.saturating_add(1);
    }
}

/// The keys that a decision writes.
fn written(decision: &Decision) -> Vec<Key> {
    match decision {
        Decision::Commit(writes) => writes.keys().cloned().collect(),
        Decision::Abort => Vec::new(),
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

#[cfg(test)]
mod tests {
    use orthodrome_core::id::ClientId;
    use orthodrome_core::rng::Rng;
    use orthodrome_core::time::Timestamp;
    use orthodrome_core::txn::{Read, Value, Version};
    use orthodrome_eval::workload::{self, Issuer, Options};

    use super::*;

    /// What a key has after `element` was appended at `time`.
    fn read(element: u64, time: u64) -> Read {
        let value = Some(Value::from(element.to_le_bytes().to_vec()));
        let writer = TxnId::new(ClientId(2), time);
        Read { value, version: Version { timestamp: Timestamp(time), writer } }
    }

    /// A transaction that reads `request.reads`, and one of `request.writes[1..]` that follows from
    /// the value.
    fn dependent() -> (Box<dyn Workload>, Ahead) {
        let mut workload = workload::parse("list-append:dependent", &Options::default()).unwrap();
        let issuer = Issuer { client: ClientId(1), index: 0, region: RegionId(0) };
        let mut rng = Rng::stream(1, "test", 0);
        let is_long = |it: &Request| it.kind == Kind::General && it.writes.len() > 2;
        let next = || workload.next(issuer, &mut rng);
        let request = std::iter::repeat_with(next).find(is_long).unwrap();
        (workload, Ahead::new(request))
    }

    /// Looks for all keys, with 0 as the last element of the first.
    fn look(ahead: &mut Ahead, workload: &dyn Workload) -> Request {
        loop {
            let request = ahead.next(workload);
            if request.name != LOOK {
                return request;
            }
            ahead.seen.extend(request.reads.into_iter().map(|key| (key, read(0, 1))));
        }
    }

    #[test]
    fn who_read_old_values_declares_the_same_keys_and_computes_from_what_they_have_now() {
        let (workload, mut ahead) = dependent();
        let first = look(&mut ahead, &*workload);
        assert_eq!((first.kind.clone(), first.reads.len()), (Kind::Interactive, 2));
        let changed: Reads = first.reads.iter().map(|key| (key.clone(), read(0, 2))).collect();
        assert_eq!(ahead.decide(&changed, &*workload), Decision::Abort);
        assert!(ahead.is_stale);
        ahead.again();
        let second = ahead.next(&*workload);
        assert_eq!((&second.reads, &second.writes), (&first.reads, &first.writes));
        let later: Reads = first.reads.iter().map(|key| (key.clone(), read(0, 3))).collect();
        let decision = ahead.decide(&later, &*workload);
        assert_eq!(written(&decision), first.writes, "nobody looked before");
        assert!(!ahead.is_stale);
    }

    #[test]
    fn who_needs_another_key_goes_on_from_what_it_has_read() {
        let (workload, mut ahead) = dependent();
        let first = look(&mut ahead, &*workload);
        let key = ahead.request.reads[0].clone();
        assert_eq!(ahead.decide(&Reads::new(), &*workload), Decision::Abort);
        ahead.again();
        assert_eq!(ahead.next(&*workload).kind, Kind::Interactive);
        let other: Reads = first.reads.iter().map(|key| (key.clone(), read(1, 4))).collect();
        assert_eq!(ahead.decide(&other, &*workload), Decision::Abort);
        assert!(ahead.is_stale);
        ahead.again();
        let third = ahead.next(&*workload);
        assert_eq!((third.name, third.reads.len()), (LOOK, 1));
        assert!(!first.reads.contains(&third.reads[0]));
        assert_eq!(ahead.seen.get(&key), other.get(&key), "what it has read counts");
        let fourth = look(&mut ahead, &*workload);
        assert_eq!(fourth.kind, Kind::Interactive);
        assert_eq!(fourth.reads.len(), 2);
    }
}
