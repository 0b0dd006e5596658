//! `leases`: keys that are attached to leases, with the transactions of [`orthodrome_core::lease`].
//!
//! A lease tells by versions whether a key is still attached: two keys that one transaction has written
//! must have the same version, whatever the protocol and whatever fails. So each transaction that
//! attaches a key writes one tag into the key and into its attachment, and each client that reads both checks
//! that their versions are equal if and only if their tags are. And no key may be attached to a lease
//! that has ended.
//!
//! The end of a lease reads all attachments that there may be, instead of a scan.

use orthodrome_core::lease::{self, Ending, LeaseId, TTL_MIN, is_attached};
use orthodrome_core::rng::Rng;
use orthodrome_core::scan::Page;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Decision, Key, Kind, Op, Priority, Read, Reads, Value, Writes};

use super::options::{Priorities, bounded};
use super::{Issuer, Options, Request, Values, Workload, WorkloadError};

const ATTACH: &str = "attach";
const END: &str = "end";
const GRANT: &str = "grant";
const LOOK: &str = "look";
const WRITE: &str = "write";
const RENEW: &str = "renew";

/// Transactions use so many leases: the newest.
const NEWEST: u64 = 8;

/// Leases are granted and renewed at one of these times. No clock decides here.
const TIMES: u64 = 4;

/// One of these times: a renewal at a later one extends the lease.
fn at(time: u64) -> Timestamp {
    Timestamp::ZERO + TTL_MIN * u32::try_from(time).unwrap_or(u32::MAX)
}

/// The workload.
#[derive(Debug)]
pub struct Leases {
    keys: u64,
    granted: u64,
    tags: u64,
    priorities: Priorities,
}

impl Leases {
    /// Each lease has up to `keys` (12) keys, which all leases share.
    ///
    /// # Errors
    /// If an option makes no sense.
    pub fn new(options: &Options) -> Result<Self, WorkloadError> {
        options.only("leases", &["keys"])?;
        let priorities = options.priorities(&[ATTACH, END, GRANT, LOOK, WRITE, RENEW])?;
        Ok(Self {
            keys: bounded("keys", options.keys, 12, (1, 64))?,
            granted: 0,
            tags: 0,
            priorities,
        })
    }

    fn keys(&self) -> Vec<Key> {
        (0..self.keys).map(|number| format!("k{number}").into()).collect()
    }

    /// A read of a lease, of all keys, and of their attachments.
    fn look(&self, number: u64) -> Request {
        let (id, keys) = (named(number), self.keys());
        let attachments: Vec<Key> = keys.iter().map(|key| id.attachment(key)).collect();
        let reads = [vec![id.record()], keys, attachments].concat();
        let (kind, writes, priority) = (Kind::ReadOnly, Vec::new(), Priority::LOW);
        Request { name: LOOK, kind, reads, writes, priority, parameter: number, scan: None }
    }

    /// The end of the lease, if it ends at this time.
    fn ending(&self, parameter: u64) -> Ending {
        let (number, time) = (parameter / TIMES, parameter % TIMES);
        let mut ending = Ending::new(named(number).end(at(time)), named(number));
        // Every attachment is read, so no second pass is needed.
        ending.on_committed(&Page::default(), &Writes::new());
        ending
    }

    /// All attachments of the lease that were read, as the page of a scan.
    fn page(&self, id: LeaseId, reads: Option<&Reads>) -> Page {
        let attachments = self.keys().into_iter().map(|key| id.attachment(&key));
        let rows = attachments.filter_map(|key| match reads {
            Some(reads) => {
                let read = reads.get(&key).filter(|read| read.value.is_some())?.clone();
                Some((key, read))
            }
            None => Some((key, Read::default())),
        });
        Page { rows: rows.collect(), ..Page::default() }
    }
}

fn named(number: u64) -> LeaseId {
    LeaseId::new(TTL_MIN, number).unwrap_or_else(|| unreachable!("the shortest time is allowed"))
}

impl Workload for Leases {
    fn name(&self) -> String {
        "leases".into()
    }

    fn values(&self) -> Values {
        Values::Versions
    }

    fn next(&mut self, _issuer: Issuer, rng: &mut Rng) -> Request {
        self.tags += 1;
        let number = self.granted.saturating_sub(1 + rng.below(NEWEST));
        let (id, time, tag) = (named(number), rng.below(TIMES), Value::from(self.tags.to_string()));
        let key: Key = format!("k{}", rng.below(self.keys)).into();
        let interactive = |name, keys: lease::Keys| {
            let (kind, parameter) = (Kind::Interactive, number * TIMES + time);
            let lease::Keys { reads, writes } = keys;
            Request { name, kind, reads, writes, priority: Priority::LOW, parameter, scan: None }
        };
        let procedure = |name, ops: Vec<Op>| {
            let mut reads: Vec<Key> = ops.iter().flat_map(Op::reads).cloned().collect();
            let mut writes: Vec<Key> = ops.iter().flat_map(Op::writes).cloned().collect();
            [&mut reads, &mut writes].into_iter().for_each(|keys| keys.sort_unstable());
            let (kind, priority) = (Kind::Procedure(ops), Priority::LOW);
            Request { name, kind, reads, writes, priority, parameter: number, scan: None }
        };
        let mut request = match rng.below(16) {
            0..3 => {
                let id = named(self.granted);
                self.granted += 1;
                procedure(GRANT, id.grant(at(time)))
            }
            3..9 => {
                let lives = Op::Compare(id.record(), Some(Value::default()));
                let attach = Op::Put(id.attachment(&key), tag.clone());
                procedure(ATTACH, vec![lives, Op::Put(key, tag), attach])
            }
            9..12 => procedure(WRITE, vec![Op::Put(key, tag)]),
            12 => interactive(RENEW, id.renewal_keys(at(time))),
            13 => {
                let ending = self.ending(number * TIMES + time);
                interactive(END, ending.keys(&self.page(id, None)))
            }
            _ => self.look(number),
        };
        request.priority = self.priorities.draw(request.name, rng);
        request
    }

    fn decide(&self, request: &Request, reads: &Reads) -> Decision {
        let (number, time) = (request.parameter / TIMES, request.parameter % TIMES);
        let id = named(number);
        let writes = if request.name == RENEW {
            id.renew(at(time), reads).unwrap_or_default()
        } else {
            self.ending(request.parameter).decide(&self.page(id, Some(reads)), reads).0
        };
        Decision::Commit(writes)
    }

    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String> {
        let number = match request.name {
            LOOK => request.parameter,
            END => request.parameter / TIMES,
            _ => return Ok(()),
        };
        let id = named(number);
        let value = |key: &Key| reads.get(key).and_then(|read| read.value.as_ref());
        for key in self.keys() {
            let attachment = id.attachment(&key);
            let Some(tag) = value(&attachment) else { continue };
            let is_attached = is_attached(reads.get(&attachment), reads.get(&key));
            let is_same = value(&key) == Some(tag);
            if is_attached != is_same {
                return Err(format!(
                    "{key} and its attachment {attachment} have the tags {:?} and {tag:?}, and the versions \
                     {:?} and {:?}",
                    value(&key),
                    reads.get(&key).map(|read| read.version),
                    reads.get(&attachment).map(|read| read.version),
                ));
            }
            if request.name == LOOK && value(&id.record()).is_none() {
                return Err(format!("{key} is attached to {id}, which has ended"));
            }
        }
        Ok(())
    }

    fn final_requests(&self) -> Vec<Request> {
        let first = self.granted.saturating_sub(16);
        (first..self.granted).map(|number| self.look(number)).collect()
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::{ClientId, TxnId};
    use orthodrome_core::txn::Version;

    use super::*;

    #[test]
    fn an_audit_compares_tags_with_versions_and_misses_no_ended_lease() {
        let workload = Leases::new(&Options::default()).unwrap();
        let (look, id, key) = (workload.look(0), named(0), Key::from("k0"));
        let read = |tag: &str, at: u64| {
            let writer = TxnId::new(ClientId(1), at);
            let version = Version { timestamp: Timestamp(at), writer };
            Read { value: Some(Value::from(tag)), version }
        };
        let audit = |of_key, of_attachment, lives: bool| {
            let mut reads = Reads::from([(key.clone(), of_key)]);
            reads.insert(id.attachment(&key), of_attachment);
            if lives {
                reads.insert(id.record(), read("", 1));
            }
            workload.audit(&look, &reads)
        };
        assert_eq!(audit(read("a", 2), read("a", 2), true), Ok(()));
        assert_eq!(audit(read("b", 3), read("a", 2), true), Ok(()));
        assert!(
            audit(read("a", 3), read("a", 2), true).is_err(),
            "two versions of one transaction"
        );
        assert!(
            audit(read("b", 2), read("a", 2), true).is_err(),
            "one version of two transactions"
        );
        assert!(audit(read("a", 2), read("a", 2), false).is_err(), "attached after the end");
    }
}
