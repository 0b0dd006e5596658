//! The client side of Ocean Vista: passes the transactions of one gateway's callers to
//! coordinators, and the answers back. It decides nothing and stores nothing.

use std::fmt;
use std::sync::Arc;

use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::machine::{Cx, Input, Leak, Machine, Setup, UNKNOWABLE};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::session::{highest, is_below};
use orthodrome_core::time::{Duration, Time, Timestamp, nanos};
use orthodrome_core::txn::{AbortReason, Decision, Key, Kind, Outcome, Reads, Txn};

use super::message::{Functor, Msg, Path, Reason, Record};
use super::{Config, Note, OceanVista, Timer};
use crate::gateway::UNDECIDED;
use crate::waiting::{Helpers, RetryState};

/// The client side of Ocean Vista.
#[derive(Debug)]
pub struct Client {
    config: Arc<Config>,
    /// Servers that may coordinate.
    servers: Helpers,
    /// Servers whose last message said that they have no lease, and when.
    inactive: OrdMap<NodeId, Time>,
    /// When each of those was last asked nevertheless.
    probed: OrdMap<NodeId, Time>,
    open: OrdMap<TxnId, Open>,
}

/// A transaction with a waiting caller.
#[derive(Debug)]
struct Open {
    txn: Txn,
    phase: Phase,
    /// The reads that its caller has received.
    reads: Reads,
    /// The time of the reads.
    at: Option<Timestamp>,
    round: u32,
    coordinator: NodeId,
    /// Servers that did not answer about it; cleared when all have been asked.
    silent: OrdSet<NodeId>,
    asked: RetryState,
    /// True if its coordinator has declined it, as all nearby servers have.
    is_declined: bool,
    /// Number of times that it was declined.
    declines: u32,
    /// True if its caller asks for its outcome.
    is_resolved: bool,
}

#[derive(Debug)]
enum Phase {
    /// Its caller reads these keys.
    Looking(Vec<Key>),
    /// The caller is deciding.
    Deciding,
    /// A coordinator runs it.
    Submitted(Arc<Functor>),
    /// The coordinator is lost or overloaded, so another one finds out the outcome. With the reason
    /// for the abort if the transaction is unknown.
    Inquiring(Arc<Functor>, AbortReason),
}

impl Machine<OceanVista> for Client {
    fn new(setup: Setup<OceanVista>, _: Vec<Record>, _: &mut Cx<'_, OceanVista>) -> Self {
        let Setup { node, cluster, config, engine: _, workers: _, is_replacement: _ } = setup;
        let servers = Helpers::new(&cluster, node, config.answer_after);
        let (inactive, probed) = (OrdMap::new(), OrdMap::new());
        Self { config, servers, inactive, probed, open: OrdMap::new() }
    }

    fn step(&mut self, input: Input<OceanVista>, cx: &mut Cx<'_, OceanVista>) {
        match input {
            Input::Begin(txn) => self.on_begin(txn, cx),
            Input::Read { txn, keys } => self.on_read(txn, keys, cx),
            Input::Decide { txn, decision } => self.on_decide(txn, decision, cx),
            Input::Resolve { txn, reads, decision } => self.on_resolve(txn, reads, decision, cx),
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(Timer::Open(txn)) => self.on_open_timeout(txn, cx),
            Input::Timer(
                Timer::Report | Timer::Gossip | Timer::Sweep | Timer::Ask | Timer::Directory(_),
            )
            | Input::Durable(_)
            | Input::Admin(_) => unreachable!("a server's input at a client"),
        }
    }

    fn flush(&mut self, _: &mut Cx<'_, OceanVista>) {}

    fn assert_invariants(&self) {
        for (id, open) in &self.open {
            assert_eq!(*id, open.txn.id, "a transaction under another's name");
        }
    }

    fn leaks(&self) -> Vec<Leak> {
        vec![("open transactions", self.open.len())]
    }
}

/// The history of a request.
#[derive(Clone, Copy, Debug)]
enum Tried {
    /// The request is new.
    Never,
    /// The server that was asked does not answer, or is overloaded.
    Silent,
    /// Servers without a lease declined it this number of times.
    Declined(u32),
}

/// Number of refusals nearby after which a request is also sent to servers of other regions: the
/// nearby servers may be cut off from the directory.
const DECLINES_NEARBY: u32 = 4;

/// Number of refusals for which the pause before the next try is doubled.
const DECLINE_DOUBLINGS: u32 = 4;

impl Client {
    /// True if a server has recently reported that it has no lease.
    fn is_inactive(&self, server: NodeId, now: Time) -> bool {
        let shortly = self.config.sweep_interval * 5;
        self.inactive.get(&server).is_some_and(|&at| now.since(at) < shortly)
    }

    /// Chooses a server to coordinate a request with this history, nearby if possible. An
    /// unanswered request does not go to a server that was ever suspected. A declined request goes
    /// to any of those nearby, so that the first server that is back does not get all requests that
    /// waited for all of them. Once all servers are suspected or have declined it, it goes to a
    /// server that it has not been tried with, and not to the current one, `but`.
    fn coordinator(
        &mut self,
        tried: Tried,
        (but, silent): (Option<NodeId>, &OrdSet<NodeId>),
        now: Time,
    ) -> NodeId {
        self.servers.turn();
        let servers = &self.servers;
        let is_suspect = |id| servers.suspects.is(id, now);
        let is_trusted = |id| !servers.suspects.was(id);
        let is_other = |id| Some(id) != but;
        let is_untried = |id| is_other(id) && !silent.contains(&id);
        let well = match tried {
            Tried::Never => servers
                .nearest(|id| !is_suspect(id) && !self.is_inactive(id, now))
                .or_else(|| servers.nearest(|id| !is_suspect(id))),
            Tried::Silent => servers
                .nearest(|id| is_trusted(id) && !self.is_inactive(id, now))
                .or_else(|| servers.nearest(is_trusted)),
            Tried::Declined(times) if times < DECLINES_NEARBY => servers.nearest(is_trusted),
            Tried::Declined(_) => servers.any(|id| is_other(id) && is_trusted(id)),
        };
        let any = well.or_else(|| servers.any(is_untried)).or_else(|| servers.any(is_other));
        let any = any.or_else(|| servers.any(|_| true));
        any.unwrap_or_default()
    }

    fn on_begin(&mut self, txn: Txn, cx: &mut Cx<'_, OceanVista>) {
        let id = txn.id;
        if self.open.contains_key(&id) {
            // It has already been begun here, so its answers will arrive.
            return;
        }
        let coordinator = self.coordinator(Tried::Never, (None, &OrdSet::new()), cx.now());
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
            Kind::ReadOnly | Kind::StaleReadOnly => {
                Phase::Submitted(Functor::procedure(&txn, Vec::new()))
            }
        };
        let open = Open {
            txn,
            phase,
            reads: Reads::new(),
            at: None,
            round: 1,
            coordinator,
            silent: OrdSet::new(),
            asked: RetryState::new(cx.now()),
            is_declined: false,
            declines: 0,
            is_resolved: false,
        };
        self.open.insert(id, open);
        self.ask(id, cx);
    }

    /// Sends the request of the transaction's current phase.
    fn ask(&mut self, id: TxnId, cx: &mut Cx<'_, OceanVista>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.asked = RetryState::new(cx.now());
        self.send(id, cx);
    }

    /// True if a server may be asked now. A server without a lease is asked only from time to time,
    /// to learn when it has one. All waiting requests at once would keep it from getting a lease.
    fn may_ask(&mut self, server: NodeId, now: Time) -> bool {
        if !self.is_inactive(server, now) {
            return true;
        }
        let interval = self.config.sweep_interval;
        let is_due = self.probed.get(&server).is_none_or(|&at| now.since(at) >= interval);
        if is_due {
            self.probed.insert(server, now);
        }
        is_due
    }

    /// Lets a transaction wait until a server has a lease: longer each time, and randomized.
    fn back_off(&mut self, id: TxnId, cx: &mut Cx<'_, OceanVista>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.is_declined = true;
        let pause = self.config.sweep_interval * (1 << open.declines.min(DECLINE_DOUBLINGS));
        let jitter = cx.rng().below(1 + nanos(pause) / 2);
        cx.set_timer(Timer::Open(id), cx.now() + pause + Duration::from_nanos(jitter));
    }

    fn send(&mut self, id: TxnId, cx: &mut Cx<'_, OceanVista>) {
        let Some(coordinator) = self.open.get(&id).map(|open| open.coordinator) else { return };
        if !self.may_ask(coordinator, cx.now()) {
            if let Some(open) = self.open.get_mut(&id) {
                open.declines = open.declines.saturating_add(1);
            }
            self.back_off(id, cx);
            return;
        }
        let Some(open) = self.open.get_mut(&id) else { return };
        open.is_declined = false;
        let msg = match &open.phase {
            Phase::Deciding => return,
            Phase::Looking(keys) => {
                Msg::Look { txn: id, round: open.round, keys: keys.clone(), at: open.at }
            }
            Phase::Submitted(functor) => Msg::Submit { functor: functor.clone() },
            Phase::Inquiring(functor, _) => Msg::Inquire { functor: functor.clone() },
        };
        cx.send(open.coordinator, msg);
        let timeout = open.asked.timeout(self.config.answer_after);
        cx.set_timer(Timer::Open(id), cx.now() + timeout);
    }

    fn on_found(
        &mut self,
        id: TxnId,
        round: u32,
        (at, reads): (Timestamp, Reads),
        cx: &mut Cx<'_, OceanVista>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Looking(keys) = &open.phase else { return };
        if open.round != round || open.at.is_some_and(|chosen| chosen != at) {
            // A second answer: the caller may already have used the first.
            return;
        }
        if is_below(&open.txn.floors, &reads) {
            cx.note(Note::BehindClient);
            if open.at.is_some() {
                // All its rounds read as of one time, which is too early for this key (R11).
                self.finish(id, Outcome::Aborted(AbortReason::StaleRead), "behind", cx);
                return;
            }
            // The coordinator chose a state that every replica has, which is slightly too old
            // (R11).
            open.at = Some(highest(&open.txn.floors, open.txn.floors.keys()).next());
            self.ask(id, cx);
            return;
        }
        open.at = Some(at);
        let round: Reads =
            keys.iter().filter_map(|key| Some((key.clone(), reads.get(key)?.clone()))).collect();
        open.reads.extend(reads);
        self.tell(id, round, cx);
    }

    fn tell(&mut self, id: TxnId, round: Reads, cx: &mut Cx<'_, OceanVista>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.phase = Phase::Deciding;
        cx.cancel_timer(Timer::Open(id));
        cx.reads(id, round);
    }

    /// Handles the next round of a general transaction.
    fn on_read(&mut self, id: TxnId, keys: Vec<Key>, cx: &mut Cx<'_, OceanVista>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if !matches!((&open.phase, &open.txn.kind), (Phase::Deciding, Kind::General)) {
            return;
        }
        let known = |key: &Key| Some((key.clone(), open.reads.get(key)?.clone()));
        let held: Reads = keys.iter().filter_map(known).collect();
        if keys.iter().all(|key| held.contains_key(key)) {
            self.tell(id, held, cx);
            return;
        }
        open.round += 1;
        open.phase = Phase::Looking(keys);
        self.ask(id, cx);
    }

    /// Handles the decision of an interactive or general transaction's caller.
    fn on_decide(&mut self, id: TxnId, decision: Decision, cx: &mut Cx<'_, OceanVista>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let is_asked = matches!(open.phase, Phase::Deciding);
        let is_reading = matches!(open.phase, Phase::Looking(_));
        match decision {
            Decision::Commit(writes) if is_asked => {
                let is_free = matches!(open.txn.kind, Kind::General);
                if !is_free && !open.txn.declares(&writes) {
                    self.finish(id, Outcome::Aborted(AbortReason::Client), "abort", cx);
                } else if open.reads.is_empty() && writes.is_empty() {
                    self.finish(id, Outcome::Committed(cx.clock().now), "empty", cx);
                } else {
                    // No server knows it yet, so it can still get the id that names its decision.
                    let decided = open.txn.decided(&open.reads, &writes);
                    open.txn.id = decided;
                    open.phase =
                        Phase::Submitted(Functor::validation(&open.txn, &open.reads, writes));
                    let Some(open) = self.open.remove(&id) else { return };
                    self.open.insert(decided, open);
                    self.ask(decided, cx);
                }
            }
            // Nothing has been stored yet.
            Decision::Abort if is_asked || is_reading => {
                self.finish(id, Outcome::Aborted(AbortReason::Client), "abort", cx);
            }
            Decision::Commit(_) | Decision::Abort => {}
        }
    }

    /// Handles a caller's question about the outcome of a transaction that it began here or
    /// elsewhere.
    fn on_resolve(
        &mut self,
        txn: Txn,
        reads: Reads,
        decision: Option<Decision>,
        cx: &mut Cx<'_, OceanVista>,
    ) {
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
        if txn.is_read_only() {
            // It changes nothing, so it can be run again.
            self.on_begin(txn, cx);
            return;
        }
        cx.note(Note::Resolved);
        let functor = match (decision, &txn.kind) {
            (_, Kind::Procedure(ops)) => Functor::procedure(&txn, ops.clone()),
            (Some(Decision::Commit(writes)), _) => Functor::validation(&txn, &reads, writes),
            (Some(Decision::Abort), _) => {
                // Nothing of it was ever stored.
                cx.finish(id, Outcome::Aborted(AbortReason::Client), "recovered");
                return;
            }
            (None, _) => {
                // Without the decision nobody knows its id.
                cx.finish(id, Outcome::Unknown, UNDECIDED);
                return;
            }
        };
        if functor.reads.is_empty() && functor.writes.is_empty() {
            cx.finish(id, functor.outcome_without_keys(cx.clock().now), "empty");
            return;
        }
        let phase = if functor.is_read_only() {
            Phase::Submitted(functor)
        } else {
            Phase::Inquiring(functor, AbortReason::Recovery)
        };
        let coordinator = self.coordinator(Tried::Never, (None, &OrdSet::new()), cx.now());
        let open = Open {
            txn,
            phase,
            reads,
            at: None,
            round: 1,
            coordinator,
            silent: OrdSet::new(),
            asked: RetryState::new(cx.now()),
            is_declined: false,
            declines: 0,
            is_resolved: true,
        };
        self.open.insert(id, open);
        self.ask(id, cx);
    }

    fn on_answer(
        &mut self,
        id: TxnId,
        outcome: Outcome,
        (reads, path): (Option<Reads>, Path),
        cx: &mut Cx<'_, OceanVista>,
    ) {
        let Some(open) = self.open.get(&id) else { return };
        let is_told = match open.txn.kind {
            Kind::Interactive | Kind::General => true,
            Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly => false,
        };
        let (outcome, path) = match (&open.phase, outcome) {
            // It is too old: the replicas have forgotten it.
            (_, Outcome::Unknown) => (Outcome::Unknown, UNKNOWABLE),
            (Phase::Inquiring(_, reason), Outcome::Aborted(AbortReason::Recovery)) => {
                let is_busy = *reason == AbortReason::Overload;
                (Outcome::Aborted(*reason), if is_busy { "shed" } else { path.name() })
            }
            (
                Phase::Looking(_) | Phase::Deciding | Phase::Submitted(_) | Phase::Inquiring(..),
                outcome,
            ) => (outcome, path.name()),
        };
        match (outcome, reads, is_told) {
            (Outcome::Committed(_), Some(reads), false) => cx.reads(id, reads),
            (Outcome::Committed(_), None, false) if !open.is_resolved => {
                // It has committed, and its reads are lost; the caller may ask for the outcome.
                self.finish(id, Outcome::Unknown, path, cx);
                return;
            }
            (Outcome::Committed(_) | Outcome::Aborted(_) | Outcome::Unknown, _, _) => {}
        }
        self.finish(id, outcome, path, cx);
    }

    fn finish(
        &mut self,
        id: TxnId,
        outcome: Outcome,
        path: &'static str,
        cx: &mut Cx<'_, OceanVista>,
    ) {
        self.open.remove(&id);
        cx.cancel_timer(Timer::Open(id));
        cx.finish(id, outcome, path);
    }

    /// Handles a server's refusal of a request.
    fn on_declined(
        &mut self,
        from: NodeId,
        id: TxnId,
        reason: Reason,
        cx: &mut Cx<'_, OceanVista>,
    ) {
        if self.open.get(&id).is_none_or(|open| open.coordinator != from) {
            return;
        }
        let is_news = !self.is_inactive(from, cx.now());
        if reason == Reason::Inactive {
            self.inactive.insert(from, cx.now());
        }
        let Some(open) = self.open.get_mut(&id) else { return };
        match (reason, &open.phase) {
            // A late refusal: another server has answered, or the question was repeated.
            (_, Phase::Deciding)
            | (Reason::Collected | Reason::TooLarge, Phase::Submitted(_) | Phase::Inquiring(..))
            | (Reason::Busy, Phase::Looking(_) | Phase::Inquiring(..)) => {}
            (Reason::TooLarge, Phase::Looking(_)) => {
                self.finish(id, Outcome::Aborted(AbortReason::TooLarge), "refused", cx);
            }
            (Reason::Collected, Phase::Looking(_)) => {
                // Its caller decided so late that others have, or may have, overwritten its reads.
                self.finish(id, Outcome::Aborted(AbortReason::StaleRead), "refused", cx);
            }
            (Reason::Busy, Phase::Submitted(functor)) if !functor.is_read_only() => {
                // An earlier copy of the request may have been accepted nevertheless.
                open.phase = Phase::Inquiring(functor.clone(), AbortReason::Overload);
                self.move_on(id, Tried::Silent, cx.now());
                self.ask(id, cx);
            }
            (Reason::Busy, Phase::Submitted(_)) => {
                self.finish(id, Outcome::Aborted(AbortReason::Overload), "shed", cx);
            }
            (Reason::Inactive, _) => {
                cx.note(Note::Declined);
                open.declines = open.declines.saturating_add(1);
                if is_news {
                    let tried = Tried::Declined(open.declines);
                    self.move_on(id, tried, cx.now());
                    self.send(id, cx);
                } else {
                    // No other server can be asked now, for example when all have just started.
                    self.back_off(id, cx);
                }
            }
        }
    }

    /// Moves a transaction to another coordinator. If two coordinators have the transaction, it is
    /// stored at most once, so this is safe even if the first one is alive.
    fn move_on(&mut self, id: TxnId, tried: Tried, now: Time) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if self.servers.all().all(|server| open.silent.contains(&server)) {
            open.silent = [open.coordinator].into();
        }
        let (but, silent) = (Some(open.coordinator), open.silent.clone());
        let next = self.coordinator(tried, (but, &silent), now);
        if let Some(open) = self.open.get_mut(&id) {
            open.coordinator = next;
        }
    }

    /// Handles the time-out of a request.
    fn on_open_timeout(&mut self, id: TxnId, cx: &mut Cx<'_, OceanVista>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        cx.note(Note::Resent);
        if open.is_declined {
            let tried = Tried::Declined(open.declines);
            self.move_on(id, tried, cx.now());
            self.send(id, cx);
            return;
        }
        let coordinator = open.coordinator;
        self.servers.suspects.add(coordinator, cx.now());
        let Some(open) = self.open.get_mut(&id) else { return };
        if let Phase::Submitted(functor) = &open.phase
            && !functor.is_read_only()
            && open.asked.times > 0
        {
            open.phase = Phase::Inquiring(functor.clone(), AbortReason::Recovery);
        }
        // The first time, the message may just have been lost.
        let is_first = matches!(open.phase, Phase::Submitted(_)) && open.asked.times == 0;
        open.asked = open.asked.again(cx.now());
        open.silent.insert(coordinator);
        if !is_first {
            self.move_on(id, Tried::Silent, cx.now());
        }
        self.send(id, cx);
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Cx<'_, OceanVista>) {
        self.servers.suspects.remove(from);
        if !matches!(msg, Msg::Declined { .. }) {
            self.inactive.remove(&from);
        }
        match msg {
            Msg::Answer { txn, outcome, reads, path } => {
                self.on_answer(txn, outcome, (reads, path), cx);
            }
            Msg::Found { txn, round, at, reads } => self.on_found(txn, round, (at, reads), cx),
            Msg::Declined { txn, reason } => self.on_declined(from, txn, reason, cx),
            Msg::Submit { .. }
            | Msg::Look { .. }
            | Msg::Inquire { .. }
            | Msg::Write { .. }
            | Msg::Written { .. }
            | Msg::Refused { .. }
            | Msg::Finalize { .. }
            | Msg::Confirm { .. }
            | Msg::Abort { .. }
            | Msg::Aborted { .. }
            | Msg::Get { .. }
            | Msg::Got { .. }
            | Msg::NotReady { .. }
            | Msg::Put { .. }
            | Msg::Executed { .. }
            | Msg::Query { .. }
            | Msg::Known { .. }
            | Msg::Missing { .. }
            | Msg::Have { .. }
            | Msg::Pull { .. }
            | Msg::Pulled { .. }
            | Msg::Scan { .. }
            | Msg::Scanned { .. }
            | Msg::Intent { .. }
            | Msg::Directory(_)
            | Msg::Takeover(_)
            | Msg::Gossip(_)
            | Msg::Digests { .. } => unreachable!("a server's message at a client"),
        }
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.open.is_empty() {
            return f.write_str("idle");
        }
        for (at, (id, open)) in self.open.iter().enumerate() {
            let separator = if at == 0 { "" } else { " | " };
            let (phase, by) = (&open.phase, open.coordinator);
            match phase {
                Phase::Looking(keys) => {
                    write!(f, "{separator}{id} looks at {keys:?} through {by}")?
                }
                Phase::Deciding => write!(f, "{separator}{id} deciding")?,
                Phase::Submitted(_) => write!(f, "{separator}{id} submitted to {by}")?,
                Phase::Inquiring(..) => write!(f, "{separator}{id} inquires through {by}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::cluster::{Cluster, Role};
    use orthodrome_core::id::ClientId;
    use orthodrome_core::machine::Protocol as _;
    use orthodrome_core::topology::Topology;

    use super::super::NAME;
    use super::*;

    /// Two transactions that retry alternately: with one common rotation, each would ask the same
    /// two of three servers for ever.
    #[test]
    fn each_transaction_goes_round_all_servers_whatever_others_ask() {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(40));
        let cluster = Cluster::spread(map, 1, 1, 1, 3).unwrap();
        let gateway = cluster.nodes().find(|node| node.role == Role::Gateway).unwrap();
        let config = Arc::new(OceanVista::configure(&cluster, NAME));
        let servers = Helpers::new(&cluster, gateway.id, config.answer_after);
        let (inactive, probed) = (OrdMap::new(), OrdMap::new());
        let mut client = Client { config, servers, inactive, probed, open: OrdMap::new() };
        let (now, all) = (Time::from_millis(1), client.servers.all().collect::<OrdSet<_>>());
        let ids = [1, 2].map(|counter| TxnId::new(ClientId(1), counter));
        for id in ids {
            let txn = Txn::read_only(id, gateway.region, vec![Key::from("k")]);
            let open = Open {
                txn,
                phase: Phase::Deciding,
                reads: Reads::new(),
                at: None,
                round: 1,
                coordinator: all.first().copied().unwrap(),
                silent: OrdSet::new(),
                asked: RetryState::new(now),
                is_declined: false,
                declines: 0,
                is_resolved: false,
            };
            client.open.insert(id, open);
        }
        for _ in 0..4 {
            let mut reached = ids.map(|id| OrdSet::from([client.open[&id].coordinator]));
            for _ in 0..2 {
                for (id, reached) in ids.iter().zip(&mut reached) {
                    let open = client.open.get_mut(id).unwrap();
                    client.servers.suspects.add(open.coordinator, now);
                    open.silent.insert(open.coordinator);
                    client.move_on(*id, Tried::Silent, now);
                    reached.insert(client.open[id].coordinator);
                }
            }
            assert_eq!(reached, [all.clone(), all.clone()]);
        }
    }
}
