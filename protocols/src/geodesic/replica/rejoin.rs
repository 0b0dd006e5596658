//! A replica whose disk was lost rejoins its group with an empty one (D19, `docs/protocols/geodesic.md`).
//!
//! Nobody knows what the lost disk has said: stamps, promises, closings, registers. So for every
//! transaction in which it may have had a part, the replica stays what it was when the disk broke:
//! dead. The other replicas end these transactions without it, as they would if it never came back.
//! In later transactions it has a part like any other, from their beginning.
//!
//! 1. *Until when.* The lost disk refused timestamps far ahead of its clock (R8). So once the clock of
//!    this replica has passed `until`, every new transaction is later than all in which the lost disk
//!    may have had a part.
//! 2. *Seal.* f + 1 peers promise to give no stamps to transactions at or below `until` that they do not
//!    know, and send what they know: then their data. Every decision that counted the lost disk counted
//!    f others too, and one of those is among these peers. Without a stamp of theirs nothing else gets
//!    a place. So this replica now knows every such transaction that has a place, or may get one; all
//!    others were refused, or will be. Then it takes part again. While one that it knows is pending,
//!    nothing is read here that the transaction may write.

use std::sync::Arc;

use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::store::{Start, Versions};
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Key, Outcome, Writes};

use super::super::message::{Answer, Ballot, Change, Msg, Output, Text};
use super::super::server::World;
use super::super::state::{Entry, State};
use super::super::{Note, backoff};
use super::{Closings, Replica};

/// What a replica with a new disk, or a new member, still needs.
#[derive(Debug)]
pub(super) enum Rejoin {
    /// A new member: f + 1 others that refuse messages of the epoch before.
    Fencing {
        /// They do, and had a part in transactions up to these timestamps.
        fenced: OrdMap<NodeId, Timestamp>,
        /// When the others were asked last.
        asked: Option<Time>,
    },
    /// A copy of the partition.
    Copying(Copying),
}

#[derive(Debug)]
pub(super) struct Copying {
    until: Timestamp,
    peers: OrdMap<NodeId, Peer>,
}

/// How far the copy from one peer is.
#[derive(Debug)]
struct Peer {
    stage: Stage,
    /// When it was asked last, and how often in vain.
    asked: Option<Time>,
    times: u32,
    /// Its answer may have so many bytes. Where packets are lost, one of many packets hardly ever
    /// arrives: after a time-out the next one is shorter, and after each answer longer again.
    bytes_max: usize,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Stage {
    /// It sends this part of its state, which belongs to the answer of this name.
    State(u32, u64),
    /// It sends its data from here on.
    Data(Start),
    /// It has sent everything.
    Complete,
}

/// A peer's answer to a replica with a new disk: its state when it was asked, in parts.
#[derive(Debug)]
pub(super) struct Leaving {
    until: Timestamp,
    name: u64,
    parts: Vec<State>,
    /// The largest part.
    bytes_max: usize,
    asked: Time,
}

impl Rejoin {
    fn copying(&mut self, until: Timestamp) -> Option<&mut Copying> {
        match self {
            Self::Copying(copying) if copying.until == until => Some(copying),
            Self::Copying(_) | Self::Fencing { .. } => None,
        }
    }
}

impl Peer {
    fn new(bytes_max: usize) -> Self {
        Self { stage: Stage::State(0, 0), asked: None, times: 0, bytes_max }
    }

    /// It has answered: the next question follows at once.
    fn goes_on(&mut self, stage: Stage, piece_bytes: usize) {
        (self.stage, self.asked, self.times) = (stage, None, 0);
        self.bytes_max = self.bytes_max.saturating_mul(2).min(piece_bytes);
    }
}

impl Replica {
    /// True if it has all that it needs to take part.
    pub(in super::super) fn is_ready(&self) -> bool {
        self.rejoin.is_none()
    }

    /// True if another failure may block keys: the replica still copies, or transactions in which the
    /// lost disk may have had a part are pending.
    pub(in super::super) fn is_incomplete(&self) -> bool {
        let has_new_disk = self.state.barred > Timestamp::ZERO;
        !self.is_ready() || has_new_disk && self.state.entries.values().any(Entry::is_barred)
    }

    /// Peers that have not answered to several questions for the copy.
    pub(in super::super) fn silent_peers(&self) -> impl Iterator<Item = NodeId> {
        let copying = self.rejoin.iter().filter_map(|rejoin| match rejoin {
            Rejoin::Copying(copying) => Some(copying),
            Rejoin::Fencing { .. } => None,
        });
        let peers = copying.flat_map(|copying| &copying.peers);
        peers.filter(|(_, peer)| peer.times >= SILENT_TIMES).map(|(&node, _)| node)
    }

    /// Begins if this disk replaced a lost one, or this replica is new in the group; and anew at each
    /// start until it is complete: the first start may have been refused, because the process with the
    /// old disk was still running.
    pub(super) fn rejoin_if_needed(&mut self, is_replacement: bool, world: &mut World<'_, '_>) {
        let has_nothing = self.state.barred == Timestamp::ZERO;
        let is_newest = has_nothing && self.newest() == Some(world.node);
        let is_needed = has_nothing && is_replacement || is_newest || self.state.is_rejoining;
        let mutations = world.config.mutations;
        if !is_needed || mutations.replacement_takes_part() {
            return;
        }
        world.cx.note(Note::Rejoining);
        if is_newest && !mutations.no_fence() {
            self.rejoin = Some(Rejoin::Fencing { fenced: OrdMap::new(), asked: None });
        } else {
            self.begin_copy(Timestamp::ZERO, world);
        }
    }

    /// The group has other members, and this replica still copies: it begins anew with those, because
    /// what it knows of the register of the next members is of the epoch before.
    pub(super) fn copy_from_others(&mut self, world: &mut World<'_, '_>) {
        match &mut self.rejoin {
            None => {}
            Some(Rejoin::Fencing { .. }) => self.rejoin_if_needed(false, world),
            Some(Rejoin::Copying(_)) => self.begin_copy(Timestamp::ZERO, world),
        }
    }

    /// Nobody gives a part any more to the disk that was lost, or to the member that has left: not in
    /// transactions up to `until`, nor up to what the clock says.
    pub(super) fn begin_copy(&mut self, until: Timestamp, world: &mut World<'_, '_>) {
        let clock = world.cx.clock();
        let allowed = clock.now + clock.error * 4 + world.config.clock_ahead_max + ERROR_MAX;
        self.change(Change::Rejoin(until.max(allowed)), world);
        let until = self.state.barred;
        world.maker.forget(until);
        self.closings = Closings::new(self.state.ceiling);
        let peer = |node| (node, Peer::new(world.config.piece_bytes));
        let peers = self.peers(world.node).into_iter().map(peer).collect();
        self.rejoin = Some(Rejoin::Copying(Copying { until, peers }));
    }

    /// Asks peers for what is missing.
    pub(super) fn pursue_rejoin(&mut self, world: &mut World<'_, '_>) {
        let (now, partition) = (world.cx.now(), self.id);
        let peers = self.peers(world.node);
        let Some(rejoin) = &mut self.rejoin else { return };
        let rejoin = match rejoin {
            Rejoin::Fencing { fenced, asked } => {
                if asked.is_none_or(|asked| now.since(asked) >= world.config.resend_after) {
                    *asked = Some(now);
                    for to in peers.into_iter().filter(|node| !fenced.contains_key(node)) {
                        world.send(to, Msg::Fence { partition });
                    }
                }
                return;
            }
            Rejoin::Copying(copying) => copying,
        };
        let until = rejoin.until;
        if world.cx.clock().now <= until {
            return;
        }
        // What was copied is in memory until a checkpoint has it.
        let must_wait = world.store.is_frozen() && world.store.active_bytes() > COPIED_BYTES_MAX;
        for (&to, peer) in &mut rejoin.peers {
            let pause = world.config.resend_after * backoff(peer.times);
            let pause = pause + world.config.span_of(world.config.piece_bytes);
            if peer.asked.is_some_and(|asked| now.since(asked) < pause) {
                continue;
            }
            let is_late = peer.asked.is_some();
            let bytes = if is_late { shorter(peer.bytes_max) } else { peer.bytes_max };
            let bytes_max = u32::try_from(bytes).unwrap_or(u32::MAX);
            let question = match &peer.stage {
                Stage::State(number, answer) => {
                    let (number, answer) = (*number, *answer);
                    Msg::Rejoin { partition, until, number, answer, bytes_max }
                }
                Stage::Data(_) if must_wait => continue,
                Stage::Data(start) => {
                    let start = Box::new(start.clone());
                    Msg::Copy { partition, until, start, bytes_max }
                }
                Stage::Complete => continue,
            };
            peer.times += u32::from(is_late);
            (peer.asked, peer.bytes_max) = (Some(now), bytes);
            world.send(to, question);
        }
        if rejoin.peers.values().any(|peer| peer.times > 1) {
            self.locate(world);
        }
    }

    /// A part of a peer's state.
    pub(super) fn on_known(
        &mut self,
        from: NodeId,
        (until, answer): (Timestamp, u64),
        (number, count): (u32, u32),
        part: Box<State>,
        world: &mut World<'_, '_>,
    ) {
        let Some(rejoin) = self.rejoin.as_mut().and_then(|it| it.copying(until)) else { return };
        let Some(peer) = rejoin.peers.get_mut(&from) else { return };
        let Stage::State(wanted, of) = peer.stage else { return };
        // A peer that has restarted begins another answer.
        let begins = number == 0 && answer != of;
        if !begins && (number, answer) != (wanted, of) {
            return;
        }
        let is_last = number.saturating_add(1) >= count;
        let next = match is_last {
            true => Stage::Data(Start::default()),
            false => Stage::State(number + 1, answer),
        };
        peer.goes_on(next, world.config.piece_bytes);
        let txns: Vec<TxnId> = part.entries.keys().copied().collect();
        for &txn in &txns {
            // It may have ended by now, or have become known with what it writes.
            self.unindex(txn, world);
        }
        let now = world.cx.now();
        self.shortened.extend(part.outcomes.keys().map(|&txn| (now, txn)));
        self.change(Change::Inherit(part), world);
        for txn in txns {
            self.index(txn, world);
            self.watch(txn, world);
        }
        self.pursue_rejoin(world);
    }

    /// A piece of a peer's data.
    pub(super) fn on_copied(
        &mut self,
        from: NodeId,
        until: Timestamp,
        (start, next): (&Start, Option<Box<Start>>),
        keys: Vec<(Key, Versions)>,
        world: &mut World<'_, '_>,
    ) {
        let majority = self.majority();
        let Some(rejoin) = self.rejoin.as_mut().and_then(|it| it.copying(until)) else { return };
        let Some(peer) = rejoin.peers.get_mut(&from) else { return };
        if !matches!(&peer.stage, Stage::Data(wanted) if wanted == start) {
            return;
        }
        let next = next.map_or(Stage::Complete, |next| Stage::Data(*next));
        peer.goes_on(next, world.config.piece_bytes);
        let complete = rejoin.peers.values().filter(|peer| peer.stage == Stage::Complete);
        let is_whole = complete.count() >= majority;
        if !keys.is_empty() {
            self.change(Change::Copy { keys }, world);
        }
        if is_whole {
            world.cx.note(Note::Rejoined);
            self.rejoin = None;
            self.change(Change::Rejoined, world);
            self.on_whole(world.cx.now());
        }
        self.pursue_rejoin(world);
    }

    // At a peer.

    /// A peer has lost its disk.
    pub(super) fn on_rejoin(
        &mut self,
        from: NodeId,
        (until, number): (Timestamp, u32),
        (answer, bytes_max): (u64, u32),
        world: &mut World<'_, '_>,
    ) {
        let is_peer = from != world.node && self.replicas.contains(&from);
        // A replica with a new disk cannot say of which transactions it was part before.
        if !is_peer || self.is_incomplete() || self.is_far_future(until, world) {
            return;
        }
        if until > self.state.sealed && !world.config.mutations.no_seal() {
            self.change(Change::Seal(until), world);
        }
        let now = world.cx.now();
        let bytes_max = piece(bytes_max, world);
        let serves = |leaving: &Leaving| leaving.until == until && leaving.bytes_max <= bytes_max;
        if !self.leaving.get(&from).is_some_and(serves) {
            let parts = self.state.clone().divide(bytes_max);
            let name = world.cx.rng().next_u64().max(1);
            self.leaving.insert(from, Leaving { until, name, parts, bytes_max, asked: now });
        }
        let Some(leaving) = self.leaving.get_mut(&from) else { return };
        leaving.asked = now;
        // Another answer than the one that was begun begins at its beginning.
        let number = if leaving.name == answer { number } else { 0 };
        let count = u32::try_from(leaving.parts.len()).unwrap_or(u32::MAX);
        let (answer, partition) = (leaving.name, self.id);
        let part = leaving.parts.get(number as usize).cloned().map(Box::new);
        if let Some(part) = part {
            world.reply(from, Msg::Known { partition, until, number, count, answer, part });
        }
    }

    /// A peer with a new disk needs data.
    pub(super) fn on_copy(
        &mut self,
        from: NodeId,
        until: Timestamp,
        (start, bytes_max): (Box<Start>, u32),
        world: &mut World<'_, '_>,
    ) {
        if until > self.state.sealed && !world.config.mutations.no_seal() {
            return;
        }
        self.leaving.remove(&from);
        let bounds = (COPIED_KEYS_MAX, piece(bytes_max, world));
        let (keys, next) = world.store.cut(self.id, &start, bounds);
        let next = next.map(Box::new);
        world.reply(from, Msg::Copied { partition: self.id, until, start, keys, next });
    }

    /// Answers that nobody asks for any more.
    pub(super) fn drop_answers(&mut self, world: &World<'_, '_>) {
        let (now, kept) = (world.cx.now(), world.config.absence_after);
        self.leaving.retain(|_, leaving| now.since(leaving.asked) < kept);
    }

    // Transactions of before.

    /// True if this replica must not say anything about a transaction.
    pub(super) fn is_barred(&self, txn: TxnId) -> bool {
        let has_new_disk = self.state.barred > Timestamp::ZERO;
        has_new_disk && self.state.entries.get(&txn).is_some_and(Entry::is_barred)
    }

    /// True if this replica must give a transaction no stamp, because it does not know it, and
    /// somebody's disk was lost since it was begun.
    pub(super) fn is_too_old(&self, text: &Text) -> bool {
        let is_older = text.t <= self.state.sealed.max(self.state.barred);
        is_older && !self.state.entries.get(&text.txn()).is_some_and(Entry::is_known)
    }

    /// True if a transaction is older than this disk, and neither known here nor forgotten: then no
    /// replica ever decides a place for it.
    pub(super) fn was_never_decided(&self, text: &Text) -> bool {
        let txn = text.txn();
        let is_known = || self.state.entries.get(&txn).is_some_and(Entry::is_known);
        text.t <= self.state.barred && !is_known() && !self.state.is_forgotten(txn)
    }

    /// Says to whoever recovers such a transaction that it has aborted.
    pub(super) fn answer_never_decided(
        &self,
        to: NodeId,
        (text, ballot): (&Text, Ballot),
        world: &mut World<'_, '_>,
    ) {
        world.cx.note(Note::TooOld);
        let outcome = Outcome::Aborted(AbortReason::Recovery);
        let ended = Some(Arc::new(Output { outcome, writes: Writes::new() }));
        let answer = Box::new(Answer { ended, ..Answer::default() });
        let (txn, partition) = (text.txn(), self.id);
        world.reply(to, Msg::Promised { txn, partition, ballot, answer });
    }
}

/// How many bytes a part of an answer may have of which somebody wants at most `wanted`.
fn piece(wanted: u32, world: &World<'_, '_>) -> usize {
    let all = world.config.piece_bytes;
    if wanted == 0 { all } else { (wanted as usize).clamp(SHORT_BYTES.min(all), all) }
}

/// The bound of the next part of an answer after one of `bytes` that did not come in time.
fn shorter(bytes: usize) -> usize {
    (bytes / 4).max(SHORT_BYTES.min(bytes))
}

/// The shortest bound of a part of an answer, in bytes: a few packets.
const SHORT_BYTES: usize = 4_096;

/// The clock's error may have been larger when the disk was lost than it is now, by a quarter of this.
const ERROR_MAX: Duration = Duration::from_secs(1);

/// With more bytes in memory than this, a copy waits until the checkpoint under way is durable.
const COPIED_BYTES_MAX: usize = 64 << 20;

/// A peer that has not answered to so many questions is reported.
const SILENT_TIMES: u32 = 3;

/// Keys of one piece of a copy, at most.
const COPIED_KEYS_MAX: usize = 4_096;

#[cfg(test)]
mod tests {
    use orthodrome_core::cluster::Cluster;
    use orthodrome_core::id::{ClientId, PartitionId};
    use orthodrome_core::machine::{Machine as _, Protocol as _};
    use orthodrome_core::store::MemoryEngine;
    use orthodrome_core::time::Clock;
    use orthodrome_core::topology::Topology;
    use orthodrome_core::txn::{Op, Priority};
    use orthodrome_core::workers::Alone;
    use orthodrome_core::{Effect, Host, Input, Limits, Rng, Setup};

    use super::super::super::message::{Record, Side};
    use super::super::super::{Geodesic, Server};
    use super::*;
    use crate::functor::{Body, Functor};

    const P: PartitionId = PartitionId(0);

    fn clock(seconds: u64) -> (Time, Clock) {
        let error = Duration::from_millis(1);
        let now = Timestamp(seconds * 1_000_000_000);
        (Time(now.0), Clock { now, error })
    }

    /// n1 with a disk that replaced a lost one, and what it has made durable.
    fn start(recovered: Vec<Record>, seconds: u64) -> (Host<Geodesic, Server>, Vec<Record>) {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Arc::new(Cluster::spread(map, 1, 1, 1, 3).unwrap());
        let config = Arc::new(Geodesic::configure(&cluster, "geodesic"));
        let setup = Setup {
            node: NodeId(1),
            cluster,
            config,
            engine: Box::new(MemoryEngine::default()),
            workers: Arc::new(Alone),
            is_replacement: true,
        };
        let (now, clock) = clock(seconds);
        let mut host = Host::start(setup, recovered.clone(), Rng::stream(1, "test", 1), now, clock);
        let new = host.drain().filter_map(|effect| {
            if let Effect::Persist { record, .. } = effect { Some(record) } else { None }
        });
        let records = recovered.into_iter().chain(new).collect();
        (host, records)
    }

    /// The timestamp in its questions, if it asks at this time.
    fn asks(host: &mut Host<Geodesic, Server>, seconds: u64) -> Option<Timestamp> {
        let (now, clock) = clock(seconds);
        host.fire(now, clock);
        let asked = host.drain().filter_map(|effect| {
            let Effect::Send { msg: Msg::Rejoin { until, .. }, .. } = effect else { return None };
            Some(until)
        });
        asked.max()
    }

    #[test]
    fn each_start_before_the_copy_is_complete_waits_anew() {
        let (mut host, records) = start(vec![], 100);
        assert_eq!(asks(&mut host, 103), None);
        let first = asks(&mut host, 106).unwrap();
        // The process with the old disk was still there, until now.
        let (mut host, _) = start(records, 130);
        assert_eq!(asks(&mut host, 133), None);
        let second = asks(&mut host, 136).unwrap();
        assert!(second > first + Duration::from_secs(29), "{first} {second}");
    }

    /// Where packets are lost, an answer of many packets hardly ever arrives.
    #[test]
    fn an_answer_that_does_not_come_is_asked_for_in_shorter_parts() {
        let (mut host, _) = start(vec![], 100);
        let mut seconds = 106;
        let mut bounds = Vec::new();
        let mut asked = |host: &mut Host<Geodesic, Server>, seconds| {
            let (now, clock) = clock(seconds);
            host.fire(now, clock);
            let asked = host.drain().find_map(|effect| match effect {
                Effect::Send { to: NodeId(2), msg: Msg::Rejoin { until, bytes_max, .. } } => {
                    Some((until, bytes_max))
                }
                Effect::Send { to: NodeId(2), msg: Msg::Copy { until, bytes_max, .. } } => {
                    Some((until, bytes_max))
                }
                Effect::Send { .. }
                | Effect::Persist { .. }
                | Effect::Checkpoint { .. }
                | Effect::Reads { .. }
                | Effect::Finish { .. }
                | Effect::Note(_)
                | Effect::Claim(_) => None,
            });
            asked.inspect(|(_, bytes_max)| bounds.push(*bytes_max as usize))
        };
        let mut last = None;
        while seconds < 700 {
            last = asked(&mut host, seconds).or(last);
            seconds += 10;
        }
        let (now, clock) = clock(seconds);
        let (until, part) = (last.unwrap().0, Box::new(State::default()));
        let msg = Msg::Known { partition: P, until, number: 0, count: 1, answer: 7, part };
        host.step(now, clock, Input::Message { from: NodeId(2), msg });
        asked(&mut host, seconds);
        assert!(bounds.is_sorted_by(|a, b| a >= b || *a == SHORT_BYTES), "{bounds:?}");
        let all = Limits::SERVER.piece_bytes();
        assert_eq!(bounds.first(), Some(&all));
        assert!(bounds.ends_with(&[SHORT_BYTES, 2 * SHORT_BYTES]), "{bounds:?}");
    }

    #[test]
    fn a_new_disk_is_complete_once_older_transactions_have_ended() {
        let (mut host, _) = start(vec![], 100);
        let until = asks(&mut host, 106).unwrap();
        let txn = TxnId::new(ClientId(1), 1);
        let functor = Functor {
            txn,
            reads: vec![],
            writes: vec![Key::from("a")],
            body: Body::Ops(vec![Op::Put(Key::from("a"), "1".into())]),
            acknowledged_below: 0,
        };
        let sides = vec![Side {
            partition: P,
            named: vec![NodeId(1), NodeId(2)],
            is_direct: false,
            is_patient: false,
        }];
        let (t, priority) = (Timestamp(99_000_000_000), Priority::default());
        let text =
            Arc::new(Text { functor, priority, gateway: NodeId(4), t, sides, register: None });
        let entry = Entry { participants: vec![P], text: Some(text), ..Entry::default() };
        let (now, clock) = clock(107);
        let mut hear = |from, msg| {
            host.step(now, clock, Input::Message { from: NodeId(from), msg });
            let gauges = host.machine().gauges(now);
            gauges.iter().find(|gauge| gauge.name == "incomplete").unwrap().value
        };
        for (from, entries) in [(2, OrdMap::from([(txn, entry)])), (3, OrdMap::new())] {
            let part = Box::new(State { entries, ..State::default() });
            let (number, count, answer) = (0, 1, 7);
            let known = Msg::Known { partition: P, until, number, count, answer, part };
            assert_eq!(hear(from, known), 1);
        }
        let copied = || {
            let start = Box::new(Start::default());
            Msg::Copied { partition: P, until, start, keys: vec![], next: None }
        };
        assert_eq!(hear(2, copied()), 1);
        assert_eq!(hear(3, copied()), 1, "it takes part, and one transaction is pending");
        let outcome = Outcome::Committed(Timestamp(99_500_000_000));
        let output = Arc::new(Output { outcome, writes: Writes::new() });
        let apply = Msg::Apply { txn, partition: P, output, participants: vec![P], more: vec![] };
        assert_eq!(hear(2, apply), 0);
    }
}
