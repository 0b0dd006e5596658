//! One replica of one partition: stamps, closings, decisions of h, promises, and what it observes.

mod members;
mod rejoin;

use std::collections::VecDeque;
use std::sync::Arc;

use orthodrome_core::Wire;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::limits::Pieces;
use orthodrome_core::machine::Message as _;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::{Ask, Basis, Listing, Voters, is_fence};
use orthodrome_core::store::{Store, Versioned, Versions};
use orthodrome_core::time::{Duration, Time, Timestamp, nanos};
use orthodrome_core::txn::{Key, Outcome, Read, Version};

use super::early::{Before, Early, Touched};
use super::message::{Answer, Ballot, Change, Kind, Msg, Offer, Output, Predecessor, Text, Value};
use super::pending::{Closings, Hints, Name, Place, Question, Questions, Writers};
use super::server::World;
use super::state::{Entry, OUTCOME, State};
use super::{Note, Timer, backoff};
use crate::portions::Portion;
use members::Moving;
pub(super) use members::Reached;
use rejoin::{Leaving, Rejoin};

/// One replica of one partition.
#[derive(Debug)]
pub(super) struct Replica {
    pub id: PartitionId,
    pub state: State,
    replicas: Vec<NodeId>,
    closings: Closings,
    writers: Writers,
    hints: Hints,
    questions: Questions,
    /// Stamps that its clock has not passed. As y, with what the clock said when the forward came: h
    /// waits for an acknowledgement.
    closing_due: OrdMap<Place, Option<Timestamp>>,
    /// In direct mode: it has closed up to this for these, since this server began.
    closed: OrdMap<TxnId, Timestamp>,
    /// As h: what the other named replicas acknowledged.
    acks: OrdMap<TxnId, OrdMap<NodeId, (Timestamp, Timestamp)>>,
    /// As h, for f ≥ 2: who accepted the largest stamp; the last arrival.
    settling: OrdMap<TxnId, (Timestamp, OrdSet<NodeId>, Timestamp)>,
    /// Transactions that ended elsewhere and are forgotten there, and who has told what they wrote.
    fetching: OrdMap<TxnId, OrdSet<NodeId>>,
    /// What each peer said of its mark, and when.
    marks: OrdMap<NodeId, (Timestamp, Time)>,
    gossiped: Time,
    /// What clients knew at the time `aged`.
    aging: OrdMap<ClientId, u64>,
    aged: Time,
    /// When to look after each transaction, and how often that was done.
    watched: OrdMap<TxnId, Watch>,
    due: OrdSet<(Time, TxnId)>,
    /// How long gateways take to answer whether they look after a transaction.
    inquiries: OrdMap<NodeId, Duration>,
    /// Size of the entries.
    entries_bytes: usize,
    /// Of which transactions only the outcome is kept, and since when, or since this server began.
    shortened: VecDeque<(Time, TxnId)>,
    /// What it needs for early answers, if it is the only one of its partition (D20).
    early: Option<Early>,
    /// What this replica needs before it takes part, if its disk was lost or it is a new member.
    rejoin: Option<Rejoin>,
    /// What it knows of changes of members.
    moving: Moving,
    /// Answers to peers whose disks were lost.
    leaving: OrdMap<NodeId, Leaving>,
}

#[derive(Clone, Copy, Debug)]
struct Watch {
    at: Time,
    since: Time,
    times: u32,
    inquiry: Inquiry,
    /// When that was, the last time.
    asked: Time,
    /// The highest ballot that this node, recovering it, heard of.
    heard_of: Ballot,
}

/// Whether the gateway of a transaction looks after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Inquiry {
    /// It was not asked since it last said yes.
    None,
    /// It was asked so often, and has not answered.
    Open(u32),
    /// It does not, or need not be asked.
    Over,
}

/// What all replicas may forget of a transaction that is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Release {
    /// Everything: its client knows the outcomes below this counter, or has not asked for long.
    Known(u64),
    /// All but the outcome: together they take too much memory.
    TooMuch,
}

/// A transaction that somebody should look after.
#[derive(Debug)]
pub(super) struct Overdue {
    pub txn: TxnId,
    pub participants: Vec<PartitionId>,
    pub text: Option<Arc<Text>>,
    pub promised: Ballot,
    pub ended: Option<Arc<Output>>,
}

impl Overdue {
    /// What one receiver may get of it.
    pub(super) fn bytes(&self) -> usize {
        let text = self.text.as_ref().map_or(0, Wire::size);
        let output = self.ended.as_ref().map_or(0, Wire::size);
        text.max(output).saturating_mul(self.participants.len())
    }
}

impl Replica {
    pub(super) fn new(
        id: PartitionId,
        replicas: Vec<NodeId>,
        (state, is_replacement): (State, bool),
        world: &mut World<'_, '_>,
    ) -> Self {
        let now = world.cx.now();
        let mut replica = Self {
            id,
            closings: Closings::new(Timestamp::ZERO),
            early: None,
            state,
            marks: replicas.iter().map(|&node| (node, (Timestamp::ZERO, now))).collect(),
            replicas,
            writers: Writers::default(),
            hints: Hints::default(),
            questions: Questions::default(),
            closing_due: OrdMap::new(),
            closed: OrdMap::new(),
            acks: OrdMap::new(),
            settling: OrdMap::new(),
            fetching: OrdMap::new(),
            gossiped: now,
            aging: OrdMap::new(),
            aged: now,
            watched: OrdMap::new(),
            due: OrdSet::new(),
            inquiries: OrdMap::new(),
            entries_bytes: 0,
            shortened: VecDeque::new(),
            rejoin: None,
            moving: Moving::new(now),
            leaving: OrdMap::new(),
        };
        // This may raise the ceiling.
        replica.rejoin_if_needed(is_replacement, world);
        replica.closings = Closings::new(replica.state.ceiling);
        replica.early = (replica.replicas.len() == 1).then(|| Early::new(replica.state.ceiling));
        replica.shortened.extend(replica.state.outcomes.keys().map(|&txn| (now, txn)));
        let txns: Vec<TxnId> = replica.state.entries.keys().copied().collect();
        for txn in txns {
            replica.entries_bytes += replica.state.entries.get(&txn).map_or(0, Wire::size);
            replica.index(txn, world);
            replica.watch(txn, world);
        }
        world.cx.set_timer(Timer::Sweep(id), now + world.config.sweep_interval);
        replica
    }

    /// The names in a range: of what has ended, and of what unfinished transactions may write.
    pub(super) fn names(&self, ask: &Ask, store: &Store) -> Listing {
        let basis = Basis::Voter {
            since: self.epoch(),
            voters: vec![Voters { nodes: self.replicas.clone() }],
        };
        if let Some(after) = ask.changes_after {
            // What it will stamp is none of its business here: the watch has closed the partition.
            let before = self.first_unfinished().map(|at| at - Duration::from_nanos(1));
            let closed = before.unwrap_or(Timestamp::MAX);
            return Listing::of_changes(store, [self.id], (ask, after), closed, basis);
        }
        let pending = self.writers.keys_in(&ask.range).cloned();
        Listing::of(store, [self.id], pending, ask, basis)
    }

    fn majority(&self) -> usize {
        self.replicas.len() / 2 + 1
    }

    /// Takes a message meant for this replica.
    pub(super) fn on_message(&mut self, from: NodeId, msg: Msg, world: &mut World<'_, '_>) {
        let is_barred = msg.txn().is_some_and(|txn| self.is_barred(txn));
        let is_copy = matches!(msg, Msg::Known { .. } | Msg::Copied { .. } | Msg::Fenced { .. });
        let tells_end = matches!(
            msg,
            Msg::Apply { .. } | Msg::Commit { .. } | Msg::Fetched { .. } | Msg::Driving { .. }
        );
        if !self.is_ready() && !is_copy || is_barred && !tells_end {
            world.cx.note(Note::Barred);
            return;
        }
        match msg {
            Msg::Begin { text, .. } => self.on_begin(from, &text, world),
            Msg::Forward { text, stamp, .. } => self.on_forward(from, &text, stamp, world),
            Msg::Ack { txn, stamp, arrived, .. } => self.on_ack(from, txn, stamp, arrived, world),
            Msg::Settle { txn, at, text, .. } => self.on_settle(from, txn, at, &text, world),
            Msg::Settled { txn, .. } => self.on_settled(from, txn, world),
            Msg::Store { txn, offer, participants, .. } => {
                self.on_store(from, txn, &offer, participants, world);
            }
            Msg::Commit { txn, at, text, .. } => self.on_commit(from, txn, at, text, world),
            Msg::Apply { txn, output, participants, .. } => {
                self.end(txn, &output, &participants, world);
                world.reply(from, Msg::Applied { txn, partition: self.id, late: 0 });
            }
            Msg::Forget { txns, acknowledged, keeps_outcomes, .. } => {
                self.on_forget(txns, acknowledged, keeps_outcomes, world);
            }
            Msg::Fetch { txn, keys, .. } => self.on_fetch(from, txn, keys, world),
            Msg::Fetched { txn, keys, rest, .. } => self.on_fetched(from, txn, (keys, rest), world),
            Msg::Recover { txn, ballot, text, participants, .. } => {
                self.on_recover(from, (txn, ballot), text, participants, world);
            }
            Msg::Propose { txn, ballot, value, text, participants, .. } => {
                self.on_propose(from, (txn, ballot, value), text, participants, world);
            }
            Msg::Read { txn, keys, .. } => self.on_read(from, txn, keys, world),
            Msg::ReadOnly { txn, keys, at, fenced, is_single, .. } => {
                let to = from;
                let question = Question { txn, to, at, keys, fenced, is_read_only: true };
                self.on_read_only(question, is_single, world);
            }
            Msg::Gossip { mark, .. } => {
                let known = self.marks.entry(from).or_insert((mark, world.cx.now()));
                *known = (known.0.max(mark), world.cx.now());
                self.on_member_heard(from);
            }
            Msg::Fence { .. } => self.on_fence(from, world),
            Msg::Fenced { until, .. } => self.on_fenced(from, until, world),
            Msg::Elect { ballot, members, is_final, .. } => {
                self.on_elect(from, (ballot, is_final), members, world);
            }
            Msg::Elected { ballot, is_final, election, .. } => {
                self.on_elected(from, (ballot, is_final), *election, world);
            }
            Msg::Driving { txn, is_driven, .. } => self.on_driving(from, txn, is_driven, world),
            Msg::Rejoin { until, number, answer, bytes_max, .. } => {
                self.on_rejoin(from, (until, number), (answer, bytes_max), world);
            }
            Msg::Known { until, number, count, answer, part, .. } => {
                self.on_known(from, (until, answer), (number, count), part, world);
            }
            Msg::Copy { until, start, bytes_max, .. } => {
                self.on_copy(from, until, (start, bytes_max), world);
            }
            Msg::Copied { until, start, keys, next, .. } => {
                self.on_copied(from, until, (&start, next), keys, world);
            }
            Msg::Hint { txn, gateway, keys, .. } => {
                if !self.state.entries.contains_key(&txn) && !self.state.is_forgotten(txn) {
                    self.hints.add(txn, gateway, keys, world.cx.now());
                }
            }
            Msg::Decided { .. }
            | Msg::Observed { .. }
            | Msg::Stamped { .. }
            | Msg::Stored { .. }
            | Msg::Applied { .. }
            | Msg::Promised { .. }
            | Msg::Accepted { .. }
            | Msg::ReadResult { .. }
            | Msg::ReadOnlyResult { .. }
            | Msg::Inquire { .. }
            | Msg::Blocked { .. }
            | Msg::Follow { .. }
            | Msg::Foretold { .. }
            | Msg::Ping
            | Msg::Pong
            | Msg::Several(_)
            | Msg::Under { .. }
            | Msg::Members { .. } => unreachable!("{} is asked, and was answered", self.id),
        }
    }

    /// Makes a change durable, and carries it out.
    fn change(&mut self, change: Change, world: &mut World<'_, '_>) {
        let concerned: Vec<TxnId> = match &change {
            Change::Stamp { text, .. } | Change::Direct { text, .. } => vec![text.txn()],
            Change::Promise { txn, .. }
            | Change::Accept { txn, .. }
            | Change::Store { txn, .. }
            | Change::Final { txn, .. }
            | Change::Confirm { txn, .. }
            | Change::End { txn, .. } => vec![*txn],
            Change::Forget(txns) | Change::Shorten(txns) => txns.clone(),
            Change::Inherit(part) => part.entries.keys().copied().collect(),
            Change::Copy { .. }
            | Change::Rejoin(_)
            | Change::Rejoined
            | Change::Seal { .. }
            | Change::Elect(..)
            | Change::Members(_)
            | Change::Leave(_)
            | Change::Acknowledge(_)
            | Change::Ceiling(_)
            | Change::Mark(_)
            | Change::Age(_) => vec![],
        };
        let before = self.bytes_of(&concerned);
        self.state.apply((world.cluster, self.id), &change, world.store);
        self.entries_bytes += self.bytes_of(&concerned);
        self.entries_bytes = self.entries_bytes.saturating_sub(before);
        world.persist(self.id, change);
    }

    fn bytes_of(&self, txns: &[TxnId]) -> usize {
        txns.iter().filter_map(|txn| self.state.entries.get(txn)).map(Wire::size).sum()
    }

    /// What a transaction that has not ended may write here.
    fn index(&mut self, txn: TxnId, world: &mut World<'_, '_>) {
        self.trace(txn, world);
        let entry = self.state.entries.get(&txn).filter(|entry| !entry.is_visible);
        if let Some(text) = entry.and_then(|entry| entry.text.as_ref()) {
            self.writers.add(txn, text.writes(world.cluster, self.id));
            self.hints.remove(txn);
        }
    }

    /// Where only this replica knows what comes before what: remembers the stamp of a transaction.
    fn trace(&mut self, txn: TxnId, world: &mut World<'_, '_>) {
        let Some(early) = &mut self.early else { return };
        let entry = self.state.entries.get(&txn).filter(|entry| entry.ended.is_none());
        let Some((text, stamp)) = entry.and_then(|entry| entry.text.clone().zip(entry.stamp))
        else {
            return;
        };
        let (reads, writes) = touched(&text, self.id, world);
        let is_single = text.sides.len() == 1;
        let touched = Touched { reads: &reads, writes: &writes };
        early.stamp(txn, touched, (stamp.at, is_single));
        if is_single {
            // It closes what the transaction writes, too, and closings are durable (D1).
            self.close(&[], stamp.at, world);
        }
    }

    /// Where only this replica knows what comes before what: a transaction has ended, with a place up
    /// to `until`.
    fn end_trace(&mut self, txn: TxnId, until: Timestamp, world: &World<'_, '_>) {
        let Some(early) = &mut self.early else { return };
        let entry = self.state.entries.get(&txn);
        if let Some(text) = entry.and_then(|entry| entry.text.as_ref()) {
            let (reads, writes) = touched(text, self.id, world);
            early.end(txn, Touched { reads: &reads, writes: &writes }, until);
        }
    }

    /// What must have passed on every clock before a transaction with this decision may be answered, if
    /// that is less than the decision (D20).
    fn answered_after(
        &self,
        text: &Text,
        at: Timestamp,
        world: &World<'_, '_>,
    ) -> Option<Timestamp> {
        let early = self.early.as_ref().filter(|_| text.sides.len() == 1)?;
        if world.config.mutations.early_always() {
            return Some(Timestamp::ZERO);
        }
        let (reads, writes) = touched(text, self.id, world);
        match early.before(text.txn(), Touched { reads: &reads, writes: &writes }) {
            Before::Until(until) => Some(until).filter(|until| *until < at),
            Before::Pending => None,
        }
    }

    /// A stamp for a transaction: `wanted` if that is above the closings of what it writes, and above
    /// what is settled (D2); otherwise a new timestamp that is. Where answers may be early, also above
    /// what was written of what it reads (D20).
    fn stamp_for(
        &mut self,
        text: &Text,
        wanted: Timestamp,
        world: &mut World<'_, '_>,
    ) -> Timestamp {
        let closed = if world.config.mutations.closings_are_ignored() {
            Timestamp::ZERO
        } else {
            let mut writes = text.writes(world.cluster, self.id).peekable();
            if writes.peek().is_none() { Timestamp::ZERO } else { self.closings.of(writes) }
        };
        let written = match &self.early {
            Some(early) if !world.config.mutations.written_is_open() => {
                let all = text.reads(world.cluster, self.id);
                early.closed(all.chain(text.writes(world.cluster, self.id)))
            }
            Some(_) | None => Timestamp::ZERO,
        };
        let closed = closed.max(written);
        let least = closed.max(self.state.mark).max(self.state.collected).next();
        if wanted >= least {
            return wanted;
        }
        let at = world.maker.at_least(least);
        // After a restart nothing is known of it, but that it lies below the ceiling.
        if at > self.state.ceiling {
            self.change(Change::Ceiling(at + world.config.ceiling_ahead), world);
        }
        at
    }

    /// The latest timestamp in which this replica takes part now (R8).
    fn latest_allowed(world: &World<'_, '_>) -> Timestamp {
        let clock = world.cx.clock();
        clock.now + clock.error * 2 + world.config.clock_ahead_max
    }

    /// R8: a timestamp that no sane clock shows yet would be in everybody's way.
    fn is_far_future(&self, t: Timestamp, world: &mut World<'_, '_>) -> bool {
        let is_far = t > Self::latest_allowed(world);
        if is_far {
            world.cx.note(Note::FarFuture);
        }
        is_far
    }

    /// Closes keys. What is closed lies below a durable ceiling (D1).
    fn close(&mut self, keys: &[Key], at: Timestamp, world: &mut World<'_, '_>) {
        self.closings.close(keys, at);
        if at > self.state.ceiling {
            let ceiling = at.max(world.cx.clock().now) + world.config.ceiling_ahead;
            self.change(Change::Ceiling(ceiling), world);
        }
    }

    /// True if this replica has started again, and its clock has not reached the ceiling of its closings
    /// yet. Each stamp that it gave a writer would be ahead, and everybody would wait for that time.
    pub(super) fn is_ahead(&self, now: Timestamp) -> bool {
        self.replicas.len() > 2 && self.closings.floor() >= now
    }

    /// True if this replica gives a transaction no stamp, because that would be ahead. To others it is
    /// still down, for a second at most, and a majority does without it.
    fn would_be_ahead(&self, text: &Text, wanted: Timestamp, world: &mut World<'_, '_>) -> bool {
        let is_behind = wanted <= self.closings.floor() && self.is_ahead(world.cx.clock().now);
        let is_ahead = is_behind && text.writes(world.cluster, self.id).next().is_some();
        if is_ahead {
            world.cx.note(Note::Ahead);
        }
        is_ahead
    }

    // Steps 1 to 4.

    /// True if a message of ballot 0 comes too late, or too early.
    fn is_past_ballot_zero(&self, text: &Text, world: &mut World<'_, '_>) -> bool {
        let txn = text.txn();
        let entry = self.state.entries.get(&txn);
        let is_over =
            entry.is_some_and(|entry| entry.ended.is_some() || entry.promised != Ballot::default());
        if is_over || self.state.is_forgotten(txn) {
            world.cx.note(Note::LateMessage);
            return true;
        }
        if self.is_too_old(text) {
            world.cx.note(Note::TooOld);
            return true;
        }
        entry.is_none() && self.is_far_future(text.t, world)
    }

    /// Step 2, at h; in direct mode at every replica.
    fn on_begin(&mut self, from: NodeId, text: &Arc<Text>, world: &mut World<'_, '_>) {
        let (txn, partition) = (text.txn(), self.id);
        let named = text.named(partition);
        let Some(&h) = named.first() else { return };
        let (is_first, is_direct) = (h == world.node, text.is_direct(partition));
        if !(is_first || is_direct) || self.is_past_ballot_zero(text, world) {
            return;
        }
        let arrived = world.cx.clock().now;
        let known = self.state.entries.get(&txn).and_then(|entry| entry.stamp);
        let at = match known {
            Some(stamp) => stamp.at,
            None if self.would_be_ahead(text, text.t, world) => return,
            None => {
                let at = self.stamp_for(text, text.t, world);
                let text = text.clone();
                let change =
                    if is_first { Change::Stamp { text, at } } else { Change::Direct { text, at } };
                self.stamp(change, txn, world);
                at
            }
        };
        let is_raised = at > text.t;
        if is_raised && known.is_none() {
            world.cx.note(Note::Raised);
        }
        if is_direct {
            world.reply(text.gateway, Msg::Stamped { txn, partition, at, arrived });
            let is_second = named.contains(&world.node) && !is_first;
            let acks = is_second && world.config.mutations.direct_stamp_is_acknowledged();
            self.closing_due.entry((at, txn)).or_insert(acks.then_some(arrived));
            self.close_due(world);
        }
        let is_patient = text.is_patient(partition);
        let is_asked = known.is_some() || from != text.gateway;
        if is_first && (!is_patient || is_raised || is_asked) {
            self.forward(text, at, world);
        } else if !is_first && is_patient && is_raised {
            world.reply(h, Msg::Begin { partition, text: text.clone(), more: vec![] });
        }
    }

    /// h has stamped.
    fn forward(&mut self, text: &Arc<Text>, stamp: Timestamp, world: &mut World<'_, '_>) {
        let named = text.named(self.id);
        if !text.is_direct(self.id) {
            self.hint(text, world);
        }
        if named.len() == 1 {
            self.try_record(text.txn(), world);
            return;
        }
        for &to in named.iter().skip(1) {
            let (partition, text, more) = (self.id, text.clone(), vec![]);
            world.reply(to, Msg::Forward { partition, text, stamp, more });
        }
    }

    /// Says to the replicas that the gateway did not name what the transaction may write.
    fn hint(&self, text: &Text, world: &mut World<'_, '_>) {
        let keys: Vec<Key> = text.writes(world.cluster, self.id).cloned().collect();
        if keys.is_empty() {
            return;
        }
        let named = text.named(self.id);
        let (txn, partition, gateway) = (text.txn(), self.id, text.gateway);
        for to in self.replicas.iter().copied().filter(|node| !named.contains(node)) {
            world.send(to, Msg::Hint { txn, partition, gateway, keys: keys.clone() });
        }
    }

    fn stamp(&mut self, change: Change, txn: TxnId, world: &mut World<'_, '_>) {
        self.change(change, world);
        self.index(txn, world);
        self.watch(txn, world);
    }

    /// Step 3, at y.
    fn on_forward(
        &mut self,
        from: NodeId,
        text: &Arc<Text>,
        stamp: Timestamp,
        world: &mut World<'_, '_>,
    ) {
        let txn = text.txn();
        let named = text.named(self.id);
        let is_named = named.first() == Some(&from) && named.contains(&world.node);
        if !is_named || self.is_past_ballot_zero(text, world) {
            return;
        }
        let arrived = world.cx.clock().now;
        let at = match self.state.entries.get(&txn).and_then(|entry| entry.stamp) {
            Some(known) if known.kind == Kind::Direct => self.confirm(txn, known.at, stamp, world),
            Some(known) => known.at,
            None if self.would_be_ahead(text, stamp, world) => return,
            None => {
                let at = self.stamp_for(text, stamp, world);
                if at > stamp {
                    world.cx.note(Note::RaisedAtSecond);
                }
                self.stamp(Change::Stamp { text: text.clone(), at }, txn, world);
                at
            }
        };
        if arrived > at {
            world.cx.note(Note::LateForward);
        }
        self.closing_due.insert((at, txn), Some(arrived));
        self.close_due(world);
    }

    /// Direct mode, at y: its stamp respects that of h from now on (D9). Returns it.
    fn confirm(
        &mut self,
        txn: TxnId,
        own: Timestamp,
        stamp: Timestamp,
        world: &mut World<'_, '_>,
    ) -> Timestamp {
        let at = if world.config.mutations.confirmed_as_it_is() { own } else { own.max(stamp) };
        if own > stamp {
            world.cx.note(Note::RaisedAtSecond);
        }
        self.closing_due.remove(&(own, txn));
        self.change(Change::Confirm { txn, at }, world);
        if at > own {
            self.recheck(txn, world);
        }
        at
    }

    /// y, and in direct mode every replica, closes up to the stamps that its clock has passed.
    pub(super) fn close_due(&mut self, world: &mut World<'_, '_>) {
        let now = world.cx.clock().now;
        while let Some((&(at, txn), &arrived)) = self.closing_due.first_key_value() {
            if at >= now {
                let wait = Duration::from_nanos(at.0 - now.0 + 1);
                world.cx.set_timer(Timer::Close(self.id), world.cx.now() + wait);
                return;
            }
            self.closing_due.pop_first();
            let entry = self.state.entries.get(&txn);
            let Some(text) = entry.and_then(|entry| entry.text.clone()) else { continue };
            let Some(&h) = text.named(self.id).first() else { continue };
            self.observe_once(&text, at, world);
            if let Some(arrived) = arrived {
                world.reply(h, Msg::Ack { txn, partition: self.id, stamp: at, arrived });
            }
        }
    }

    /// Closes and tells the gateway what the transaction reads, unless that was done as of this time: in
    /// direct mode a replica need not wait for h.
    fn observe_once(&mut self, text: &Arc<Text>, at: Timestamp, world: &mut World<'_, '_>) {
        let is_done = text.is_direct(self.id) && self.closed.insert(text.txn(), at) == Some(at);
        if !is_done {
            self.observe(text, text.gateway, at, world);
        }
    }

    /// Step 4, at h: a named replica has closed.
    fn on_ack(
        &mut self,
        from: NodeId,
        txn: TxnId,
        stamp: Timestamp,
        arrived: Timestamp,
        world: &mut World<'_, '_>,
    ) {
        let Some(entry) = self.state.entries.get(&txn) else { return };
        let Some(text) = &entry.text else { return };
        let named = text.named(self.id);
        // D4: only those count that the gateway named.
        let is_named = named.first() == Some(&world.node) && named.contains(&from);
        if is_named && entry.accepted.is_none() {
            self.acks.entry(txn).or_default().insert(from, (stamp, arrived));
            self.try_record(txn, world);
        }
    }

    /// Step 4, at h: decides the largest stamp of all named replicas, if enough of them gave it (D11).
    fn try_record(&mut self, txn: TxnId, world: &mut World<'_, '_>) {
        let Some(entry) = self.state.entries.get(&txn) else { return };
        let (Some(text), Some(stamp)) = (entry.text.clone(), entry.stamp) else { return };
        let is_promised =
            entry.promised != Ballot::default() && !world.config.mutations.record_after_promise();
        let is_first = text.named(self.id).first() == Some(&world.node);
        if !is_first || is_promised || entry.accepted.is_some() || stamp.kind != Kind::Confirmed {
            return;
        }
        let acks = self.acks.get(&txn);
        let acks: Vec<(Timestamp, Timestamp)> =
            acks.into_iter().flatten().map(|it| *it.1).collect();
        if acks.len() + 1 < text.named(self.id).len() {
            return;
        }
        let stamps = || acks.iter().map(|(at, _)| *at).chain([stamp.at]);
        let largest = stamps().max().unwrap_or(stamp.at);
        let times = stamps().filter(|at| *at == largest).count();
        let arrived = acks.iter().map(|(_, arrived)| *arrived).max();
        let arrived = arrived.unwrap_or(world.cx.clock().now);
        self.acks.remove(&txn);
        let value = Value::At(largest);
        let participants = entry.participants.clone();
        let accept =
            Change::Accept { txn, participants, text: None, ballot: Ballot::default(), value };
        self.change(accept, world);
        if times >= self.replicas.len() / 2 {
            self.decided(&text, largest, arrived, world);
            return;
        }
        world.cx.note(Note::Settle);
        self.settling.insert(txn, (largest, [world.node].into(), arrived));
        for to in self.peers(world.node) {
            let (partition, text) = (self.id, text.clone());
            world.reply(to, Msg::Settle { txn, partition, at: largest, text });
        }
    }

    /// The decision is durable: h closes up to it and says so.
    fn decided(
        &mut self,
        text: &Arc<Text>,
        at: Timestamp,
        arrived: Timestamp,
        world: &mut World<'_, '_>,
    ) {
        let (txn, partition) = (text.txn(), self.id);
        self.observe_once(text, at, world);
        let after = self.answered_after(text, at, world);
        world.reply(text.gateway, Msg::Decided { txn, partition, at, arrived, after });
    }

    /// f ≥ 2: h proposes at ballot 0.
    fn on_settle(
        &mut self,
        from: NodeId,
        txn: TxnId,
        at: Timestamp,
        text: &Arc<Text>,
        world: &mut World<'_, '_>,
    ) {
        if text.named(self.id).first() != Some(&from) || self.is_past_ballot_zero(text, world) {
            return;
        }
        let (participants, ballot) = (text.participants(), Ballot::default());
        let (text, value) = (Some(text.clone()), Value::At(at));
        self.change(Change::Accept { txn, participants, text, ballot, value }, world);
        self.index(txn, world);
        self.watch(txn, world);
        world.reply(from, Msg::Settled { txn, partition: self.id });
    }

    fn on_settled(&mut self, from: NodeId, txn: TxnId, world: &mut World<'_, '_>) {
        let majority = self.majority();
        let Some((at, accepted, arrived)) = self.settling.get_mut(&txn) else { return };
        accepted.insert(from);
        let (at, arrived, is_enough) = (*at, *arrived, accepted.len() >= majority);
        if !is_enough {
            return;
        }
        self.settling.remove(&txn);
        let entry = self.state.entries.get(&txn);
        if let Some(text) = entry.and_then(|entry| entry.text.clone()) {
            self.decided(&text, at, arrived, world);
        }
    }

    // Steps 5 and 6.

    /// F is known: what was decided below it is closed once more.
    fn on_commit(
        &mut self,
        from: NodeId,
        txn: TxnId,
        at: Timestamp,
        text: Option<Arc<Text>>,
        world: &mut World<'_, '_>,
    ) {
        let entry = self.state.entries.get(&txn);
        if entry.is_some_and(|entry| entry.ended.is_some()) || self.state.is_forgotten(txn) {
            self.answer(from, (txn, Ballot::default()), true, world);
            return;
        }
        let known = entry.and_then(|entry| entry.text.clone());
        let Some(text) = known.clone().or(text) else { return };
        if known.is_none() && text.t <= self.state.barred {
            return;
        }
        let before = entry.and_then(|entry| entry.finally_at);
        match before {
            Some(before) => assert_eq!(before, at, "{txn} has two final timestamps at {}", self.id),
            None => {
                let new = Some(text.clone()).filter(|_| known.is_none());
                self.change(Change::Final { txn, text: new, at }, world);
                if self.state.entries.get(&txn).is_some_and(|entry| entry.is_visible) {
                    self.writers.remove(txn, text.writes(world.cluster, self.id));
                } else {
                    self.index(txn, world);
                }
                self.watch(txn, world);
                self.recheck(txn, world);
            }
        }
        if self.is_barred(txn) {
            return;
        }
        self.observe(&text, from, at, world);
    }

    /// Closes what the transaction reads here up to `at`, and tells what it reads once every
    /// predecessor that is known here has ended or is none.
    fn observe(&mut self, text: &Arc<Text>, to: NodeId, at: Timestamp, world: &mut World<'_, '_>) {
        let keys: Vec<Key> = text.reads(world.cluster, self.id).cloned().collect();
        if keys.is_empty() {
            return;
        }
        self.close(&keys, at, world);
        let (txn, fenced, is_read_only) = (text.txn(), None, false);
        self.ask(Question { txn, to, at, keys, fenced, is_read_only }, world);
    }

    fn ask(&mut self, mut question: Question, world: &mut World<'_, '_>) {
        if self.questions.has(&question) {
            // Its keys have been closed since it was asked first, so nobody has come before it.
            world.cx.note(Note::Waited);
            return;
        }
        self.questions.widen(&mut question);
        let mut blockers = self.writers.of(&question.keys, question.fenced.as_ref());
        if world.config.mutations.fences_stand_for_nothing() {
            let keys = question.keys.iter().filter(|key| !is_fence(key));
            blockers = self.writers.of(&keys.cloned().collect::<Vec<_>>(), None);
        }
        let place = question.place();
        blockers.retain(|&txn| txn != question.txn && self.is_before(txn, place));
        if world.config.mutations.replacement_reads_early() {
            blockers.retain(|&txn| !self.is_barred(txn));
        }
        if blockers.is_empty() || world.config.mutations.no_predecessors() {
            self.tell(question, world);
        } else {
            world.cx.note(Note::Waited);
            let name = question.name();
            let is_new = self.questions.get(name).is_none();
            let is_soon = blockers.len() <= BEHIND_MAX;
            self.questions.wait(question, blockers);
            if is_new && is_soon {
                self.tell_blocked(name, world);
            }
        }
    }

    /// Names to the gateway the pending predecessors of its transaction, once they are few. The
    /// gateways of those know what they write before this replica does.
    fn tell_blocked(&self, name: Name, world: &mut World<'_, '_>) {
        let Some((question, blockers)) = self.questions.get(name) else { return };
        let Question { txn, to, at, keys, is_read_only, .. } = question;
        let text = self.state.entries.get(txn).and_then(|entry| entry.text.as_ref());
        let is_gateways = text.is_some_and(|text| text.gateway == *to);
        if *is_read_only || !is_gateways || *at <= self.state.collected {
            return;
        }
        let behind: Option<Vec<Predecessor>> =
            blockers.iter().map(|&txn| self.predecessor(txn, keys, world)).collect();
        let Some(behind) = behind else { return };
        let place = question.place();
        let read = |key: &Key| (key.clone(), read_below(world.store, self.id, key, place));
        let reads: Vec<(Key, Read)> = keys.iter().map(read).collect();
        if Wire::size(&reads) + Wire::size(&behind) > world.config.piece_bytes {
            // Its gateway waits for the whole answer.
            return;
        }
        let (txn, partition, at) = (*txn, self.id, *at);
        world.reply(*to, Msg::Blocked { txn, partition, at, reads, behind });
    }

    /// A pending transaction, with those of `keys` that it may write; none if this replica does not
    /// know its gateway.
    fn predecessor(&self, txn: TxnId, keys: &[Key], world: &World<'_, '_>) -> Option<Predecessor> {
        let text = self.state.entries.get(&txn).and_then(|entry| entry.text.as_ref())?;
        let own = text.writes(world.cluster, self.id).filter(|key| keys.contains(key));
        Some(Predecessor { txn, gateway: text.gateway, keys: own.cloned().collect() })
    }

    /// Who may yet write these keys below the place of a transaction that reads them; some of them, if
    /// they are many.
    fn behind(&self, txn: TxnId, keys: &[Key], world: &World<'_, '_>) -> Vec<Predecessor> {
        let own = self.state.entries.get(&txn).and_then(Entry::pending_at);
        let place = (own.unwrap_or(Timestamp::MAX), txn);
        let known = self.writers.of(keys, None).into_iter();
        let known = known.filter(|&other| other != txn && self.is_before(other, place));
        let known = known.filter_map(|other| self.predecessor(other, keys, world));
        let heard = self.hints.of(keys).into_iter().map(|(txn, gateway)| {
            let own = keys.iter().filter(|key| self.hints.writes(txn, key));
            Predecessor { txn, gateway, keys: own.cloned().collect() }
        });
        known.chain(heard).take(BEHIND_MAX).collect()
    }

    /// True if a transaction that has not ended may have a place below this one.
    fn is_before(&self, txn: TxnId, place: Place) -> bool {
        let awaited = self.state.entries.get(&txn).and_then(Entry::awaited_at);
        awaited.is_some_and(|at| (at, txn) < place)
    }

    /// More is known of a transaction: whoever waits for it need not any more, perhaps.
    fn recheck(&mut self, txn: TxnId, world: &mut World<'_, '_>) {
        for (name, place) in self.questions.blocked_by(txn) {
            if self.is_before(txn, place) {
                continue;
            }
            if let Some(question) = self.questions.release(name, txn) {
                self.tell(question, world);
            } else if self.questions.get(name).is_some_and(|(_, left)| left.len() == BEHIND_MAX) {
                self.tell_blocked(name, world);
            }
        }
    }

    fn tell(&self, question: Question, world: &mut World<'_, '_>) {
        let place = question.place();
        let Question { txn, to, at, keys, is_read_only, .. } = question;
        let partition = self.id;
        if at <= self.state.collected {
            world.cx.note(Note::Collected);
            if is_read_only {
                let (portion, reads, above) = (Portion::WHOLE, None, Timestamp::ZERO);
                world.reply(to, Msg::ReadOnlyResult { txn, partition, at, portion, reads, above });
            }
            return;
        }
        let mut parts: Pieces<Vec<(Key, Read)>> = Pieces::new(vec![], world.config.piece_bytes);
        for key in keys {
            let read = read_below(world.store, partition, &key, place);
            parts.of(key.size() + read.size()).push((key, read));
        }
        for (portion, reads) in Portion::number(parts.finish(), world.cx.now()) {
            let msg = if is_read_only {
                let (reads, above) = (Some(reads), Timestamp::ZERO);
                Msg::ReadOnlyResult { txn, partition, at, portion, reads, above }
            } else {
                Msg::Observed { txn, partition, at, portion, reads }
            };
            world.reply(to, msg);
        }
    }

    /// The transaction has ended.
    fn end(
        &mut self,
        txn: TxnId,
        output: &Arc<Output>,
        participants: &[PartitionId],
        world: &mut World<'_, '_>,
    ) {
        self.hints.remove(txn);
        if self.state.is_forgotten(txn) {
            world.cx.note(Note::LateMessage);
            self.catch_up(txn, output, world);
            return;
        }
        let entry = self.state.entries.get(&txn);
        if let Some(known) = entry.and_then(|entry| entry.ended.as_ref()) {
            let is_commit = |output: &Output| matches!(output.outcome, Outcome::Committed(_));
            let agree =
                known.outcome == output.outcome || (!is_commit(known) && !is_commit(output));
            assert!(agree, "{txn} ended {known:?} and {output:?} at {}", self.id);
            return;
        }
        let until = match output.outcome {
            Outcome::Committed(at) => at,
            Outcome::Aborted(_) | Outcome::Unknown => Timestamp::ZERO,
        };
        self.end_trace(txn, until, world);
        self.unindex(txn, world);
        let (participants, output) = (participants.to_vec(), output.clone());
        self.change(Change::End { txn, participants, output }, world);
        self.watch(txn, world);
        self.fetching.remove(&txn);
        self.questions.forget(txn);
        self.recheck(txn, world);
    }

    /// A transaction of which nothing is known here has ended, and its client knows. Either this replica
    /// has forgotten it, or it never heard of it before, and has to have what it wrote.
    fn catch_up(&mut self, txn: TxnId, output: &Output, world: &mut World<'_, '_>) {
        let Outcome::Committed(timestamp) = output.outcome else { return };
        let version = Version { timestamp, writer: txn.name() };
        let own = output.writes.iter().filter(|(key, _)| {
            world.cluster.partition_of(key) == self.id
                && version_of(world.store, self.id, key, txn).is_none()
        });
        let versions = |value: &Option<_>| Versions::from_iter([(version, value.clone())]);
        let keys = own.map(|(key, value)| (key.clone(), versions(value)));
        let keys: Vec<(Key, Versions)> = keys.collect();
        if !keys.is_empty() {
            world.cx.note(Note::CaughtUp);
            self.change(Change::Copy { keys }, world);
        }
    }

    fn unindex(&mut self, txn: TxnId, world: &World<'_, '_>) {
        self.acks.remove(&txn);
        self.settling.remove(&txn);
        self.closed.remove(&txn);
        let Some(entry) = self.state.entries.get(&txn) else { return };
        if let Some(stamp) = entry.stamp {
            self.closing_due.remove(&(stamp.at, txn));
        }
        if let Some(text) = &entry.text {
            self.writers.remove(txn, text.writes(world.cluster, self.id));
        }
    }

    /// Enough replicas of every participant have applied these, and their clients know, or may still
    /// ask for the outcomes.
    fn on_forget(
        &mut self,
        txns: Vec<TxnId>,
        acknowledged: Vec<(ClientId, u64)>,
        keeps_outcomes: bool,
        world: &mut World<'_, '_>,
    ) {
        let is_new = |(client, below): &(ClientId, u64)| {
            self.state.acknowledged.get(client).is_none_or(|known| known < below)
        };
        if acknowledged.iter().any(is_new) {
            self.change(Change::Acknowledge(acknowledged), world);
        }
        self.drop_all(&txns, keeps_outcomes, world);
    }

    /// Enough others have applied these, and their clients know, or their outcomes are kept. Those that
    /// this replica has applied it forgets; of the others it first fetches what it missed. It may have
    /// told somebody that it knows of them, and must not answer without them.
    fn drop_all(&mut self, txns: &[TxnId], keeps_outcomes: bool, world: &mut World<'_, '_>) {
        let (mut gone, mut shortened) = (Vec::new(), Vec::new());
        for &txn in txns {
            let is_known = self.state.is_acknowledged(txn);
            if !is_known && !keeps_outcomes {
                continue;
            }
            let Some(entry) = self.state.entries.get(&txn) else {
                // It has never heard of it, and need not.
                gone.extend((!self.state.is_forgotten(txn)).then_some(txn));
                continue;
            };
            let missed: Vec<Key> = match (&entry.ended, &entry.text) {
                (None, Some(text)) => text.writes(world.cluster, self.id).cloned().collect(),
                (Some(_), _) | (None, None) => vec![],
            };
            let f = self.replicas.len() / 2;
            if missed.is_empty() || f == 0 {
                if is_known {
                    gone.push(txn)
                } else {
                    shortened.push(txn)
                }
                continue;
            }
            world.cx.note(Note::Fetched);
            self.fetching.entry(txn).or_default();
            for to in self.peers(world.node) {
                let (partition, keys) = (self.id, missed.clone());
                world.send(to, Msg::Fetch { txn, partition, keys });
            }
        }
        self.forget(gone, Change::Forget, world);
        if !shortened.is_empty() {
            world.cx.note(Note::Shortened);
            let now = world.cx.now();
            self.shortened.extend(shortened.iter().map(|&txn| (now, txn)));
            self.forget(shortened, Change::Shorten, world);
        }
    }

    fn forget(
        &mut self,
        txns: Vec<TxnId>,
        change: fn(Vec<TxnId>) -> Change,
        world: &mut World<'_, '_>,
    ) {
        if txns.is_empty() {
            return;
        }
        for &txn in &txns {
            self.hints.remove(txn);
            self.end_trace(txn, Self::latest_allowed(world), world);
            self.unindex(txn, world);
            self.unwatch(txn);
            self.fetching.remove(&txn);
        }
        self.change(change(txns.clone()), world);
        for txn in txns {
            self.questions.forget(txn);
            self.recheck(txn, world);
        }
    }

    /// A peer has missed how a transaction ended. A replica that has missed the same answers, too, with
    /// what it has: the peer counts answers, and the others may be too few.
    fn on_fetch(&self, from: NodeId, txn: TxnId, keys: Vec<Key>, world: &mut World<'_, '_>) {
        let of = |key: Key| {
            let newest = world.store.read(self.id, &key);
            let own = version_of(world.store, self.id, &key, txn);
            let mut versions = Versions::new();
            versions.extend(own.filter(|(version, _)| *version < newest.version));
            if newest.version != Version::INITIAL {
                versions.push((newest.version, newest.value));
            }
            (key, versions)
        };
        let (mut told, mut rest, mut bytes) = (Vec::new(), Vec::new(), 0);
        for key in keys {
            if bytes >= world.config.piece_bytes {
                rest.push(key);
                continue;
            }
            let (key, versions) = of(key);
            let values = versions.iter().filter_map(|(_, value)| value.as_ref());
            bytes += key.len() + values.map(|value| value.0.len()).sum::<usize>();
            told.push((key, versions));
        }
        world.reply(from, Msg::Fetched { txn, partition: self.id, keys: told, rest });
    }

    /// f peers have told what this replica missed. f + 1 others had applied it before anybody was asked
    /// to forget it, so at most f - 1 of these peers can have missed it, too.
    fn on_fetched(
        &mut self,
        from: NodeId,
        txn: TxnId,
        (keys, rest): (Vec<(Key, Versions)>, Vec<Key>),
        world: &mut World<'_, '_>,
    ) {
        // The lost disk may have been one of those f + 1.
        let lost = usize::from(self.is_barred(txn));
        let Some(told) = self.fetching.get_mut(&txn) else { return };
        if rest.is_empty() {
            told.insert(from);
        } else {
            world.send(from, Msg::Fetch { txn, partition: self.id, keys: rest });
        }
        let is_enough = told.len() >= self.replicas.len() / 2 + lost;
        self.change(Change::Copy { keys }, world);
        if is_enough {
            self.forget(vec![txn], Change::Forget, world);
        }
    }

    // Recovery.

    /// Whoever recovers asks for a promise.
    fn on_recover(
        &mut self,
        from: NodeId,
        (txn, ballot): (TxnId, Ballot),
        text: Option<Arc<Text>>,
        participants: Vec<PartitionId>,
        world: &mut World<'_, '_>,
    ) {
        if let Some(text) = text.as_ref().filter(|text| self.was_never_decided(text)) {
            self.answer_never_decided(from, (text, ballot), world);
            return;
        }
        let entry = self.state.entries.get(&txn);
        let is_over = entry.is_some_and(|entry| entry.ended.is_some());
        let promised = entry.map_or_else(Ballot::default, |entry| entry.promised);
        let is_told = text.is_some();
        if !is_over && !self.state.is_forgotten(txn) && promised < ballot {
            let known = entry.and_then(|entry| entry.text.clone());
            let has_stamp = entry.is_some_and(|entry| entry.stamp.is_some());
            let new = text.filter(|_| known.is_none());
            let new = new.filter(|text| !self.is_far_future(text.t, world));
            // Of what is too old it promises without a stamp (D19).
            let new = new.filter(|text| !self.is_too_old(text));
            let whole = known.or(new.clone());
            let may_stamp = !has_stamp && !world.config.mutations.no_recovery_stamp();
            let whole = whole.filter(|_| may_stamp);
            if whole.as_ref().is_some_and(|text| self.would_be_ahead(text, text.t, world)) {
                return;
            }
            let stamp = whole.map(|text| self.stamp_for(&text, text.t, world));
            world.cx.note(if stamp.is_some() { Note::RecoveryStamp } else { Note::Promised });
            self.change(Change::Promise { txn, participants, text: new, ballot, stamp }, world);
            self.index(txn, world);
            self.watch(txn, world);
        }
        self.answer(from, (txn, ballot), is_told, world);
    }

    /// The answer has the text unless the asker has it.
    fn answer(
        &self,
        to: NodeId,
        (txn, ballot): (TxnId, Ballot),
        has_text: bool,
        world: &mut World<'_, '_>,
    ) {
        let mut answer = Box::new(self.what_is_known(txn));
        answer.text = answer.text.filter(|_| !has_text);
        world.reply(to, Msg::Promised { txn, partition: self.id, ballot, answer });
    }

    fn what_is_known(&self, txn: TxnId) -> Answer {
        let is_forgotten = self.state.is_forgotten(txn);
        let has_ended = is_forgotten && self.state.forgotten.contains(&txn);
        let outcome = self.state.outcomes.get(&txn).copied();
        let entry = self.state.entries.get(&txn);
        let gone = Answer { is_forgotten, has_ended, outcome, ..Answer::default() };
        entry.map_or(gone, Entry::answer)
    }

    /// Whoever recovers proposes.
    fn on_propose(
        &mut self,
        from: NodeId,
        (txn, ballot, value): (TxnId, Ballot, Value),
        text: Option<Arc<Text>>,
        participants: Vec<PartitionId>,
        world: &mut World<'_, '_>,
    ) {
        if let Some(text) = text.as_ref().filter(|text| self.was_never_decided(text)) {
            self.answer_never_decided(from, (text, ballot), world);
            return;
        }
        let entry = self.state.entries.get(&txn);
        let is_over = entry.is_some_and(|entry| entry.ended.is_some());
        let promised = entry.map_or_else(Ballot::default, |entry| entry.promised);
        let is_known = entry.is_some_and(|entry| entry.text.is_some());
        let is_accepted = entry.is_some_and(|entry| entry.accepted == Some((ballot, value)));
        let may = !is_over && !self.state.is_forgotten(txn) && promised <= ballot;
        if may && !is_accepted {
            let text = text.filter(|_| !is_known);
            self.change(Change::Accept { txn, participants, text, ballot, value }, world);
            self.index(txn, world);
            self.watch(txn, world);
        }
        let answer = Box::new(Answer { text: None, offer: None, ..self.what_is_known(txn) });
        world.reply(from, Msg::Accepted { txn, partition: self.id, ballot, answer });
    }

    /// What an interactive transaction writes is stored before it counts (D16). After a promise the
    /// gateway's own ballot is refused; of its attempts the latest stays.
    fn on_store(
        &mut self,
        from: NodeId,
        txn: TxnId,
        offer: &Arc<Offer>,
        participants: Vec<PartitionId>,
        world: &mut World<'_, '_>,
    ) {
        let entry = self.state.entries.get(&txn);
        let is_over = entry.is_some_and(|entry| entry.ended.is_some());
        let promised = entry.map_or_else(Ballot::default, |entry| entry.promised);
        let held = entry.and_then(|entry| entry.offer.as_ref());
        let is_new =
            held.is_none_or(|held| (held.ballot, held.attempt) < (offer.ballot, offer.attempt));
        if !is_over && !self.state.is_forgotten(txn) && promised <= offer.ballot && is_new {
            self.change(Change::Store { txn, participants, offer: offer.clone() }, world);
            self.watch(txn, world);
        }
        let answer = Box::new(Answer { text: None, offer: None, ..self.what_is_known(txn) });
        let (partition, ballot, attempt) = (self.id, offer.ballot, offer.attempt);
        world.reply(from, Msg::Stored { txn, partition, ballot, attempt, answer });
    }

    // Reading.

    /// The latest versions that this replica knows.
    fn on_read(&self, from: NodeId, txn: TxnId, keys: Vec<Key>, world: &mut World<'_, '_>) {
        let is_too_much = world.is_too_much(self.id, &keys);
        let keys = if is_too_much { vec![] } else { keys };
        let mut behind = self.behind(txn, &keys, world);
        let mut bytes = 0;
        behind.retain(|predecessor| {
            bytes += predecessor.size();
            bytes <= world.config.piece_bytes
        });
        // Values that are about to change would not be used.
        let keys = if behind.is_empty() { keys } else { vec![] };
        let read = |key: Key| {
            let read = world.store.read(self.id, &key);
            (key, read)
        };
        let reads = keys.into_iter().map(read).collect();
        let partition = self.id;
        world.send(from, Msg::ReadResult { txn, partition, reads, is_too_much, behind });
    }

    /// A read-only transaction: nobody writes these keys at or below `at` any more (D14).
    fn on_read_only(&mut self, question: Question, is_single: bool, world: &mut World<'_, '_>) {
        let Question { txn, to, at, .. } = question;
        let above = self.missed(&question, world);
        if above.is_some() || self.is_far_future(at, world) {
            let (partition, portion, reads) = (self.id, Portion::WHOLE, None);
            let above = above.unwrap_or_default();
            world.send(to, Msg::ReadOnlyResult { txn, partition, at, portion, reads, above });
            return;
        }
        if let Some(early) = &mut self.early
            && !world.config.mutations.reads_leave_no_trace()
        {
            early.read(txn, &question.keys, (at, is_single));
        }
        if !world.config.mutations.read_closes_nothing() {
            self.close(&question.keys, at, world);
        }
        self.ask(question, world);
    }

    /// Where answers may be early: the timestamp of a write that a question as of its own time would not
    /// see, although that write may have been answered before the question was asked (D20).
    fn missed(&self, question: &Question, world: &mut World<'_, '_>) -> Option<Timestamp> {
        let early = self.early.as_ref()?;
        if world.config.mutations.missed_is_missed() {
            return None;
        }
        let Question { at, keys, fenced, .. } = question;
        let until = *at + world.cx.clock().error * 2;
        let newest = early.newest();
        if newest <= *at {
            return None;
        }
        if keys.iter().any(is_fence) {
            return Some(newest);
        }
        let pending = self.writers.of(keys, fenced.as_ref()).into_iter();
        let pending = pending.filter_map(|txn| self.state.entries.get(&txn)?.pending_at());
        let place = (until.next(), TxnId::default());
        let read = |key: &Key| read_below(world.store, self.id, key, place).version.timestamp;
        let known = pending.chain(keys.iter().map(read));
        known.filter(|written| *at < *written && *written <= until).max()
    }

    // Looking after what is unfinished.

    /// Looks after `txn` some time from now: a transaction that has not ended by then may have lost its
    /// gateway, and one that has ended may be forgotten.
    fn watch(&mut self, txn: TxnId, world: &mut World<'_, '_>) {
        if self.watched.contains_key(&txn) {
            return;
        }
        let Some(entry) = self.state.entries.get(&txn) else { return };
        // The replicas of the first participant, in turn; then everybody else.
        let turn = self.replicas.iter().position(|&node| node == world.node);
        let mut rank = turn.unwrap_or(0);
        if entry.participants.first() != Some(&self.id) {
            rank += self.replicas.len();
        }
        let rank = u32::try_from(rank).unwrap_or(u32::MAX);
        let timeout = world.config.takeover_after + world.config.takeover_step * rank;
        let now = world.cx.now();
        let watch = Watch {
            at: now + timeout,
            since: now,
            times: 0,
            inquiry: Inquiry::None,
            asked: now,
            heard_of: Ballot::default(),
        };
        self.watched.insert(txn, watch);
        self.due.insert((watch.at, txn));
    }

    fn unwatch(&mut self, txn: TxnId) {
        if let Some(watch) = self.watched.remove(&txn) {
            self.due.remove(&(watch.at, txn));
        }
    }

    fn watch_again(&mut self, txn: TxnId, at: Time, inquiry: Inquiry) {
        let Some(watch) = self.watched.get_mut(&txn) else { return };
        self.due.remove(&(watch.at, txn));
        (watch.at, watch.inquiry) = (at, inquiry);
        self.due.insert((at, txn));
    }

    /// A gateway says whether it looks after a transaction.
    fn on_driving(&mut self, from: NodeId, txn: TxnId, is_driven: bool, world: &mut World<'_, '_>) {
        let now = world.cx.now();
        let Some(watch) = self.watched.get_mut(&txn) else { return };
        let usual = self.inquiries.entry(from).or_default();
        *usual = now.since(watch.asked).max(*usual * 7 / 8).min(INQUIRY_MAX);
        if !matches!(watch.inquiry, Inquiry::Open(_)) {
            // The answer came too late. The next one will be waited for.
            return;
        }
        if !is_driven {
            self.watch_again(txn, now, Inquiry::Over);
            return;
        }
        watch.times += 1;
        let after = world.config.takeover_after * backoff(watch.times.min(TAKEOVERS_DOUBLED));
        self.watch_again(txn, now + after, Inquiry::None);
    }

    /// Transactions that somebody should look after. Gateways are asked first; again if they are there,
    /// and only slow to answer.
    pub(super) fn overdue(&mut self, world: &mut World<'_, '_>) -> Vec<Overdue> {
        let now = world.cx.now();
        let mut overdue = Vec::new();
        if !self.is_ready() {
            return overdue;
        }
        while let Some(&(at, txn)) = self.due.first() {
            if at > now || overdue.len() >= TAKEOVERS_AT_ONCE {
                break;
            }
            self.due.pop_first();
            let Some(watch) = self.watched.get_mut(&txn) else { continue };
            let Some(entry) = self.state.entries.get(&txn) else { continue };
            let is_there = |gateway| world.heard.get(gateway).is_some_and(|&at| at > watch.asked);
            let inquiries = entry.text.as_ref().and_then(|text| match watch.inquiry {
                Inquiry::None => Some((text, 0)),
                Inquiry::Open(times) if times < INQUIRIES_MAX && is_there(&text.gateway) => {
                    Some((text, times))
                }
                Inquiry::Open(_) | Inquiry::Over => None,
            });
            if let Some((text, times)) = inquiries {
                world.send(text.gateway, Msg::Inquire { txn, partition: self.id });
                let usual = self.inquiries.get(&text.gateway).copied().unwrap_or_default();
                let span = world.config.takeover_step.max(usual * 2) * backoff(times);
                let span = span + world.config.span_of(text.size());
                watch.inquiry = Inquiry::Open(times + 1);
                (watch.asked, watch.at) = (now, now + span);
                self.due.insert((watch.at, txn));
                continue;
            }
            watch.times += 1;
            let pause = world.config.takeover_after * backoff(watch.times.min(TAKEOVERS_DOUBLED));
            let jitter = world.cx.rng().below(1 + nanos(pause) / 2);
            watch.inquiry = Inquiry::None;
            watch.at = now + pause + Duration::from_nanos(jitter);
            self.due.insert((watch.at, txn));
            // One that has ended stays until its client knows, or is gone for good.
            let is_kept = entry.ended.is_some()
                && !self.state.is_acknowledged(txn)
                && now.since(watch.since) < world.config.retention
                && self.entries_bytes <= world.config.kept_bytes;
            if !is_kept {
                overdue.push(Overdue {
                    txn,
                    participants: entry.participants.clone(),
                    text: entry.text.clone(),
                    promised: entry.promised.max(watch.heard_of),
                    ended: entry.ended.clone(),
                });
            }
        }
        overdue
    }

    /// Somebody was promised so much for `txn`: a recovery by this node needs a higher ballot.
    pub(super) fn heard_of(&mut self, txn: TxnId, ballot: Ballot) {
        if let Some(watch) = self.watched.get_mut(&txn) {
            watch.heard_of = watch.heard_of.max(ballot);
        }
    }

    /// This node has as much under way as it may: it looks at `txn` again a little later.
    pub(super) fn postpone(&mut self, txn: TxnId, world: &World<'_, '_>) {
        self.watch_again(txn, world.cx.now() + world.config.takeover_step, Inquiry::Over);
    }

    /// This node has driven `txn` to its end everywhere: may it be forgotten?
    pub(super) fn may_forget(&self, txn: TxnId, world: &World<'_, '_>) -> Option<Release> {
        if let Some(below) = self.state.acknowledged.get(&txn.client)
            && txn.counter < *below
        {
            return Some(Release::Known(*below));
        }
        let watch = self.watched.get(&txn)?;
        if world.cx.now().since(watch.since) >= world.config.retention {
            return Some(Release::Known(txn.counter.saturating_add(1)));
        }
        (self.entries_bytes > world.config.kept_bytes).then_some(Release::TooMuch)
    }

    /// Outcomes that were kept for long enough, or are too many, go as if their clients knew them.
    fn drop_outcomes(&mut self, world: &mut World<'_, '_>) {
        let (now, retention) = (world.cx.now(), world.config.retention);
        let many_max = world.config.kept_bytes / OUTCOME;
        let mut clients = OrdMap::<ClientId, u64>::new();
        while let Some(&(since, txn)) = self.shortened.front() {
            if now.since(since) < retention && self.shortened.len() <= many_max {
                break;
            }
            self.shortened.pop_front();
            let below = clients.entry(txn.client).or_default();
            *below = (*below).max(txn.counter.saturating_add(1));
        }
        let clients: Vec<(ClientId, u64)> = clients.into_iter().collect();
        for clients in clients.chunks(CLIENTS_AT_ONCE) {
            self.change(Change::Acknowledge(clients.to_vec()), world);
        }
    }

    /// Somebody says that everybody has forgotten `txn`, perhaps with the exception of its outcome.
    pub(super) fn on_forgotten(
        &mut self,
        txn: TxnId,
        keeps_outcome: bool,
        world: &mut World<'_, '_>,
    ) {
        if self.state.entries.contains_key(&txn) {
            if !self.state.is_acknowledged(txn) && !keeps_outcome {
                let acknowledged = vec![(txn.client, txn.counter.saturating_add(1))];
                self.change(Change::Acknowledge(acknowledged), world);
            }
            self.drop_all(&[txn], keeps_outcome, world);
        }
    }

    /// Periodic work.
    pub(super) fn on_sweep_timeout(&mut self, world: &mut World<'_, '_>) {
        let now = world.cx.now();
        self.drop_answers(world);
        self.pursue_rejoin(world);
        if !self.is_ready() {
            world.cx.set_timer(Timer::Sweep(self.id), now + world.config.sweep_interval);
            return;
        }
        let clock = world.cx.clock();
        self.closings.collect(clock.now);
        if let Some(early) = &mut self.early {
            early.collect(clock.now, clock.error);
        }
        let old = nanos(world.config.takeover_after * 2);
        self.hints.expire(Time(world.cx.now().0.saturating_sub(old)));
        world.maker.forget(world.cx.clock().now - MAKER_KEEPS);
        if now.since(self.gossiped) >= world.config.gossip_interval {
            self.gossiped = now;
            self.advance_mark(world);
            for to in self.listeners(world) {
                world.reply(to, Msg::Gossip { partition: self.id, mark: self.state.mark });
            }
        }
        self.pursue_members(world);
        self.drop_outcomes(world);
        if now.since(self.aged) >= MEMORY {
            self.aged = now;
            self.age(world);
        }
        world.cx.set_timer(Timer::Sweep(self.id), now + world.config.sweep_interval);
    }

    /// What clients have known for [`MEMORY`] this replica need not tell apart any more.
    fn age(&mut self, world: &mut World<'_, '_>) {
        let known = std::mem::replace(&mut self.aging, self.state.acknowledged.clone());
        let is_new = |(client, below): &(ClientId, u64)| {
            self.state.floors.get(client).is_none_or(|floor| floor < below)
        };
        let old: Vec<(ClientId, u64)> = known.into_iter().filter(is_new).collect();
        for clients in old.chunks(CLIENTS_AT_ONCE) {
            self.change(Change::Age(clients.to_vec()), world);
        }
    }

    /// The earliest timestamp of what is unfinished here.
    fn first_unfinished(&self) -> Option<Timestamp> {
        let pending = self.state.entries.values().filter_map(Entry::pending_at).min();
        let stamps = self.state.entries.values().filter(|entry| entry.ended.is_none());
        let stamps = stamps.filter_map(|entry| entry.stamp.map(|stamp| stamp.at)).min();
        let asked = self.questions.least();
        [pending, stamps, asked].into_iter().flatten().min()
    }

    /// Nothing unfinished is at or below the mark, and nothing will be.
    fn advance_mark(&mut self, world: &mut World<'_, '_>) {
        let least = self.first_unfinished();
        let old = world.cx.clock().now - world.config.version_retention;
        let mark = least.map_or(old, |least| old.min(least - Duration::from_nanos(1)));
        if mark > self.state.mark {
            self.change(Change::Mark(mark), world);
        }
        let mark = self.state.mark;
        self.marks.insert(world.node, (mark, now_of(world)));
    }

    /// Versions below this may go: nothing will ever be read there. Replicas that were silent for long
    /// are not waited for, as long as a majority is heard of.
    pub(super) fn settled(&self, world: &World<'_, '_>) -> Timestamp {
        let now = now_of(world);
        let mut heard: Vec<Timestamp> = Vec::new();
        for (&node, &(mark, at)) in &self.marks {
            if node == world.node || now.since(at) < world.config.absence_after {
                heard.push(mark);
            }
        }
        let is_enough = heard.len() >= self.majority();
        heard.into_iter().min().filter(|_| is_enough).unwrap_or_default()
    }

    fn peers(&self, me: NodeId) -> Vec<NodeId> {
        self.replicas.iter().copied().filter(|&node| node != me).collect()
    }

    /// What waits here, for operators.
    pub(super) fn waiting(&self) -> usize {
        self.questions.len()
    }

    /// Of what may be long, the beginning only: this is called after every step of some runs.
    pub(super) fn assert_invariants(&self) {
        for (question, blockers) in self.questions.iter().take(LOOKED_AT) {
            assert!(!blockers.is_empty(), "{question:?} waits for nobody at {}", self.id);
            for &txn in blockers.iter().take(LOOKED_AT) {
                assert!(
                    self.is_before(txn, question.place()),
                    "{question:?} waits for {txn} in vain at {}",
                    self.id
                );
            }
        }
        let (entries, watched) = (&self.state.entries, &self.watched);
        assert_eq!(watched.len(), entries.len(), "nobody looks after some at {}", self.id);
        for (txn, entry) in entries.iter().take(LOOKED_AT) {
            let is_open = entry.ended.is_none();
            let is_below = entry.stamp.is_some_and(|stamp| stamp.at <= self.state.mark);
            assert!(!is_open || !is_below, "{txn} is unfinished below the mark of {}", self.id);
        }
        let has_writers = self.writers.len() > 0;
        assert!(!has_writers || !entries.is_empty(), "writers that are gone at {}", self.id);
    }
}

/// So many of a kind are looked at by one check of invariants.
const LOOKED_AT: usize = 8;

/// The keys of a partition that a transaction reads, and those that it may write.
fn touched(text: &Text, partition: PartitionId, world: &World<'_, '_>) -> (Vec<Key>, Vec<Key>) {
    let reads = text.reads(world.cluster, partition).cloned().collect();
    (reads, text.writes(world.cluster, partition).cloned().collect())
}

fn now_of(world: &World<'_, '_>) -> Time {
    world.cx.now()
}

/// The newest version below a place.
fn read_below(store: &Store, partition: PartitionId, key: &Key, (at, txn): Place) -> Read {
    store.read_before(partition, key, Version { timestamp: at, writer: txn.name() })
}

/// The version of a key that a transaction wrote, if it is there.
fn version_of(store: &Store, partition: PartitionId, key: &Key, txn: TxnId) -> Option<Versioned> {
    let versions = store.versions(partition, key);
    versions.into_iter().find(|(version, _)| version.writer == txn.name())
}

/// Timestamps that were made are remembered for so long.
const MAKER_KEEPS: Duration = Duration::from_secs(60);

/// Transactions that one sweep takes over, at most.
const TAKEOVERS_AT_ONCE: usize = 64;

/// So often the time until a transaction is looked after again doubles: its gateway, or whoever
/// recovers it, may be lost meanwhile.
const TAKEOVERS_DOUBLED: u32 = 3;

/// A replica names at most so many pending predecessors of a transaction. If it named all that wait for
/// one hot key, the bytes would grow with the square of their number.
const BEHIND_MAX: usize = 16;

/// For at least so long after its client knows the outcome, a replica that has never heard of a
/// transaction still takes part in its recovery.
const MEMORY: Duration = Duration::from_secs(60);

/// Clients that one change is about.
const CLIENTS_AT_ONCE: usize = 1_000;

/// A gateway that is there, and does not answer, is asked so often before a replica takes a transaction
/// over.
const INQUIRIES_MAX: u32 = 16;

/// No answer of a gateway is waited for longer than twice this.
const INQUIRY_MAX: Duration = Duration::from_secs(5);
