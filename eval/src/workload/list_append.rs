//! `list-append`: transactions read lists and append unique elements to them. The lists themselves
//! then show in which order the transactions took effect (the idea of K. Kingsbury and P. Alvaro,
//! "Elle: Inferring Isolation Anomalies from Experimental Observations", PVLDB 14(3), 2020, §3).
//!
//! The keys in use form a window: a fresh key replaces a key that has received its share of
//! appends. So lists stay short, and a long history can be checked.
//!
//! A *dependent* transaction (`list-append:dependent`) reads one list, chooses another list by the
//! last element of the first, reads that too, and appends to it or to both. Its keys follow from
//! what it reads.

use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Key, Kind, Op, Priority, Reads, Value, Writes};

use super::options::{Priorities, bounded, share};
use super::spread::{Spread, Zipf, chance};
use super::{Form, Issuer, Options, Request, Step, Values, Workload, WorkloadError, list_elements};

const APPEND: &str = "append";
const FOLLOW: &str = "follow";
const READ: &str = "read";

/// So many lists are read at once at the end: nodes take at most 1 000 keys.
const LAST_READ_MAX: usize = 500;

/// Largest number of keys in one transaction.
const KEYS_MAX: u64 = 4;

/// Bits of an element that count the issuer's appending transactions; the bits above are the
/// issuer's index. For the first two million clients, elements stay below 2^53, which every JSON
/// reader can represent.
const COUNTER_BITS: u32 = 32;

/// One key of the window.
#[derive(Debug)]
struct List {
    number: u64,
    appends: u64,
}

/// The workload.
#[derive(Debug)]
pub struct ListAppend {
    window: Vec<List>,
    next_number: u64,
    appends_per_key: u64,
    spread: Spread,
    read_only: f64,
    dependent: f64,
    form: Form,
    priorities: Priorities,
    elements: Elements,
}

/// The elements that transactions append: no two of a run are equal.
#[derive(Debug, Default)]
pub(super) struct Elements {
    /// The number of appending transactions of each issuer, by its index.
    counters: OrdMap<u32, u64>,
}

impl Elements {
    /// The next one.
    pub(super) fn next(&mut self, issuer: Issuer) -> u64 {
        let counter = self.counters.entry(issuer.index).or_default();
        *counter += 1;
        (u64::from(issuer.index) << COUNTER_BITS) | *counter
    }
}

impl ListAppend {
    /// A window of `keys` lists (16), chosen by `zipf` (0). Each list is replaced after
    /// `appends_per_key` (64) appends. A share `read_only` (0.2) of the transactions appends
    /// nothing. Of the others a share `dependent` (0, or 1 with the parameter `dependent`) is
    /// dependent.
    ///
    /// # Errors
    /// If an option makes no sense.
    pub fn new(parameter: Option<&str>, options: &Options) -> Result<Self, WorkloadError> {
        let without_form = ["keys", "zipf", "read_only", "appends_per_key", "dependent"];
        let known = [&without_form[..], &["form"]].concat();
        // Transactions that find their keys by reading have no other form.
        let (dependent, spec, known) = match parameter {
            None => (0.0, "list-append", &known[..]),
            Some("dependent") => (1.0, "list-append:dependent", &without_form[..]),
            Some(other) => {
                return Err(WorkloadError::Parameter {
                    spec: format!("list-append:{other}"),
                    problem: format!("list-append has no variant {other:?}"),
                    remedy: "use \"list-append\" or \"list-append:dependent\"".into(),
                });
            }
        };
        options.only(spec, known)?;
        let keys = bounded("keys", options.keys, 16, (1, 100_000))?;
        Ok(Self {
            window: (0..keys).map(|number| List { number, appends: 0 }).collect(),
            next_number: keys,
            appends_per_key: bounded("appends_per_key", options.appends_per_key, 64, (1, 100_000))?,
            spread: Spread::Zipf {
                ranks: Zipf::new(keys, options.theta(0.0)?),
                keys_per_rank: 1,
                rank_share: 1.0,
            },
            read_only: share("read_only", options.read_only, 0.2)?,
            dependent: share("dependent", options.dependent, dependent)?,
            form: options.form.unwrap_or_default(),
            priorities: options.priorities(&[APPEND, FOLLOW, READ])?,
            elements: Elements::default(),
        })
    }

    /// The key in slot `slot` of the window. If `is_append`, counts an append to it.
    fn key(&mut self, slot: u64, is_append: bool) -> Option<Key> {
        let list = self.window.get_mut(usize::try_from(slot).ok()?)?;
        let key = name(list.number);
        if is_append {
            list.appends += 1;
            if list.appends >= self.appends_per_key {
                *list = List { number: self.next_number, appends: 0 };
                self.next_number += 1;
            }
        }
        Some(key)
    }

    /// Reads the first key, and appends to one of the others.
    fn next_dependent(&mut self, issuer: Issuer, rng: &mut Rng) -> Request {
        let count = KEYS_MAX.min(self.spread.widest());
        let slots = self.spread.pick(usize::try_from(count).unwrap_or(1), issuer, rng);
        let keys: Vec<Key> = slots.into_iter().filter_map(|slot| self.key(slot, true)).collect();
        let priority = self.priorities.draw(FOLLOW, rng);
        let reads = keys.first().cloned().into_iter().collect();
        let parameter = self.elements.next(issuer);
        Request {
            name: FOLLOW,
            kind: Kind::General,
            reads,
            writes: keys,
            priority,
            parameter,
            scan: None,
        }
    }
}

fn name(number: u64) -> Key {
    format!("k{number}").into()
}

/// Appends the request's element to each list that it writes.
pub(super) fn append(request: &Request, reads: &Reads) -> Writes {
    let with_element = |key: &Key| {
        let before = reads.get(key).and_then(|read| read.value.as_ref());
        let mut list = before.map(|value| value.0.to_vec()).unwrap_or_default();
        list.extend_from_slice(&request.parameter.to_le_bytes());
        (key.clone(), Some(Value::from(list)))
    };
    request.writes.iter().map(with_element).collect()
}

/// Checks that everything that was requested was read, and is a list without duplicates.
pub(super) fn audit_lists(request: &Request, reads: &Reads) -> Result<(), String> {
    if let Some(key) = request.reads.iter().find(|key| !reads.contains_key(*key)) {
        return Err(format!("{key} was requested but not read"));
    }
    for (key, read) in reads {
        let list = list_elements(read.value.as_ref())
            .ok_or_else(|| format!("{key} holds {:?}, which is not a list", read.value))?;
        let mut seen = OrdSet::new();
        if let Some(twice) = list.iter().find(|element| !seen.insert(**element)) {
            return Err(format!("{key} holds {twice} twice: {list:?}"));
        }
    }
    Ok(())
}

impl Workload for ListAppend {
    fn name(&self) -> String {
        if self.dependent >= 1.0 { "list-append:dependent" } else { "list-append" }.into()
    }

    fn values(&self) -> Values {
        Values::Lists
    }

    fn next(&mut self, issuer: Issuer, rng: &mut Rng) -> Request {
        let is_read_only = chance(self.read_only, rng);
        // If there is nothing to choose, nothing is drawn, so that the draws of other
        // configurations stay the same.
        if !is_read_only && self.dependent > 0.0 && chance(self.dependent, rng) {
            return self.next_dependent(issuer, rng);
        }
        let count = rng.range(1, KEYS_MAX.min(self.spread.widest()));
        let slots = self.spread.pick(usize::try_from(count).unwrap_or(1), issuer, rng);
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for slot in slots {
            // The transaction always appends to the first key, and only reads the others half of
            // the time. So some transactions read what others write, and the reverse.
            let is_append = !is_read_only && (reads.is_empty() || rng.chance(1, 2));
            if let Some(key) = self.key(slot, is_append) {
                if is_append {
                    writes.push(key.clone());
                }
                reads.push(key);
            }
        }
        if is_read_only {
            let priority = self.priorities.draw(READ, rng);
            let kind = Kind::ReadOnly;
            return Request { name: READ, kind, reads, writes, priority, parameter: 0, scan: None };
        }
        let element = self.elements.next(issuer);
        let kind = if self.form.draw_procedure(rng) {
            let op = |key: &Key| {
                if writes.contains(key) {
                    Op::Append(key.clone(), Value::from(element.to_le_bytes().to_vec()))
                } else {
                    Op::Get(key.clone())
                }
            };
            Kind::Procedure(reads.iter().map(op).collect())
        } else {
            Kind::Interactive
        };
        let priority = self.priorities.draw(APPEND, rng);
        Request { name: APPEND, kind, reads, writes, priority, parameter: element, scan: None }
    }

    fn decide(&self, request: &Request, reads: &Reads) -> Decision {
        let mut writes = append(request, reads);
        // Every second dependent transaction appends to both lists that it read.
        let is_wanted = |key: &Key| match request.kind {
            Kind::Interactive | Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly => true,
            Kind::General => {
                let leaves_first = request.parameter.is_multiple_of(2) && reads.len() > 1;
                reads.contains_key(key) && !(leaves_first && request.reads.contains(key))
            }
        };
        writes.retain(|key, _| is_wanted(key));
        Decision::Commit(writes)
    }

    fn step(&self, request: &Request, reads: &Reads) -> Step {
        if let Some(unread) = request.reads.iter().find(|key| !reads.contains_key(*key)) {
            return Step::Read(vec![unread.clone()]);
        }
        let first = request.reads.first().and_then(|key| reads.get(key));
        let elements = list_elements(first.and_then(|read| read.value.as_ref()));
        let last = elements.and_then(|elements| elements.last().copied()).unwrap_or_default();
        // The first key is the first that it may write; the others are those that the first may
        // lead to.
        let others = request.writes.get(1..).unwrap_or_default();
        let turn =
            last.checked_rem(others.len() as u64).and_then(|turn| usize::try_from(turn).ok());
        match turn.and_then(|turn| others.get(turn)) {
            Some(next) if !reads.contains_key(next) => Step::Read(vec![next.clone()]),
            Some(_) | None => Step::Decide(self.decide(request, reads)),
        }
    }

    fn is_general(&self) -> bool {
        self.dependent > 0.0
    }

    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String> {
        audit_lists(request, reads)
    }

    /// Reads the lists in use, so that some transaction sees the last appends.
    fn final_requests(&self) -> Vec<Request> {
        let read = |lists: &[List]| Request {
            name: READ,
            kind: Kind::ReadOnly,
            reads: lists.iter().map(|list| name(list.number)).collect(),
            writes: Vec::new(),
            priority: Priority::LOW,
            parameter: 0,
            scan: None,
        };
        self.window.chunks(LAST_READ_MAX).map(read).collect()
    }
}
