//! A middleware for clients of the simulator: it turns their transactions into the statements that
//! a session would send.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::machine::{Claim, Cx, Input, Leak, Machine, Setup, UNKNOWABLE};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::txn::{
    AbortReason, Decision, Key, Kind, Op, Outcome, Reads, Txn, Value, Writes,
};

use super::{Config, GeoTp, Msg, Record, Timer};
use crate::contract::{Effect, Io, Isolation, Last, Note, Part, SessionId, Xid};
use crate::middleware::{Commit, Known, Middleware};
use crate::source::{Action, Answer, Model, Statement};

/// A middleware.
#[derive(Debug)]
pub struct Client {
    node: NodeId,
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    middleware: Middleware<Model>,
    open: OrdMap<TxnId, Open>,
    /// Questions to other middlewares that are not answered yet.
    asking: OrdMap<TxnId, Asking>,
    /// Middlewares that wait for the end of a transaction here.
    askers: OrdMap<TxnId, OrdSet<NodeId>>,
    /// Effects that are not carried out yet. One may call the middleware, whose new effects come
    /// after the others.
    effects: VecDeque<Effect<Model>>,
    is_busy: bool,
}

/// The stage of a session.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Stage {
    /// A round of reads is pending.
    Reading(Vec<Key>),
    /// Waiting for the client's decision.
    Deciding,
    /// The procedure's reads are pending; its writes follow from them.
    Computing,
    /// Writes are pending that will be undone; these writes follow.
    Undoing(Writes),
    /// The last round is pending.
    Ending,
    /// `near`: answers of copies are pending, about rows that the client reads.
    Looking(Vec<Key>),
    /// `near`: answers of copies are pending, about rows that the procedure reads.
    LookingToCompute,
    /// `near`: answers of copies are pending, about rows that are written and were not read.
    Foreseeing(Writes),
}

#[derive(Clone, Debug)]
struct Open {
    txn: Txn,
    xid: Xid,
    stage: Stage,
    reads: Reads,
    /// True if its client asked for the outcome.
    is_resolved: bool,
    /// True if no source knows it yet: its reads are from copies.
    is_near: bool,
    /// Number of questions to copies so far, and the sources that have not answered the last one.
    looks: u32,
    silent: OrdMap<NodeId, Vec<Key>>,
    /// Number of times that the last question was sent again.
    tries: u32,
    /// Whether rows exist that it writes and has not read.
    existing: OrdMap<Key, bool>,
}

#[derive(Clone, Debug)]
struct Asking {
    /// It may have committed without a record: one source, in one phase.
    is_single: bool,
    /// Its client had asked to commit.
    is_decided: bool,
    silent: OrdSet<NodeId>,
}

type Context<'a> = Cx<'a, GeoTp>;

/// Savepoints: before the first read, before what is undone, and once more there.
const FIRST: u32 = 1;
const SECOND: u32 = 2;
const THIRD: u32 = 3;

impl Machine<GeoTp> for Client {
    fn new(setup: Setup<GeoTp>, recovered: Vec<Record>, cx: &mut Context<'_>) -> Self {
        let Setup { node, cluster, config, .. } = setup;
        let records = recovered.into_iter().filter_map(|record| match record {
            Record::Middleware(record) => Some(record),
            Record::Source(_) => None,
        });
        let mut effects = Vec::new();
        let (now, clock) = (cx.now(), cx.clock().now);
        let mut io = Io { now, clock, rng: cx.rng(), effects: &mut effects };
        let middleware =
            Middleware::new(node, config.middleware.clone(), records.collect(), &mut io);
        let (open, asking, askers) = (OrdMap::new(), OrdMap::new(), OrdMap::new());
        let (pending, is_busy) = (VecDeque::new(), false);
        let mut client = Self {
            node,
            cluster,
            config,
            middleware,
            open,
            asking,
            askers,
            effects: pending,
            is_busy,
        };
        client.carry_out(effects, cx);
        client
    }

    fn step(&mut self, input: Input<GeoTp>, cx: &mut Context<'_>) {
        match input {
            Input::Begin(txn) => self.on_begin(txn, cx),
            Input::Read { txn, keys } => self.on_read(txn, keys, cx),
            Input::Decide { txn, decision } => self.on_decide(txn, decision, cx),
            Input::Resolve { txn, reads, decision } => self.on_resolve(txn, &reads, decision, cx),
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(Timer::Middleware(timer)) => {
                self.with(cx, |dm, io| dm.on_timer(timer, io))
            }
            Input::Timer(Timer::Ask(txn)) => self.on_ask_timeout(txn, cx),
            Input::Timer(Timer::Look(txn)) => self.on_look_timeout(txn, cx),
            Input::Durable(ticket) => self.with(cx, |dm, io| dm.on_durable(ticket, io)),
            Input::Admin(_) => {}
            Input::Timer(Timer::Agent(_) | Timer::Source(_)) => {
                unreachable!("only a source has that")
            }
        }
    }

    fn flush(&mut self, _: &mut Context<'_>) {}

    fn assert_invariants(&self) {
        self.middleware.assert_invariants();
        for (txn, open) in &self.open {
            let is_known = match self.middleware.known(*txn) {
                Known::Open(xid) | Known::Untold(xid) => xid == open.xid,
                // Its client receives the outcome when every source has committed.
                Known::Committed(_) => true,
                Known::Nothing => false,
            };
            assert!(is_known, "{txn} is open here alone");
        }
    }

    fn leaks(&self) -> Vec<Leak> {
        let mut left = self.middleware.leaks();
        left.push(("questions", self.asking.len() + self.askers.len()));
        left
    }
}

impl Client {
    fn with(
        &mut self,
        cx: &mut Context<'_>,
        act: impl FnOnce(&mut Middleware<Model>, &mut Io<'_, Effect<Model>>),
    ) {
        let mut effects = Vec::new();
        let (now, clock) = (cx.now(), cx.clock().now);
        let mut io = Io { now, clock, rng: cx.rng(), effects: &mut effects };
        act(&mut self.middleware, &mut io);
        self.carry_out(effects, cx);
    }

    fn carry_out(&mut self, effects: Vec<Effect<Model>>, cx: &mut Context<'_>) {
        self.effects.extend(effects);
        if std::mem::replace(&mut self.is_busy, true) {
            return;
        }
        while let Some(effect) = self.effects.pop_front() {
            match effect {
                Effect::Send { to, msg } => cx.send(to, Msg::ToAgent(msg)),
                Effect::Answers { xid, answers } => self.on_answers(xid, answers, cx),
                Effect::StatementFailed { xid, .. } => self.on_statement_failed(xid, cx),
                Effect::Finished { xid, label, outcome, path, .. } => {
                    if let Some(txn) = label {
                        self.on_finished(txn, xid, outcome, path, cx);
                    }
                }
                Effect::Persist { ticket, record } => {
                    let given = cx.persist(Record::Middleware(record));
                    assert_eq!(given, ticket, "tickets are counted alike");
                }
                Effect::Checkpoint { ticket, records } => {
                    let records = records.into_iter().map(Record::Middleware).collect();
                    let given = cx.checkpoint(Arc::default(), records);
                    assert_eq!(given, ticket, "tickets are counted alike");
                }
                Effect::SetTimer(timer, at) => cx.set_timer(Timer::Middleware(timer), at),
                Effect::CancelTimer(timer) => cx.cancel_timer(Timer::Middleware(timer)),
                Effect::Note(note) => cx.note(note),
            }
        }
        self.is_busy = false;
    }

    fn source_of(&self, key: &Key) -> NodeId {
        let partition = self.cluster.partition(self.cluster.partition_of(key));
        partition.map_or(NodeId(0), |partition| partition.preferred_leader)
    }

    /// A round of statements, by source.
    fn parts(
        &self,
        txn: TxnId,
        actions: impl IntoIterator<Item = Action>,
    ) -> OrdMap<NodeId, Part<Model>> {
        let mut parts: OrdMap<NodeId, Part<Model>> = OrdMap::new();
        let mut actions: Vec<Action> = actions.into_iter().collect();
        if self.config.writes_last {
            actions.sort_by_key(Action::writes);
        }
        for action in actions {
            let Some(key) = action.key().cloned() else { continue };
            let source = self.source_of(&key);
            let none = || Part { statements: Vec::new(), records: Vec::new(), writes: false };
            let part = parts.entry(source).or_insert_with(none);
            if !part.records.contains(&key) {
                part.records.push(key);
            }
            part.writes |= action.writes();
            part.statements.push(Statement { txn, action });
        }
        parts
    }

    /// A client begins a transaction.
    fn on_begin(&mut self, txn: Txn, cx: &mut Context<'_>) {
        let id = txn.id;
        self.middleware.forget(id.client, txn.acknowledged_below);
        if self.open.contains_key(&id) {
            return;
        }
        let mut begun = None;
        self.with(cx, |dm, io| begun = Some(dm.begin(Some(id), Isolation::Serializable, io)));
        let Some(xid) = begun else { return };
        if self.config.follows {
            self.middleware.follow(xid, SessionId(id.client.0));
        }
        let mut open = Open {
            txn: txn.clone(),
            xid,
            stage: Stage::Deciding,
            reads: Reads::new(),
            is_resolved: false,
            is_near: false,
            looks: 0,
            silent: OrdMap::new(),
            tries: 0,
            existing: OrdMap::new(),
        };
        if let (true, Some((keys, stage))) = (self.config.is_near, looked_at(&txn)) {
            (open.is_near, open.stage) = (true, stage);
            self.open.insert(id, open);
            self.look(id, keys, cx);
            return;
        }
        let (stage, parts, last) = match &txn.kind {
            Kind::Procedure(ops) if ops.iter().all(|op| !matches!(op, Op::Call(_))) => {
                let parts = self.parts(id, ops.iter().cloned().map(Action::Apply));
                (Stage::Ending, parts, Last::Commit)
            }
            Kind::Procedure(_) => (Stage::Computing, self.parts(id, lock_all(&txn)), Last::No),
            Kind::ReadOnly | Kind::StaleReadOnly => {
                (Stage::Ending, self.parts(id, lock_all(&txn)), Last::Commit)
            }
            Kind::Interactive | Kind::General => {
                let reads = reads_of(&txn, txn.reads.clone());
                (Stage::Reading(txn.reads.clone()), self.parts(id, reads), Last::No)
            }
        };
        if self.config.savepoints && matches!(stage, Stage::Reading(_)) {
            self.middleware.set_savepoint(xid, FIRST);
        }
        open.stage = stage;
        self.open.insert(id, open);
        self.with(cx, |dm, io| dm.round(xid, parts, last, io));
    }

    /// The sources of a round have answered.
    fn on_answers(&mut self, xid: Xid, answers: OrdMap<NodeId, Vec<Answer>>, cx: &mut Context<'_>) {
        let Some(open) = self.open.values_mut().find(|open| open.xid == xid) else { return };
        let id = open.txn.id;
        for Answer { key, read } in answers.into_values().flatten() {
            open.reads.entry(key).or_insert(read);
        }
        match std::mem::replace(&mut open.stage, Stage::Deciding) {
            Stage::Reading(keys) => {
                let told =
                    keys.iter().filter_map(|key| Some((key.clone(), open.reads.get(key)?.clone())));
                let told: Reads = told.collect();
                if self.config.savepoints {
                    // What has been read stays as it was.
                    self.middleware.roll_back_to(xid, FIRST);
                }
                cx.reads(id, told);
            }
            Stage::Computing => self.compute(id, cx),
            Stage::Ending => open.stage = Stage::Ending,
            Stage::Undoing(writes) => self.undo(id, writes, cx),
            Stage::Deciding
            | Stage::Looking(_)
            | Stage::LookingToCompute
            | Stage::Foreseeing(_) => {
                unreachable!("nothing is under way at the sources")
            }
        }
    }

    /// The procedure's reads are known.
    fn compute(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        let Kind::Procedure(ops) = &open.txn.kind else {
            unreachable!("only a procedure computes");
        };
        let xid = open.xid;
        match Txn::execute(ops, &open.reads) {
            Ok(writes) => self.write(id, writes, cx),
            Err(_) => self.with(cx, |dm, io| dm.rollback(xid, io)),
        }
    }

    // --- Copies ---

    /// Asks copies for rows. What happens then depends on the stage.
    fn look(&mut self, id: TxnId, keys: Vec<Key>, cx: &mut Context<'_>) {
        let mut of: OrdMap<NodeId, Vec<Key>> = OrdMap::new();
        for key in keys {
            of.entry(self.source_of(&key)).or_default().push(key);
        }
        let Some(open) = self.open.get_mut(&id) else { return };
        open.looks += 1;
        open.tries = 0;
        open.silent = of;
        self.ask_copies(id, cx);
    }

    fn ask_copies(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        if open.silent.is_empty() {
            self.has_looked(id, cx);
            return;
        }
        for (&source, keys) in &open.silent {
            cx.send(source, Msg::Look { txn: id, look: open.looks, keys: keys.clone() });
        }
        cx.set_timer(Timer::Look(id), cx.now() + self.config.ask_after);
    }

    fn on_seen(
        &mut self,
        from: NodeId,
        id: TxnId,
        look: u32,
        answers: Vec<Answer>,
        cx: &mut Context<'_>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if open.looks != look || open.silent.remove(&from).is_none() {
            return;
        }
        let is_read = !matches!(open.stage, Stage::Foreseeing(_));
        for Answer { key, read } in answers {
            if is_read {
                open.reads.entry(key).or_insert(read);
            } else {
                open.existing.insert(key, read.value.is_some());
            }
        }
        if open.silent.is_empty() {
            cx.cancel_timer(Timer::Look(id));
            self.has_looked(id, cx);
        }
    }

    /// Every copy has answered.
    fn has_looked(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        match std::mem::replace(&mut open.stage, Stage::Deciding) {
            Stage::Looking(keys) => {
                let told =
                    keys.iter().filter_map(|key| Some((key.clone(), open.reads.get(key)?.clone())));
                let told: Reads = told.collect();
                cx.reads(id, told);
            }
            Stage::LookingToCompute => self.compute(id, cx),
            Stage::Foreseeing(writes) => self.end_near(id, writes, cx),
            Stage::Reading(_)
            | Stage::Deciding
            | Stage::Computing
            | Stage::Undoing(_)
            | Stage::Ending => unreachable!("no copy was asked"),
        }
    }

    /// A copy does not answer. After some tries, what is remembered goes to the sources, and the
    /// transaction continues there with locks.
    fn on_look_timeout(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if open.silent.is_empty() {
            return;
        }
        open.tries += 1;
        if open.tries < LOOKS {
            self.ask_copies(id, cx);
            return;
        }
        cx.note(Note::SentEarly);
        open.silent.clear();
        open.is_near = false;
        let mut actions = expected(open, &Writes::new());
        let (xid, mut last) = (open.xid, Last::No);
        match std::mem::replace(&mut open.stage, Stage::Deciding) {
            Stage::Looking(keys) => {
                let unread = keys.iter().filter(|key| !open.reads.contains_key(*key)).cloned();
                actions.extend(reads_of(&open.txn, unread.collect()));
                open.stage = Stage::Reading(keys);
            }
            Stage::LookingToCompute => {
                let known = &open.reads;
                let unread =
                    |action: &Action| action.key().is_some_and(|key| !known.contains_key(key));
                actions.extend(lock_all(&open.txn).into_iter().filter(unread));
                open.stage = Stage::Computing;
            }
            Stage::Foreseeing(writes) => {
                let write = |(key, value)| Action::Write { key, value };
                actions.extend(writes.into_iter().map(write));
                (open.stage, last) = (Stage::Ending, Last::Commit);
            }
            Stage::Reading(_)
            | Stage::Deciding
            | Stage::Computing
            | Stage::Undoing(_)
            | Stage::Ending => unreachable!("no copy was asked"),
        }
        let parts = self.parts(id, actions);
        self.with(cx, |dm, io| dm.round(xid, parts, last, io));
    }

    /// The only round: the statements of the whole transaction, with their answers.
    fn end_near(&mut self, id: TxnId, writes: Writes, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let unknown =
            |key: &&Key| !open.reads.contains_key(*key) && !open.existing.contains_key(*key);
        let unknown: Vec<Key> = writes.keys().filter(unknown).cloned().collect();
        if !unknown.is_empty() {
            open.stage = Stage::Foreseeing(writes);
            self.look(id, unknown, cx);
            return;
        }
        let mut actions = expected(open, &writes);
        for (key, value) in writes {
            let read = open.reads.get(&key).map(|read| read.value.is_some());
            let existed = read.or(open.existing.get(&key).copied()).unwrap_or_default();
            actions.push(Action::Counted { key, value, existed });
        }
        // Transactions lock their rows in the same order.
        actions.sort_by(|one, other| one.key().cmp(&other.key()));
        open.stage = Stage::Ending;
        let xid = open.xid;
        if actions.is_empty() {
            self.with(cx, |dm, io| dm.commit(xid, io));
            return;
        }
        let parts = self.parts(id, actions);
        self.with(cx, |dm, io| dm.round(xid, parts, Last::Commit, io));
    }

    /// Writes all values. With savepoints, other values are written and undone first.
    fn write(&mut self, id: TxnId, writes: Writes, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if !self.config.savepoints {
            self.end(id, writes, cx);
            return;
        }
        let keys: OrdSet<Key> = open.reads.keys().chain(writes.keys()).cloned().collect();
        let xid = open.xid;
        open.stage = Stage::Undoing(writes);
        let never = Value::from("never");
        let mut actions: Vec<Action> = Vec::new();
        for key in keys {
            actions.push(Action::Write { key: key.clone(), value: Some(never.clone()) });
            if cx.rng().chance(1, 8) {
                // This is not what was just written, so it fails.
                actions.push(Action::Apply(Op::Compare(key, None)));
            }
        }
        if actions.is_empty() {
            self.undo(id, Writes::new(), cx);
            return;
        }
        self.middleware.set_savepoint(xid, SECOND);
        self.middleware.set_savepoint(xid, THIRD);
        let parts = self.parts(id, actions);
        self.with(cx, |dm, io| dm.round(xid, parts, Last::No, io));
    }

    /// Undoes what has been written.
    fn undo(&mut self, id: TxnId, writes: Writes, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        let back = if cx.rng().chance(1, 2) { SECOND } else { THIRD };
        self.middleware.roll_back_to(open.xid, back);
        if cx.rng().chance(3, 4) {
            self.middleware.release_savepoint(open.xid, FIRST);
        }
        self.end(id, writes, cx);
    }

    /// A statement has failed, and the transaction can go on.
    fn on_statement_failed(&mut self, xid: Xid, cx: &mut Context<'_>) {
        let Some(open) = self.open.values_mut().find(|open| open.xid == xid) else { return };
        let id = open.txn.id;
        match std::mem::replace(&mut open.stage, Stage::Deciding) {
            Stage::Undoing(writes) => self.undo(id, writes, cx),
            Stage::Reading(_)
            | Stage::Computing
            | Stage::Ending
            | Stage::Deciding
            | Stage::Looking(_)
            | Stage::LookingToCompute
            | Stage::Foreseeing(_) => {
                self.with(cx, |dm, io| dm.rollback(xid, io));
            }
        }
    }

    /// The last round: all writes, and the commit.
    fn end(&mut self, id: TxnId, writes: Writes, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if open.is_near {
            self.end_near(id, writes, cx);
            return;
        }
        open.stage = Stage::Ending;
        let xid = open.xid;
        if writes.is_empty() {
            self.with(cx, |dm, io| dm.commit(xid, io));
            return;
        }
        let parts =
            self.parts(id, writes.into_iter().map(|(key, value)| Action::Write { key, value }));
        self.with(cx, |dm, io| dm.round(xid, parts, Last::Commit, io));
    }

    /// The client of a general transaction reads another round. Earlier reads do not change,
    /// because of its locks.
    fn on_read(&mut self, id: TxnId, keys: Vec<Key>, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if open.stage != Stage::Deciding || open.txn.kind != Kind::General {
            return;
        }
        if open.is_near {
            let unread: Vec<Key> =
                keys.iter().filter(|key| !open.reads.contains_key(*key)).cloned().collect();
            open.stage = Stage::Looking(keys);
            self.look(id, unread, cx);
            return;
        }
        open.stage = Stage::Reading(keys.clone());
        let (xid, unread) =
            (open.xid, keys.into_iter().filter(|key| !open.reads.contains_key(key)));
        let reads = reads_of(&open.txn, unread.collect());
        let parts = self.parts(id, reads);
        self.with(cx, |dm, io| dm.round(xid, parts, Last::No, io));
    }

    /// The client of an interactive or general transaction has decided.
    fn on_decide(&mut self, id: TxnId, decision: Decision, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        let (xid, is_general) = (open.xid, open.txn.kind == Kind::General);
        match decision {
            Decision::Commit(writes) if open.stage == Stage::Deciding => {
                if is_general || open.txn.declares(&writes) {
                    self.write(id, writes, cx);
                } else {
                    self.with(cx, |dm, io| dm.rollback(xid, io));
                }
            }
            Decision::Abort => self.with(cx, |dm, io| dm.rollback(xid, io)),
            Decision::Commit(_) => {}
        }
    }

    /// The transaction has ended.
    fn on_finished(
        &mut self,
        id: TxnId,
        xid: Xid,
        outcome: Outcome,
        path: &'static str,
        cx: &mut Context<'_>,
    ) {
        // A read-only transaction may have been begun again under its name.
        if self.open.get(&id).is_none_or(|open| open.xid != xid) {
            return;
        }
        let Some(open) = self.open.remove(&id) else { return };
        for asker in self.askers.remove(&id).unwrap_or_default() {
            cx.send(asker, Msg::Told { txn: id, outcome: Some(outcome) });
        }
        if let Outcome::Committed(_) = outcome
            && matches!(open.txn.kind, Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly)
            && !open.is_resolved
        {
            cx.reads(id, open.reads);
        }
        self.tell(id, outcome, path, cx);
    }

    fn tell(&mut self, id: TxnId, outcome: Outcome, path: &'static str, cx: &mut Context<'_>) {
        if outcome != Outcome::Unknown {
            cx.claim(Claim::Decided { txn: id, outcome });
        }
        cx.finish(id, outcome, path);
    }

    // --- Clients that ask for an outcome ---

    fn on_resolve(
        &mut self,
        txn: Txn,
        reads: &Reads,
        decision: Option<Decision>,
        cx: &mut Context<'_>,
    ) {
        let id = txn.id;
        if txn.is_read_only() {
            // It changes nothing, so it can simply be read again.
            if let Some(open) = self.open.remove(&id) {
                self.with(cx, |dm, io| dm.rollback(open.xid, io));
            }
            self.on_begin(txn, cx);
            return;
        }
        match self.middleware.known(id) {
            Known::Open(xid) => {
                if let Some(open) = self.open.get_mut(&id) {
                    open.is_resolved = true;
                    if open.stage == Stage::Deciding {
                        match decision {
                            Some(decision) => self.on_decide(id, decision, cx),
                            None => self.with(cx, |dm, io| dm.rollback(xid, io)),
                        }
                    }
                }
            }
            Known::Untold(_) => {
                if let Some(open) = self.open.get_mut(&id) {
                    open.is_resolved = true;
                }
            }
            Known::Committed(at) => self.tell(id, Outcome::Committed(at), "resolved", cx),
            Known::Nothing => {
                let is_decided = match (&txn.kind, &decision) {
                    (Kind::Procedure(_), _) | (_, Some(Decision::Commit(_))) => true,
                    (_, Some(Decision::Abort) | None) => false,
                };
                let written = decision.iter().flat_map(|decision| match decision {
                    Decision::Commit(writes) => writes.keys().collect::<Vec<_>>(),
                    Decision::Abort => Vec::new(),
                });
                let keys = txn.reads.iter().chain(&txn.writes).chain(reads.keys()).chain(written);
                let sources: OrdSet<NodeId> = keys.map(|key| self.source_of(key)).collect();
                let others =
                    self.cluster.gateways().map(|node| node.id).filter(|&node| node != self.node);
                let is_single = sources.len() <= 1;
                self.asking.insert(id, Asking { is_single, is_decided, silent: others.collect() });
                self.on_ask_timeout(id, cx);
            }
        }
    }

    /// Asks every other middleware that has not answered, and concludes when all have.
    fn on_ask_timeout(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(asking) = self.asking.get(&id) else { return };
        if asking.silent.is_empty() {
            // No middleware has it or has logged a decision to commit it, and none ever will.
            let needs_no_record =
                asking.is_single || self.config.middleware.commit == Commit::Local;
            let outcome = if needs_no_record && asking.is_decided {
                Outcome::Unknown
            } else {
                Outcome::Aborted(AbortReason::Recovery)
            };
            self.asking.remove(&id);
            let path = if outcome == Outcome::Unknown { UNKNOWABLE } else { "resolved" };
            self.tell(id, outcome, path, cx);
            return;
        }
        for &other in &asking.silent {
            cx.send(other, Msg::Ask { txn: id });
        }
        cx.set_timer(Timer::Ask(id), cx.now() + self.config.ask_after);
    }

    /// A client of another middleware asks for a transaction that may have begun here. The
    /// transaction has no client here any more.
    fn on_ask(&mut self, from: NodeId, id: TxnId, cx: &mut Context<'_>) {
        match self.middleware.known(id) {
            Known::Open(xid) => {
                self.askers.entry(id).or_default().insert(from);
                self.with(cx, |dm, io| dm.rollback(xid, io));
            }
            Known::Committed(at) => {
                cx.send(from, Msg::Told { txn: id, outcome: Some(Outcome::Committed(at)) });
            }
            Known::Untold(_) | Known::Nothing => {
                cx.send(from, Msg::Told { txn: id, outcome: None });
            }
        }
    }

    fn on_told(&mut self, from: NodeId, id: TxnId, outcome: Option<Outcome>, cx: &mut Context<'_>) {
        let Some(asking) = self.asking.get_mut(&id) else { return };
        match outcome {
            None => {
                asking.silent.remove(&from);
                if asking.silent.is_empty() {
                    self.on_ask_timeout(id, cx);
                }
            }
            Some(outcome) => {
                self.asking.remove(&id);
                cx.cancel_timer(Timer::Ask(id));
                let path = if outcome == Outcome::Unknown { UNKNOWABLE } else { "resolved" };
                self.tell(id, outcome, path, cx);
            }
        }
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Context<'_>) {
        match msg {
            Msg::FromAgent(msg) => self.with(cx, |dm, io| dm.on_message(from, msg, io)),
            Msg::Ask { txn } => self.on_ask(from, txn, cx),
            Msg::Told { txn, outcome } => self.on_told(from, txn, outcome, cx),
            Msg::Seen { txn, look, answers } => self.on_seen(from, txn, look, answers, cx),
            Msg::ToAgent(_) | Msg::Peer(_) | Msg::Look { .. } => {
                unreachable!("only a source gets that")
            }
        }
    }
}

/// Number of tries before a transaction goes on without a copy.
const LOOKS: u32 = 3;

/// The rows that a transaction first reads from copies, and the stage of its session meanwhile. None
/// if it is sent to its sources as a whole.
fn looked_at(txn: &Txn) -> Option<(Vec<Key>, Stage)> {
    match &txn.kind {
        Kind::Procedure(ops) if ops.iter().any(|op| matches!(op, Op::Call(_))) => {
            let keys: OrdSet<Key> = txn.reads.iter().chain(&txn.writes).cloned().collect();
            Some((keys.into_iter().collect(), Stage::LookingToCompute))
        }
        Kind::Interactive | Kind::General => {
            Some((txn.reads.clone(), Stage::Looking(txn.reads.clone())))
        }
        Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly => None,
    }
}

/// The reads of a transaction, which fail if their results differ from those of the copies.
fn expected(open: &Open, writes: &Writes) -> Vec<Action> {
    let expect = |(key, read): (&Key, &orthodrome_core::txn::Read)| Action::Expect {
        key: key.clone(),
        read: read.clone(),
        for_update: writes.contains_key(key) || open.txn.writes.binary_search(key).is_ok(),
    };
    open.reads.iter().map(expect).collect()
}

/// Reads of these keys, for update where the transaction has declared that it writes them.
fn reads_of(txn: &Txn, keys: Vec<Key>) -> Vec<Action> {
    let read = |key: Key| Action::Read { for_update: txn.writes.binary_search(&key).is_ok(), key };
    keys.into_iter().map(read).collect()
}

/// Reads of every key that the transaction declares.
fn lock_all(txn: &Txn) -> Vec<Action> {
    let keys: OrdSet<Key> = txn.reads.iter().chain(&txn.writes).cloned().collect();
    reads_of(txn, keys.into_iter().collect())
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.middleware)?;
        for (txn, open) in &self.open {
            write!(f, " | {txn} is {}", open.xid)?;
        }
        for (txn, asking) in &self.asking {
            write!(f, " | asks {:?} about {txn}", asking.silent)?;
        }
        Ok(())
    }
}
