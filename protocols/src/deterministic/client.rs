//! The client side: gives the transactions of one gateway's clients to servers, and returns the
//! answers. It decides nothing and stores nothing durably: a submitted transaction runs once,
//! however often it is submitted.

use std::fmt;
use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, ShareId, TxnId};
use orthodrome_core::machine::{Input, Leak, Machine, Setup, UNKNOWABLE};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::session::is_below;
use orthodrome_core::time::Duration;
use orthodrome_core::txn::{AbortReason, Decision, Key, Kind, Outcome, Reads, Txn};

use super::message::{Msg, Record};
use super::placement::shares;
use super::{Config, Cx, Deterministic, Note, Timer};
use crate::functor::Functor;
use crate::gateway::UNDECIDED;
use crate::waiting::{Helpers, RetryState};

/// The client side of the deterministic protocols.
#[derive(Debug)]
pub struct Client {
    config: Arc<Config>,
    cluster: Arc<Cluster>,
    helpers: Helpers,
    open: OrdMap<TxnId, Open>,
    /// The size of the submitted transactions that have not been answered.
    open_bytes: usize,
}

/// A transaction whose client waits.
#[derive(Debug)]
struct Open {
    txn: Txn,
    phase: Phase,
    /// True if its client asked for its outcome.
    is_resolved: bool,
    /// The reads that its client has received.
    reads: Reads,
    round: u32,
    /// The values found so far for the keys that it looks up.
    found: Reads,
    /// The server that was asked, for each share.
    servers: OrdMap<ShareId, NodeId>,
    asked: RetryState,
    /// True if the values found are older than its client knows (R11); the keys are looked up
    /// again.
    is_behind: bool,
}

impl Phase {
    /// Its size in bytes.
    fn size(&self) -> usize {
        match self {
            Self::Looking(_) | Self::Deciding => 0,
            Self::Submitted(functor) => functor.size(),
        }
    }
}

/// How long after an answer with older versions than the client knows another server is asked.
const AGAIN_AFTER: Duration = Duration::from_millis(5);

#[derive(Debug)]
enum Phase {
    /// Its client wants to read these keys.
    Looking(Vec<Key>),
    /// Waiting for the client's decision.
    Deciding,
    /// Submitted: it will run, if it has not run yet.
    Submitted(Arc<Functor>),
}

impl Machine<Deterministic> for Client {
    fn new(setup: Setup<Deterministic>, _: Vec<Record>, _: &mut Cx<'_>) -> Self {
        let Setup { node, cluster, config, engine: _, workers: _, is_replacement: _ } = setup;
        let helpers = Helpers::new(&cluster, node, config.answer_after);
        Self { config, cluster, helpers, open: OrdMap::new(), open_bytes: 0 }
    }

    fn step(&mut self, input: Input<Deterministic>, cx: &mut Cx<'_>) {
        match input {
            Input::Begin(txn) => self.on_begin(txn, cx),
            Input::Read { txn, keys } => self.on_read(txn, keys, cx),
            Input::Decide { txn, decision } => self.on_decide(txn, decision, cx),
            Input::Resolve { txn, reads, decision } => self.on_resolve(txn, reads, decision, cx),
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(Timer::Open(txn)) => self.on_open_timeout(txn, cx),
            Input::Timer(Timer::Replication(..) | Timer::Sweep | Timer::Release(_))
            | Input::Durable(_)
            | Input::Admin(_) => unreachable!("a server's input at a client"),
        }
    }

    fn flush(&mut self, _: &mut Cx<'_>) {}

    fn assert_invariants(&self) {
        for (id, open) in &self.open {
            assert_eq!(*id, open.txn.id, "a transaction under another's name");
        }
        let bytes: usize = self.open.values().map(|open| open.phase.size()).sum();
        assert_eq!(bytes, self.open_bytes, "what is under way is not counted");
    }

    fn leaks(&self) -> Vec<Leak> {
        vec![("open transactions", self.open.len())]
    }
}

impl Client {
    fn on_begin(&mut self, txn: Txn, cx: &mut Cx<'_>) {
        let id = txn.id;
        if self.open.contains_key(&id) {
            // It was already begun here: its answers will arrive.
            return;
        }
        let phase = match &txn.kind {
            Kind::Interactive | Kind::General if txn.reads.is_empty() => {
                cx.reads(id, Reads::new());
                Phase::Deciding
            }
            Kind::Interactive | Kind::General => Phase::Looking(txn.reads.clone()),
            Kind::Procedure(ops) if txn.reads.is_empty() && txn.writes.is_empty() => {
                cx.reads(id, Reads::new());
                let functor = Functor::procedure(&txn, ops.clone());
                cx.finish(id, functor.outcome_without_keys(cx.clock().now), "empty");
                return;
            }
            Kind::ReadOnly | Kind::StaleReadOnly if txn.reads.is_empty() => {
                cx.reads(id, Reads::new());
                cx.finish(id, Outcome::Committed(cx.clock().now), "empty");
                return;
            }
            Kind::Procedure(ops) => Phase::Submitted(Functor::procedure(&txn, ops.clone())),
            Kind::ReadOnly => Phase::Submitted(Functor::procedure(&txn, Vec::new())),
            // The states of servers with different shares together may never have existed. Nor is
            // one server's share consistent: the server may wait for other shares with one
            // transaction, and have run the next.
            Kind::StaleReadOnly if self.cluster.shares() > 1 => {
                Phase::Submitted(Functor::procedure(&txn, Vec::new()))
            }
            Kind::StaleReadOnly => Phase::Looking(txn.reads.clone()),
        };
        if self.is_full(&phase) {
            // No server knows it yet.
            cx.note(Note::Shed);
            cx.finish(id, Outcome::Aborted(AbortReason::Overload), "overload");
            return;
        }
        self.open((txn, false), phase, Reads::new(), cx);
    }

    /// True if there is no room for one more transaction in this phase.
    fn is_full(&self, phase: &Phase) -> bool {
        self.open_bytes > 0 && self.open_bytes + phase.size() > self.config.open_bytes
    }

    fn open(
        &mut self,
        (txn, is_resolved): (Txn, bool),
        phase: Phase,
        reads: Reads,
        cx: &mut Cx<'_>,
    ) {
        let (id, asked) = (txn.id, RetryState::new(cx.now()));
        let (found, servers, round) = (Reads::new(), OrdMap::new(), 1);
        self.open_bytes += phase.size();
        let is_behind = false;
        let open = Open { txn, phase, is_resolved, reads, round, found, servers, asked, is_behind };
        self.open.insert(id, open);
        self.choose(id, true, cx);
        self.send(id, cx);
    }

    /// Sends the requests of the transaction's new phase.
    fn ask(&mut self, id: TxnId, phase: Phase, cx: &mut Cx<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        self.open_bytes = (self.open_bytes + phase.size()).saturating_sub(open.phase.size());
        open.phase = phase;
        open.found.clear();
        open.asked = RetryState::new(cx.now());
        if self.cluster.shares() > 1 {
            self.choose(id, true, cx);
        }
        self.send(id, cx);
    }

    /// Chooses the servers to ask. A lookup needs one server of each share of its keys. To run, the
    /// transaction needs one server of any share that it accesses.
    fn choose(&mut self, id: TxnId, is_first: bool, cx: &Cx<'_>) {
        let Self { cluster, helpers, open, .. } = self;
        let Some(open) = open.get_mut(&id) else { return };
        let share_at = |node| cluster.share_at(node).0;
        match &open.phase {
            Phase::Looking(keys) => {
                let missing = keys.iter().filter(|key| !open.found.contains_key(key));
                for share in shares(cluster, missing) {
                    let is_able = |node| cluster.shares() == 1 || share_at(node) == share;
                    let server = helpers.next_of(is_first, cx.now(), is_able);
                    open.servers.insert(share, server);
                }
            }
            Phase::Submitted(functor) => {
                let touched = shares(cluster, functor.reads.iter().chain(&functor.writes));
                let is_able = |node| cluster.shares() == 1 || touched.contains(&share_at(node));
                let server = helpers.next_of(is_first, cx.now(), is_able);
                open.servers = OrdMap::from([(share_at(server), server)]);
            }
            Phase::Deciding => {
                let server = helpers.next(is_first, cx.now());
                open.servers = OrdMap::from([(share_at(server), server)]);
            }
        }
    }

    fn send(&self, id: TxnId, cx: &mut Cx<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        match &open.phase {
            Phase::Deciding => return,
            Phase::Looking(keys) => {
                let (txn, round) = (id, open.round);
                let missing = || keys.iter().filter(|key| !open.found.contains_key(key));
                for share in shares(&self.cluster, missing()) {
                    let Some(&server) = open.servers.get(&share) else { continue };
                    let here = missing().filter(|key| self.cluster.share_of(key) == share);
                    cx.send(server, Msg::Look { txn, round, keys: here.cloned().collect() });
                }
            }
            Phase::Submitted(functor) => {
                for &server in open.servers.values() {
                    cx.send(server, Msg::Submit { functor: functor.clone() });
                }
            }
        }
        let timeout = open.asked.timeout(self.config.answer_after);
        cx.set_timer(Timer::Open(id), cx.now() + timeout);
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Cx<'_>) {
        self.helpers.suspects.remove(from);
        match msg {
            Msg::Answer { txn, outcome, reads } => self.on_answer(txn, outcome, reads, cx),
            Msg::TooOld { txn, outcome } => self.on_too_old(txn, outcome, cx),
            Msg::Found { txn, round, reads } => self.on_found(txn, round, reads, cx),
            Msg::Submit { .. }
            | Msg::Look { .. }
            | Msg::Sequence { .. }
            | Msg::NotLeader { .. }
            | Msg::Replication { .. }
            | Msg::RemoteReads { .. }
            | Msg::WantReads { .. }
            | Msg::ReadsGone { .. }
            | Msg::Covered { .. }
            | Msg::WantState { .. }
            | Msg::StatePiece { .. }
            | Msg::Digests { .. } => unreachable!("a server's message at a client"),
        }
    }

    fn on_found(&mut self, id: TxnId, round: u32, reads: Reads, cx: &mut Cx<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Looking(keys) = &open.phase else { return };
        if open.round != round {
            // A second answer: the client may have computed from the first.
            return;
        }
        if is_below(&open.txn.floors, &reads) {
            // This server has not run yet a transaction that the client knows. Another server may
            // have, or this one will.
            cx.note(Note::BehindClient);
            open.is_behind = true;
            cx.set_timer(Timer::Open(id), cx.now() + AGAIN_AFTER);
            return;
        }
        for (key, read) in reads {
            open.found.entry(key).or_insert(read);
        }
        if !keys.iter().all(|key| open.found.contains_key(key)) {
            return;
        }
        let reads = std::mem::take(&mut open.found);
        if open.txn.kind == Kind::StaleReadOnly {
            // The transactions that a server has run include all transactions that precede any of
            // them: a consistent state.
            let written = reads.values().filter(|read| !read.version.is_unwritten());
            let newest = written.map(|read| read.version.timestamp).max();
            cx.reads(id, reads);
            self.finish(id, Outcome::Committed(newest.unwrap_or_default()), "stale", cx);
            return;
        }
        // The reads of an earlier round do not change. The end of the transaction finds out whether
        // they are still current.
        let told = reads.into_iter().map(|(key, read)| {
            let read = open.reads.entry(key.clone()).or_insert(read).clone();
            (key, read)
        });
        let told: Reads = told.collect();
        open.phase = Phase::Deciding;
        cx.cancel_timer(Timer::Open(id));
        cx.reads(id, told);
    }

    /// The next round of a general transaction.
    fn on_read(&mut self, id: TxnId, keys: Vec<Key>, cx: &mut Cx<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if !matches!((&open.phase, &open.txn.kind), (Phase::Deciding, Kind::General)) {
            return;
        }
        let known = |key: &Key| Some((key.clone(), open.reads.get(key)?.clone()));
        let held: Reads = keys.iter().filter_map(known).collect();
        if keys.iter().all(|key| held.contains_key(key)) {
            cx.reads(id, held);
            return;
        }
        open.round += 1;
        self.ask(id, Phase::Looking(keys), cx);
    }

    /// The client of an interactive or general transaction has decided.
    fn on_decide(&mut self, id: TxnId, decision: Decision, cx: &mut Cx<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        match (decision, &open.phase) {
            (Decision::Commit(writes), Phase::Deciding) => {
                let is_free = matches!(open.txn.kind, Kind::General);
                if !is_free && !open.txn.declares(&writes) {
                    self.finish(id, Outcome::Aborted(AbortReason::Client), "abort", cx);
                } else if open.reads.is_empty() && writes.is_empty() {
                    self.finish(id, Outcome::Committed(cx.clock().now), "empty", cx);
                } else {
                    // No server knows it yet, so it can still get the id that names its decision.
                    let decided = open.txn.decided(&open.reads, &writes);
                    open.txn.id = decided;
                    let functor = Functor::validation(&open.txn, &open.reads, writes);
                    let phase = Phase::Submitted(functor);
                    let Some(open) = self.open.remove(&id) else { return };
                    let id = decided;
                    self.open.insert(id, open);
                    if self.is_full(&phase) {
                        // No sequencer knows it yet.
                        cx.note(Note::Shed);
                        self.finish(id, Outcome::Aborted(AbortReason::Overload), "overload", cx);
                    } else {
                        self.ask(id, phase, cx);
                    }
                }
            }
            // No sequencer knows it yet.
            (Decision::Abort, Phase::Deciding | Phase::Looking(_)) => {
                self.finish(id, Outcome::Aborted(AbortReason::Client), "abort", cx);
            }
            (Decision::Commit(_) | Decision::Abort, Phase::Looking(_) | Phase::Submitted(_)) => {}
        }
    }

    /// A client asks for the outcome of a transaction that it began here or at another gateway
    /// (R1). If the transaction may have been submitted, it is submitted again: it runs, if it has
    /// not run yet.
    fn on_resolve(&mut self, txn: Txn, reads: Reads, decision: Option<Decision>, cx: &mut Cx<'_>) {
        let id = match (&decision, &txn.kind) {
            (Some(Decision::Commit(writes)), Kind::Interactive | Kind::General) => {
                txn.decided(&reads, writes)
            }
            (_, _) => txn.id,
        };
        let txn = Txn { id, ..txn };
        if self.open.contains_key(&id) {
            return;
        }
        cx.note(Note::Resolved);
        let functor = match (decision, &txn.kind) {
            (_, Kind::Procedure(ops)) => Functor::procedure(&txn, ops.clone()),
            (_, Kind::ReadOnly | Kind::StaleReadOnly) => Functor::procedure(&txn, Vec::new()),
            (Some(Decision::Commit(writes)), Kind::Interactive | Kind::General) => {
                let is_free = matches!(txn.kind, Kind::General);
                let has_reads = txn.reads.iter().all(|key| reads.contains_key(key));
                if !has_reads || !(is_free || txn.declares(&writes)) {
                    // It cannot have been submitted.
                    cx.finish(id, Outcome::Aborted(AbortReason::Client), "recovered");
                    return;
                }
                Functor::validation(&txn, &reads, writes)
            }
            (Some(Decision::Abort), Kind::Interactive | Kind::General) => {
                cx.finish(id, Outcome::Aborted(AbortReason::Client), "recovered");
                return;
            }
            // Without the decision nobody knows its id.
            (None, Kind::Interactive | Kind::General) => {
                cx.finish(id, Outcome::Unknown, UNDECIDED);
                return;
            }
        };
        if functor.reads.is_empty() && functor.writes.is_empty() {
            cx.finish(id, functor.outcome_without_keys(cx.clock().now), "empty");
            return;
        }
        let phase = Phase::Submitted(functor);
        if self.is_full(&phase) {
            // It may have run: its client asks again later.
            cx.note(Note::Shed);
            cx.finish(id, Outcome::Unknown, "overload");
            return;
        }
        self.open((txn, true), phase, reads, cx);
    }

    /// It ran so long ago that its reads are forgotten. A client that resolves a writing
    /// transaction receives the outcome, if that is known. A client that needs the reads cannot be
    /// answered.
    fn on_too_old(&mut self, id: TxnId, outcome: Option<Outcome>, cx: &mut Cx<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        let needs_reads = !open.is_resolved || !matches!(open.txn.kind, Kind::Procedure(_));
        match outcome.filter(|_| !needs_reads) {
            Some(outcome) => self.finish(id, outcome, "too-old", cx),
            None => self.finish(id, Outcome::Unknown, UNKNOWABLE, cx),
        }
    }

    fn on_answer(&mut self, id: TxnId, outcome: Outcome, reads: Reads, cx: &mut Cx<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        match (outcome, &open.txn.kind) {
            (Outcome::Committed(_), Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly) => {
                cx.reads(id, reads)
            }
            (Outcome::Committed(_), Kind::Interactive | Kind::General)
            | (Outcome::Aborted(_) | Outcome::Unknown, _) => {}
        }
        self.finish(id, outcome, "sequenced", cx);
    }

    fn finish(&mut self, id: TxnId, outcome: Outcome, path: &'static str, cx: &mut Cx<'_>) {
        if let Some(open) = self.open.remove(&id) {
            self.open_bytes = self.open_bytes.saturating_sub(open.phase.size());
        }
        cx.cancel_timer(Timer::Open(id));
        cx.finish(id, outcome, path);
    }

    /// No answer arrived for a while: another server is asked.
    fn on_open_timeout(&mut self, id: TxnId, cx: &mut Cx<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if std::mem::take(&mut open.is_behind) {
            self.choose(id, true, cx);
            self.send(id, cx);
            return;
        }
        let Some(open) = self.open.get(&id) else { return };
        cx.note(Note::Resent);
        let missing: OrdSet<ShareId> = match &open.phase {
            Phase::Looking(keys) => {
                shares(&self.cluster, keys.iter().filter(|key| !open.found.contains_key(key)))
            }
            Phase::Submitted(_) | Phase::Deciding => open.servers.keys().copied().collect(),
        };
        for server in missing.iter().filter_map(|share| open.servers.get(share)) {
            self.helpers.suspects.add(*server, cx.now());
        }
        self.choose(id, false, cx);
        let Some(open) = self.open.get_mut(&id) else { return };
        open.asked = open.asked.again(cx.now());
        self.send(id, cx);
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.open.is_empty() {
            return f.write_str("idle");
        }
        for (at, (id, open)) in self.open.iter().enumerate() {
            let separator = if at == 0 { "" } else { " | " };
            let servers: Vec<String> = open.servers.values().map(NodeId::to_string).collect();
            let servers = servers.join(", ");
            match &open.phase {
                Phase::Looking(keys) => {
                    write!(f, "{separator}{id} looks at {keys:?} through {servers}")?;
                }
                Phase::Deciding => write!(f, "{separator}{id} deciding")?,
                Phase::Submitted(_) => write!(f, "{separator}{id} submitted to {servers}")?,
            }
        }
        Ok(())
    }
}
