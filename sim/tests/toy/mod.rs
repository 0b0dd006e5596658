//! A small but complete protocol for tests of the simulator. One leader orders everything, checks
//! the versions read, remembers outcomes, and answers only when a record is on its disk. Its
//! mutations are mistakes that the simulator must find.

use std::fmt;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, Ticket, TxnId};
use orthodrome_core::limits::bytes_of;
use orthodrome_core::machine::{Cx, Input, Leak, Machine, Message, Protocol, Setup};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::{Ask, Basis, Listing, Unit, Voters};
use orthodrome_core::store::Store;
use orthodrome_core::time::{Duration, Timestamp};
use orthodrome_core::txn::{
    AbortReason, Decision, Key, Kind, Outcome, Reads, Txn, Version, Writes,
};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Toy;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    pub retransmit: Duration,
    /// Records between checkpoints.
    pub checkpoint_every: usize,
    pub mutation: Option<&'static str>,
}

#[derive(Clone, PartialEq, Eq, Debug, Message)]
#[message(size = size)]
pub enum Msg {
    #[message(keys = keys.len())]
    Read {
        txn: TxnId,
        keys: Vec<Key>,
    },
    #[message(keys = reads.len())]
    ReadReply {
        txn: TxnId,
        reads: Reads,
    },
    #[message(keys = seen.len() + writes.len())]
    Commit {
        txn: TxnId,
        below: u64,
        seen: OrdMap<Key, Version>,
        writes: Writes,
    },
    Resolve {
        txn: TxnId,
    },
    Outcome {
        txn: TxnId,
        outcome: Outcome,
    },
}

fn size(msg: &Msg) -> usize {
    24 + match msg {
        Msg::Read { keys, .. } => keys.iter().map(|key| key.len() + 2).sum(),
        Msg::ReadReply { reads, .. } => reads.keys().map(|key| key.len() + 32).sum(),
        Msg::Commit { seen, writes, .. } => {
            seen.keys().map(|key| key.len() + 24).sum::<usize>()
                + writes.keys().map(|key| key.len() + 24).sum::<usize>()
        }
        Msg::Resolve { .. } | Msg::Outcome { .. } => 8,
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    txn: TxnId,
    outcome: Outcome,
    writes: Writes,
}

/// A record that writes nothing, for tests of disks.
#[allow(dead_code, reason = "not every test that shares this file needs it")]
pub fn record(txn: TxnId, outcome: Outcome) -> Record {
    Record { txn, outcome, writes: Writes::new() }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    Retransmitted,
    DuplicateCommit,
    Recovered,
}

impl Protocol for Toy {
    const NAMES: &'static [&'static str] = &["toy"];
    const SCANS: bool = true;
    type Config = Config;
    type Msg = Msg;
    type Timer = TxnId;
    type Record = Record;
    type Note = Note;
    type Client = Client;
    type Server = Server;

    fn name(_: &Config) -> &'static str {
        "toy"
    }

    fn mutations(_: &str) -> &'static [&'static str] {
        &["told-before-durable", "no-validation", "forgets-outcomes", "gives-up"]
    }

    fn configure(cluster: &Cluster, _: &str) -> Config {
        let retransmit = cluster.topology.rtt_max() * 2;
        Config { retransmit, checkpoint_every: 40, mutation: None }
    }

    fn enable_mutation(config: &mut Config, mutation: &str) {
        config.mutation = Self::mutations("toy").iter().copied().find(|known| *known == mutation);
        assert!(config.mutation.is_some(), "{mutation} is not a mutation");
    }

    fn record_size(record: &Record) -> usize {
        40 + bytes_of(&record.writes)
    }
}

#[derive(Debug)]
struct Pending {
    txn: Txn,
    sent: Msg,
    reads: Reads,
}

/// Sends requests to the leader, and retries until the leader answers.
#[derive(Debug)]
pub struct Client {
    leader: NodeId,
    config: Arc<Config>,
    pending: OrdMap<TxnId, Pending>,
}

impl Client {
    fn ask(&mut self, pending: Pending, cx: &mut Cx<'_, Toy>) {
        let txn = pending.txn.id;
        cx.send(self.leader, pending.sent.clone());
        cx.set_timer(txn, cx.now() + self.config.retransmit);
        self.pending.insert(txn, pending);
    }

    fn commit(&mut self, txn: TxnId, writes: Writes, cx: &mut Cx<'_, Toy>) {
        let Some(mut pending) = self.pending.remove(&txn) else { return };
        let seen = pending.reads.iter().map(|(key, read)| (key.clone(), read.version)).collect();
        pending.sent = Msg::Commit { txn, below: pending.txn.acknowledged_below, seen, writes };
        self.ask(pending, cx);
    }

    fn finish(&mut self, txn: TxnId, outcome: Outcome, cx: &mut Cx<'_, Toy>) {
        cx.cancel_timer(txn);
        if self.pending.remove(&txn).is_some() {
            cx.finish(txn, outcome, "only");
        }
    }

    fn on_read_reply(&mut self, txn: TxnId, reads: Reads, cx: &mut Cx<'_, Toy>) {
        let Some(pending) = self.pending.get_mut(&txn) else { return };
        if !matches!(pending.sent, Msg::Read { .. }) || !pending.reads.is_empty() {
            return;
        }
        pending.reads = reads.clone();
        cx.reads(txn, reads.clone());
        match pending.txn.kind.clone() {
            Kind::General => unreachable!("no toy runs general transactions"),
            // The client decides. Until then there is nothing to retry.
            Kind::Interactive => cx.cancel_timer(txn),
            Kind::ReadOnly | Kind::StaleReadOnly => {
                self.finish(txn, Outcome::Committed(Timestamp(cx.now().0)), cx)
            }
            Kind::Procedure(ops) => match Txn::execute(&ops, &reads) {
                Ok(writes) => self.commit(txn, writes, cx),
                Err(reason) => self.finish(txn, Outcome::Aborted(reason), cx),
            },
        }
    }
}

impl Machine<Toy> for Client {
    fn new(setup: Setup<Toy>, recovered: Vec<Record>, _: &mut Cx<'_, Toy>) -> Self {
        assert!(recovered.is_empty(), "a client persists nothing");
        let leader = setup.cluster.partition(PartitionId(0)).unwrap().preferred_leader;
        Self { leader, config: setup.config, pending: OrdMap::new() }
    }

    fn step(&mut self, input: Input<Toy>, cx: &mut Cx<'_, Toy>) {
        match input {
            Input::Begin(txn) => {
                let mut keys = txn.reads.clone();
                if keys.is_empty() {
                    keys.clone_from(&txn.writes);
                }
                let sent = Msg::Read { txn: txn.id, keys };
                self.ask(Pending { txn, sent, reads: Reads::new() }, cx);
            }
            Input::Read { .. } => unreachable!("no toy runs general transactions"),
            Input::Decide { txn, decision: Decision::Commit(writes) } => {
                self.commit(txn, writes, cx);
            }
            Input::Decide { txn, decision: Decision::Abort } => {
                self.finish(txn, Outcome::Aborted(AbortReason::Client), cx);
            }
            Input::Resolve { txn, reads, .. } => {
                let sent = Msg::Resolve { txn: txn.id };
                self.ask(Pending { txn, sent, reads }, cx);
            }
            Input::Message { msg: Msg::ReadReply { txn, reads }, .. } => {
                self.on_read_reply(txn, reads, cx);
            }
            Input::Message { msg: Msg::Outcome { txn, outcome }, .. } => {
                self.finish(txn, outcome, cx);
            }
            Input::Timer(txn) => {
                if self.config.mutation == Some("gives-up") {
                    return;
                }
                if let Some(pending) = self.pending.remove(&txn) {
                    cx.note(Note::Retransmitted);
                    self.ask(pending, cx);
                }
            }
            Input::Message {
                msg: Msg::Read { .. } | Msg::Commit { .. } | Msg::Resolve { .. },
                ..
            }
            | Input::Durable(_)
            | Input::Admin(_) => unreachable!("not for a client"),
        }
    }

    fn flush(&mut self, _: &mut Cx<'_, Toy>) {}

    fn assert_invariants(&self) {}
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pending={:?}", self.pending.keys().collect::<Vec<_>>())
    }
}

#[derive(Debug)]
struct Reply {
    to: NodeId,
    txn: TxnId,
    outcome: Outcome,
}

/// The leader; all other servers do nothing.
#[derive(Debug)]
pub struct Server {
    node: NodeId,
    leader: NodeId,
    config: Arc<Config>,
    store: Store,
    last: Timestamp,
    /// Outcomes on disk, or being written.
    outcomes: OrdMap<TxnId, Outcome>,
    locked: OrdSet<Key>,
    /// Actions to take when a ticket is durable.
    waiting: OrdMap<Ticket, (Record, Vec<Reply>)>,
    checkpoint: Option<Ticket>,
    since_checkpoint: usize,
}

const P: PartitionId = PartitionId(0);

impl Server {
    fn is(&self, mutation: &str) -> bool {
        self.config.mutation == Some(mutation)
    }

    fn apply(&mut self, record: &Record) {
        let Outcome::Committed(timestamp) = record.outcome else { return };
        self.last = self.last.max(timestamp);
        for (key, value) in &record.writes {
            let version = Version { timestamp, writer: record.txn };
            self.store.put(P, key.clone(), version, value.clone());
        }
    }

    fn decide(&mut self, from: NodeId, record: Record, cx: &mut Cx<'_, Toy>) {
        let Record { txn, outcome, .. } = record;
        self.outcomes.insert(txn, outcome);
        self.locked.extend(record.writes.keys().cloned());
        let ticket = cx.persist(record.clone());
        let mut replies = vec![Reply { to: from, txn, outcome }];
        if self.is("told-before-durable") {
            replies.clear();
            cx.send(from, Msg::Outcome { txn, outcome });
        }
        self.waiting.insert(ticket, (record, replies));
    }

    fn on_commit(
        &mut self,
        from: NodeId,
        (txn, below): (TxnId, u64),
        seen: &OrdMap<Key, Version>,
        writes: Writes,
        cx: &mut Cx<'_, Toy>,
    ) {
        if self.answer_known(from, txn, cx) {
            cx.note(Note::DuplicateCommit);
            return;
        }
        let acknowledged = TxnId::new(txn.client, 0)..TxnId::new(txn.client, below);
        let known: Vec<TxnId> = self.outcomes.range(acknowledged).map(|(&id, _)| id).collect();
        for id in known {
            self.outcomes.remove(&id);
        }
        let is_stale =
            seen.iter().any(|(key, version)| self.store.read(P, key).version != *version);
        let is_locked = writes.keys().chain(seen.keys()).any(|key| self.locked.contains(key));
        if (is_stale || is_locked) && !self.is("no-validation") {
            let outcome = Outcome::Aborted(AbortReason::Conflict);
            self.decide(from, Record { txn, outcome, writes: Writes::new() }, cx);
            return;
        }
        self.last = self.last.next().max(cx.clock().now);
        self.decide(from, Record { txn, outcome: Outcome::Committed(self.last), writes }, cx);
    }

    /// Answers now or later, if the outcome of `txn` is known.
    fn answer_known(&mut self, to: NodeId, txn: TxnId, cx: &mut Cx<'_, Toy>) -> bool {
        if self.is("forgets-outcomes") {
            return false;
        }
        let Some(&outcome) = self.outcomes.get(&txn) else { return false };
        match self.waiting.values_mut().find(|(record, _)| record.txn == txn) {
            Some((_, replies)) => replies.push(Reply { to, txn, outcome }),
            None => cx.send(to, Msg::Outcome { txn, outcome }),
        }
        true
    }

    fn on_durable(&mut self, ticket: Ticket, cx: &mut Cx<'_, Toy>) {
        if self.checkpoint.is_some_and(|checkpoint| checkpoint <= ticket) {
            self.checkpoint = None;
            self.store.thaw();
        }
        while let Some(entry) = self.waiting.first_entry().filter(|entry| *entry.key() <= ticket) {
            let (record, replies) = entry.remove();
            self.apply(&record);
            for key in record.writes.keys() {
                self.locked.remove(key);
            }
            for Reply { to, txn, outcome } in replies {
                cx.send(to, Msg::Outcome { txn, outcome });
            }
            self.since_checkpoint += 1;
        }
        if self.since_checkpoint >= self.config.checkpoint_every && self.checkpoint.is_none() {
            self.since_checkpoint = 0;
            // Waiting records are not applied yet, so a restart needs their records, which the
            // checkpoint replaces: the checkpoint includes them.
            let waiting: OrdMap<TxnId, Record> =
                self.waiting.values().map(|(record, _)| (record.txn, record.clone())).collect();
            let record = |(&txn, &outcome): (&TxnId, &Outcome)| {
                let empty = Record { txn, outcome, writes: Writes::new() };
                waiting.get(&txn).cloned().unwrap_or(empty)
            };
            let records = self.outcomes.iter().map(record).collect();
            self.checkpoint = Some(cx.checkpoint(self.store.freeze(), records));
        }
    }
}

impl Machine<Toy> for Server {
    fn new(setup: Setup<Toy>, recovered: Vec<Record>, cx: &mut Cx<'_, Toy>) -> Self {
        let mut server = Self {
            node: setup.node,
            leader: setup.cluster.partition(P).unwrap().preferred_leader,
            config: setup.config,
            store: Store::new(setup.engine),
            last: Timestamp::ZERO,
            outcomes: OrdMap::new(),
            locked: OrdSet::new(),
            waiting: OrdMap::new(),
            checkpoint: None,
            since_checkpoint: 0,
        };
        for record in &recovered {
            server.outcomes.insert(record.txn, record.outcome);
            server.apply(record);
            cx.note(Note::Recovered);
        }
        server
    }

    fn step(&mut self, input: Input<Toy>, cx: &mut Cx<'_, Toy>) {
        match input {
            Input::Message { from, msg: Msg::Read { txn, keys } } => {
                // Later transactions commit later: so a watch goes on, also if nobody writes.
                self.last = self.last.max(cx.clock().now);
                let read = |key: Key| (key.clone(), self.store.read(P, &key));
                let reads = keys.into_iter().map(read).collect();
                cx.send(from, Msg::ReadReply { txn, reads });
            }
            Input::Message { from, msg: Msg::Commit { txn, below, seen, writes } } => {
                self.on_commit(from, (txn, below), &seen, writes, cx);
            }
            Input::Message { from, msg: Msg::Resolve { txn } } => {
                if !self.answer_known(from, txn, cx) {
                    let outcome = Outcome::Aborted(AbortReason::Recovery);
                    self.decide(from, Record { txn, outcome, writes: Writes::new() }, cx);
                }
            }
            Input::Durable(ticket) => self.on_durable(ticket, cx),
            Input::Admin(_) => {}
            Input::Message { msg: Msg::ReadReply { .. } | Msg::Outcome { .. }, .. }
            | Input::Timer(_)
            | Input::Begin(_)
            | Input::Read { .. }
            | Input::Decide { .. }
            | Input::Resolve { .. } => unreachable!("not for a server"),
        }
    }

    fn flush(&mut self, _: &mut Cx<'_, Toy>) {}

    fn assert_invariants(&self) {
        for (record, _) in self.waiting.values() {
            for key in record.writes.keys() {
                assert!(self.locked.contains(key), "{key} is being written without a lock");
            }
        }
    }

    /// The leader has everything; the others say that it is the only voter.
    fn names(&self, ask: &Ask) -> Option<Listing> {
        let Unit::Partition(_) = ask.unit else { return None };
        if let Some(after) = ask.changes_after {
            let committed = self.waiting.values().map(|(record, _)| record.outcome);
            let before = committed.filter_map(|outcome| match outcome {
                Outcome::Committed(at) => Some(Timestamp(at.0.saturating_sub(1))),
                Outcome::Aborted(_) | Outcome::Unknown => None,
            });
            let closed = before.fold(self.last, Timestamp::min);
            let is_leader = self.node == self.leader;
            let listing =
                || Listing::of_changes(&self.store, [P], (ask, after), closed, Basis::Complete);
            return is_leader.then(listing);
        }
        let pending = self.waiting.values().flat_map(|(record, _)| record.writes.keys().cloned());
        let voters = vec![Voters { nodes: vec![self.leader] }];
        let is_leader = self.node == self.leader;
        let basis = if is_leader { Basis::Complete } else { Basis::Voter { since: 0, voters } };
        Some(Listing::of(&self.store, [P], pending, ask, basis))
    }

    fn leaks(&self) -> Vec<Leak> {
        vec![("records that are not on disk", self.waiting.len())]
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, outcomes, locked, waiting, .. } = self;
        write!(f, "{node} outcomes={} locked={locked:?} waiting={}", outcomes.len(), waiting.len())
    }
}
