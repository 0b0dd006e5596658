//! What only the leader of a stream knows: transactions on their way into it (Sloth §4.2.1). Lost with its
//! leadership, and never needed after it: whoever waits for a transaction asks again.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;
use std::sync::Arc;

use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::time::{Clock, Time, Timestamp};
use orthodrome_core::txn::Key;

use super::message::{Command, Sequenced};
use super::placement::Placement;
use super::state::State;
use super::{Config, Note};
use crate::replication::Index;

/// A stream's leader.
#[derive(Debug, Default)]
pub(super) struct Sequencer {
    /// Everything here, and everything proposed that is not chosen yet.
    taken: BTreeSet<TxnId>,
    /// Held until all homes have it; by the time of release here, then by the time that all homes
    /// agree on (S1).
    held: BTreeMap<(Time, Timestamp, TxnId), Arc<Sequenced>>,
    /// Kept out while something on their keys waits for long (S1).
    closed: Vec<Arc<Sequenced>>,
    /// To be proposed with the next batch.
    batch: Vec<Arc<Sequenced>>,
    /// Where an acknowledgement was proposed last.
    acknowledging: Index,
}

/// What a sequencer has to know of its server.
pub(super) struct View<'a> {
    pub stream: PartitionId,
    pub state: &'a State,
    pub placement: &'a Placement,
    pub config: &'a Config,
    pub now: Time,
    pub clock: Clock,
}

impl View<'_> {
    /// True if `entry` is kept out for now: something on its keys has waited for long. One that
    /// is in another stream already is not: it waits there, and others wait for it.
    fn is_closed(&self, entry: &Sequenced) -> bool {
        if self.config.teeth.is_unbounded || !self.is_new(entry) {
            return false;
        }
        let keys = entry.functor.reads.iter().chain(&entry.functor.writes);
        let here = keys.filter(|key: &&Key| self.placement.stream_of(key) == self.stream);
        let since = self.state.merge.waits_since(here);
        since.is_some_and(|since| self.now.since(since) >= self.config.close_after)
    }

    /// True if `entry` has several homes and is in no stream yet, as far as is known here.
    fn is_new(&self, entry: &Sequenced) -> bool {
        entry.is_multi_home() && !self.state.merge.contains(entry.functor.txn)
    }
}

impl Sequencer {
    /// Everything that is on its way into the stream.
    pub fn len(&self) -> usize {
        self.held.len() + self.closed.len() + self.batch.len()
    }

    /// True if a batch is to be proposed.
    pub fn has_batch(&self) -> bool {
        !self.batch.is_empty()
    }

    /// Somebody wants `entry` in the stream.
    pub fn take(&mut self, entry: Arc<Sequenced>, view: &View<'_>) -> Option<Note> {
        let txn = entry.functor.txn;
        if view.state.is_sequenced(view.stream, txn) || self.taken.contains(&txn) {
            return Some(Note::RepeatedSequence);
        }
        // One that is in another stream is always let in: those that are kept out wait for it.
        let is_full = self.taken.len() >= view.config.in_flight_max;
        if is_full && !view.state.merge.contains(txn) {
            return Some(Note::Shed);
        }
        self.taken.insert(txn);
        if !view.config.teeth.is_unbounded && view.is_new(&entry) {
            let ahead = entry.due.0.saturating_sub(view.clock.now.0);
            let wait = orthodrome_core::Duration::from_nanos(ahead).min(view.config.hold_max);
            if !wait.is_zero() {
                self.held.insert((view.now + wait, entry.due, txn), entry);
                return Some(Note::Held);
            }
        }
        self.admit(entry, view)
    }

    /// Lets `entry` in, unless its keys are closed.
    fn admit(&mut self, entry: Arc<Sequenced>, view: &View<'_>) -> Option<Note> {
        if view.is_closed(&entry) {
            self.closed.push(entry);
            return Some(Note::Closed);
        }
        self.batch.push(entry);
        None
    }

    /// When the first that is held goes on.
    pub fn next_release(&self) -> Option<Time> {
        self.held.first_key_value().map(|(&(at, ..), _)| at)
    }

    /// Lets go on what was held until now.
    pub fn release(&mut self, view: &View<'_>) -> Vec<Note> {
        let mut notes = Vec::new();
        while self.next_release().is_some_and(|at| at <= view.now)
            && let Some((_, entry)) = self.held.pop_first()
        {
            notes.extend(self.admit(entry, view));
        }
        notes
    }

    /// Lets in what was kept out, as far as its keys are open again, in the order that all homes agree on.
    pub fn reopen(&mut self, view: &View<'_>) {
        let mut closed = take(&mut self.closed);
        closed.sort_by_key(|entry| (entry.due, entry.functor.txn));
        for entry in closed {
            self.admit(entry, view);
        }
    }

    /// The next batch to propose.
    pub fn next_batch(&mut self, view: &View<'_>) -> Option<Command> {
        // An earlier leader may have left some of it.
        self.batch.retain(|entry| !view.state.is_sequenced(view.stream, entry.functor.txn));
        if self.batch.is_empty() {
            return None;
        }
        let count = self.batch.len().min(view.config.batch_max);
        let entries = self.batch.drain(..count).collect();
        Some(Command::Batch { stamp: view.clock.now, entries })
    }

    /// `txn` is in the stream.
    pub fn sequenced(&mut self, txn: TxnId) {
        self.taken.remove(&txn);
    }

    /// What other streams say that clients know, if nothing of the kind is under way.
    pub fn acknowledgement(&self, view: &View<'_>) -> Option<Command> {
        if self.acknowledging > view.state.applied(view.stream) {
            return None;
        }
        let news = view.state.unacknowledged(view.stream);
        (!news.is_empty()).then_some(Command::Acknowledge(news))
    }

    /// An acknowledgement was proposed there.
    pub fn acknowledging(&mut self, at: Index) {
        self.acknowledging = at;
    }
}
