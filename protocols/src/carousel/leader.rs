//! The leader's own state, and the dispatch of its messages and of its log's commands.

use std::fmt;

use orthodrome_core::id::{NodeId, PartitionId, Ticket, TxnId};
use orthodrome_core::locks::PendingKeys;
use orthodrome_core::machine::Leak;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::Key;

use super::cpc::Listed;
use super::fast::Fast;
use super::message::{Command, Log, Msg};
use super::participant::Prepare;
use super::state::{Prepared, State};
use super::{Config, Note, Timer};
use crate::commit::{Applied, Coordination, Participation, Verdict};
use crate::hosting::{self, Role};

/// The server side: every role that one node plays.
pub type Server = hosting::Server<Leader>;
/// One replica of one partition.
pub(super) type Partition = hosting::Partition<Leader>;
/// The same while it leads.
pub(super) type Leading<'a> = hosting::Leading<'a, Leader>;
/// The context of its handlers.
pub(super) type World<'a> = hosting::World<'a, Leader>;
/// The context of a node or a gateway.
pub(super) type Context<'a> = hosting::Context<'a, Leader>;

/// The leader's own state. It is lost with its leadership, and never needed afterwards.
#[derive(Debug, Default)]
pub struct Leader {
    // For the role of participant.
    /// The key sets of all transactions that are prepared or being prepared.
    pub pending: PendingKeys,
    /// The keys that each of them holds.
    pub held: OrdMap<TxnId, Vec<Key>>,
    /// The state of pending transactions, and what is remembered of ended ones.
    pub participation: Participation<Prepared>,
    /// The keys of aborts that are proposed but not chosen: free, except for the fast path.
    pub freed: Freed,
    /// New proposals must be larger (C11).
    pub floor: Timestamp,
    /// At or above every ceiling and commit timestamp that this leader or an earlier one has put
    /// into the log, chosen or not. Timestamps of the fast path must be above it.
    pub logged: Timestamp,
    /// The highest ceiling proposed.
    pub ceiling_proposed: Timestamp,
    /// Read-only requests that wait for a leadership check.
    pub reads: OrdMap<u64, WaitingRead>,
    /// Read-only requests that wait for a higher ceiling.
    pub reads_above_ceiling: Vec<WaitingRead>,
    /// Read-only requests of scans that wait until earlier prepares are chosen.
    pub reads_of_scans: Vec<WaitingRead>,
    /// The number of the next leadership check.
    pub next_read: u64,
    /// Prepares that wait for commits that their clients know (R11), and their gateways.
    pub waiting: OrdMap<TxnId, (NodeId, Prepare)>,

    /// For the role of coordinator.
    pub coordination: Coordination<Leader>,
}

/// For each key, how many transactions read and write it whose abort is in the log and not chosen.
/// Two of them may conflict: one may have taken keys that the other's abort freed.
#[derive(Debug, Default)]
pub struct Freed {
    keys: OrdMap<Key, (usize, usize)>,
    of: OrdMap<TxnId, Prepared>,
}

impl Freed {
    /// True if none of them writes a key in `reads`, or accesses a key in `writes`.
    pub(super) fn is_clear_of(&self, reads: &[Key], writes: &[Key]) -> bool {
        let written = |key: &Key| self.keys.get(key).is_some_and(|(_, writers)| *writers > 0);
        !writes.iter().any(|key| self.keys.contains_key(key)) && !reads.iter().any(written)
    }

    pub(super) fn insert(&mut self, txn: TxnId, prepared: Prepared) {
        for (key, _) in prepared.versions.iter() {
            self.keys.entry(key.clone()).or_default().0 += 1;
        }
        for key in prepared.writes.iter() {
            self.keys.entry(key.clone()).or_default().1 += 1;
        }
        self.of.insert(txn, prepared);
    }

    pub(super) fn remove(&mut self, txn: TxnId) {
        // Most transactions are here only if their abort is in the log.
        let Some(prepared) = self.of.remove(&txn) else { return };
        for (key, _) in prepared.versions.iter() {
            self.keys.entry(key.clone()).or_default().0 -= 1;
        }
        for key in prepared.writes.iter() {
            self.keys.entry(key.clone()).or_default().1 -= 1;
        }
        for key in prepared.keys() {
            if self.keys.get(key) == Some(&(0, 0)) {
                self.keys.remove(key);
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.of.len()
    }
}

/// A read-only request that waits.
#[derive(Clone, Debug)]
pub struct WaitingRead {
    pub client: NodeId,
    pub txn: TxnId,
    pub keys: Vec<Key>,
    pub at_least: Timestamp,
    /// For a scan: the transactions whose prepares were in the log and not chosen when the request
    /// arrived, and are still not chosen; none before the leader has checked.
    pub behind: Option<OrdSet<TxnId>>,
}

impl Role for Leader {
    crate::commit::role_items!(super::Carousel);

    type Own = Fast;
    /// An entry of the pending-transaction list (§4.2).
    type OwnRecord = (TxnId, Listed);

    fn on_timer(server: &mut Server, timer: Timer, cx: &mut Context<'_>) {
        match timer {
            Timer::Replication(id, timer) => server.on_log_timer(id, timer, cx),
            Timer::Sweep(id) => server.with(id, cx, |p, world| p.on_sweep_timeout(world)),
            Timer::CommitWait(id) => {
                server.with(id, cx, |p, world| p.led().on_commit_wait_timeout(world));
            }
            Timer::Resend(_) | Timer::Heartbeat => unreachable!("a client's timer at a server"),
        }
    }

    fn on_chosen(partition: &mut Partition, command: &Command, world: &mut World<'_>) {
        if world.config.is_fast {
            let keeps_ended = world.config.mutations.lists_keep_the_ended();
            partition.own.before_apply(command, &partition.state, keeps_ended);
        }
        let settled: &[TxnId] = if let Command::Settle(txns) = command { txns } else { &[] };
        let applied = partition.state.apply(partition.id, command, world.store);
        applied.add_to(world.effects());
        if let Some(outcome) = partition.state.told_by(applied) {
            world.cx.claim(outcome);
        }
        if let Some(mut leading) = partition.leading() {
            leading.on_applied(applied, settled, world);
        }
        if let Applied::Prepared(txn) | Applied::Ended(txn) = applied {
            partition.on_recovered(txn, world);
        }
    }

    fn on_leading(partition: &mut Partition, world: &mut World<'_>) {
        if world.config.is_fast {
            partition.on_log_complete(world);
        } else {
            partition.on_leading(OrdMap::new(), world);
        }
    }

    fn on_deposed(partition: &mut Partition, world: &mut World<'_>) {
        partition.own.recovery = None;
        if partition.own.list.len() == 0 {
            world.cx.cancel_timer(Timer::Sweep(partition.id));
        }
        world.cx.cancel_timer(Timer::CommitWait(partition.id));
    }

    fn pending_names(partition: &Partition, name: &mut dyn FnMut(&Key)) {
        let prepared = partition.state.prepared.values();
        let listed = partition.own.list.iter().map(|(_, listed)| &listed.prepared);
        prepared.chain(listed).flat_map(|prepared| prepared.writes.iter()).for_each(name);
    }

    fn closed(partition: &Partition) -> Option<Timestamp> {
        let leader = partition.leader.as_ref()?;
        let prepared = partition.state.prepared.values();
        let prepared = prepared.chain(leader.participation.preparing.values());
        let proposals = prepared.map(|prepared| prepared.proposal);
        Some(partition.state.closed(leader.floor, proposals))
    }

    fn command_names(command: &Command, name: &mut dyn FnMut(&Key)) {
        match command {
            Command::Prepare { writes, .. } => writes.iter().for_each(name),
            Command::End { verdict: Verdict::Commit(_, writes), .. } => {
                writes.keys().for_each(name);
            }
            Command::Refuse { .. }
            | Command::End { verdict: Verdict::Abort(_), .. }
            | Command::Coordinate { .. }
            | Command::RequestCommit { .. }
            | Command::Decide { .. }
            | Command::Settle(_)
            | Command::Forget(_)
            | Command::Acknowledge(_)
            | Command::Ceiling(_) => {}
        }
    }

    fn describe(partition: &Partition, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let State { prepared, coordinated, .. } = &partition.state;
        if !prepared.is_empty() {
            write!(f, " prepared {:?}", prepared.keys())?;
        }
        if !coordinated.is_empty() {
            write!(f, " coordinated {:?}", coordinated.keys())?;
        }
        if partition.own.list.len() > 0 {
            let listed: Vec<_> = partition.own.list.txns().collect();
            write!(f, " listed {listed:?}")?;
        }
        Ok(())
    }

    fn assert_invariants(partition: &Partition) {
        let (id, state) = (partition.id, &partition.state);
        state.assert_invariants(id);
        let Some(leader) = &partition.leader else { return };
        for txn in leader.held.keys() {
            assert!(
                state.prepared.contains_key(txn)
                    || leader.participation.preparing.contains_key(txn),
                "{txn} holds keys of {id} after its end"
            );
        }
        if leader.held.is_empty() {
            assert!(leader.pending.is_empty(), "{id} holds keys for nobody");
        }
    }

    fn leaks(&self, state: &State) -> Vec<Leak> {
        let mut leaks = vec![
            state.unforgettable(),
            ("pending keys", self.pending.len()),
            ("holders of keys", self.held.len()),
            ("keys of endings under way", self.freed.len()),
            ("waiting reads", self.reads.len() + self.reads_above_ceiling.len()),
            ("waiting reads of scans", self.reads_of_scans.len()),
            ("waiting prepares", self.waiting.len()),
        ];
        leaks.extend(state.leaks());
        leaks.extend(self.participation.leaks());
        leaks.extend(self.coordination.leaks());
        leaks
    }

    fn own_leaks(own: &Fast) -> Vec<Leak> {
        own.leaks()
    }

    fn on_opened(partition: &mut Partition, records: Vec<(TxnId, Listed)>, world: &mut World<'_>) {
        partition.on_opened(records, world);
    }

    fn own_records(partition: &Partition) -> Vec<(TxnId, Listed)> {
        partition.own.list.iter().map(|(txn, listed)| (txn, listed.clone())).collect()
    }

    fn on_durable(partition: &mut Partition, ticket: Ticket, world: &mut World<'_>) {
        partition.on_durable(ticket, world);
    }

    fn on_installed(partition: &mut Partition) {
        partition.own.reindex(&partition.state);
    }

    fn on_message(
        partition: &mut Partition,
        from: NodeId,
        msg: Msg,
        world: &mut World<'_>,
    ) -> Option<Msg> {
        if let Msg::CollectPending { term, .. } = msg {
            partition.on_collect_pending(from, term, world);
            return None;
        }
        if let Msg::PendingList { term, listed, portion, .. } = msg {
            partition.on_pending_list(from, term, (portion, listed), world);
            return None;
        }
        if matches!(msg, Msg::FastPrepare { .. }) && !partition.replica.is_leader() {
            let prepare = Prepare::fast(msg)?;
            partition.on_follower_prepare(from, prepare, world);
            return None;
        }
        Some(msg)
    }

    fn on_elected(partition: &mut Partition, world: &mut World<'_>) {
        if world.config.is_fast && partition.own.recovery.is_none() {
            partition.begin_recovery(world);
        }
    }

    fn is_ready(partition: &Partition) -> bool {
        partition.own.recovery.is_none()
    }
}

impl Leading<'_> {
    /// This leader's actions after an entry is applied.
    fn on_applied(&mut self, applied: Applied, settled: &[TxnId], world: &mut World<'_>) {
        match applied {
            Applied::Prepared(txn) => self.on_prepared(txn, world),
            Applied::Ended(txn) => self.on_ended(txn, world),
            Applied::Ceiling => self.on_ceiling(world),
            Applied::Nothing | Applied::Requested(_) | Applied::Decided(_) | Applied::Settled => {
                self.on_coordinated(applied, settled, world)
            }
        }
    }

    fn serve(&mut self, from: NodeId, msg: Msg, world: &mut World<'_>) {
        match msg {
            Msg::ReadAndPrepare { txn, participant, coordinator, acknowledged_below, .. } => {
                let prepare = Prepare {
                    txn,
                    participant,
                    coordinator,
                    acknowledged_below,
                    timestamp: None,
                    wants_reads: true,
                };
                self.on_read_and_prepare(from, prepare, world);
            }
            Msg::FastPrepare { .. } => {
                if let Some(prepare) = Prepare::fast(msg) {
                    self.on_read_and_prepare(from, prepare, world);
                }
            }
            Msg::FastPrepareResult { txn, partition, vote, .. } => {
                self.on_fast_prepare_result(from, txn, partition, vote, world);
            }
            Msg::QueryPending { txns, .. } => self.on_query_pending(txns, world),
            Msg::CoordinatorPrepare { txn, participants, acknowledged_below, .. } => {
                self.on_coordinator_prepare(from, txn, participants, acknowledged_below, world);
            }
            Msg::Commit { txn, participants, writes, versions, .. } => {
                self.on_commit(from, txn, participants, writes, versions, world);
            }
            Msg::Abort { txn, participants, is_refusal, versions, .. } => {
                let refused = is_refusal.then_some(versions);
                self.on_abort(from, txn, participants, refused, world);
            }
            Msg::Heartbeat { txns, .. } => self.on_heartbeat(&txns, world),
            Msg::Resolve { txn, participants, .. } => {
                self.on_resolve(from, txn, participants, world);
            }
            Msg::PrepareResult { txn, partition, vote, .. } => {
                self.on_slow_vote(txn, partition, vote, world);
            }
            Msg::WritebackAck { txn, partition, .. } => {
                self.on_decision_ack(txn, partition);
            }
            Msg::QueryDecision { txn, partition, vote, .. } => {
                self.on_query_decision(txn, partition, vote, world);
            }
            Msg::MayForget { partition, txns, .. } => self.on_may_forget(partition, txns, world),
            Msg::QueryPrepare { txn, participant, coordinator } => {
                self.on_query_prepare(txn, participant, coordinator, world);
            }
            Msg::Writeback { txn, coordinator, verdict, .. } => {
                self.on_decision(txn, coordinator, verdict, world);
            }
            Msg::Forget { txns, coordinator, .. } => self.on_forget(coordinator, txns, world),
            Msg::ReadOnly { txn, keys, at_least, .. } => {
                self.on_read_only(from, txn, keys, at_least, world);
            }
            Msg::ReadResult { .. }
            | Msg::FollowerReadResult { .. }
            | Msg::CollectPending { .. }
            | Msg::PendingList { .. }
            | Msg::FastDecided { .. }
            | Msg::Decided { .. }
            | Msg::ReadOnlyResult { .. }
            | Msg::NotLeader { .. }
            | Msg::Members { .. }
            | Msg::Replication { .. } => {
                unreachable!("{} is not for a partition's leader", self.id)
            }
        }
    }
}

impl Partition {
    /// This replica leads, and everything that earlier leaders left has been applied. On the fast
    /// path, the lists of the group come first.
    pub(super) fn on_leading(
        &mut self,
        examined: OrdMap<TxnId, (Prepared, bool)>,
        world: &mut World<'_>,
    ) {
        let now = world.cx.now();
        let mut leader = Leader {
            // C12, R8: a predecessor may have promised anything up to its ceiling.
            floor: self.state.ceiling.max(self.state.floor),
            logged: self.state.ceiling.max(self.state.floor),
            ceiling_proposed: self.state.ceiling,
            participation: Participation::new(
                self.state.prepared.keys(),
                self.state.ended.keys(),
                now,
            ),
            coordination: Coordination::new(self.state.settled.keys().copied(), now),
            ..Leader::default()
        };
        if world.config.mutations.no_lease() {
            leader.floor = self.state.floor;
        }
        for (&txn, prepared) in &self.state.prepared {
            leader.hold(txn, prepared);
        }
        if !self.state.prepared.is_empty() {
            world.cx.note(Note::ParticipantTakeover);
        }
        self.leader = Some(leader);
        let mut leading = self.led();
        leading.replicate_recovered(examined, world);
        leading.take_over_coordination(world);
        self.set_sweep_timer(world);
        self.led().reserve(world.cx.clock().now, world);
    }

    /// A leader looks for overdue work; a follower looks for entries that should have left its
    /// list.
    pub(super) fn on_sweep_timeout(&mut self, world: &mut World<'_>) {
        if world.config.is_fast {
            self.collect(world);
            self.sweep_list(world);
        }
        if let Some(mut leading) = self.leading() {
            leading.reserve(world.cx.clock().now, world);
            leading.sweep_participation(world);
            leading.sweep_coordinator(world);
        } else if self.own.recovery.is_none() && self.own.list.len() == 0 {
            return;
        }
        self.set_sweep_timer(world);
    }
}

impl Leader {
    /// Marks the keys of a transaction as held.
    pub(super) fn hold(&mut self, txn: TxnId, prepared: &Prepared) {
        self.pending.insert(
            txn,
            prepared.versions.iter().map(|(key, _)| key),
            prepared.writes.iter(),
        );
        self.held.insert(txn, prepared.keys().cloned().collect());
    }

    /// Releases the keys of a transaction, if it holds any.
    pub(super) fn free(&mut self, txn: TxnId) {
        if let Some(held) = self.held.remove(&txn) {
            self.pending.remove(txn, held.iter());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use orthodrome_core::id::ClientId;
    use orthodrome_core::rng::Rng;
    use orthodrome_core::txn::Version;

    use super::*;

    /// Compares the index with its definition: a comparison with every transaction in it.
    #[test]
    fn agrees_with_a_look_at_every_transaction() {
        let mut rng = Rng::stream(12, "freed", 0);
        let mut freed = Freed::default();
        let mut all: OrdMap<TxnId, Prepared> = OrdMap::new();
        let (mut clear, mut met) = (0, 0);
        for counter in 0..3_000 {
            let mut draw = || -> Vec<Key> {
                let mut keys: Vec<Key> =
                    (0..rng.below(3)).map(|_| Key::from(format!("k{}", rng.below(40)))).collect();
                keys.sort();
                keys.dedup();
                keys
            };
            let (reads, writes) = (draw(), draw());
            let meets = |prepared: &Prepared| {
                prepared.versions.iter().any(|(key, _)| writes.contains(key))
                    || prepared.writes.iter().any(|key| writes.contains(key) || reads.contains(key))
            };
            let is_clear = !all.values().any(meets);
            assert_eq!(freed.is_clear_of(&reads, &writes), is_clear);
            if is_clear {
                clear += 1
            } else {
                met += 1
            }
            let prepared = Prepared {
                coordinator: PartitionId(0),
                versions: Arc::new(
                    reads.into_iter().map(|key| (key, Version::default())).collect(),
                ),
                writes: Arc::new(writes),
                proposal: Timestamp::ZERO,
            };
            let txn = TxnId::new(ClientId(1), counter);
            freed.insert(txn, prepared.clone());
            all.insert(txn, prepared);
            while all.len() > rng.below(12) as usize {
                let (gone, _) = all.pop_first().unwrap();
                freed.remove(gone);
                // Removed again, or never present.
                freed.remove(gone);
            }
        }
        assert!(clear > 300 && met > 300, "{clear} {met}");
        all.keys().for_each(|txn| freed.remove(*txn));
        assert_eq!((freed.len(), freed.keys.len()), (0, 0));
    }
}
