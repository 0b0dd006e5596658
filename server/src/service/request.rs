//! Converts requests to transactions. Everything is checked here, and every refusal names the
//! field.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use orthodrome_core::lease::{self, LeaseId, NotALease};
use orthodrome_core::machine::Admin;
use orthodrome_core::ordered::OrdSet;
use orthodrome_core::procedure::{Call, Procedure};
use orthodrome_core::scan::{self, KeyRange, Scan};
use orthodrome_core::session::{Floor, Floors};
use orthodrome_core::txn::{Kind, Op, Priority, Read, Reads, Version, Writes};
use orthodrome_core::{
    ClientId, Cluster, Decision, Key, NodeId, PartitionId, RegionId, Timestamp, Txn, TxnId, Value,
};
use tonic::Status;

use super::access::DEFAULT_KEYSPACE;
use super::api;
use super::limits::Limits;
use super::refuse;

/// Checks requests against the limits and the placement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Checker<'a> {
    pub(super) limits: &'a Limits,
    pub(super) cluster: &'a Cluster,
    /// True if general transactions are supported.
    pub(super) general: bool,
}

/// A checked `Resolve` request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Resolve {
    pub(super) txn: Txn,
    pub(super) reads: Reads,
    pub(super) decision: Option<Decision>,
}

/// The fields that all requests to begin a transaction share.
struct Head {
    txn: Option<api::TxnId>,
    home_region: u32,
    priority: i32,
    acknowledged_below: u64,
    keyspace: String,
}

/// Adds the versions that its client knows of the transaction's keys.
fn with_floors(mut txn: Txn, mut floors: Floors) -> Txn {
    let Txn { reads, writes, .. } = &txn;
    floors.retain(|key, _| [reads, writes].iter().any(|keys| keys.binary_search(key).is_ok()));
    txn.floors = floors;
    txn
}

fn invalid(field: &str, problem: impl std::fmt::Display) -> Status {
    refuse(Status::invalid_argument(clipped(format!("{field}: {problem}"))))
}

/// Bytes of a message, at most. Clients refuse trailers of some KiB, and then do not see the status.
const MESSAGE_MAX: usize = 1_024;

/// A message that repeats what a client has sent, without its middle if that is long.
fn clipped(text: String) -> String {
    if text.len() <= MESSAGE_MAX {
        return text;
    }
    let part = MESSAGE_MAX / 2 - 8;
    let head = text.get(..text.floor_char_boundary(part)).unwrap_or_default();
    let tail = text.get(text.ceil_char_boundary(text.len() - part)..).unwrap_or_default();
    format!("{head} […] {tail}")
}

/// No commit has a timestamp above this: clocks differ by milliseconds, and a node stops if its clock
/// differs by more. A transaction that had to come after such a timestamp would wait until the clock
/// has passed it, which is longer than requests may take.
fn far_future() -> Timestamp {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let nanos = (now + SESSION_AHEAD_MAX).as_nanos();
    Timestamp(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// How far a session may be ahead of this node's clock.
const SESSION_AHEAD_MAX: Duration = Duration::from_secs(60);

/// The largest counter of a transaction. What comes after it has a number, too.
const COUNTER_MAX: u64 = u64::MAX >> 1;

/// Checks a transaction id.
pub(super) fn txn_id(field: &str, id: Option<&api::TxnId>) -> Result<TxnId, Status> {
    let id = id.ok_or_else(|| invalid(field, "missing"))?;
    if id.client == 0 {
        return Err(invalid(field, "client is 0; use the id that Register returned"));
    }
    if id.counter == 0 {
        return Err(invalid(field, "counter is 0; a client counts its transactions from 1"));
    }
    if id.counter > COUNTER_MAX {
        return Err(invalid(
            field,
            format_args!("counter is over {COUNTER_MAX}; a client counts its transactions from 1"),
        ));
    }
    Ok(TxnId { attempt: id.attempt, ..TxnId::new(ClientId(id.client), id.counter) })
}

impl Checker<'_> {
    pub(super) fn begin(&self, request: api::BeginRequest) -> Result<Txn, Status> {
        let api::BeginRequest { read_keys, write_keys, session, .. } = request;
        let head = Head {
            txn: request.txn,
            home_region: request.home_region,
            priority: request.priority,
            acknowledged_below: request.acknowledged_below,
            keyspace: request.keyspace,
        };
        let reads = self.keys("read_keys", read_keys)?;
        let writes = self.keys("write_keys", write_keys)?;
        let floors = self.floors("session", session)?;
        if request.general {
            if !self.general {
                return Err(invalid(
                    "general",
                    "this keyspace's protocol runs no general transactions; read first with `Read`, \
                     then declare the keys and compare",
                ));
            }
            if !writes.is_empty() {
                return Err(invalid("write_keys", "a general transaction declares none"));
            }
            let txn = self.txn(head, Kind::General, reads, writes)?;
            return Ok(Txn { floors, ..txn });
        }
        if reads.is_empty() && writes.is_empty() {
            return Err(invalid("read_keys", "the transaction names no key to read or write"));
        }
        let txn = self.txn(head, Kind::Interactive, reads, writes)?;
        Ok(with_floors(txn, floors))
    }

    pub(super) fn execute(&self, request: api::ExecuteRequest) -> Result<Txn, Status> {
        if request.ops.is_empty() {
            return Err(invalid("ops", "the procedure has no operation"));
        }
        self.count("ops", request.ops.len(), self.limits.ops_max)?;
        let ops = request.ops.into_iter().enumerate();
        let ops = ops.map(|(at, op)| self.op(at, op)).collect::<Result<Vec<Op>, _>>()?;
        let head = Head {
            txn: request.txn,
            home_region: request.home_region,
            priority: request.priority,
            acknowledged_below: request.acknowledged_below,
            keyspace: request.keyspace,
        };
        let sets = Txn::procedure(TxnId::default(), RegionId(0), ops);
        self.txn(head, sets.kind, sets.reads, sets.writes)
    }

    pub(super) fn read(&self, request: api::ReadRequest) -> Result<Txn, Status> {
        let keys = self.keys("keys", request.keys)?;
        if keys.is_empty() {
            return Err(invalid("keys", "no key to read"));
        }
        let head = Head {
            txn: request.txn,
            home_region: request.home_region,
            priority: request.priority,
            acknowledged_below: request.acknowledged_below,
            keyspace: request.keyspace,
        };
        let floors = self.floors("session", request.session)?;
        let kind = if request.stale { Kind::StaleReadOnly } else { Kind::ReadOnly };
        let txn = self.txn(head, kind, keys, Vec::new())?;
        Ok(with_floors(txn, floors))
    }

    /// A range of keys.
    fn range(&self, from: Vec<u8>, until: Option<Vec<u8>>) -> Result<KeyRange, Status> {
        let bound = |field: &'static str, bytes: Vec<u8>| {
            if bytes.is_empty() {
                return Ok(Key::default());
            }
            // A range that follows a longest key begins with one byte more.
            let most = self.limits.key_bytes_max as usize + 1;
            if bytes.len() > most {
                let have = bytes.len();
                return Err(invalid(field, format!("{have} bytes; at most {most}")));
            }
            Ok(Key::from(bytes))
        };
        let from = bound("from", from)?;
        let until = until.map(|until| bound("until", until)).transpose()?;
        let range = KeyRange { from, until };
        if range.is_empty() {
            return Err(invalid("until", "not after `from`, so no key can be in the range"));
        }
        Ok(range)
    }

    /// The range of a watch, and the timestamp after which it begins.
    pub(super) fn watch(
        &self,
        request: &api::WatchRequest,
    ) -> Result<(KeyRange, Option<Timestamp>), Status> {
        check_keyspace(&request.keyspace)?;
        let range = self.range(request.from.clone(), request.until.clone())?;
        Ok((range, request.after.map(Timestamp)))
    }

    /// The scan, whether values are left out of the answer, and the priority.
    pub(super) fn scan(&self, request: api::ScanRequest) -> Result<(Scan, bool, Priority), Status> {
        check_keyspace(&request.keyspace)?;
        let priority = priority(request.priority)?;
        let range = self.range(request.from, request.until)?;
        // One transaction reads the keys of a page.
        let most = (self.limits.keys_max as usize).min(scan::NAMES_MAX);
        let limit = match usize::try_from(request.limit).unwrap_or(usize::MAX) {
            0 => most,
            limit => limit.min(most),
        };
        Ok((Scan { range, backwards: request.backwards, limit }, request.keys_only, priority))
    }

    pub(super) fn resolve(&self, request: api::ResolveRequest) -> Result<Resolve, Status> {
        use api::resolve_request::{Begun, Decision as Asked};
        let txn = match request.begun {
            Some(Begun::Interactive(begin)) => self.begin(begin),
            Some(Begun::Procedure(execute)) => self.execute(execute),
            Some(Begun::ReadOnly(read)) => self.read(read),
            None => Err(invalid("begun", "missing; give the transaction as it was submitted")),
        }?;
        let interactive = match txn.kind {
            Kind::Interactive | Kind::General => true,
            Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly => false,
        };
        let general = matches!(txn.kind, Kind::General);
        if !interactive && request.decision.is_some() {
            return Err(invalid("decision", "only an interactive transaction has one"));
        }
        let decision = match request.decision {
            Some(Asked::Commit(commit)) => {
                let writes = self.writes("commit.writes", commit.writes)?;
                if !general {
                    check_declared("commit.writes", &writes, &txn.writes)?;
                }
                Some(Decision::Commit(writes))
            }
            Some(Asked::Abort(api::GiveUp {})) => Some(Decision::Abort),
            None => None,
        };
        let reads = self.versions(request.reads, &txn)?;
        let commits = matches!(decision, Some(Decision::Commit(_)));
        if commits && !txn.reads.iter().all(|key| reads.contains_key(key)) {
            return Err(invalid("reads", "give the version of every read key with a commit"));
        }
        if let Some(Decision::Commit(writes)) = &decision {
            let unread = writes.keys().filter(|key| !reads.contains_key(*key)).count();
            self.count("keys", reads.len() + unread, self.limits.keys_max)?;
        }
        Ok(Resolve { txn, reads, decision })
    }

    /// The writes of `Commit`. [`check_declared`] checks that they were declared.
    pub(super) fn writes(&self, field: &str, writes: Vec<api::KeyWrite>) -> Result<Writes, Status> {
        self.count(field, writes.len(), self.limits.keys_max)?;
        let mut checked = Writes::new();
        for (at, write) in writes.into_iter().enumerate() {
            let field = || format!("{field}[{at}]");
            let key = self.key(&field, write.key)?;
            let value = write.value.map(|value| self.value(&field, value)).transpose()?;
            if value.is_some() {
                check_not_reserved(&field, &key)?;
            }
            if checked.insert(key, value).is_some() {
                return Err(invalid(&field(), "its key is written twice"));
            }
        }
        Ok(checked)
    }

    fn versions(&self, reads: Vec<api::KeyVersion>, txn: &Txn) -> Result<Reads, Status> {
        self.count("reads", reads.len(), self.limits.keys_max)?;
        let mut checked = Reads::new();
        for (at, read) in reads.into_iter().enumerate() {
            let field = || format!("reads[{at}]");
            let key = self.key(&field, read.key)?;
            let general = matches!(txn.kind, Kind::General);
            if !general && txn.reads.binary_search(&key).is_err() {
                return Err(invalid(&field(), "not a read key of the transaction"));
            }
            let version = read.version.ok_or_else(|| invalid(&field(), "version is missing"))?;
            let writer = version.writer.map_or(TxnId::default(), |id| TxnId {
                attempt: id.attempt,
                ..TxnId::new(ClientId(id.client), id.counter)
            });
            let version = Version { timestamp: Timestamp(version.timestamp), writer };
            if checked.insert(key, Read::without_value(version)).is_some() {
                return Err(invalid(&field(), "its key is given twice"));
            }
        }
        Ok(checked)
    }

    fn txn(
        &self,
        head: Head,
        kind: Kind,
        reads: Vec<Key>,
        writes: Vec<Key>,
    ) -> Result<Txn, Status> {
        check_keyspace(&head.keyspace)?;
        let id = txn_id("txn", head.txn.as_ref())?;
        let home = u16::try_from(head.home_region)
            .ok()
            .filter(|&region| usize::from(region) < self.cluster.topology.len());
        let home = home.map(RegionId).ok_or_else(|| {
            let regions = self.cluster.topology.len();
            invalid("home_region", format!("{} is not one of {regions} regions", head.home_region))
        })?;
        let priority = priority(head.priority)?;
        if head.acknowledged_below > id.counter {
            return Err(invalid(
                "acknowledged_below",
                "above the counter of the transaction itself",
            ));
        }
        let both = reads.iter().filter(|key| writes.binary_search(key).is_ok()).count();
        self.count("keys", reads.len() + writes.len() - both, self.limits.keys_max)?;
        let acknowledged_below = head.acknowledged_below;
        let (floors, fenced) = (Floors::new(), None);
        Ok(Txn { id, home, priority, kind, reads, writes, acknowledged_below, floors, fenced })
    }

    /// The keys of the next round of a general transaction.
    pub(super) fn read_round(&self, keys: Vec<Vec<u8>>) -> Result<Vec<Key>, Status> {
        let keys = self.keys("keys", keys)?;
        if keys.is_empty() {
            return Err(invalid("keys", "no key to read"));
        }
        Ok(keys)
    }

    /// The keys, sorted and without duplicates.
    fn keys(&self, field: &str, keys: Vec<Vec<u8>>) -> Result<Vec<Key>, Status> {
        self.count(field, keys.len(), self.limits.keys_max)?;
        let mut distinct = OrdSet::new();
        for (at, key) in keys.into_iter().enumerate() {
            let field = || format!("{field}[{at}]");
            if !distinct.insert(self.key(&field, key)?) {
                return Err(invalid(&field(), "the same key as an earlier one"));
            }
        }
        Ok(distinct.into_iter().collect())
    }

    /// The versions that the client knows.
    fn floors(&self, field: &str, session: Vec<api::KnownKey>) -> Result<Floors, Status> {
        self.count(field, session.len(), self.limits.keys_max)?;
        let mut floors = Floors::new();
        for (at, known) in session.into_iter().enumerate() {
            let field = || format!("{field}[{at}]");
            let key = self.key(&field, known.key)?;
            let timestamp = Timestamp(known.timestamp);
            if timestamp > far_future() {
                return Err(invalid(
                    &field(),
                    "a timestamp more than a minute ahead of this node's clock",
                ));
            }
            if floors.insert(key, Floor { timestamp, is_deletion: known.deleted }).is_some() {
                return Err(invalid(&field(), "the same key as an earlier one"));
            }
        }
        Ok(floors)
    }

    fn op(&self, at: usize, op: api::Op) -> Result<Op, Status> {
        let field = || format!("ops[{at}]");
        if let Some(api::op::Op::Call(call)) = op.op {
            return self.call(at, &op.key, call);
        }
        let key = self.key(&field, op.key)?;
        let value = |value| self.value(&field, value);
        let op = match op.op {
            Some(api::op::Op::Get(api::Get {})) => Op::Get(key),
            Some(api::op::Op::Compare(compare)) => {
                Op::Compare(key, compare.expected.map(value).transpose()?)
            }
            Some(api::op::Op::Put(bytes)) => Op::Put(key, value(bytes)?),
            Some(api::op::Op::Add(amount)) => Op::Add(key, amount),
            Some(api::op::Op::Append(bytes)) => Op::Append(key, value(bytes)?),
            Some(api::op::Op::Delete(api::Delete {})) => Op::Delete(key),
            Some(api::op::Op::Call(_)) | None => {
                return Err(invalid(
                    &field(),
                    "op is missing, or this version does not know its kind",
                ));
            }
        };
        match &op {
            Op::Put(key, _) | Op::Add(key, _) | Op::Append(key, _) => {
                check_not_reserved(&field, key)?;
            }
            Op::Get(_) | Op::Compare(..) | Op::Delete(_) | Op::Call(_) => {}
        }
        Ok(op)
    }

    fn call(&self, at: usize, key: &[u8], call: api::Call) -> Result<Op, Status> {
        let field = |name: &str| format!("ops[{at}].call.{name}");
        if !key.is_empty() {
            return Err(invalid(&format!("ops[{at}].key"), "a call names its keys itself"));
        }
        let api::Call { procedure, reads, writes, arguments } = call;
        let Some(procedure) = Procedure::find(&procedure) else {
            let known: Vec<&str> = Procedure::ALL.into_iter().map(Procedure::name).collect();
            let known = known.join(", ");
            return Err(invalid(
                &field("procedure"),
                format!("unknown procedure {procedure:?}; use one of {known}"),
            ));
        };
        let keys = |name: &str, keys: Vec<Vec<u8>>| {
            self.count(&field(name), keys.len(), self.limits.keys_max)?;
            let keys = keys.into_iter().enumerate();
            let key = |(at, key)| self.key(&|| format!("{}[{at}]", field(name)), key);
            keys.map(key).collect::<Result<Vec<Key>, _>>()
        };
        let (reads, writes) = (keys("reads", reads)?, keys("writes", writes)?);
        writes.iter().try_for_each(|key| check_not_reserved(&|| field("writes"), key))?;
        if writes.iter().collect::<OrdSet<_>>().len() < writes.len() {
            return Err(invalid(&field("writes"), "a key is named twice"));
        }
        let arguments = self.value(&|| field("arguments"), arguments)?;
        Ok(Op::Call(Call { procedure, reads, writes, arguments }))
    }

    fn key(&self, field: &dyn Fn() -> String, bytes: Vec<u8>) -> Result<Key, Status> {
        if bytes.is_empty() {
            return Err(invalid(&field(), "the empty key is not allowed"));
        }
        if bytes.len() > self.limits.key_bytes_max as usize {
            let (have, most) = (bytes.len(), self.limits.key_bytes_max);
            return Err(invalid(&field(), format!("a key of {have} bytes; at most {most}")));
        }
        let key = Key::from(bytes);
        if scan::is_fence(&key) {
            let why = "ends with `\\0fence` and a number; scans use such keys themselves";
            return Err(invalid(&field(), why));
        }
        Ok(key)
    }

    fn value(&self, field: &dyn Fn() -> String, bytes: Vec<u8>) -> Result<Value, Status> {
        if bytes.len() > self.limits.value_bytes_max as usize {
            let (have, most) = (bytes.len(), self.limits.value_bytes_max);
            return Err(invalid(&field(), format!("a value of {have} bytes; at most {most}")));
        }
        Ok(Value::from(bytes))
    }

    pub(super) fn count(&self, field: &str, have: usize, most: u32) -> Result<(), Status> {
        if have > most as usize {
            return Err(invalid(field, format!("{have} are given; at most {most} are allowed")));
        }
        Ok(())
    }

    pub(super) fn transfer_leader(
        &self,
        request: &api::TransferLeaderRequest,
    ) -> Result<Admin, Status> {
        let partition = self.partition(request.partition)?;
        Ok(Admin::TransferLeader { partition, to: self.server("to", request.to)? })
    }

    pub(super) fn change_members(
        &self,
        request: &api::ChangeMembersRequest,
    ) -> Result<Admin, Status> {
        let partition = self.partition(request.partition)?;
        let mut members = OrdSet::new();
        let mut check = |field: &str, ids: &[u32]| {
            ids.iter()
                .map(|&id| {
                    let node = self.server(field, id)?;
                    if members.insert(node) {
                        Ok(node)
                    } else {
                        Err(invalid(field, format!("{node} is named twice")))
                    }
                })
                .collect::<Result<Vec<NodeId>, Status>>()
        };
        let voters = check("voters", &request.voters)?;
        let learners = check("learners", &request.learners)?;
        if voters.len().is_multiple_of(2) {
            let count = voters.len();
            return Err(invalid("voters", format!("{count} voters; use an odd number")));
        }
        Ok(Admin::ChangeMembers { partition, voters, learners })
    }

    fn partition(&self, id: u32) -> Result<PartitionId, Status> {
        let id = PartitionId(id);
        match self.cluster.partition(id) {
            Some(_) => Ok(id),
            None => Err(invalid("partition", format!("{id} does not exist"))),
        }
    }

    fn server(&self, field: &str, id: u32) -> Result<NodeId, Status> {
        let id = NodeId(id);
        if self.cluster.servers().any(|node| node.id == id) {
            Ok(id)
        } else {
            Err(invalid(field, format!("{id} is not a server of this cluster")))
        }
    }
}

fn priority(number: i32) -> Result<Priority, Status> {
    match api::Priority::try_from(number) {
        Ok(api::Priority::Low) => Ok(Priority::LOW),
        Ok(api::Priority::High) => Ok(Priority::HIGH),
        Err(_) => Err(invalid("priority", format!("{number} is not a priority"))),
    }
}

/// Refuses a key of leases that the calls for leases write.
fn check_not_reserved(field: &dyn Fn() -> String, key: &Key) -> Result<(), Status> {
    if lease::is_reserved(key) {
        let why = "the key belongs to a lease: only GrantLease and RenewLease write it, and no such key can \
                   be attached";
        return Err(invalid(&field(), why));
    }
    Ok(())
}

/// The id of a lease.
pub(super) fn lease_id(text: &str) -> Result<LeaseId, Status> {
    text.parse().map_err(|error: NotALease| invalid("lease", error))
}

pub(super) fn check_keyspace(name: &str) -> Result<(), Status> {
    if name.is_empty() || name == DEFAULT_KEYSPACE {
        return Ok(());
    }
    // The name may be long, so the message does not repeat it.
    Err(refuse(Status::not_found("keyspace: unknown keyspace; use `default`")))
}

/// Refuses writes that were not declared at the beginning of the transaction.
pub(super) fn check_declared(field: &str, writes: &Writes, declared: &[Key]) -> Result<(), Status> {
    match writes.keys().position(|key| declared.binary_search(key).is_err()) {
        Some(at) => Err(invalid(
            field,
            format!("number {at} in the order of keys is not declared as a write key"),
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use tonic::Code;

    use super::*;
    use crate::service::tests::map;

    fn limits() -> Limits {
        Limits {
            key_bytes_max: 8,
            value_bytes_max: 16,
            keys_max: 3,
            ops_max: 4,
            ..Limits::default()
        }
    }

    fn checked<T>(check: impl FnOnce(Checker<'_>) -> Result<T, Status>) -> Result<T, Status> {
        check(Checker { limits: &limits(), cluster: &map(), general: true })
    }

    fn name() -> Option<api::TxnId> {
        Some(api::TxnId { client: 4, counter: 19, attempt: 0 })
    }

    #[test]
    fn messages_that_repeat_what_was_sent_are_short() {
        let long = invalid("field", format!("unknown procedure {}; use y", "ü".repeat(20_000)));
        let text = long.message();
        assert!(text.len() <= MESSAGE_MAX, "{} bytes", text.len());
        assert!(text.starts_with("field: unknown procedure ü") && text.ends_with("ü; use y"));
        assert_eq!(invalid("field", "short").message(), "field: short");
    }

    fn keys(keys: &[&str]) -> Vec<Vec<u8>> {
        keys.iter().map(|key| key.as_bytes().to_vec()).collect()
    }

    fn begin(change: impl FnOnce(&mut api::BeginRequest)) -> api::BeginRequest {
        let mut request = api::BeginRequest {
            txn: name(),
            read_keys: keys(&["b", "a"]),
            write_keys: keys(&["b", "c"]),
            ..Default::default()
        };
        change(&mut request);
        request
    }

    #[test]
    fn what_is_within_every_bound_passes_sorted() {
        let txn = checked(|check| check.begin(begin(|_| ()))).unwrap();
        assert_eq!(txn.reads, ["a", "b"].map(Key::from));
        assert_eq!(txn.writes, ["b", "c"].map(Key::from));
        let edge = begin(|request| {
            request.read_keys = keys(&["12345678"]);
            request.acknowledged_below = 19;
            request.keyspace = "default".into();
            request.home_region = 2;
        });
        assert!(checked(|check| check.begin(edge)).is_ok());
    }

    #[test]
    fn every_bound_of_begin_is_refused_by_the_name_of_its_field() {
        type Change = fn(&mut api::BeginRequest);
        let cases: [(&str, Change); 16] = [
            ("session[0]: a timestamp", |r| {
                let (key, timestamp) = (b"a".to_vec(), u64::MAX);
                r.session = vec![api::KnownKey { key, timestamp, deleted: false }];
            }),
            ("session[0]: a timestamp", |r| {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let later = now + SESSION_AHEAD_MAX + Duration::from_secs(60);
                let timestamp = u64::try_from(later.as_nanos()).unwrap_or_default();
                r.session = vec![api::KnownKey { key: b"a".to_vec(), timestamp, deleted: false }];
            }),
            ("txn: missing", |r| r.txn = None),
            ("txn: client", |r| r.txn = Some(api::TxnId { client: 0, counter: 1, attempt: 0 })),
            ("txn: counter", |r| r.txn = Some(api::TxnId { client: 1, counter: 0, attempt: 0 })),
            ("txn: counter", |r| {
                r.txn = Some(api::TxnId { client: 1, counter: u64::MAX, attempt: 0 });
            }),
            ("home_region", |r| r.home_region = 3),
            ("home_region", |r| r.home_region = 1 << 20),
            ("priority", |r| r.priority = 2),
            ("acknowledged_below", |r| r.acknowledged_below = 20),
            ("read_keys[1]", |r| r.read_keys = keys(&["a", ""])),
            ("read_keys[0]", |r| r.read_keys = keys(&["123456789"])),
            ("write_keys[2]", |r| r.write_keys = keys(&["a", "b", "a"])),
            ("read_keys", |r| r.read_keys = keys(&["a", "b", "c", "d"])),
            ("keys: 4", |r| r.write_keys = keys(&["c", "d"])),
            ("read_keys", |r| (r.read_keys, r.write_keys) = (Vec::new(), Vec::new())),
        ];
        for (expected, change) in cases {
            let status = checked(|check| check.begin(begin(change))).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{expected}");
            assert!(status.message().starts_with(expected), "{status} is not about {expected}");
        }
        let elsewhere = begin(|request| request.keyspace = "elsewhere".into());
        let status = checked(|check| check.begin(elsewhere)).unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
    }

    #[test]
    fn every_bound_of_a_procedure_is_refused_by_the_name_of_its_field() {
        use api::op::Op;
        let op = |op| api::Op { key: b"k".to_vec(), op };
        let alone = |op| api::Op { key: Vec::new(), op: Some(op) };
        let call = |procedure: &str, reads: &[&str], writes: &[&str]| {
            let (reads, writes) = (keys(reads), keys(writes));
            Op::Call(api::Call { procedure: procedure.into(), reads, writes, arguments: vec![] })
        };
        let long = vec![0; 17];
        let compare = api::Compare { expected: Some(long.clone()) };
        let cases = [
            ("ops: the procedure", vec![]),
            ("ops: 5", vec![op(Some(Op::Add(1))); 5]),
            ("ops[1]: op", vec![op(Some(Op::Add(1))), op(None)]),
            ("ops[0]: a value of 17", vec![op(Some(Op::Put(long.clone())))]),
            ("ops[0]: a value of 17", vec![op(Some(Op::Append(long)))]),
            ("ops[0]: a value of 17", vec![op(Some(Op::Compare(compare)))]),
            ("ops[0]: the empty key", vec![api::Op { key: vec![], op: Some(Op::Add(1)) }]),
            ("ops[0].key: a call", vec![op(Some(call("movr.end-ride", &[], &[])))]),
            ("ops[0].call.procedure: unknown procedure \"x\"", vec![alone(call("x", &[], &[]))]),
            (
                "ops[0].call.reads[1]: the empty",
                vec![alone(call("movr.end-ride", &["a", ""], &[]))],
            ),
            ("ops[0].call.writes: a key is", vec![alone(call("movr.end-ride", &[], &["a", "a"]))]),
        ];
        for (expected, ops) in cases {
            let request = api::ExecuteRequest { txn: name(), ops, ..Default::default() };
            let status = checked(|check| check.execute(request)).unwrap_err();
            assert!(status.message().starts_with(expected), "{status} is not about {expected}");
        }
    }

    #[test]
    fn a_question_must_repeat_the_transaction_and_what_it_read() {
        use api::resolve_request::{Begun, Decision as Asked};
        let read = |key: &str| api::KeyVersion {
            key: key.as_bytes().to_vec(),
            version: Some(api::Version::default()),
        };
        let write = |key: &str| {
            let writes = vec![api::KeyWrite { key: key.as_bytes().to_vec(), value: None }];
            Some(Asked::Commit(api::Writes { writes }))
        };
        let begun = || Some(Begun::Interactive(begin(|_| ())));
        let question = |begun, reads, decision| api::ResolveRequest { begun, reads, decision };
        let fine = question(begun(), vec![read("b"), read("a")], write("c"));
        let resolve = checked(|check| check.resolve(fine)).unwrap();
        assert_eq!(resolve.reads.len(), 2);
        assert!(resolve.reads.values().all(|read| read.compared() == Version::INITIAL));
        let writer = Some(api::TxnId { client: 7, counter: 1, attempt: 0 });
        let version = Some(api::Version { timestamp: 5, writer });
        let held = vec![read("a"), api::KeyVersion { version, ..read("b") }];
        let held = checked(|check| check.resolve(question(begun(), held, write("c")))).unwrap();
        // A key that had a value is not taken for one that was absent.
        assert_eq!(held.reads[&"b".into()].compared().timestamp, Timestamp(5));
        assert!(matches!(resolve.decision, Some(Decision::Commit(writes)) if writes.len() == 1));
        let none = question(begun(), vec![], None);
        assert_eq!(checked(|check| check.resolve(none)).unwrap().decision, None);
        let reading = api::ReadRequest { txn: name(), keys: keys(&["a"]), ..Default::default() };
        let cases = [
            ("begun", question(None, vec![], None)),
            ("reads: give", question(begun(), vec![read("a")], write("c"))),
            ("reads[1]", question(begun(), vec![read("a"), read("c")], None)),
            ("reads[1]", question(begun(), vec![read("a"), read("a")], None)),
            ("commit.writes", question(begun(), vec![read("a"), read("b")], write("a"))),
            ("decision", question(Some(Begun::ReadOnly(reading)), vec![], write("c"))),
        ];
        for (expected, question) in cases {
            let status = checked(|check| check.resolve(question)).unwrap_err();
            assert!(status.message().starts_with(expected), "{status} is not about {expected}");
        }
    }

    #[test]
    fn orders_name_what_exists() {
        let fine =
            api::ChangeMembersRequest { partition: 0, voters: vec![1, 2, 3], learners: vec![] };
        assert!(checked(|check| check.change_members(&fine)).is_ok());
        let cases = [
            ("partition", 9, vec![1], vec![]),
            ("voters", 0, vec![1, 2], vec![]),
            ("voters", 0, vec![], vec![]),
            ("voters", 0, vec![1, 1, 2], vec![]),
            ("voters", 0, vec![4], vec![]),
            ("learners", 0, vec![1, 2, 3], vec![2]),
        ];
        for (expected, partition, voters, learners) in cases {
            let order = api::ChangeMembersRequest { partition, voters, learners };
            let status = checked(|check| check.change_members(&order)).unwrap_err();
            assert!(status.message().starts_with(expected), "{status} is not about {expected}");
        }
        let gateway = api::TransferLeaderRequest { partition: 0, to: 4 };
        assert!(checked(|check| check.transfer_leader(&gateway)).is_err());
    }

    fn any_key() -> impl Strategy<Value = Vec<u8>> {
        vec(0_u8..3, 0..10)
    }

    fn any_id() -> impl Strategy<Value = Option<api::TxnId>> {
        let id = (0_u64..3, 0_u64..3, any::<u32>());
        proptest::option::of(id.prop_map(|(client, counter, attempt)| api::TxnId {
            client,
            counter,
            attempt,
        }))
    }

    prop_compose! {
        fn any_begin()(
            txn in any_id(),
            home_region in 0_u32..4,
            read_keys in vec(any_key(), 0..5),
            write_keys in vec(any_key(), 0..5),
            priority in -1_i32..3,
            acknowledged_below in 0_u64..4,
        ) -> api::BeginRequest {
            let (keyspace, general, session) = (String::new(), false, Vec::new());
            api::BeginRequest {
                txn, home_region, read_keys, write_keys, priority, acknowledged_below, keyspace,
                general, session,
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]

        /// An accepted request is within every bound; any other request is refused as invalid.
        #[test]
        fn whatever_is_asked_is_bounded_or_refused(
            request in any_begin(),
            reads in vec(any_key(), 0..5),
            writes in vec((any_key(), proptest::option::of(vec(0_u8.., 0..20))), 0..5),
        ) {
            let version = Some(api::Version::default());
            let versions = |key| api::KeyVersion { key, version };
            let question = api::ResolveRequest {
                begun: Some(api::resolve_request::Begun::Interactive(request)),
                reads: reads.into_iter().map(versions).collect(),
                decision: Some(api::resolve_request::Decision::Commit(api::Writes {
                    writes: writes.into_iter().map(|(key, value)| api::KeyWrite { key, value }).collect(),
                })),
            };
            match checked(|check| check.resolve(question)) {
                Ok(Resolve { txn, reads, decision }) => {
                    let sorted = |keys: &[Key]| keys.is_sorted_by(|a, b| a < b);
                    prop_assert!(sorted(&txn.reads) && sorted(&txn.writes));
                    let distinct: OrdSet<_> = txn.reads.iter().chain(&txn.writes).collect();
                    prop_assert!((1..=3).contains(&distinct.len()));
                    prop_assert!(distinct.iter().all(|key| (1..=8).contains(&key.len())));
                    prop_assert!(reads.keys().eq(&txn.reads));
                    prop_assert!(txn.home.0 < 3 && txn.priority <= Priority::HIGH);
                    prop_assert!(txn.acknowledged_below <= txn.id.counter);
                    let Some(Decision::Commit(writes)) = decision else { panic!("no decision") };
                    prop_assert!(writes.keys().all(|key| txn.writes.contains(key)));
                    prop_assert!(writes.values().flatten().all(|value| value.len() <= 16));
                }
                Err(status) => {
                    prop_assert_eq!(status.code(), Code::InvalidArgument);
                    prop_assert!(status.message().len() < 200);
                }
            }
        }
    }
}
