//! The coordinator after the decision. It sends the outcome to the client and to the participants,
//! and repeats it to each participant until that participant has acknowledged it
//! (Carousel §4.1.2–4.1.3, §4.3.1; commit-wait: C13).

use std::fmt::Debug;

use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::machine::Leak;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Time;
use orthodrome_core::txn::Outcome;

use super::timeouts::Timeouts;
use crate::acknowledged::Kept;
use crate::hosting::{CommandOf, Leading, Role, World};
use crate::waiting::{CommitWait, RetryState, take_batch};

/// Rare events of coordinators, participants and gateways.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Note {
    /// A recovery query found no record of a decision, so the transaction was aborted.
    QueryAborted,
    /// A coordinator aborted a transaction because its client was silent.
    Abandoned,
    /// A new leader took over unfinished transactions as their coordinator.
    CoordinatorTakeover,
    /// A client asked again for an outcome.
    Resolved,
    /// A client asked for an outcome that this group does not keep any more.
    Forgotten,
    /// A commit waited for its timestamp to pass.
    CommitWait,
    /// The versions that a client read differ from those that were prepared.
    StaleVersions,
    /// A read-only transaction needed a second round.
    SecondRound,
    /// A gateway sent a request again.
    Resent,
    /// A later attempt ended an earlier one.
    AttemptSuperseded,
    /// An abort of an unknown transaction left a tombstone.
    Tombstone,
}

/// Timers of coordinators and gateways.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Timer {
    /// The first timestamp for which this leader's commits wait may have passed.
    CommitWait(PartitionId),
    /// A gateway sends a transaction's unanswered requests again.
    Resend(TxnId),
    /// A gateway sends heartbeats.
    Heartbeat,
}

/// The part of a group's state that a coordinator reads.
pub trait Outcomes {
    /// The group's decision, as far as it remembers.
    fn decision(&self, txn: TxnId) -> Option<Outcome>;
    /// The participants of a transaction that is not settled; none if the group does not know it.
    fn participants(&self, txn: TxnId) -> Option<Vec<PartitionId>>;
    /// True if an outcome is kept only until its client acknowledges it.
    fn is_kept(&self, txn: TxnId) -> bool;
    /// True if the transaction's client knows its outcome.
    fn is_acknowledged(&self, txn: TxnId) -> bool;
}

/// The hooks by which a protocol completes the coordinator.
pub trait Coordinator: Role<State: Outcomes, Note: From<Note>, Timer: From<Timer>> {
    /// A participant's vote.
    type Vote: Debug + Send;
    /// The protocol's own state of a pending transaction, besides the votes.
    type More: Debug + Default + Send;

    /// The leader's field for it.
    fn coordination(&mut self) -> &mut Coordination<Self>;

    /// The message that reports the outcome to the client.
    fn outcome_message(
        txn: TxnId,
        outcome: Outcome,
        coordinating: Option<&Coordinating<Self>>,
    ) -> Self::Msg;
    /// The message that sends the decision to a participant.
    fn decision_message(
        leading: &Leading<'_, Self>,
        to: (TxnId, PartitionId),
        outcome: Outcome,
        world: &World<'_, Self>,
    ) -> Self::Msg;
    /// The command for decisions that every participant has acknowledged.
    fn settle_command(txns: Vec<TxnId>) -> CommandOf<Self>;
    /// The command for clients that know the outcomes of their transactions below these counters.
    fn acknowledge_command(clients: Vec<(ClientId, u64)>) -> CommandOf<Self>;
    /// The time-outs of the settings.
    fn timeouts(config: &Self::Config) -> &Timeouts;

    // Optional hooks.

    /// True if a participant's vote has arrived and will not change.
    fn has_voted(coordinating: &Coordinating<Self>, partition: PartitionId) -> bool {
        coordinating.votes.contains_key(&partition)
    }
    /// False if outcomes are announced before their commit timestamps have passed: unsafe, for
    /// mutations.
    fn waits_for_timestamps(_config: &Self::Config) -> bool {
        true
    }
    /// A transaction is decided, and its outcome is not announced yet. Runs again after
    /// commit-wait.
    fn before_telling(_leading: &mut Leading<'_, Self>, _txn: TxnId, _world: &mut World<'_, Self>) {
    }
    /// The outcomes of clients that have been silent for too long are forgotten.
    fn on_retired(_world: &mut World<'_, Self>) {}
}

/// A leader's state as coordinator.
#[derive(Debug)]
pub struct Coordination<R: Coordinator> {
    /// Pending transactions.
    pub transactions: OrdMap<TxnId, Coordinating<R>>,
    /// Decided commits whose timestamps have not passed yet.
    commit_wait: CommitWait,
    /// Decisions that every participant has acknowledged; they are settled together.
    settling: OrdSet<TxnId>,
    /// When this leader first saw outcomes that are kept for clients to acknowledge.
    pub kept: Kept,
}

impl<R: Coordinator> Default for Coordination<R> {
    fn default() -> Self {
        Self::new([], Time::ZERO)
    }
}

impl<R: Coordinator> Coordination<R> {
    /// The state of a new leader whose group keeps these outcomes.
    pub fn new(kept: impl IntoIterator<Item = TxnId>, now: Time) -> Self {
        Self {
            transactions: OrdMap::new(),
            commit_wait: CommitWait::default(),
            settling: OrdSet::new(),
            kept: Kept::new(kept, now),
        }
    }

    /// State that must disappear when nothing is pending.
    pub fn leaks(&self) -> Vec<Leak> {
        vec![
            ("coordinations", self.transactions.len()),
            ("waiting commits", self.commit_wait.len()),
            ("unsettled decisions", self.settling.len()),
        ]
    }
}

/// A leader's view of a transaction that it coordinates.
#[derive(Debug)]
pub struct Coordinating<R: Coordinator> {
    /// The gateway that waits for the outcome.
    pub client: Option<NodeId>,
    /// Votes so far.
    pub votes: OrdMap<PartitionId, R::Vote>,
    /// The number of the client's last commit request that was proposed or is in the log; 0 if
    /// there is none.
    pub requested: u32,
    /// True if a decision has been proposed.
    pub is_decision_proposed: bool,
    /// The decision, from the moment at which durable facts determine it.
    pub outcome: Option<Outcome>,
    /// True if the outcome has been announced: its timestamp has passed.
    pub is_told: bool,
    /// Participants that have acknowledged the decision.
    pub acks: OrdSet<PartitionId>,
    /// When the last message of the client arrived.
    pub heard: Time,
    /// When missing votes or acknowledgements were last requested.
    pub asked: RetryState,
    /// The protocol's own state.
    pub more: R::More,
}

impl<R: Coordinator> Coordinating<R> {
    fn new(now: Time) -> Self {
        Self {
            client: None,
            votes: OrdMap::new(),
            requested: 0,
            is_decision_proposed: false,
            outcome: None,
            is_told: false,
            acks: OrdSet::new(),
            heard: now,
            asked: RetryState::new(now),
            more: R::More::default(),
        }
    }

    /// True if a participant has not sent its vote yet or, once the decision was announced, its
    /// acknowledgement.
    pub fn awaits(&self, partition: PartitionId) -> bool {
        match self.is_told {
            true => !self.acks.contains(&partition),
            false => !R::has_voted(self, partition),
        }
    }
}

impl<R: Coordinator> Leading<'_, R> {
    /// The entry of a transaction that this leader coordinates; creates it if necessary.
    pub fn coordinating(&mut self, txn: TxnId, now: Time) -> &mut Coordinating<R> {
        let transactions = &mut self.leader.coordination().transactions;
        transactions.entry(txn).or_insert_with(|| Coordinating::new(now))
    }

    /// A pending transaction, if it is one.
    pub fn under_way(&mut self, txn: TxnId) -> Option<&mut Coordinating<R>> {
        self.leader.coordination().transactions.get_mut(&txn)
    }

    /// Answers `client` if the transaction is decided, or if this group has forgotten its outcome.
    /// False if it is still pending.
    pub fn answer(&mut self, client: NodeId, txn: TxnId, world: &mut World<'_, R>) -> bool {
        if self.answer_if_decided(client, txn, world) {
            return true;
        }
        let is_forgotten = self.state.is_acknowledged(txn);
        if is_forgotten {
            self.tell_forgotten(client, txn, world);
        }
        is_forgotten
    }

    /// Without an answer the client would ask for ever.
    pub fn tell_forgotten(&self, client: NodeId, txn: TxnId, world: &mut World<'_, R>) {
        world.cx.note(Note::Forgotten.into());
        world.send(client, R::outcome_message(txn, Outcome::Unknown, None));
    }

    /// Sends `client` the outcome if it may be announced already.
    pub fn answer_if_decided(
        &mut self,
        client: NodeId,
        txn: TxnId,
        world: &mut World<'_, R>,
    ) -> bool {
        if let Some(coordinating) = self.under_way(txn) {
            coordinating.client = Some(client);
            let Some(outcome) = coordinating.outcome else { return false };
            if coordinating.is_told {
                world.send(client, R::outcome_message(txn, outcome, None));
            }
            return true;
        }
        if let Some(outcome) = self.state.decision(txn) {
            world.send(client, R::outcome_message(txn, outcome, None));
            return true;
        }
        false
    }

    /// Sends the outcome to the client and to the participants, once the commit timestamp has
    /// passed on every clock. Only then does the order of timestamps agree with real time (C13).
    pub fn announce(&mut self, txn: TxnId, world: &mut World<'_, R>) {
        let clock = world.cx.clock();
        let now = world.cx.now();
        let Some(outcome) = self.under_way(txn).and_then(|known| known.outcome) else {
            unreachable!("{txn} is announced and not decided");
        };
        R::before_telling(self, txn, world);
        let coordination = self.leader.coordination();
        if let Outcome::Committed(timestamp) = outcome
            && !clock.has_passed_everywhere(timestamp)
            && R::waits_for_timestamps(world.config)
        {
            world.cx.note(Note::CommitWait.into());
            coordination.commit_wait.insert(timestamp, txn);
            self.set_commit_wait_timer(world);
            return;
        }
        let coordinating = self.coordinating(txn, now);
        coordinating.is_told = true;
        coordinating.asked = RetryState::new(now);
        if let Some(client) = coordinating.client {
            world.send(client, R::outcome_message(txn, outcome, Some(coordinating)));
        }
        self.tell_participants(txn, None, world);
        // Participants may have acknowledged an earlier leader's message while this leader waited
        // for the timestamp.
        self.settle_if_done(txn);
    }

    fn set_commit_wait_timer(&mut self, world: &mut World<'_, R>) {
        let waiting = &self.leader.coordination().commit_wait;
        if let Some(at) = waiting.next(world.cx.clock(), world.cx.now()) {
            world.cx.set_timer(Timer::CommitWait(self.id).into(), at);
        }
    }

    /// The first of the waiting timestamps may have passed.
    pub fn on_commit_wait_timeout(&mut self, world: &mut World<'_, R>) {
        for txn in self.leader.coordination().commit_wait.pop_passed(world.cx.clock()) {
            self.announce(txn, world);
        }
        self.set_commit_wait_timer(world);
    }

    /// Sends an announced decision to every participant that has not acknowledged it, or only to
    /// `only`.
    pub fn tell_participants(
        &mut self,
        txn: TxnId,
        only: Option<PartitionId>,
        world: &mut World<'_, R>,
    ) {
        let mut audience = self.audience(txn);
        // Before the announcement there is nothing to send; afterwards the transaction may be
        // settled already.
        let Some(coordinating) = self.under_way(txn).filter(|known| known.is_told) else { return };
        let Some(outcome) = coordinating.outcome else {
            unreachable!("{txn} was told without an outcome");
        };
        audience.retain(|partition| {
            !coordinating.acks.contains(partition) && only.is_none_or(|only| only == *partition)
        });
        for partition in audience {
            let decision = R::decision_message(self, (txn, partition), outcome, world);
            world.send_to_leader(partition, decision);
        }
    }

    /// Partitions that must learn the decision: the participants, and other partitions that voted.
    pub fn audience(&mut self, txn: TxnId) -> OrdSet<PartitionId> {
        let known = self.state.participants(txn).into_iter().flatten();
        let voters = self.under_way(txn).into_iter().flat_map(|known| known.votes.keys().copied());
        known.chain(voters).collect()
    }

    /// A participant has the decision in its log.
    pub fn on_decision_ack(&mut self, txn: TxnId, partition: PartitionId) {
        // If the transaction is settled, the acknowledgement is a repetition.
        let Some(coordinating) = self.under_way(txn) else { return };
        coordinating.acks.insert(partition);
        self.settle_if_done(txn);
    }

    /// A decision is in this group's own log. It is the decision, if durable facts had not
    /// determined one before. Once every participant has acknowledged it, the transaction is
    /// settled.
    pub fn on_decided(&mut self, txn: TxnId, world: &mut World<'_, R>) {
        let decision = self.state.decision(txn);
        let coordinating = self.coordinating(txn, world.cx.now());
        coordinating.is_decision_proposed = true;
        match coordinating.outcome {
            Some(outcome) => {
                assert_eq!(Some(outcome), decision, "{txn} was decided twice (R7)");
            }
            None => {
                coordinating.outcome = decision;
                self.announce(txn, world);
            }
        }
        self.settle_if_done(txn);
    }

    fn settle_if_done(&mut self, txn: TxnId) {
        // First what is cheapest: this runs for every acknowledgement, and most are not the last.
        let is_heard = self.under_way(txn).is_some_and(|coordinating| {
            let mut voters = coordinating.votes.keys();
            coordinating.is_told && voters.all(|voter| coordinating.acks.contains(voter))
        });
        if !is_heard || self.state.decision(txn).is_none() {
            return;
        }
        let Some(participants) = self.state.participants(txn) else { return };
        let is_done = self.under_way(txn).is_some_and(|coordinating| {
            participants.iter().all(|partition| coordinating.acks.contains(partition))
        });
        if is_done {
            self.leader.coordination().settling.insert(txn);
        }
    }

    /// These transactions are settled: their outcomes are kept for clients that ask again.
    pub fn on_settled(&mut self, txns: &[TxnId], world: &mut World<'_, R>) {
        let coordination = self.leader.coordination();
        for txn in txns {
            coordination.transactions.remove(txn);
            coordination.kept.insert(*txn, world.cx.now());
        }
    }

    /// Settles, in one entry, all decisions that every participant has acknowledged. Also
    /// acknowledges for clients that have been silent for too long (R6).
    pub fn settle(&mut self, world: &mut World<'_, R>) {
        let retention = R::timeouts(world.config).retention;
        let state = self.state;
        let coordination = self.leader.coordination();
        let is_kept = |txn: &TxnId| state.is_kept(*txn);
        let silent = coordination.kept.overdue(is_kept, retention, world.cx.now());
        let done = take_batch(&mut coordination.settling);
        if !done.is_empty() {
            self.propose(R::settle_command(done), world);
        }
        if !silent.is_empty() {
            R::on_retired(world);
            self.propose(R::acknowledge_command(silent), world);
        }
    }
}
