//! Messages between servers of different shares, and to servers of one share that lag behind (ADR
//! 18).

use std::collections::VecDeque;
use std::mem::take;
use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, ShareId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::store::PIECE_BYTES;
use orthodrome_core::time::{Duration, Time};

use super::super::message::{Chunk, Command, Image, Msg, Name, Part, TURN, Turn};
use super::super::state::{Applied, Leaving, State};
use super::super::{Cx, Note};
use super::Server;
use crate::replication::{Index, Payload};
use crate::waiting::{Paces, RetryState};

/// The most parts requested at a time.
const ASKED_MAX: usize = 1_024;
/// The most transactions that are remembered because another server wants this share's part before
/// their turn has come.
const WANTED_MAX: usize = 65_536;
/// The most bytes that one repeated request for parts is answered with.
const AGAIN_BYTES_MAX: usize = 16 << 20;
/// The interval at which servers report which parts they do not need any more.
const COVERED_AFTER: Duration = Duration::from_secs(1);
/// A state that is being sent in pieces is dropped if no piece is requested for this long.
const LEAVING_FOR: Duration = Duration::from_secs(30);
/// How often one piece of a state is requested again before another server is asked for another
/// state, from the beginning.
const PIECE_AGAIN_MAX: u32 = 6;

/// A server's exchange with servers of other shares, and of its own share.
#[derive(Debug)]
pub(super) struct Exchange {
    /// The servers that hold each share, in the order in which this server asks them.
    holders: OrdMap<ShareId, Vec<NodeId>>,
    /// Servers of this region to which this server sends its parts.
    receivers: Vec<(ShareId, NodeId)>,
    /// Parts to send together.
    outgoing: OrdMap<NodeId, Vec<(Turn, Arc<Part>)>>,
    /// Parts to request together.
    asking: OrdMap<NodeId, Vec<Turn>>,
    /// Transactions that wait for parts, and when the parts were requested.
    awaited: OrdMap<Turn, RetryState>,
    /// The servers that want this share's part of a transaction that is not due here yet.
    wanted: OrdMap<Turn, OrdSet<NodeId>>,
    /// Servers that were asked and have not answered, and since when.
    silent: OrdMap<NodeId, Time>,
    /// A server that has been silent for this long is not asked.
    timeout: Duration,
    /// The entries covered by this server's durable checkpoint, and by the pending one.
    covered: OrdMap<PartitionId, Index>,
    covering: Option<OrdMap<PartitionId, Index>>,
    told_at: Time,
    /// The entries that other servers do not need any more.
    passed: OrdMap<NodeId, OrdMap<PartitionId, Index>>,
    /// A state that is arriving.
    arriving: Option<Arriving>,
    /// The number of the last request for a state; 0 if there was none.
    number: u64,
    /// States that are being sent in pieces, by receiver.
    leaving: OrdMap<NodeId, Outgoing>,
    /// How long their pieces are, by start.
    paces: Paces<usize>,
    /// Streams whose logs begin after the end of this server's state, and what has been chosen in
    /// them since.
    gaps: OrdMap<PartitionId, Gap>,
}

#[derive(Debug)]
struct Arriving {
    peer: NodeId,
    past: Turn,
    asked: RetryState,
    staged: Option<Chunk>,
    cursor: Option<usize>,
}

/// A state that is being sent in pieces.
#[derive(Debug)]
struct Outgoing {
    /// The number of the request for it, and the transaction that it must contain.
    number: u64,
    past: Turn,
    state: Leaving,
    /// When a piece was last requested.
    at: Time,
}

/// A stream's log begins after `until`, and the state ends before it.
#[derive(Debug)]
struct Gap {
    until: Index,
    chosen: VecDeque<(Index, Payload<Command>)>,
}

impl Exchange {
    pub fn new(node: NodeId, cluster: &Cluster, timeout: Duration, now: Time) -> Self {
        let mut holders: OrdMap<ShareId, Vec<NodeId>> = OrdMap::new();
        let mut receivers = Vec::new();
        if cluster.shares() > 1 {
            holders = holders_for(node, cluster);
            let (own, _) = cluster.share_at(node);
            for server in cluster.servers().filter(|server| server.id != node) {
                let (share, _) = cluster.share_at(server.id);
                let is_near = server.region == cluster.region_of(node) && share != own;
                if is_near
                    && holders_for(server.id, cluster).get(&own).and_then(|all| all.first())
                        == Some(&node)
                {
                    receivers.push((share, server.id));
                }
            }
        }
        Self {
            holders,
            receivers,
            outgoing: OrdMap::new(),
            asking: OrdMap::new(),
            awaited: OrdMap::new(),
            wanted: OrdMap::new(),
            silent: OrdMap::new(),
            timeout,
            covered: OrdMap::new(),
            covering: None,
            told_at: now,
            passed: OrdMap::new(),
            arriving: None,
            number: 0,
            leaving: OrdMap::new(),
            paces: Paces::long(PIECE_BYTES),
            gaps: OrdMap::new(),
        }
    }

    /// A message of `from` arrived.
    pub fn heard(&mut self, from: NodeId) {
        self.silent.remove(&from);
    }

    /// True if some stream's log begins after the end of this server's state.
    pub fn has_gaps(&self) -> bool {
        !self.gaps.is_empty()
    }

    /// True if this stream's log begins after the end of this server's state.
    pub fn has_gap(&self, stream: PartitionId) -> bool {
        self.gaps.contains_key(&stream)
    }

    /// Keeps an entry that is chosen in a stream with a gap. False if the stream has none.
    pub fn hold(&mut self, stream: PartitionId, index: Index, payload: &Payload<Command>) -> bool {
        let Some(gap) = self.gaps.get_mut(&stream) else { return false };
        gap.chosen.push_back((index, payload.clone()));
        true
    }

    /// A checkpoint with this image begins.
    pub fn checkpoint(&mut self, image: &Image) {
        self.covering = Some(image.covered());
    }

    /// This server started with this image.
    pub fn restore(&mut self, image: &Image) {
        self.covered = image.covered();
    }

    fn is_silent(&self, node: NodeId, now: Time) -> bool {
        self.silent.get(&node).is_some_and(|&since| now.since(since) >= self.timeout)
    }

    /// The server to ask for a share after `times` requests: one that is not silent, and another
    /// one every second time.
    fn holder(&self, share: ShareId, times: u32, now: Time) -> Option<NodeId> {
        let all = self.holders.get(&share)?;
        let well = all.iter().filter(|&&node| !self.is_silent(node, now));
        let well: Vec<NodeId> = well.copied().collect();
        let from = if well.is_empty() { all } else { &well };
        from.get((times as usize / 2).checked_rem(from.len())?).copied()
    }

    fn ask(&mut self, turn: Turn, share: ShareId, times: u32, now: Time) {
        if let Some(holder) = self.holder(share, times, now) {
            self.silent.entry(holder).or_insert(now);
            self.asking.entry(holder).or_default().push(turn);
        }
    }
}

/// The servers of each share except `node`, in the order in which `node` asks them. Near servers
/// come first. Of those in one region, the first is the one with the same position in its share as
/// `node` has in its own.
fn holders_for(node: NodeId, cluster: &Cluster) -> OrdMap<ShareId, Vec<NodeId>> {
    let (home, (_, spare)) = (cluster.region_of(node), cluster.share_at(node));
    let mut counts = OrdMap::new();
    for server in cluster.servers() {
        let (share, _) = cluster.share_at(server.id);
        *counts.entry((server.region, share)).or_insert(0_u32) += 1;
    }
    let mut holders: OrdMap<ShareId, Vec<_>> = OrdMap::new();
    for server in cluster.servers().filter(|server| server.id != node) {
        let (share, at) = cluster.share_at(server.id);
        let count = counts.get(&(server.region, share)).copied().unwrap_or(1);
        let distance = cluster.topology.rtt(home, server.region);
        let turn = (at + count - spare.checked_rem(count).unwrap_or(0)) % count.max(1);
        let rank = (server.region != home, distance, server.region, turn, server.id);
        holders.entry(share).or_default().push(rank);
    }
    let sorted = holders.into_iter().map(|(share, mut ranks)| {
        ranks.sort_unstable();
        (share, ranks.into_iter().map(|(.., id)| id).collect())
    });
    sorted.collect()
}

/// Groups parts into messages of at most `bytes_max` bytes, unless a single part is larger. One
/// message if there are no parts.
fn messages(parts: Vec<(Turn, Arc<Part>)>, bytes_max: usize) -> Vec<Vec<(Turn, Arc<Part>)>> {
    let (mut all, mut last, mut bytes) = (Vec::new(), Vec::new(), 0);
    for (turn, part) in parts {
        let size = TURN + part.size();
        if bytes > 0 && bytes + size > bytes_max {
            all.push(take(&mut last));
            bytes = 0;
        }
        bytes += size;
        last.push((turn, part));
    }
    all.push(last);
    all
}

impl Server {
    /// Sends the parts that were taken, and requests the parts for which transactions wait.
    pub(super) fn exchange(&mut self, applied: &mut Applied, cx: &mut Cx<'_>) {
        let exchange = &mut self.exchange;
        for (turn, shares, part) in take(&mut applied.taken) {
            let near = exchange.receivers.iter().filter(|(share, _)| shares.contains(share));
            let mut to: OrdSet<NodeId> = near.map(|&(_, node)| node).collect();
            to.extend(exchange.wanted.remove(&turn).unwrap_or_default());
            for node in to {
                exchange.outgoing.entry(node).or_default().push((turn, part.clone()));
            }
        }
        for turn in take(&mut applied.due) {
            let missing = self.state.shares.missing(turn.name);
            if missing.is_empty() {
                continue;
            }
            exchange.awaited.entry(turn).or_insert(RetryState::new(cx.now()));
            for share in missing {
                let first = exchange.holders.get(&share).and_then(|all| all.first()).copied();
                if first.is_some_and(|first| exchange.is_silent(first, cx.now())) {
                    // Nobody else would send it.
                    exchange.ask(turn, share, 0, cx.now());
                }
            }
        }
    }

    /// Sends the parts that were collected for other shares.
    pub(super) fn flush_exchange(&mut self, cx: &mut Cx<'_>) {
        let bytes_max = self.config.piece_bytes;
        for (to, parts) in take(&mut self.exchange.outgoing) {
            for parts in messages(parts, bytes_max) {
                cx.send(to, Msg::RemoteReads { parts });
            }
        }
        for (to, turns) in take(&mut self.exchange.asking) {
            cx.note(Note::WantedReads);
            cx.send(to, Msg::WantReads { turns });
        }
    }

    /// Parts of another share have arrived.
    pub(super) fn on_remote_reads(
        &mut self,
        from: NodeId,
        parts: Vec<(Turn, Arc<Part>)>,
        cx: &mut Cx<'_>,
    ) {
        let (share, _) = self.cluster.share_at(from);
        for (turn, part) in parts {
            self.state.arrive(turn, share, part);
        }
        let mut applied = Applied::default();
        self.state.run_due(&mut applied, &self.placement, &mut self.store);
        self.answer(applied, cx);
    }

    /// Another server waits for this share's parts of these transactions.
    pub(super) fn on_want_reads(&mut self, from: NodeId, turns: Vec<Turn>, cx: &mut Cx<'_>) {
        let (mut gone, mut bytes) = (Vec::new(), 0);
        // Also if there are no parts: the answer shows that this server is alive.
        self.exchange.outgoing.entry(from).or_default();
        for turn in turns {
            if let Some(part) = self.state.shares.part(turn) {
                if bytes > 0 && bytes + TURN + part.size() > AGAIN_BYTES_MAX {
                    // The other server will ask again.
                    continue;
                }
                bytes += TURN + part.size();
                cx.note(Note::SentReadsAgain);
                self.exchange.outgoing.entry(from).or_default().push((turn, part));
            } else if self.state.has_run(turn) {
                gone.push(turn);
            } else if self.exchange.wanted.len() < WANTED_MAX {
                self.exchange.wanted.entry(turn).or_default().insert(from);
            }
        }
        if !gone.is_empty() {
            cx.send(from, Msg::ReadsGone { turns: gone });
        }
    }

    /// The requested parts are not kept any more. A server that holds this share and has run the
    /// transactions can send a state.
    pub(super) fn on_reads_gone(&mut self, turns: &[Turn], cx: &mut Cx<'_>) {
        let state = &self.state;
        let waits = turns.iter().find(|turn| !state.shares.missing(turn.name).is_empty());
        if let Some(&turn) = waits {
            self.want_state(turn, cx);
        }
    }

    /// Servers of other shares do not need these parts any more.
    pub(super) fn on_covered(&mut self, from: NodeId, through: OrdMap<PartitionId, Index>) {
        self.exchange.passed.insert(from, through);
        for stream in self.placement.streams() {
            let (all, most) = self.exchange.needed(self.placement.share(), stream);
            self.state.shares.forget(stream, all, 0);
            self.state.shares.forget(stream, most, self.config.kept_bytes);
        }
    }

    /// Overdue work between shares.
    pub(super) fn sweep_exchange(&mut self, cx: &mut Cx<'_>) {
        let (now, timeout) = (cx.now(), self.config.ask_after);
        let Self { exchange, state, .. } = self;
        exchange.awaited.retain(|turn, _| state.shares.is_due(turn.name));
        exchange.wanted.retain(|turn, _| !state.has_run(*turn));
        let due = exchange.awaited.iter().filter(|(_, asked)| asked.is_due(timeout, now));
        let mut due: Vec<(Time, Turn)> = due.map(|(turn, asked)| (asked.at, *turn)).collect();
        due.sort_unstable();
        due.truncate(ASKED_MAX);
        for (_, turn) in due {
            let Some(asked) = exchange.awaited.get_mut(&turn) else { continue };
            let times = asked.times;
            *asked = asked.again(now);
            for share in state.shares.missing(turn.name) {
                exchange.ask(turn, share, times, now);
            }
        }
        exchange.leaving.retain(|_, outgoing| now.since(outgoing.at) < LEAVING_FOR);
        if let Some(stream) = exchange.gaps.keys().next().copied()
            && exchange.arriving.is_none()
        {
            self.fill_gap(stream, cx);
        }
        self.want_state_again(cx);
        if self.placement.is_divided() && now.since(self.exchange.told_at) >= COVERED_AFTER {
            self.tell_covered(cx);
        }
    }

    /// A checkpoint is durable.
    pub(super) fn covered(&mut self, cx: &mut Cx<'_>) {
        if let Some(covered) = self.exchange.covering.take() {
            self.exchange.covered = covered;
            self.tell_covered(cx);
        }
    }

    fn tell_covered(&mut self, cx: &mut Cx<'_>) {
        self.exchange.told_at = cx.now();
        let own = self.placement.share();
        let others = self.exchange.holders.iter().filter(|(share, _)| **share != own);
        for &to in others.flat_map(|(_, all)| all) {
            cx.send(to, Msg::Covered { through: self.exchange.covered.clone() });
        }
    }

    // States from servers of the same share.

    /// Requests a state in which `past` has run.
    fn want_state(&mut self, past: Turn, cx: &mut Cx<'_>) {
        if self.exchange.arriving.is_some() {
            return;
        }
        let Some(peer) = self.exchange.holder(self.placement.share(), 0, cx.now()) else { return };
        self.begin_state(peer, past, RetryState::new(cx.now()), cx);
    }

    fn begin_state(&mut self, peer: NodeId, past: Turn, asked: RetryState, cx: &mut Cx<'_>) {
        // The first number is random: after a restart, pieces of an earlier request are on their way.
        let number = match self.exchange.number {
            0 => 1 + cx.rng().below(u64::MAX / 2),
            last => last + 1,
        };
        self.exchange.number = number;
        self.exchange.arriving = Some(Arriving { peer, past, asked, staged: None, cursor: None });
        cx.note(Note::WantedState);
        cx.send(peer, Msg::WantState { number, past, cursor: None });
    }

    /// A piece of the state did not arrive. It is requested again, and after some times another
    /// server is asked, if the state is still needed.
    fn want_state_again(&mut self, cx: &mut Cx<'_>) {
        let (now, timeout) = (cx.now(), self.config.answer_after);
        let Some(arriving) = &mut self.exchange.arriving else { return };
        if !arriving.asked.is_due(timeout, now) {
            return;
        }
        let (peer, past, asked) = (arriving.peer, arriving.past, arriving.asked.again(now));
        if self.state.has_run(past) {
            self.exchange.arriving = None;
        } else if arriving.cursor.is_some() && asked.times <= PIECE_AGAIN_MAX {
            arriving.asked = asked;
            cx.note(Note::WantedPieceAgain);
            let (number, cursor) = (self.exchange.number, arriving.cursor);
            cx.send(peer, Msg::WantState { number, past, cursor });
        } else {
            let next = self.exchange.holder(self.placement.share(), 2 * asked.times, now);
            self.begin_state(next.unwrap_or(peer), past, asked, cx);
        }
    }

    /// A server of this share lags behind.
    pub(super) fn on_want_state(
        &mut self,
        from: NodeId,
        (number, past): (u64, Turn),
        cursor: Option<usize>,
        cx: &mut Cx<'_>,
    ) {
        if !self.state.has_run(past) {
            // It asks another server, or again.
            return;
        }
        let (now, within) = (cx.now(), self.config.answer_after);
        let start = cursor.unwrap_or(0);
        let place = (start, cursor.is_none());
        let bytes = self.exchange.paces.next((from, past.stream), place, now, within);
        let is_asked = |held: &Outgoing| held.number == number && held.past == past;
        // A first request that arrives twice must not replace the state of which the receiver has
        // pieces already.
        if cursor.is_none() && !self.exchange.leaving.get(&from).is_some_and(is_asked) {
            let state = self.leaving(bytes);
            self.exchange.leaving.insert(from, Outgoing { number, past, state, at: now });
        }
        let held = self.exchange.leaving.get_mut(&from).filter(|held| is_asked(held));
        let Some(outgoing) = held else { return };
        outgoing.at = now;
        // One piece at a time is in flight, as large as several of a leader's.
        let window = self.config.hosting.replication.snapshot_window;
        let keys = self.config.hosting.chunk_keys.saturating_mul(window);
        let (chunk, next) = outgoing.state.piece(start, (keys, bytes));
        cx.send(from, Msg::StatePiece { number, chunk, next, start: Some(start) });
    }

    /// A piece of the requested state arrived.
    pub(super) fn on_state_piece(
        &mut self,
        from: NodeId,
        (number, start, next): (u64, Option<usize>, Option<usize>),
        chunk: Chunk,
        cx: &mut Cx<'_>,
    ) {
        if number != self.exchange.number {
            return;
        }
        let Some(arriving) = &mut self.exchange.arriving else { return };
        let wanted = arriving.cursor.unwrap_or(0);
        if arriving.peer != from || start.is_some_and(|start| start != wanted) {
            // Of another state, or it arrived twice.
            return;
        }
        match &mut arriving.staged {
            Some(staged) if staged.goes_on_with(&chunk) => staged.add(chunk),
            staged @ None if chunk.is_first() => *staged = Some(chunk),
            // It arrived twice.
            Some(_) | None => return,
        }
        arriving.asked = RetryState::new(cx.now());
        if let Some(cursor) = next {
            arriving.cursor = Some(cursor);
            let past = arriving.past;
            cx.send(from, Msg::WantState { number, past, cursor: Some(cursor) });
            return;
        }
        let Some(Chunk { image: Some(image), keys }) = arriving.staged.take() else { return };
        self.exchange.arriving = None;
        self.take_state(&image, keys, cx);
        self.close_gaps(cx);
    }

    /// A stream's log begins after `until`, where this server's state ends earlier.
    pub(super) fn open_gap(&mut self, stream: PartitionId, until: Index, cx: &mut Cx<'_>) {
        self.exchange.gaps.insert(stream, Gap { until, chosen: VecDeque::new() });
        self.fill_gap(stream, cx);
    }

    fn fill_gap(&mut self, stream: PartitionId, cx: &mut Cx<'_>) {
        let Some(gap) = self.exchange.gaps.get(&stream) else { return };
        let past = Turn { stream, index: gap.until, name: Name::default() };
        self.want_state(past, cx);
    }

    /// Continues with streams whose logs begin where the state ends now.
    pub(super) fn close_gaps(&mut self, cx: &mut Cx<'_>) {
        let is_closed =
            |state: &State, stream: PartitionId, gap: &Gap| state.applied(stream) >= gap.until;
        for stream in self.placement.streams() {
            let gap = self.exchange.gaps.get(&stream);
            if !gap.is_some_and(|gap| is_closed(&self.state, stream, gap)) {
                continue;
            }
            let Some(gap) = self.exchange.gaps.remove(&stream) else { continue };
            self.disk.installed.insert(stream);
            self.on_chosen(stream, gap.chosen.into(), cx);
        }
    }
}

impl Exchange {
    /// How much of a stream's log may be dropped. Values of other shares follow from it, and a
    /// server of such a share that needs the log must find another holder.
    pub fn compactable(&self, own: ShareId, stream: PartitionId) -> Index {
        self.needed(own, stream).1
    }

    /// The entry up to which no server of another share needs anything of `stream`, and the entry
    /// up to which a majority of each share's servers does not.
    fn needed(&self, own: ShareId, stream: PartitionId) -> (Index, Index) {
        let (mut all, mut most) = (Index(u64::MAX), Index(u64::MAX));
        for (_, holders) in self.holders.iter().filter(|(share, _)| **share != own) {
            let passed = |node| self.passed.get(node).and_then(|of| of.get(&stream)).copied();
            let mut passed: Vec<Index> =
                holders.iter().map(|node| passed(node).unwrap_or(Index(0))).collect();
            passed.sort_unstable();
            all = all.min(passed.first().copied().unwrap_or_default());
            // A majority has passed this entry.
            let minority = passed.len().saturating_sub(1) / 2;
            most = most.min(passed.get(minority).copied().unwrap_or_default());
        }
        (all, most)
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::txn::{Read, Reads, Version};

    use super::*;

    #[test]
    fn parts_are_divided_among_messages_by_their_bytes() {
        let part = |bytes: usize| {
            let read = Read { value: Some(vec![b'x'; bytes].into()), version: Version::INITIAL };
            let reads = Reads::from([(orthodrome_core::txn::Key::from("k"), read)]);
            (Turn::default(), Arc::new(Part { reads, ..Part::default() }))
        };
        let parts = [10, 10, 3_000, 600, 10, 10].map(part).to_vec();
        let sizes: Vec<usize> = messages(parts, 1_000).iter().map(Vec::len).collect();
        assert_eq!(sizes, [2, 1, 3]);
        // Also if there are no parts: the answer shows that this server is alive.
        assert_eq!(messages(Vec::new(), 1_000), [vec![]]);
    }
}
