//! The gateway. It runs the transactions of its clients (Carousel §4.1, §4.4.2).
//!
//! For each transaction the gateway sends the reads to the participants. If participants vote
//! without a request, it also sends the transaction's id to the coordinator. It waits for the
//! values and then for the client's decision, and asks the coordinator to end the transaction. It
//! sends a request again if the answer does not arrive in time. For a read-only transaction it asks
//! the participants for snapshots instead.

use std::fmt::{self, Debug};
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{Cx, Gauge, Input, Leak, Machine, Protocol, Setup};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Decision, Key, Kind, Outcome, Reads, Txn};

use super::coordinator::{Note, Timer};
use super::timeouts::Timeouts;
use crate::gateway::{Participant, Snapshot, Snapshots, coordinator_of, split};
use crate::routes::Routes;
use crate::waiting::RetryState;

/// The hooks by which a protocol completes the gateway. The value is the protocol's own state
/// besides the transactions.
pub trait Gateway: Debug + Send + Sized + 'static {
    /// The protocol.
    type Protocol: Protocol<Note: From<Note>, Timer: From<Timer>>;
    /// The protocol's own state of a pending transaction.
    type More: Debug + Default + Send;

    /// A gateway starts.
    fn new(setup: &Setup<Self::Protocol>) -> Self;
    /// The time-outs of the settings.
    fn timeouts(config: &ConfigOf<Self>) -> &Timeouts;
    /// A transaction begins; nothing has been sent yet.
    fn on_begun(client: &mut Client<Self>, open: &mut Open<Self>, cx: &mut Context<'_, Self>);
    /// Asks a participant for its values and its vote, or for locks.
    fn send_prepare(
        client: &Client<Self>,
        open: &Open<Self>,
        partition: PartitionId,
        cx: &mut Context<'_, Self>,
    );
    /// The request to the coordinator to end the transaction as its client decided.
    fn end_message(open: &Open<Self>, decision: &Decision) -> MsgOf<Self>;
    /// The request to the coordinator for the outcome.
    fn resolve_message(open: &Open<Self>) -> MsgOf<Self>;
    /// The heartbeat to the coordinator or a participant: the clients of these transactions are
    /// alive.
    fn heartbeat_message(client: &Client<Self>, to: PartitionId, txns: Vec<TxnId>) -> MsgOf<Self>;
    /// The request to a participant for a read-only transaction's values.
    fn read_only_message(
        txn: TxnId,
        partition: PartitionId,
        keys: Vec<Key>,
        at_least: Timestamp,
    ) -> MsgOf<Self>;
    /// Processes a message.
    fn on_message(
        client: &mut Client<Self>,
        from: NodeId,
        msg: MsgOf<Self>,
        cx: &mut Context<'_, Self>,
    );
    /// Processes the expiry of a timer: a shared one, or one of the protocol's own.
    fn on_timer(client: &mut Client<Self>, timer: TimerOf<Self>, cx: &mut Context<'_, Self>);

    // Optional hooks.

    /// The message that names the participants to the coordinator. None if the coordinator learns
    /// them at the end.
    fn coordinator_message(_open: &Open<Self>) -> Option<MsgOf<Self>> {
        None
    }
    /// True if the client cannot continue before this participant has answered. Participants that
    /// are only written to need not answer.
    fn must_answer(participant: &Participant) -> bool {
        !participant.reads.is_empty()
    }
    /// The partitions that must know that the client of an undecided transaction is alive.
    fn watchers(open: &Open<Self>) -> Vec<PartitionId> {
        vec![open.coordinator]
    }
    /// The client of a general transaction reads another round.
    fn on_read(
        _client: &mut Client<Self>,
        _txn: TxnId,
        _keys: Vec<Key>,
        _cx: &mut Context<'_, Self>,
    ) {
        // Nothing waits for an answer: general transactions are refused.
    }
    /// The values for the client, when everything that it requested has arrived.
    fn told(open: &mut Open<Self>) -> Reads {
        open.reads.clone()
    }
    /// The client of a transaction, or its procedure, has decided.
    fn carry_out(
        client: &mut Client<Self>,
        txn: TxnId,
        decision: Decision,
        cx: &mut Context<'_, Self>,
    ) {
        client.end(txn, decision, cx);
    }
    /// A client asks for the outcome of a transaction. It has the decision, if it had decided.
    fn resolve(
        client: &mut Client<Self>,
        txn: TxnId,
        decision: Option<Decision>,
        cx: &mut Context<'_, Self>,
    ) {
        match decision {
            Some(Decision::Commit(writes)) if client.at(txn).txn.declares(&writes) => {
                Self::carry_out(client, txn, Decision::Commit(writes), cx);
            }
            Some(Decision::Commit(_) | Decision::Abort) => {
                Self::carry_out(client, txn, Decision::Abort, cx);
            }
            None => client.ask(txn, cx),
        }
    }
    /// Asks a participant again, because the first replica does not lead.
    fn send_prepare_to_leader(
        client: &Client<Self>,
        open: &Open<Self>,
        partition: PartitionId,
        cx: &mut Context<'_, Self>,
    ) {
        Self::send_prepare(client, open, partition, cx);
    }
    /// Tells participants which versions of their keys the client knows (R11).
    fn set_floors(_participants: &mut OrdMap<PartitionId, Participant>, _txn: &Txn) {}
    /// True if values that the client has received are not valid any more; the client must start a
    /// new attempt.
    fn is_stale(_open: &Open<Self>) -> bool {
        false
    }
    /// A transaction has ended.
    fn on_finished(_client: &mut Client<Self>, _txn: TxnId, _outcome: Outcome) {}
    /// Quantities for operators to watch.
    fn gauges(&self, _now: Time) -> Vec<Gauge> {
        Vec::new()
    }
}

/// The context of a gateway.
pub type Context<'a, G> = Cx<'a, <G as Gateway>::Protocol>;
/// The protocol's settings.
pub type ConfigOf<G> = <<G as Gateway>::Protocol as Protocol>::Config;
/// The protocol's messages.
pub type MsgOf<G> = <<G as Gateway>::Protocol as Protocol>::Msg;
/// The protocol's timers.
pub type TimerOf<G> = <<G as Gateway>::Protocol as Protocol>::Timer;

/// The client side.
#[derive(Debug)]
pub struct Client<G: Gateway> {
    pub(crate) node: NodeId,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) config: Arc<ConfigOf<G>>,
    pub(crate) routes: Routes,
    pub(crate) open: OrdMap<TxnId, Open<G>>,
    beats: bool,
    /// The protocol's own state.
    pub(crate) own: G,
}

/// A pending transaction.
#[derive(Debug)]
pub struct Open<G: Gateway> {
    pub(crate) txn: Txn,
    pub(crate) participants: OrdMap<PartitionId, Participant>,
    pub(crate) coordinator: PartitionId,
    pub(crate) reads: Reads,
    /// Participants that have not answered.
    pub(crate) silent: OrdSet<PartitionId>,
    pub(crate) phase: Phase,
    pub(crate) begun: Time,
    /// When the unanswered requests were last sent.
    asked: RetryState,
    /// True if the client has asked for the outcome: it may know only the versions of its reads,
    /// not the values.
    pub(crate) is_resolved: bool,
    /// The protocol's own state.
    pub(crate) more: G::More,
}

/// The phase of a transaction.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Waiting for reads.
    Reading,
    /// Waiting for the client's decision.
    Deciding,
    /// The coordinator was asked to commit or abort.
    Ending(Decision),
    /// The client asked for the outcome, and had not decided.
    Resolving,
    /// A read-only transaction.
    Snapshotting(Snapshots),
}

impl<G: Gateway> Machine<G::Protocol> for Client<G> {
    fn new(
        setup: Setup<G::Protocol>,
        _recovered: Vec<<G::Protocol as Protocol>::Record>,
        _cx: &mut Context<'_, G>,
    ) -> Self {
        // A gateway keeps nothing over a restart: a client whose gateway died resolves through
        // another one.
        Self {
            own: G::new(&setup),
            node: setup.node,
            routes: Routes::new(setup.cluster.clone()),
            cluster: setup.cluster,
            config: setup.config,
            open: OrdMap::new(),
            beats: false,
        }
    }

    fn step(&mut self, input: Input<G::Protocol>, cx: &mut Context<'_, G>) {
        match input {
            Input::Begin(txn) => self.on_begin(txn, cx),
            Input::Read { txn, keys } => G::on_read(self, txn, keys, cx),
            Input::Decide { txn, decision } => self.on_decide(txn, decision, cx),
            Input::Resolve { txn, reads, decision } => {
                self.on_resolve_request(txn, reads, decision, cx);
            }
            Input::Message { from, msg } => G::on_message(self, from, msg, cx),
            Input::Timer(timer) => G::on_timer(self, timer, cx),
            Input::Durable(_) | Input::Admin(_) => unreachable!("a server's input at a client"),
        }
    }

    fn flush(&mut self, _cx: &mut Context<'_, G>) {}

    fn gauges(&self, now: Time) -> Vec<Gauge> {
        self.own.gauges(now)
    }

    fn leaks(&self) -> Vec<Leak> {
        vec![("open transactions", self.open.len())]
    }

    fn assert_invariants(&self) {
        for (id, open) in &self.open {
            assert!(
                open.silent.iter().all(|partition| open.participants.contains_key(partition)),
                "{id} waits for a partition that takes no part"
            );
        }
    }
}

impl<G: Gateway> Open<G> {
    /// The part of a participant in the transaction.
    pub(crate) fn participant(&self, partition: PartitionId) -> &Participant {
        let Some(participant) = self.participants.get(&partition) else {
            unreachable!("{partition} takes no part in {}", self.txn.id);
        };
        participant
    }
}

impl<G: Gateway> Client<G> {
    /// A transaction that has not finished. Handlers of messages, which may be late, look it up
    /// first.
    pub(crate) fn at(&self, id: TxnId) -> &Open<G> {
        let Some(open) = self.open.get(&id) else { unreachable!("{id} has finished") };
        open
    }

    /// The same, to change it.
    pub(crate) fn at_mut(&mut self, id: TxnId) -> &mut Open<G> {
        let Some(open) = self.open.get_mut(&id) else { unreachable!("{id} has finished") };
        open
    }

    fn open(&self, txn: Txn, now: Time) -> Open<G> {
        let mut participants = split(&self.cluster, &txn.reads, &txn.writes);
        G::set_floors(&mut participants, &txn);
        // The participants of a general transaction are not known, and another gateway that
        // resolves it may never learn them. So its coordinator follows from its name alone.
        let is_known = !matches!(txn.kind, Kind::General);
        let near = participants.keys().copied().filter(|_| is_known);
        let coordinator = coordinator_of(&self.cluster, txn.id, txn.home, near);
        Open {
            silent: participants
                .values()
                .filter(|participant| G::must_answer(participant))
                .map(|participant| participant.partition)
                .collect(),
            participants,
            coordinator,
            reads: Reads::new(),
            phase: Phase::Reading,
            begun: now,
            asked: RetryState::new(now),
            is_resolved: false,
            more: G::More::default(),
            txn,
        }
    }

    fn set_resend_timer(&self, txn: TxnId, after: Duration, cx: &mut Context<'_, G>) {
        cx.set_timer(Timer::Resend(txn).into(), cx.now() + after);
    }

    /// Starts a transaction: one message to each participant's leader, and one to the coordinator.
    fn on_begin(&mut self, txn: Txn, cx: &mut Context<'_, G>) {
        let id = txn.id;
        if self.open.contains_key(&id) {
            // It was already begun here: its answers will arrive.
            return;
        }
        if !G::Protocol::GENERAL && matches!(txn.kind, Kind::General) {
            cx.finish(id, Outcome::Aborted(AbortReason::Invalid), "refused");
            return;
        }
        let mut open = self.open(txn, cx.now());
        G::on_begun(self, &mut open, cx);
        if open.txn.is_read_only() {
            open.phase = Phase::Snapshotting(Snapshots::default());
        }
        self.open.insert(id, open);
        self.send_first(id, cx);
        let Timeouts { resend_after, heartbeat_interval, .. } = *G::timeouts(&self.config);
        self.set_resend_timer(id, resend_after, cx);
        if !std::mem::replace(&mut self.beats, true) {
            cx.set_timer(Timer::Heartbeat.into(), cx.now() + heartbeat_interval);
        }
        if self.open.get(&id).is_some_and(|open| open.silent.is_empty()) {
            self.on_all_answered(id, cx);
        }
    }

    /// Sends the first messages of a transaction.
    fn send_first(&mut self, id: TxnId, cx: &mut Context<'_, G>) {
        let open = self.at(id);
        if open.participants.is_empty() || !matches!(open.phase, Phase::Reading) {
            self.send_outstanding(id, cx);
            return;
        }
        for &partition in open.participants.keys() {
            G::send_prepare(self, open, partition, cx);
        }
        self.send_coordinator_prepare(open, cx);
    }

    /// Sends all requests that have not been answered yet.
    fn send_outstanding(&mut self, id: TxnId, cx: &mut Context<'_, G>) {
        let open = self.at(id);
        match &open.phase {
            Phase::Reading if !open.participants.is_empty() => {
                for partition in &open.silent {
                    G::send_prepare(self, open, *partition, cx);
                }
                self.send_coordinator_prepare(open, cx);
            }
            Phase::Reading | Phase::Deciding => {}
            Phase::Ending(_) | Phase::Resolving => self.send_end(open, cx),
            Phase::Snapshotting(snapshots) => {
                for &partition in &open.silent {
                    self.send_read_only(open, snapshots, partition, cx);
                }
            }
        }
    }

    fn send_read_only(
        &self,
        open: &Open<G>,
        snapshots: &Snapshots,
        partition: PartitionId,
        cx: &mut Context<'_, G>,
    ) {
        let (keys, at_least) = (open.participant(partition).reads.clone(), snapshots.at_least);
        let read = G::read_only_message(open.txn.id, partition, keys, at_least);
        cx.send(self.routes.leader(partition), read);
    }

    fn send_coordinator_prepare(&self, open: &Open<G>, cx: &mut Context<'_, G>) {
        if let Some(msg) = G::coordinator_message(open) {
            cx.send(self.routes.leader(open.coordinator), msg);
        }
    }

    /// Asks the coordinator to end the transaction as its client decided, or for its outcome.
    fn send_end(&self, open: &Open<G>, cx: &mut Context<'_, G>) {
        let msg = match &open.phase {
            Phase::Ending(decision) => G::end_message(open, decision),
            Phase::Resolving => G::resolve_message(open),
            Phase::Reading | Phase::Deciding | Phase::Snapshotting(_) => return,
        };
        cx.send(self.routes.leader(open.coordinator), msg);
    }

    /// The coordinator reports the outcome of a transaction.
    pub(crate) fn on_decided(
        &mut self,
        from: NodeId,
        id: TxnId,
        outcome: Outcome,
        path: impl FnOnce(&Open<G>) -> &'static str,
        cx: &mut Context<'_, G>,
    ) {
        // It has finished: this is a repetition.
        let Some(open) = self.open.get(&id) else { return };
        self.routes.learn(open.coordinator, from, cx.now());
        if outcome == Outcome::Aborted(AbortReason::Recovery) {
            // Some participant never received the prepare. A participant that is only written to
            // need not answer, so this is the only sign that its leader may have failed.
            for &partition in open.participants.keys() {
                self.routes.suspect(partition, open.begun, cx.now());
            }
        }
        let path = path(open);
        self.finish(id, outcome, path, cx);
    }

    /// The read round is complete: return the values to the client, or run the procedure.
    pub(crate) fn on_all_answered(&mut self, id: TxnId, cx: &mut Context<'_, G>) {
        let open = self.at_mut(id);
        match (&open.phase, &open.txn.kind) {
            (Phase::Snapshotting(_), _) => self.on_snapshot_complete(id, cx),
            (_, Kind::Interactive | Kind::General) => {
                cx.reads(id, G::told(open));
                open.phase = Phase::Deciding;
                cx.cancel_timer(Timer::Resend(id).into());
            }
            (_, Kind::Procedure(_)) => self.end_procedure(id, cx),
            (_, Kind::ReadOnly | Kind::StaleReadOnly) => {
                unreachable!("a read-only transaction takes its own path")
            }
        }
    }

    /// Runs a procedure on the values read, and asks to commit its writes.
    pub(crate) fn end_procedure(&mut self, id: TxnId, cx: &mut Context<'_, G>) {
        let open = self.at(id);
        let Kind::Procedure(ops) = &open.txn.kind else { unreachable!("{id} is no procedure") };
        let decision = match Txn::execute(ops, &open.reads) {
            Ok(writes) => Decision::Commit(writes),
            Err(_) => Decision::Abort,
        };
        G::carry_out(self, id, decision, cx);
    }

    /// The client of an interactive transaction has decided.
    fn on_decide(&mut self, id: TxnId, decision: Decision, cx: &mut Context<'_, G>) {
        // It has finished: its client will receive the outcome, or already has.
        let Some(open) = self.open.get(&id) else { return };
        match open.phase {
            Phase::Deciding => {}
            Phase::Reading if decision == Decision::Abort => {}
            Phase::Reading | Phase::Ending(_) | Phase::Resolving | Phase::Snapshotting(_) => {
                return;
            }
        }
        let is_general = matches!(open.txn.kind, Kind::General);
        let is_undeclared = match &decision {
            Decision::Commit(writes) => !is_general && !open.txn.declares(writes),
            Decision::Abort => false,
        };
        if G::is_stale(open) || is_undeclared {
            G::carry_out(self, id, Decision::Abort, cx);
            return;
        }
        if open.participants.is_empty() && !is_general {
            let outcome = match decision {
                Decision::Commit(_) => Outcome::Committed(cx.clock().now),
                Decision::Abort => Outcome::Aborted(AbortReason::Client),
            };
            self.finish(id, outcome, "empty", cx);
            return;
        }
        G::carry_out(self, id, decision, cx);
    }

    /// Asks the coordinator to commit or abort (Carousel §4.1.2).
    pub(crate) fn end(&mut self, id: TxnId, decision: Decision, cx: &mut Context<'_, G>) {
        self.at_mut(id).phase = Phase::Ending(decision);
        self.ask(id, cx);
    }

    /// Sends the requests of a new phase or round.
    pub(crate) fn ask(&mut self, id: TxnId, cx: &mut Context<'_, G>) {
        self.at_mut(id).asked = RetryState::new(cx.now());
        self.send_outstanding(id, cx);
        let resend_after = G::timeouts(&self.config).resend_after;
        self.set_resend_timer(id, resend_after, cx);
    }

    /// A client asks for the outcome of a transaction that it began here or at another gateway.
    fn on_resolve_request(
        &mut self,
        txn: Txn,
        reads: Reads,
        decision: Option<Decision>,
        cx: &mut Context<'_, G>,
    ) {
        let id = txn.id;
        let mut open = self.open(txn, cx.now());
        let is_general = matches!(open.txn.kind, Kind::General);
        if open.txn.is_read_only() || (is_general && !G::Protocol::GENERAL) {
            // It changes nothing, so it can simply be read again; or it is refused again.
            self.open.remove(&id);
            self.on_begin(open.txn, cx);
            return;
        }
        open.is_resolved = true;
        if open.participants.is_empty() && !is_general {
            // It may be pending here, and must not finish a second time when its client decides.
            self.open.insert(id, open);
            self.finish(id, Outcome::Committed(cx.clock().now), "empty", cx);
            return;
        }
        open.reads = reads;
        open.silent.clear();
        open.phase = Phase::Resolving;
        self.open.insert(id, open);
        G::resolve(self, id, decision, cx);
    }

    /// A part of a read-only transaction's values exceeds the size of an answer.
    pub(crate) fn on_too_much(&mut self, id: TxnId, cx: &mut Context<'_, G>) {
        if let Some(open) = self.open.get(&id)
            && matches!(open.phase, Phase::Snapshotting(_))
        {
            self.finish(id, Outcome::Aborted(AbortReason::TooLarge), "read-only", cx);
        }
    }

    /// One participant's part of a read-only transaction; none if a pending transaction conflicts
    /// (Carousel §4.4.2).
    pub(crate) fn on_read_only_result(
        &mut self,
        id: TxnId,
        partition: PartitionId,
        snapshot: Option<Snapshot>,
        cx: &mut Context<'_, G>,
    ) {
        // It has finished, and another transaction may have its name: this is a repetition.
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Snapshotting(snapshots) = &mut open.phase else { return };
        let Some(snapshot) = snapshot else {
            self.finish(id, Outcome::Aborted(AbortReason::Conflict), "read-only", cx);
            return;
        };
        if !snapshots.is_current(&snapshot) || !open.silent.remove(&partition) {
            return;
        }
        snapshots.insert(partition, snapshot);
        if open.silent.is_empty() {
            self.on_snapshot_complete(id, cx);
        }
    }

    /// All parts are here: the transaction ends, or some participants are asked again.
    fn on_snapshot_complete(&mut self, id: TxnId, cx: &mut Context<'_, G>) {
        let open = self.at_mut(id);
        let Phase::Snapshotting(snapshots) = &mut open.phase else {
            unreachable!("{id} reads no snapshots");
        };
        match snapshots.complete(&open.txn) {
            Ok((reads, outcome)) => {
                let path = snapshots.path();
                open.reads = reads;
                self.finish(id, outcome, path, cx);
            }
            Err(short) => {
                cx.note(Note::SecondRound.into());
                open.silent.extend(short);
                self.ask(id, cx);
            }
        }
    }

    /// Sends the outcome to the client, and forgets the transaction.
    pub(crate) fn finish(
        &mut self,
        id: TxnId,
        outcome: Outcome,
        path: &'static str,
        cx: &mut Context<'_, G>,
    ) {
        let Some(open) = self.open.remove(&id) else { unreachable!("{id} has finished twice") };
        G::on_finished(self, id, outcome);
        cx.cancel_timer(Timer::Resend(id).into());
        let mut outcome = outcome;
        match (&open.txn.kind, &open.phase, outcome) {
            // To the coordinator, a procedure's refusal looks like the client's own abort.
            (
                Kind::Procedure(ops),
                Phase::Ending(Decision::Abort),
                Outcome::Aborted(AbortReason::Client),
            ) => {
                let reason = Txn::execute(ops, &open.reads).err().unwrap_or(AbortReason::Guard);
                outcome = Outcome::Aborted(reason);
            }
            (
                Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly,
                _,
                Outcome::Committed(_),
            ) if !open.is_resolved => {
                cx.reads(id, open.reads);
            }
            _ => {}
        }
        cx.finish(id, outcome, path);
    }

    /// `from` does not lead `partition`. Sends the request again to the replica that leads.
    pub(crate) fn on_not_leader(
        &mut self,
        from: NodeId,
        partition: PartitionId,
        leader: Option<NodeId>,
        txn: Option<TxnId>,
        cx: &mut Context<'_, G>,
    ) {
        if !self.routes.redirect(partition, from, leader, cx.now()) {
            return;
        }
        // It has finished; or the request was not about a single transaction, like a heartbeat.
        let Some(open) = txn.and_then(|txn| self.open.get(&txn)) else { return };
        match &open.phase {
            Phase::Reading => {
                if open.silent.contains(&partition) {
                    G::send_prepare_to_leader(self, open, partition, cx);
                }
                if open.coordinator == partition {
                    self.send_coordinator_prepare(open, cx);
                }
            }
            Phase::Deciding => {
                if open.coordinator == partition {
                    self.send_coordinator_prepare(open, cx);
                }
            }
            Phase::Ending(_) | Phase::Resolving => {
                if open.coordinator == partition {
                    self.send_end(open, cx);
                }
            }
            Phase::Snapshotting(snapshots) => {
                if open.silent.contains(&partition) {
                    self.send_read_only(open, snapshots, partition, cx);
                }
            }
        }
    }

    /// No answer arrived in time: suspects the leader, sends again, and doubles the time-out.
    pub(crate) fn on_resend_timeout(&mut self, id: TxnId, cx: &mut Context<'_, G>) {
        let Some(open) = self.open.get_mut(&id) else {
            unreachable!("{id} has finished, and its timer goes on");
        };
        cx.note(Note::Resent.into());
        let asked = open.asked.at;
        open.asked = open.asked.again(cx.now());
        let resend_after = G::timeouts(&self.config).resend_after;
        let timeout = open.asked.timeout(resend_after);
        match &open.phase {
            Phase::Reading | Phase::Snapshotting(_) => {
                for &partition in &open.silent {
                    self.routes.suspect(partition, asked, cx.now());
                }
                if G::coordinator_message(open).is_some() {
                    self.routes.suspect(open.coordinator, asked, cx.now());
                }
            }
            Phase::Ending(_) | Phase::Resolving => {
                self.routes.suspect(open.coordinator, asked, cx.now());
            }
            Phase::Deciding => {}
        }
        self.send_outstanding(id, cx);
        self.set_resend_timer(id, timeout, cx);
    }

    /// Sends heartbeats to coordinators or participants for transactions whose clients are alive
    /// (Carousel §4.3.1).
    pub(crate) fn on_heartbeat_timeout(&mut self, cx: &mut Context<'_, G>) {
        let now = cx.now();
        let interval = G::timeouts(&self.config).heartbeat_interval;
        let mut beats: OrdMap<PartitionId, Vec<TxnId>> = OrdMap::new();
        for open in self.open.values() {
            let is_undecided = matches!(open.phase, Phase::Reading | Phase::Deciding);
            if is_undecided && now.since(open.begun) >= interval / 2 {
                for partition in G::watchers(open) {
                    beats.entry(partition).or_default().push(open.txn.id);
                }
            }
        }
        for (partition, txns) in beats {
            let beat = G::heartbeat_message(self, partition, txns);
            cx.send(self.routes.leader(partition), beat);
        }
        self.beats = !self.open.is_empty();
        if self.beats {
            cx.set_timer(Timer::Heartbeat.into(), now + interval);
        }
    }
}

impl<G: Gateway> fmt::Display for Client<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.open.is_empty() {
            return f.write_str("idle");
        }
        for (at, (id, open)) in self.open.iter().enumerate() {
            let separator = if at == 0 { "" } else { " | " };
            let phase = match &open.phase {
                Phase::Reading => "reading",
                Phase::Deciding => "deciding",
                Phase::Ending(Decision::Commit(_)) => "committing",
                Phase::Ending(Decision::Abort) => "aborting",
                Phase::Resolving => "resolving",
                Phase::Snapshotting(_) => "snapshotting",
            };
            write!(f, "{separator}{id} {phase} via {}", open.coordinator)?;
            if !open.silent.is_empty() {
                write!(f, " waits {:?}", open.silent)?;
            }
        }
        Ok(())
    }
}
