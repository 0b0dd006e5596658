//! `ranges`: transactions create keys and scan ranges of them. The keys are numbered, and most
//! transactions append to lists whose numbers are near a moving front, so that keys are created all
//! the time. Each appending transaction writes several lists: a scan that sees one of them and
//! misses another is an anomaly, as is a scan that misses what was acknowledged before. Some of them
//! also read a list that they do not write: a scan that sees what was appended there afterwards must
//! see them, too.
//!
//! Values are lists, as in `list-append`, so that histories show the order of transactions.
//!
//! Some scans are watches instead. A client that watches goes on where its previous watch ended.
//!
//! With deletions (`deletes`), values are no lists. Some transactions delete keys, others create them
//! again, and histories say which version each read saw.

use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::rng::Rng;
use orthodrome_core::scan::{KeyRange, NAMES_MAX, Scan};
use orthodrome_core::txn::{Decision, Key, Kind, Op, Priority, Reads, Value, Writes};

use super::list_append::{Elements, append, audit_lists};
use super::options::{Priorities, bounded, share};
use super::spread::chance;
use super::{Form, Issuer, Options, Ranging, Request, Values, Workload, WorkloadError};

const DELETE: &str = "delete";
const READ: &str = "read";
const SCAN: &str = "scan";
const WATCH: &str = "watch";
const WRITE: &str = "write";

/// Largest number of keys in one transaction.
const KEYS_MAX: u64 = 4;

/// Keys with these numbers after the front are created next, in any order.
const AHEAD: u64 = 8;

/// The number of keys after which numbers start from zero again.
const NUMBERS: u64 = 1_000_000;

/// The number of keys that one of the final scans covers.
const FINAL_KEYS: u64 = 100;

/// The largest number of final scans: of the newest keys.
const FINAL_SCANS: u64 = 64;

/// The workload.
#[derive(Debug)]
pub struct Ranges {
    /// Transactions use keys with numbers up to so many before the front.
    keys: u64,
    /// The number of transactions that created keys so far.
    front: u64,
    scans: f64,
    read_only: f64,
    deletes: f64,
    form: Form,
    priorities: Priorities,
    elements: Elements,
}

impl Ranges {
    /// Transactions use the newest `keys` (48) keys, and those that are created next. A share
    /// `scans` (0.3) of the transactions scans, a share `read_only` (0.1) reads keys by their names.
    /// Of the others, a share `deletes` (0) deletes.
    ///
    /// # Errors
    /// If an option makes no sense.
    pub fn new(options: &Options) -> Result<Self, WorkloadError> {
        options.only("ranges", &["keys", "scans", "read_only", "deletes", "form"])?;
        let scans = share("scans", options.scans, 0.3)?;
        let read_only = share("read_only", options.read_only, 0.1)?;
        if scans + read_only > 1.0 {
            return Err(WorkloadError::Option {
                field: "scans",
                problem: format!("{scans} and the share `read_only`, {read_only}, exceed 1"),
                remedy: "use shares whose sum is at most 1".into(),
            });
        }
        Ok(Self {
            keys: bounded("keys", options.keys, 48, (1, 500))?,
            front: 0,
            scans,
            read_only,
            deletes: share("deletes", options.deletes, 0.0)?,
            form: options.form.unwrap_or_default(),
            priorities: options.priorities(&[DELETE, READ, SCAN, WRITE])?,
            elements: Elements::default(),
        })
    }

    /// One to four keys. Most of them do not exist yet, if they are `fresh`.
    fn pick(&self, fresh: u64, rng: &mut Rng) -> Vec<Key> {
        let count = rng.range(1, KEYS_MAX);
        let mut numbers = OrdSet::new();
        for _ in 0..count {
            let is_fresh = rng.chance(fresh, 4) || self.front == 0;
            numbers.insert(if is_fresh {
                self.front + rng.below(AHEAD)
            } else {
                self.front - 1 - rng.below(self.front.min(self.keys))
            });
        }
        numbers.into_iter().map(name).collect()
    }

    /// A range that mostly has the front in it, or ends near it.
    fn next_scan(&mut self, rng: &mut Rng) -> Request {
        let from = self.front.saturating_sub(rng.below(self.keys));
        let width = rng.range(1, self.keys + AHEAD);
        let until = rng.chance(3, 4).then(|| name(from + width));
        if rng.chance(1, 4) {
            let (reads, writes, parameter) = (Vec::new(), Vec::new(), 0);
            // Ranges of a client that goes on stay as they were, so most of them have no end.
            let until = until.filter(|_| rng.chance(1, 4));
            let watch =
                Ranging::Watch(KeyRange { from: name(from), until }, rng.range(1, 4) as u32);
            let (kind, scan, priority) = (Kind::ReadOnly, Some(watch), Priority::LOW);
            return Request { name: WATCH, kind, reads, writes, priority, parameter, scan };
        }
        let backwards = rng.chance(1, 2);
        let limit = if rng.chance(1, 2) { rng.range(1, 12) } else { self.keys + AHEAD };
        let limit = usize::try_from(limit).unwrap_or(NAMES_MAX);
        let priority = self.priorities.draw(SCAN, rng);
        scan(Scan { range: KeyRange { from: name(from), until }, backwards, limit }, priority)
    }
}

fn name(number: u64) -> Key {
    format!("k{:06}", number % NUMBERS).into()
}

fn scan(scan: Scan, priority: Priority) -> Request {
    let (reads, writes, parameter) = (Vec::new(), Vec::new(), 0);
    let (kind, scan) = (Kind::ReadOnly, Some(Ranging::Scan(scan)));
    Request { name: SCAN, kind, reads, writes, priority, parameter, scan }
}

impl Workload for Ranges {
    fn name(&self) -> String {
        "ranges".into()
    }

    fn values(&self) -> Values {
        if self.deletes > 0.0 { Values::Versions } else { Values::Lists }
    }

    fn next(&mut self, issuer: Issuer, rng: &mut Rng) -> Request {
        let roll = rng.unit();
        if roll < self.scans {
            return self.next_scan(rng);
        }
        if roll < self.scans + self.read_only {
            let (reads, writes) = (self.pick(1, rng), Vec::new());
            let priority = self.priorities.draw(READ, rng);
            let (kind, parameter) = (Kind::ReadOnly, 0);
            return Request { name: READ, kind, reads, writes, priority, parameter, scan: None };
        }
        let deletes = self.deletes > 0.0 && chance(self.deletes, rng);
        // Mostly keys that exist, if they are to be deleted.
        let writes = self.pick(if deletes { 1 } else { 3 }, rng);
        self.front += u64::from(!deletes);
        let parameter = self.elements.next(issuer);
        let value = || Value::from(parameter.to_le_bytes().to_vec());
        let is_procedure = self.form.draw_procedure(rng);
        let op = |key: &Key| match self.values() {
            _ if deletes => Op::Delete(key.clone()),
            Values::Lists => Op::Append(key.clone(), value()),
            Values::Versions => Op::Put(key.clone(), value()),
        };
        // A procedure that appends reads the list.
        let is_blind = is_procedure && self.values() == Values::Versions;
        let mut reads = if is_blind { Vec::new() } else { writes.clone() };
        let mut ops: Vec<Op> = writes.iter().map(op).collect();
        // Some depend on a key that they do not write: whoever overwrites it comes after them.
        if rng.chance(1, 3) {
            let seen = self.pick(0, rng).into_iter().find(|key| !writes.contains(key));
            ops.extend(seen.iter().cloned().map(Op::Get));
            reads.extend(seen);
            reads.sort_unstable();
        }
        let kind = if is_procedure { Kind::Procedure(ops) } else { Kind::Interactive };
        let name = if deletes { DELETE } else { WRITE };
        let priority = self.priorities.draw(name, rng);
        Request { name, kind, reads, writes, priority, parameter, scan: None }
    }

    fn decide(&self, request: &Request, reads: &Reads) -> Decision {
        if self.values() == Values::Lists {
            return Decision::Commit(append(request, reads));
        }
        let value = Value::from(request.parameter.to_le_bytes().to_vec());
        let value = (request.name != DELETE).then_some(value);
        let writes: OrdMap<_, _> =
            request.writes.iter().map(|key| (key.clone(), value.clone())).collect();
        Decision::Commit(Writes::from(writes))
    }

    fn has_scans(&self) -> bool {
        true
    }

    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String> {
        match self.values() {
            Values::Lists => audit_lists(request, reads),
            Values::Versions => Ok(()),
        }
    }

    /// Scans the newest keys, so that some transaction sees the last writes.
    fn final_requests(&self) -> Vec<Request> {
        let end = (self.front + AHEAD).min(NUMBERS);
        let first = end.saturating_sub(FINAL_KEYS * FINAL_SCANS);
        let starts = (first..end).step_by(usize::try_from(FINAL_KEYS).unwrap_or(1));
        let request = |start: u64| {
            let until = Some(start + FINAL_KEYS).filter(|until| *until < NUMBERS).map(name);
            let range = KeyRange { from: name(start), until };
            let backwards = start / FINAL_KEYS % 2 == 1;
            scan(Scan { range, backwards, limit: NAMES_MAX }, Priority::LOW)
        };
        let rest = Ranging::Watch(KeyRange::default(), 1);
        let watch = Request { name: WATCH, ..request(first) };
        starts.map(request).chain([Request { scan: Some(rest), ..watch }]).collect()
    }
}
