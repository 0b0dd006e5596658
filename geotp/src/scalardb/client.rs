//! A middleware: runs transactions for clients, and ends prepared transactions that others left
//! behind.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, RegionId, TxnId};
use orthodrome_core::machine::{Claim, Cx, Input, Leak, Machine, Setup};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::{Duration, Time};
use orthodrome_core::txn::{AbortReason, Decision, Key, Kind, Op, Outcome, Reads, Txn, Writes};

use super::message::{Image, Mark, Msg, Record, State};
use super::{Config, Note, ScalarDb, Stored, Timer};
use crate::hotspot::{Hotspots, SourceKey};
use crate::schedule::{Average, postpone};

/// A middleware.
#[derive(Debug)]
pub struct Client {
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    /// The number of the last request. Each incarnation begins with another number, so that late
    /// answers to an earlier one are ignored.
    request: u64,
    requests: OrdMap<u64, Request>,
    open: OrdMap<TxnId, Open>,
    /// Prepared records of other transactions that are being resolved.
    finds: OrdMap<(TxnId, Key), NodeId>,
    /// Transactions whose clients asked for the outcome.
    lost: OrdSet<TxnId>,
    /// The average round trips to sources.
    distances: OrdMap<NodeId, Average>,
    hot: Hotspots,
}

/// A pending request.
#[derive(Clone, Debug)]
struct Request {
    owner: Owner,
    to: NodeId,
    msg: Msg,
    /// When it was first sent; none if it is postponed.
    sent: Option<Time>,
    resent: u32,
}

/// The owner of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Owner {
    /// A transaction.
    Txn(TxnId),
    /// The search that found this record prepared by this transaction.
    Find(TxnId, Key),
    /// A client that asked for the outcome of this transaction.
    Lost(TxnId),
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Phase {
    /// Held back, because too many other transactions are on its records.
    HeldBack,
    /// Records are being read, with the next step.
    Reading(Then),
    /// Waiting for the client's decision.
    Deciding,
    /// Its writes are being prepared.
    Preparing,
    /// The records that it only read are being read again.
    Validating,
    /// Its state is being written.
    Stating,
    /// Its state is known, and its records are being ended.
    Ending,
}

/// The next step after a round of reads.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Then {
    /// Return these to the client.
    Tell(Vec<Key>),
    /// Compute the procedure's writes.
    Compute,
    /// Commit: everything has been read.
    Commit,
}

#[derive(Clone, Debug)]
struct Open {
    txn: Txn,
    phase: Phase,
    /// Records to read, one after the other.
    queue: VecDeque<Key>,
    /// Requests that are not answered.
    waiting: OrdSet<u64>,
    /// The values read so far.
    reads: Reads,
    writes: Writes,
    /// Why it cannot commit, if so.
    verdict: Option<AbortReason>,
    /// The outcome according to its state.
    outcome: Option<Outcome>,
    is_told: bool,
    /// True if its client asked for the outcome.
    is_resolved: bool,
    /// Records whose counters it raised.
    record_keys: Vec<SourceKey>,
    /// The number of times it was held back.
    tries: u32,
}

type Context<'a> = Cx<'a, ScalarDb>;

impl Machine<ScalarDb> for Client {
    fn new(setup: Setup<ScalarDb>, _: Vec<Stored>, cx: &mut Context<'_>) -> Self {
        let Setup { cluster, config, .. } = setup;
        Self {
            cluster,
            hot: Hotspots::new(config.hot_records, config.hot_keep_percent),
            config,
            request: cx.rng().next_u64() >> 16,
            requests: OrdMap::new(),
            open: OrdMap::new(),
            finds: OrdMap::new(),
            lost: OrdSet::new(),
            distances: OrdMap::new(),
        }
    }

    fn step(&mut self, input: Input<ScalarDb>, cx: &mut Context<'_>) {
        match input {
            Input::Begin(txn) => self.on_begin(txn, cx),
            Input::Read { txn, keys } => self.on_read(txn, keys, cx),
            Input::Decide { txn, decision } => self.on_decide(txn, decision, cx),
            Input::Resolve { txn, decision, .. } => self.on_resolve(txn, decision, cx),
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(Timer::Request(number)) => self.on_request_timeout(number, cx),
            Input::Timer(Timer::Admit(txn)) => self.admit(txn, cx),
            Input::Admin(_) => {}
            Input::Durable(_) => unreachable!("a middleware persists nothing"),
        }
    }

    fn flush(&mut self, _: &mut Context<'_>) {}

    fn assert_invariants(&self) {
        for (number, request) in &self.requests {
            let is_wanted = match &request.owner {
                Owner::Txn(id) => {
                    self.open.get(id).is_some_and(|open| open.waiting.contains(number))
                }
                Owner::Find(txn, key) => self.finds.contains_key(&(*txn, key.clone())),
                Owner::Lost(id) => self.lost.contains(id),
            };
            assert!(is_wanted, "nobody waits for {request:?}");
        }
        for (id, open) in &self.open {
            let is_asking = open.waiting.iter().all(|number| self.requests.contains_key(number));
            assert!(is_asking, "{id} waits for what was never asked");
        }
    }

    fn leaks(&self) -> Vec<Leak> {
        vec![
            ("transactions", self.open.len()),
            ("requests", self.requests.len()),
            ("hot", usize::try_from(self.hot.active()).unwrap_or(usize::MAX)),
        ]
    }
}

impl Client {
    fn source_of(&self, key: &Key) -> NodeId {
        let partition = self.cluster.partition(self.cluster.partition_of(key));
        partition.map_or(NodeId(0), |partition| partition.preferred_leader)
    }

    /// The source with the states of transactions of this region: the nearest one.
    fn coordinator_of(&self, home: RegionId) -> NodeId {
        let sources = self.cluster.partitions().map(|partition| partition.preferred_leader);
        let distance = |source: &NodeId| {
            (self.cluster.topology.rtt(home, self.cluster.region_of(*source)), *source)
        };
        sources.min_by_key(distance).unwrap_or(NodeId(0))
    }

    fn by_source(&self, keys: impl IntoIterator<Item = Key>) -> OrdMap<NodeId, Vec<Key>> {
        let mut parts: OrdMap<NodeId, Vec<Key>> = OrdMap::new();
        for key in keys {
            parts.entry(self.source_of(&key)).or_default().push(key);
        }
        parts
    }

    // --- Requests ---

    fn ask(
        &mut self,
        owner: Owner,
        to: NodeId,
        wait: Duration,
        msg: impl FnOnce(u64) -> Msg,
        cx: &mut Context<'_>,
    ) {
        self.request += 1;
        let number = self.request;
        if let Owner::Txn(id) = &owner
            && let Some(open) = self.open.get_mut(id)
        {
            open.waiting.insert(number);
        }
        let mut request = Request { owner, to, msg: msg(number), sent: None, resent: 0 };
        if wait.is_zero() {
            request.sent = Some(cx.now());
            cx.send(to, request.msg.clone());
            cx.set_timer(Timer::Request(number), cx.now() + self.config.resend_after);
        } else {
            cx.note(Note::Postponed);
            cx.set_timer(Timer::Request(number), cx.now() + wait);
        }
        self.requests.insert(number, request);
    }

    /// Sends one request to each source of a transaction. If the requests block other transactions,
    /// those to nearer sources are sent later.
    fn ask_all<T>(
        &mut self,
        id: TxnId,
        parts: OrdMap<NodeId, T>,
        takes: bool,
        msg: impl Fn(u64, T) -> Msg,
        cx: &mut Context<'_>,
    ) {
        let distance = |source| self.distances.get(source).and_then(Average::get);
        let delays = if self.config.is_scheduled && takes {
            let distances = parts.keys().map(|source| (*source, distance(source)));
            postpone(&distances.map(|(source, rtt)| (source, rtt.unwrap_or_default())).collect())
        } else {
            OrdMap::new()
        };
        for (source, part) in parts {
            let wait = delays.get(&source).copied().unwrap_or_default();
            self.ask(Owner::Txn(id), source, wait, |request| msg(request, part), cx);
        }
    }

    /// Sends a request whose time has come, or repeats it.
    fn on_request_timeout(&mut self, number: u64, cx: &mut Context<'_>) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        let owner = request.owner.clone();
        if request.sent.is_none() {
            request.sent = Some(cx.now());
        } else {
            let phase = match &owner {
                Owner::Txn(id) => self.open.get(id).map(|open| &open.phase),
                Owner::Find(..) | Owner::Lost(_) => None,
            };
            // Only the coordinator table knows the outcome.
            let must_know = phase == Some(&Phase::Stating) || matches!(owner, Owner::Lost(_));
            let is_ending = phase == Some(&Phase::Ending);
            if request.resent >= self.config.resend_tries && !must_know {
                self.give_up(number, cx);
                return;
            }
            request.resent += 1;
            cx.note(Note::Resent);
            if let (Owner::Txn(id), true) = (&owner, is_ending) {
                // The outcome is known, and every transaction that finds its records can look it
                // up.
                self.tell(*id, cx);
            }
        }
        let Some(request) = self.requests.get(&number) else { return };
        cx.send(request.to, request.msg.clone());
        cx.set_timer(Timer::Request(number), cx.now() + self.config.resend_after);
    }

    fn give_up(&mut self, number: u64, cx: &mut Context<'_>) {
        let Some(request) = self.requests.remove(&number) else { return };
        cx.note(Note::GivenUp);
        match request.owner {
            Owner::Txn(id) => {
                let Some(open) = self.open.get_mut(&id) else { return };
                open.waiting.remove(&number);
                if open.phase == Phase::Ending {
                    self.on_ended(id, cx);
                } else {
                    self.abort(id, AbortReason::Recovery, cx);
                }
            }
            Owner::Find(txn, key) => drop(self.finds.remove(&(txn, key))),
            Owner::Lost(_) => unreachable!("only the coordinator table can say"),
        }
    }

    /// The answers for which a transaction waits are not needed any more.
    fn withdraw(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        for number in std::mem::take(&mut open.waiting) {
            self.requests.remove(&number);
            cx.cancel_timer(Timer::Request(number));
        }
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Context<'_>) {
        let number = msg.request();
        // An answer to a request that was repeated or withdrawn.
        let Some(request) = self.requests.remove(&number) else { return };
        cx.cancel_timer(Timer::Request(number));
        if let (Some(sent), 0) = (request.sent, request.resent) {
            let distance = self.distances.entry(from).or_default();
            distance.add(cx.now().since(sent), self.config.rtt_weight_percent);
        }
        match request.owner {
            Owner::Txn(id) => {
                if let Some(open) = self.open.get_mut(&id) {
                    open.waiting.remove(&number);
                }
                self.on_answer(id, from, msg, cx);
            }
            Owner::Find(txn, key) => self.on_find_answer(txn, key, msg, cx),
            Owner::Lost(id) => self.on_lost_answer(id, msg, cx),
        }
    }

    fn on_answer(&mut self, id: TxnId, from: NodeId, msg: Msg, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        match msg {
            Msg::Records { records, .. } if open.phase == Phase::Validating => {
                self.on_validated(id, from, records, cx);
            }
            Msg::Records { records, .. } => self.on_records(id, from, records, cx),
            Msg::Prepared { is_done, .. } => self.on_prepared(id, is_done, cx),
            Msg::StateIs { state, .. } => self.on_state(id, state, cx),
            Msg::Ended { .. } => self.on_ended(id, cx),
            Msg::Read { .. }
            | Msg::Prepare { .. }
            | Msg::PutState { .. }
            | Msg::GetState { .. }
            | Msg::Commit { .. }
            | Msg::Rollback { .. } => unreachable!("only a source is told that"),
        }
    }

    // --- Read phase ---

    /// A client begins a transaction.
    fn on_begin(&mut self, txn: Txn, cx: &mut Context<'_>) {
        let id = txn.id;
        if self.open.contains_key(&id) {
            return;
        }
        let open = Open {
            txn,
            phase: Phase::HeldBack,
            queue: VecDeque::new(),
            waiting: OrdSet::new(),
            reads: Reads::new(),
            writes: Writes::new(),
            verdict: None,
            outcome: None,
            is_told: false,
            is_resolved: false,
            record_keys: Vec::new(),
            tries: 0,
        };
        self.open.insert(id, open);
        self.admit(id, cx);
    }

    /// Late transaction scheduling (GeoTP Alg. 2 l. 11-18).
    fn admit(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        if self.config.is_scheduled {
            let keys: OrdSet<&Key> = open.txn.reads.iter().chain(&open.txn.writes).collect();
            let record_keys: Vec<SourceKey> =
                keys.into_iter().map(|key| (self.source_of(key), key.clone())).collect();
            let is_admitted = self.hot.admits(record_keys.iter(), cx.rng());
            let Some(open) = self.open.get_mut(&id) else { return };
            if !is_admitted {
                open.tries += 1;
                if open.tries > self.config.admission_tries {
                    cx.note(Note::Refused);
                    self.abort(id, AbortReason::Overload, cx);
                } else {
                    cx.note(Note::HeldBack);
                    cx.set_timer(Timer::Admit(id), cx.now() + self.config.admission_wait);
                }
                return;
            }
            self.hot.enter(record_keys.iter());
            open.record_keys = record_keys;
        }
        let Some(open) = self.open.get(&id) else { return };
        let (keys, then) = match &open.txn.kind {
            Kind::Procedure(ops) => {
                (ops.iter().flat_map(keys_of).cloned().collect(), Then::Compute)
            }
            Kind::ReadOnly | Kind::StaleReadOnly => (open.txn.reads.clone(), Then::Commit),
            Kind::Interactive | Kind::General => {
                (open.txn.reads.clone(), Then::Tell(open.txn.reads.clone()))
            }
        };
        self.read(id, keys, then, cx);
    }

    /// Reads these records, except those that were read before.
    fn read(&mut self, id: TxnId, keys: Vec<Key>, then: Then, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.phase = Phase::Reading(then);
        for key in keys {
            if !open.reads.contains_key(&key) && !open.queue.contains(&key) {
                open.queue.push_back(key);
            }
        }
        self.read_on(id, cx);
    }

    fn read_on(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if !open.waiting.is_empty() {
            return;
        }
        let is_scan = open.queue.len() > self.config.scan_above;
        let at_once = if self.config.is_scheduled || is_scan { open.queue.len() } else { 1 };
        let next: Vec<Key> = open.queue.drain(..at_once.min(open.queue.len())).collect();
        if next.is_empty() {
            self.after_reads(id, cx);
            return;
        }
        let parts = self.by_source(next);
        self.ask_all(id, parts, true, |request, keys| Msg::Read { request, txn: id, keys }, cx);
    }

    fn on_records(&mut self, id: TxnId, from: NodeId, records: Vec<Record>, cx: &mut Context<'_>) {
        let mut is_clear = true;
        for Record { key, committed, prepared } in records {
            match prepared {
                Some(mark) if !self.config.mutations.before_image => {
                    is_clear = false;
                    self.find(mark, from, key, cx);
                }
                Some(_) | None => {
                    if let Some(open) = self.open.get_mut(&id) {
                        open.reads.entry(key).or_insert(committed);
                    }
                }
            }
        }
        if is_clear {
            self.read_on(id, cx);
        } else {
            self.abort(id, AbortReason::Conflict, cx);
        }
    }

    fn after_reads(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Reading(then) = std::mem::replace(&mut open.phase, Phase::Deciding) else {
            unreachable!("it was reading");
        };
        match then {
            Then::Tell(keys) => {
                let told = keys.into_iter().filter_map(|key| {
                    let read = open.reads.get(&key).cloned()?;
                    Some((key, read))
                });
                cx.reads(id, told.collect());
            }
            Then::Compute => {
                let Kind::Procedure(ops) = &open.txn.kind else {
                    unreachable!("only a procedure computes");
                };
                match Txn::execute(ops, &open.reads) {
                    Ok(writes) => open.writes = writes,
                    // The values may never have existed together, so this is checked first.
                    Err(reason) => open.verdict = Some(reason),
                }
                self.prepare(id, cx);
            }
            Then::Commit => self.prepare(id, cx),
        }
    }

    /// The client of a general transaction reads another round.
    fn on_read(&mut self, id: TxnId, keys: Vec<Key>, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        if open.phase == Phase::Deciding && open.txn.kind == Kind::General {
            self.read(id, keys.clone(), Then::Tell(keys), cx);
        }
    }

    /// The client of an interactive or general transaction has decided.
    fn on_decide(&mut self, id: TxnId, decision: Decision, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let is_general = open.txn.kind == Kind::General;
        match decision {
            Decision::Commit(writes) if open.phase == Phase::Deciding => {
                if is_general || open.txn.declares(&writes) {
                    let keys = writes.keys().cloned().collect();
                    open.writes = writes;
                    self.read(id, keys, Then::Commit, cx);
                } else {
                    self.abort(id, AbortReason::Client, cx);
                }
            }
            Decision::Abort => match open.phase {
                Phase::HeldBack | Phase::Reading(_) | Phase::Deciding => {
                    self.abort(id, AbortReason::Client, cx);
                }
                Phase::Preparing | Phase::Validating | Phase::Stating | Phase::Ending => {}
            },
            Decision::Commit(_) => {}
        }
    }

    // --- Prepare, validate, state, end ---

    fn prepare(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        let coordinator = self.coordinator_of(open.txn.home);
        let mut parts: OrdMap<NodeId, Vec<Image>> = OrdMap::new();
        for (key, value) in &open.writes {
            let read = open.reads.get(key).map(|read| read.version).unwrap_or_default();
            let image = Image { key: key.clone(), read, value: value.clone() };
            parts.entry(self.source_of(key)).or_default().push(image);
        }
        if parts.is_empty() {
            self.validate(id, cx);
            return;
        }
        if let Some(open) = self.open.get_mut(&id) {
            open.phase = Phase::Preparing;
        }
        let since = cx.clock().now;
        let msg = |request, images| Msg::Prepare { request, txn: id, coordinator, since, images };
        self.ask_all(id, parts, true, msg, cx);
    }

    fn on_prepared(&mut self, id: TxnId, is_done: bool, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        if !is_done {
            self.abort(id, AbortReason::Conflict, cx);
        } else if open.waiting.is_empty() {
            self.validate(id, cx);
        }
    }

    /// All its writes are prepared: the records that it only read must be unchanged.
    fn validate(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let is_skipped = self.config.mutations.skipped_validation;
        let Some(open) = self.open.get_mut(&id) else { return };
        open.phase = Phase::Validating;
        let only_read = open.reads.keys().filter(|key| !open.writes.contains_key(*key));
        let keys: Vec<Key> = only_read.filter(|_| !is_skipped).cloned().collect();
        if keys.is_empty() {
            self.put_outcome(id, cx);
            return;
        }
        let parts = self.by_source(keys);
        self.ask_all(id, parts, false, |request, keys| Msg::Read { request, txn: id, keys }, cx);
    }

    fn on_validated(
        &mut self,
        id: TxnId,
        from: NodeId,
        records: Vec<Record>,
        cx: &mut Context<'_>,
    ) {
        let mut is_valid = true;
        for Record { key, committed, prepared } in records {
            let Some(open) = self.open.get(&id) else { return };
            is_valid &= open.reads.get(&key).is_some_and(|read| read.version == committed.version);
            if let Some(mark) = prepared
                && !self.config.mutations.before_image
            {
                is_valid = false;
                self.find(mark, from, key, cx);
            }
        }
        if !is_valid {
            cx.note(Note::ValidationFailed);
            self.abort(id, AbortReason::StaleRead, cx);
        } else if self.open.get(&id).is_some_and(|open| open.waiting.is_empty()) {
            self.put_outcome(id, cx);
        }
    }

    /// Nothing prevents the commit any more.
    fn put_outcome(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        if let Some(reason) = open.verdict {
            self.conclude(id, Outcome::Aborted(reason), cx);
            return;
        }
        let newest = open.reads.values().map(|read| read.version.timestamp).max();
        let at = cx.clock().now.max(newest.unwrap_or_default().next());
        if open.txn.is_read_only() {
            self.conclude(id, Outcome::Committed(at), cx);
        } else {
            self.put_state(id, State::Committed(at), cx);
        }
    }

    fn put_state(&mut self, id: TxnId, state: State, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.phase = Phase::Stating;
        let home = open.txn.home;
        let coordinator = self.coordinator_of(home);
        let parts = OrdMap::from([(coordinator, state)]);
        self.ask_all(
            id,
            parts,
            false,
            |request, state| Msg::PutState { request, txn: id, state },
            cx,
        );
    }

    fn on_state(&mut self, id: TxnId, state: Option<State>, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Some(state) = state else { unreachable!("a state was put") };
        open.phase = Phase::Ending;
        open.outcome = Some(match state {
            State::Committed(at) => Outcome::Committed(at),
            State::Aborted => {
                if open.verdict.is_none() {
                    cx.note(Note::Overruled);
                }
                Outcome::Aborted(open.verdict.unwrap_or(AbortReason::Recovery))
            }
        });
        let keys: Vec<Key> = open.writes.keys().cloned().collect();
        let parts = self.by_source(keys);
        if parts.is_empty() {
            self.on_ended(id, cx);
            return;
        }
        let msg = |request, keys| end(request, id, state, keys);
        self.ask_all(id, parts, false, msg, cx);
    }

    fn on_ended(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        if let (true, Some(outcome)) = (open.waiting.is_empty(), open.outcome) {
            self.conclude(id, outcome, cx);
        }
    }

    /// The transaction cannot commit. If a part of it may be prepared, every middleware must be
    /// able to find out.
    fn abort(&mut self, id: TxnId, reason: AbortReason, cx: &mut Context<'_>) {
        self.withdraw(id, cx);
        let Some(open) = self.open.get_mut(&id) else { return };
        open.verdict = Some(reason);
        let may_be_prepared =
            matches!(open.phase, Phase::Preparing | Phase::Validating) && !open.writes.is_empty();
        if may_be_prepared {
            self.put_state(id, State::Aborted, cx);
        } else {
            self.conclude(id, Outcome::Aborted(reason), cx);
        }
    }

    fn conclude(&mut self, id: TxnId, outcome: Outcome, cx: &mut Context<'_>) {
        self.withdraw(id, cx);
        if let Some(open) = self.open.get_mut(&id) {
            open.outcome = Some(outcome);
        }
        self.tell(id, cx);
        cx.cancel_timer(Timer::Admit(id));
        if let Some(open) = self.open.remove(&id) {
            let is_committed = matches!(outcome, Outcome::Committed(_));
            self.hot.leave(open.record_keys.iter(), is_committed);
        }
    }

    fn tell(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Some(outcome) = open.outcome else { return };
        if std::mem::replace(&mut open.is_told, true) {
            return;
        }
        let is_asked_for =
            matches!(open.txn.kind, Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly);
        if matches!(outcome, Outcome::Committed(_)) && is_asked_for && !open.is_resolved {
            let told = open.txn.reads.iter().filter_map(|key| {
                let read = open.reads.get(key).cloned()?;
                Some((key.clone(), read))
            });
            cx.reads(id, told.collect());
        }
        // A read-only transaction may be begun again under its name, at another time.
        if !open.txn.is_read_only() {
            cx.claim(Claim::Decided { txn: id, outcome });
        }
        cx.finish(id, outcome, "consensus-commit");
    }

    // --- Transactions that others left behind ---

    /// A record was found prepared (lazy recovery).
    fn find(&mut self, mark: Mark, source: NodeId, key: Key, cx: &mut Context<'_>) {
        let Mark { txn, coordinator, since } = mark;
        if self.finds.contains_key(&(txn, key.clone())) {
            return;
        }
        cx.note(Note::PreparedFound);
        self.finds.insert((txn, key.clone()), source);
        let owner = Owner::Find(txn, key.clone());
        let no_wait = Duration::ZERO;
        if self.config.mutations.ignored_state {
            let msg = |request| Msg::Rollback { request, txn, keys: vec![key] };
            self.ask(owner, source, no_wait, msg, cx);
        } else if cx.clock().now >= since + self.config.expire_after {
            cx.note(Note::Expired);
            let msg = |request| Msg::PutState { request, txn, state: State::Aborted };
            self.ask(owner, coordinator, no_wait, msg, cx);
        } else {
            self.ask(owner, coordinator, no_wait, |request| Msg::GetState { request, txn }, cx);
        }
    }

    fn on_find_answer(&mut self, txn: TxnId, key: Key, msg: Msg, cx: &mut Context<'_>) {
        let found = (txn, key);
        let (Some(&source), Msg::StateIs { state: Some(state), .. }) =
            (self.finds.get(&found), msg)
        else {
            // It has been ended; or it has no state and may still commit.
            self.finds.remove(&found);
            return;
        };
        cx.note(match state {
            State::Committed(_) => Note::RolledForward,
            State::Aborted => Note::RolledBack,
        });
        let owner = Owner::Find(txn, found.1.clone());
        let msg = |request| end(request, txn, state, vec![found.1]);
        self.ask(owner, source, Duration::ZERO, msg, cx);
    }

    // --- Clients that ask for an outcome ---

    fn on_resolve(&mut self, txn: Txn, decision: Option<Decision>, cx: &mut Context<'_>) {
        let id = txn.id;
        if txn.is_read_only() {
            // It changes nothing, so it can simply be read again.
            self.withdraw(id, cx);
            if let Some(open) = self.open.remove(&id) {
                cx.cancel_timer(Timer::Admit(id));
                self.hot.leave(open.record_keys.iter(), false);
            }
            self.on_begin(txn, cx);
            return;
        }
        if let Some(open) = self.open.get_mut(&id) {
            open.is_resolved = true;
            if open.phase == Phase::Deciding {
                self.on_decide(id, decision.unwrap_or(Decision::Abort), cx);
            }
            return;
        }
        if self.lost.insert(id) {
            // If it has not committed yet, it never will.
            let coordinator = self.coordinator_of(txn.home);
            let msg = |request| Msg::PutState { request, txn: id, state: State::Aborted };
            self.ask(Owner::Lost(id), coordinator, Duration::ZERO, msg, cx);
        }
    }

    fn on_lost_answer(&mut self, id: TxnId, msg: Msg, cx: &mut Context<'_>) {
        self.lost.remove(&id);
        let Msg::StateIs { state: Some(state), .. } = msg else {
            unreachable!("a state was put");
        };
        let outcome = match state {
            State::Committed(at) => Outcome::Committed(at),
            State::Aborted => Outcome::Aborted(AbortReason::Recovery),
        };
        cx.claim(Claim::Decided { txn: id, outcome });
        cx.finish(id, outcome, "resolved");
    }
}

/// The request that ends records as a transaction's state has it.
fn end(request: u64, txn: TxnId, state: State, keys: Vec<Key>) -> Msg {
    match state {
        State::Committed(at) => Msg::Commit { request, txn, at, keys },
        State::Aborted => Msg::Rollback { request, txn, keys },
    }
}

fn keys_of(op: &Op) -> impl Iterator<Item = &Key> {
    op.reads().iter().chain(op.writes())
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.open.is_empty() {
            f.write_str("idle")?;
        }
        for (at, (id, open)) in self.open.iter().enumerate() {
            let separator = if at == 0 { "" } else { ", " };
            let phase = match open.phase {
                Phase::HeldBack => "is held back",
                Phase::Reading(_) => "reads",
                Phase::Deciding => "waits for its client",
                Phase::Preparing => "prepares",
                Phase::Validating => "validates",
                Phase::Stating => "puts its state",
                Phase::Ending => "ends",
            };
            write!(f, "{separator}{id} {phase}")?;
        }
        for (txn, key) in self.finds.keys() {
            write!(f, " | found {key} prepared by {txn}")?;
        }
        for id in &self.lost {
            write!(f, " | asks about {id}")?;
        }
        Ok(())
    }
}
