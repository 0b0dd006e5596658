//! Serves gateways (§4.2.1: the batcher): their submitted transactions, and the answers.

use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::id::{NodeId, PartitionId, RegionId, TxnId};
use orthodrome_core::machine::Claim;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{Key, Reads, Version};

use super::super::message::{Msg, Name, Sequenced};
use super::super::state::Applied;
use super::super::{Cx, Note};
use super::Server;
use crate::functor::Functor;
use crate::waiting::RetryState;

/// A transaction for which a gateway waits.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) gateway: NodeId,
    pub(super) entry: Arc<Sequenced>,
    pub(super) asked: RetryState,
    /// When the gateway submitted it.
    pub(super) since: Time,
}

impl Waiting {
    pub(super) fn size(&self) -> usize {
        self.entry.functor.size()
    }
}

impl Server {
    /// A gateway wants a transaction to run, or its outcome.
    pub(super) fn on_submit(&mut self, gateway: NodeId, functor: Arc<Functor>, cx: &mut Cx<'_>) {
        let txn = functor.txn;
        if let Some(answer) = self.known(&functor) {
            cx.note(Note::AlreadyRan);
            if matches!(answer, Msg::TooOld { .. }) {
                cx.note(Note::TooOld);
            }
            self.send(gateway, answer, cx);
            return;
        }
        if self.state.is_acknowledged(txn) {
            // The client has acknowledged the outcome, so usually no gateway waits for an answer.
            // But a client may ask for the outcome again, with `Resolve`.
            cx.note(Note::RepeatedSubmit);
            self.send(gateway, Msg::TooOld { txn, outcome: None }, cx);
            return;
        }
        if let Some(waiting) = self.waiting.get_mut(&txn) {
            cx.note(Note::RepeatedSubmit);
            waiting.gateway = gateway;
            return;
        }
        let (bytes, bytes_max) = (self.waiting_bytes, self.config.in_flight_bytes);
        let is_over = bytes > 0 && bytes + functor.size() > bytes_max;
        if is_over || self.waiting.len() >= self.config.in_flight_max {
            // Copies of it may have been sent elsewhere, so it cannot be reported as aborted. Its
            // gateway will ask again.
            cx.note(Note::Shed);
            return;
        }
        let entry = self.plan(functor, self.cluster.region_of(gateway), cx);
        // It has its position under some name, and waits for other shares. Its keys may have moved
        // since: then it would get a second name, and another position.
        let is_placed = self.state.shares.is_any_due(txn);
        let asked = RetryState::new(cx.now());
        self.waiting_bytes += entry.functor.size();
        let since = asked.at;
        self.waiting.insert(txn, Waiting { gateway, entry: entry.clone(), asked, since });
        if !is_placed {
            self.sequence(&entry, cx);
        }
    }

    /// The answer to the gateway for a transaction that has run.
    pub(super) fn known(&self, functor: &Functor) -> Option<Msg> {
        let txn = functor.txn;
        if let Some(ended) = self.state.ended.get(txn) {
            return Some(ended.clone().answer(txn));
        }
        let is_here = !self.placement.is_divided()
            || self.placement.shares(functor).contains(&self.placement.share());
        let is_forgotten =
            is_here && !self.state.is_acknowledged(txn) && self.state.has_forgotten(txn);
        is_forgotten.then_some(Msg::TooOld { txn, outcome: None })
    }

    /// No gateway waits for a transaction any more.
    pub(super) fn stop_waiting(&mut self, txn: TxnId) -> Option<Waiting> {
        let waiting = self.waiting.remove(&txn)?;
        self.waiting_bytes = self.waiting_bytes.saturating_sub(waiting.size());
        Some(waiting)
    }

    /// How to sequence a transaction, as far as this server knows.
    pub(super) fn plan(
        &self,
        functor: Arc<Functor>,
        origin: RegionId,
        cx: &Cx<'_>,
    ) -> Arc<Sequenced> {
        let entry = self.state.plan(functor, origin, &self.placement);
        let due = cx.clock().now + self.furthest(&entry.homes) + cx.clock().error;
        Arc::new(Sequenced { due, ..entry })
    }

    /// How long a message takes to the farthest of these sequencers.
    fn furthest(&self, homes: &[PartitionId]) -> Duration {
        let here = self.cluster.region_of(self.node);
        let regions = homes.iter().map(|&home| self.cluster.region_of(self.routes.leader(home)));
        let rtt = regions.map(|region| self.cluster.topology.rtt(here, region)).max();
        rtt.unwrap_or_default() / 2
    }

    /// The streams to which a transaction must be given: those in which it is missing. If there is
    /// an orderer, the other streams take it from there.
    pub(super) fn asked(&self, entry: &Sequenced) -> Vec<PartitionId> {
        let missing = self.state.merge.missing(entry.name());
        let mut asked = missing.unwrap_or_else(|| entry.homes.clone());
        if let Some(orderer) = self.placement.orderer().filter(|_| entry.is_multi_home()) {
            asked.retain(|&stream| stream == orderer);
        }
        asked
    }

    /// Requests that a transaction be put into the streams in which it is missing.
    pub(super) fn sequence(&mut self, entry: &Arc<Sequenced>, cx: &mut Cx<'_>) {
        for stream in self.asked(entry) {
            let leader = self.routes.leader(stream);
            self.send(leader, Msg::Sequence { stream, entry: entry.clone() }, cx);
        }
    }

    /// A client wants to read these keys before it decides.
    pub(super) fn on_look(
        &mut self,
        gateway: NodeId,
        (txn, round): (TxnId, u32),
        keys: Vec<Key>,
        cx: &mut Cx<'_>,
    ) {
        // A client that knows a value must see that its deletion is newer. Servers forget deletions,
        // each at another time, but know which transactions have run.
        let read = |key: Key| {
            let mut read = self.store.read(self.placement.partition_of(&key), &key);
            if read.value.is_none() {
                let below = self.state.run_below(&key, &self.placement);
                let run = Timestamp(below.0.saturating_sub(1));
                let timestamp = read.version.timestamp.max(run);
                read.version = Version { timestamp, ..Version::INITIAL };
            }
            (key, read)
        };
        let reads: Reads = keys.into_iter().map(read).collect();
        self.send(gateway, Msg::Found { txn, round, reads }, cx);
    }

    /// Answers the gateways that wait.
    pub(super) fn answer(&mut self, mut applied: Applied, cx: &mut Cx<'_>) {
        self.exchange(&mut applied, cx);
        for _ in 0..applied.repeated {
            cx.note(Note::RepeatedEntry);
        }
        for _ in 0..applied.relocated {
            cx.note(Note::Relocated);
        }
        for name in applied.void {
            cx.note(Note::Void);
            self.plan_again(name, cx);
        }
        self.again.ran += applied.ran.len();
        for (txn, ended) in applied.ran {
            cx.claim(Claim::Decided { txn, outcome: ended.outcome });
            if let Some(waiting) = self.stop_waiting(txn) {
                self.again.answered_after(cx.now().since(waiting.since));
                self.send(waiting.gateway, ended.answer(txn), cx);
            }
        }
    }

    /// A transaction was void, because its keys have moved meanwhile. If a gateway waits for it, it
    /// is sequenced again.
    fn plan_again(&mut self, name: Name, cx: &mut Cx<'_>) {
        let Some(waiting) = self.waiting.get(&name.txn) else { return };
        if waiting.entry.name() == name {
            let (functor, origin) = (waiting.entry.functor.clone(), waiting.entry.origin);
            let entry = self.plan(functor, origin, cx);
            if let Some(waiting) = self.waiting.get_mut(&name.txn) {
                waiting.entry = entry.clone();
                waiting.asked = RetryState::new(cx.now());
            }
            self.sequence(&entry, cx);
        }
    }
}
