//! What leaders and gateways wait for: answers, timestamps that must pass, servers that do not
//! answer.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::{Clock, Duration, Time, Timestamp};

/// When a request was last sent, and how often.
#[derive(Clone, Copy, Debug)]
pub struct RetryState {
    pub at: Time,
    pub times: u32,
}

impl RetryState {
    /// A request first sent at `now`.
    pub fn new(now: Time) -> Self {
        Self { at: now, times: 0 }
    }

    /// How long to wait for an answer: `timeout` at first, then twice as long each time, up to four
    /// times `timeout`, or a second if that is longer. A slow node must not receive ever more
    /// requests because of a time-out that is too short.
    pub fn timeout(&self, timeout: Duration) -> Duration {
        let longest = (timeout * 4).max(Duration::from_secs(1));
        (timeout * (1 << self.times.min(10))).min(longest)
    }

    /// True if the request should be sent again.
    pub fn is_due(&self, timeout: Duration, now: Time) -> bool {
        now.since(self.at) >= self.timeout(timeout)
    }

    /// The request was sent again at `now`.
    pub fn again(self, now: Time) -> Self {
        Self { at: now, times: self.times + 1 }
    }
}

/// Records that all due requests are sent now, and returns when each was last sent.
pub(crate) fn take_due(
    asked: &mut OrdMap<TxnId, RetryState>,
    timeout: Duration,
    now: Time,
) -> Vec<(TxnId, RetryState)> {
    let due = asked.iter_mut().filter(|(_, asked)| asked.is_due(timeout, now));
    due.map(|(&txn, asked)| (txn, std::mem::replace(asked, asked.again(now)))).collect()
}

/// Servers that did not answer and from which nothing has arrived since; since when, and how often
/// they were tried again.
#[derive(Debug)]
pub(crate) struct Suspects {
    /// How long a suspect is not tried at first.
    alone: Duration,
    asked: OrdMap<NodeId, RetryState>,
}

impl Suspects {
    /// No suspects, for a node whose time-out is `answer_after`.
    pub fn new(answer_after: Duration) -> Self {
        let alone = answer_after.max(Duration::from_secs(1)) * 4;
        Self { alone, asked: OrdMap::new() }
    }

    /// True if a server should not be asked now. It is tried again after a while, because a server
    /// that is back is noticed only if it is asked. The first pause is several time-outs long, so
    /// that other servers are asked meanwhile, and each later pause is twice as long.
    pub fn is(&self, server: NodeId, now: Time) -> bool {
        let suspect = self.asked.get(&server);
        suspect.is_some_and(|asked| now.since(asked.at) < self.alone * (1 << asked.times.min(6)))
    }

    /// True if a server did not answer, however long ago, and nothing has arrived from it since.
    pub fn was(&self, server: NodeId) -> bool {
        self.asked.contains_key(&server)
    }

    /// A server did not answer. True if it was not a suspect before.
    pub fn add(&mut self, server: NodeId, now: Time) -> bool {
        let was_suspect = self.is(server, now);
        let asked = self.asked.get(&server).map_or(RetryState::new(now), |asked| {
            if was_suspect { *asked } else { asked.again(now) }
        });
        self.asked.insert(server, asked);
        !was_suspect
    }

    /// A message of a server arrived.
    pub fn remove(&mut self, server: NodeId) {
        self.asked.remove(&server);
    }
}

/// The servers to which a gateway gives its transactions: those of the nearest region that has any,
/// in turn. Suspects are left out for a while.
#[derive(Debug)]
pub(crate) struct Helpers {
    /// Every server, by region, the nearest first.
    regions: Vec<Vec<NodeId>>,
    turn: usize,
    /// Servers that did not answer, or are overloaded.
    pub suspects: Suspects,
}

impl Helpers {
    /// The servers as seen from `gateway`, whose time-out is `answer_after`.
    pub fn new(cluster: &Cluster, gateway: NodeId, answer_after: Duration) -> Self {
        let home = cluster.region_of(gateway);
        let mut regions: OrdMap<_, Vec<NodeId>> = OrdMap::new();
        for server in cluster.servers() {
            let region = cluster.region_of(server.id);
            let distance = (region != home, cluster.topology.rtt(home, region), region);
            regions.entry(distance).or_default().push(server.id);
        }
        let regions = regions.into_values().collect();
        Self { regions, turn: 0, suspects: Suspects::new(answer_after) }
    }

    /// Every server.
    pub fn all(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.regions.iter().flatten().copied()
    }

    /// Moves on to the next server.
    pub fn turn(&mut self) {
        self.turn = self.turn.wrapping_add(1);
    }

    /// The next server in turn, in the nearest region that has one which `is_able`.
    pub fn nearest(&self, is_able: impl Fn(NodeId) -> bool) -> Option<NodeId> {
        self.regions.iter().find_map(|servers| self.by_turn(servers.iter().copied(), &is_able))
    }

    /// The next server in turn among all that are able, in any region.
    pub fn any(&self, is_able: impl Fn(NodeId) -> bool) -> Option<NodeId> {
        self.by_turn(self.regions.iter().flatten().copied(), is_able)
    }

    fn by_turn(
        &self,
        servers: impl Iterator<Item = NodeId>,
        is_able: impl Fn(NodeId) -> bool,
    ) -> Option<NodeId> {
        let able: Vec<NodeId> = servers.filter(|&id| is_able(id)).collect();
        self.turn.checked_rem(able.len()).and_then(|at| able.get(at)).copied()
    }

    /// The server to ask, nearby if possible. A request that others have not answered (not
    /// `is_first`) is not sent to any suspect, however old the suspicion.
    pub fn next(&mut self, is_first: bool, now: Time) -> NodeId {
        self.next_of(is_first, now, |_| true)
    }

    /// The same among given servers.
    pub fn next_of(
        &mut self,
        is_first: bool,
        now: Time,
        is_able: impl Fn(NodeId) -> bool,
    ) -> NodeId {
        self.turn();
        let is_well = |id| !self.suspects.was(id) || (is_first && !self.suspects.is(id, now));
        let nearest = self.nearest(|id| is_able(id) && is_well(id));
        nearest.or_else(|| self.any(is_able)).unwrap_or_default()
    }
}

/// The size of the pieces of a long answer. Other messages to a peer wait until a piece has left,
/// and a link that loses packets is slow. Pieces grow while the next one is requested soon. They
/// shrink when it is requested late, or when the same one is requested again: links that keep no
/// order lose a whole piece with any of its packets. `P` says which piece of which answer it is.
#[derive(Debug)]
pub(crate) struct Paces<P> {
    first: usize,
    most: usize,
    /// For each answer to a peer, pending or past: its last piece.
    answers: OrdMap<(NodeId, PartitionId), Sent<P>>,
}

/// A piece that has left.
#[derive(Debug)]
struct Sent<P> {
    bytes: usize,
    at: Time,
    piece: P,
}

impl<P: PartialEq> Paces<P> {
    const FIRST: usize = 16 << 10;
    /// It fits into one packet.
    const LEAST: usize = 1 << 10;

    /// Pieces of at most `most` bytes, and small ones at first.
    pub fn new(most: usize) -> Self {
        Self { first: Self::FIRST.min(most), most, answers: OrdMap::new() }
    }

    /// Pieces of `most` bytes, until one is late or lost.
    pub fn long(most: usize) -> Self {
        Self { first: most, most, answers: OrdMap::new() }
    }

    /// The size of a piece that leaves now: the first of an answer, or one that a peer requested,
    /// where requests are expected within a given time.
    pub fn next(
        &mut self,
        answer: (NodeId, PartitionId),
        (piece, is_first): (P, bool),
        now: Time,
        within: Duration,
    ) -> usize {
        let last = self.answers.get(&answer);
        let bytes = last.map_or(self.first, |last| last.bytes);
        let is_repeated = last.is_some_and(|last| last.piece == piece);
        let is_late = last.is_some_and(|last| now.since(last.at) > within);
        let bytes = match (is_repeated || (is_late && !is_first), is_first) {
            (true, _) => (bytes / 2).max(Self::LEAST.min(self.most)),
            (false, true) => bytes,
            (false, false) => (bytes * 2).min(self.most),
        };
        self.answers.insert(answer, Sent { bytes, at: now, piece });
        bytes
    }
}

/// The most transactions named in one housekeeping message or log entry.
pub(crate) const BATCH: usize = 4_096;

/// Takes the first of these, at most as many as one message or entry may name.
pub(crate) fn take_batch(txns: &mut OrdSet<TxnId>) -> Vec<TxnId> {
    std::iter::from_fn(|| txns.pop_first()).take(BATCH).collect()
}

/// Decided commits whose timestamps have not passed on every clock yet (C13).
#[derive(Debug, Default)]
pub struct CommitWait(OrdSet<(Timestamp, TxnId)>);

impl CommitWait {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn insert(&mut self, timestamp: Timestamp, txn: TxnId) {
        self.0.insert((timestamp, txn));
    }

    /// When the first of them will have passed, by this clock.
    pub fn next(&self, clock: Clock, now: Time) -> Option<Time> {
        let &(timestamp, _) = self.0.first()?;
        let left = (timestamp + clock.error * 2).0.saturating_sub(clock.now.0).saturating_add(1);
        Some(Time(now.0.saturating_add(left)))
    }

    /// Removes and returns those that have passed.
    pub fn pop_passed(&mut self, clock: Clock) -> Vec<TxnId> {
        let mut passed = Vec::new();
        while let Some(&(timestamp, txn)) = self.0.first()
            && clock.has_passed_everywhere(timestamp)
        {
            self.0.pop_first();
            passed.push(txn);
        }
        passed
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::cluster::Role;
    use orthodrome_core::topology::Topology;

    use super::*;

    #[test]
    fn timeout_grows_to_four_times_or_a_second() {
        let waits = |timeout| {
            let mut asked = RetryState::new(Time(0));
            let mut waits = Vec::new();
            for _ in 0..12 {
                waits.push(asked.timeout(Duration::from_millis(timeout)).as_millis());
                asked = asked.again(Time(0));
            }
            waits
        };
        assert_eq!(waits(1_000)[..4], [1_000, 2_000, 4_000, 4_000]);
        assert_eq!(waits(3)[..4], [3, 6, 12, 24]);
        assert_eq!(waits(3)[11], 1_000);
    }

    #[test]
    fn pieces_grow_while_they_arrive_soon() {
        let mut paces = Paces::new(50_000);
        let (peer, within) = ((NodeId(1), PartitionId(0)), Duration::from_millis(100));
        let at = |ms: u64| Time(ms * 1_000_000);
        assert_eq!(paces.next(peer, (0, true), at(0), within), 16_384);
        assert_eq!(paces.next(peer, (1, false), at(50), within), 32_768);
        assert_eq!(paces.next(peer, (2, false), at(150), within), 50_000);
        assert_eq!(paces.next(peer, (10, true), at(1_000), within), 50_000, "a new answer");
        assert_eq!(paces.next(peer, (20, true), at(2_000), within), 50_000, "it had one piece");
        assert_eq!(paces.next(peer, (21, false), at(3_000), within), 25_000);
        assert_eq!(paces.next(peer, (21, false), at(3_001), within), 12_500, "it was lost");
        assert_eq!(paces.next(peer, (22, false), at(3_002), within), 25_000);
        for late in 4..10 {
            paces.next(peer, (20 + late, false), at(late * 1_000), within);
        }
        assert_eq!(paces.next(peer, (30, false), at(10_000), within), 1_024);
        assert_eq!(paces.next((NodeId(2), PartitionId(0)), (0, true), at(0), within), 16_384);
        let lost = (NodeId(3), PartitionId(0));
        let first: Vec<usize> =
            (0..6).map(|second| paces.next(lost, (0, true), at(second * 1_000), within)).collect();
        assert_eq!(first, [16_384, 8_192, 4_096, 2_048, 1_024, 1_024], "none of them arrives");
        assert_eq!(Paces::new(100).next(peer, (1, false), at(9_000), within), 100);
        let mut long = Paces::long(50_000);
        assert_eq!(long.next(peer, (0, true), at(0), within), 50_000);
        assert_eq!(long.next(peer, (0, true), at(1), within), 25_000, "it was lost");
    }

    #[test]
    fn a_suspect_is_tried_again_and_a_server_that_answers_is_none() {
        let map = Topology::uniform(2, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Cluster::spread(map, 1, 2, 1, 1).unwrap();
        let gateway = cluster.nodes().find(|node| node.role == Role::Gateway).unwrap().id;
        let mut helpers = Helpers::new(&cluster, gateway, Duration::from_millis(100));
        let near: OrdSet<NodeId> = (0..4).map(|_| helpers.next(true, Time(0))).collect();
        assert_eq!(near.len(), 1, "the one in this region");
        let near = near.first().copied().unwrap();
        assert!(helpers.suspects.add(near, Time(0)));
        assert!(!helpers.suspects.add(near, Time(1)), "known already");
        let later = |seconds: u64| Time(seconds * 1_000_000_000);
        let far = helpers.next(true, later(3));
        assert_ne!(far, near);
        assert_eq!(helpers.next(true, later(4)), near, "new work tries it again");
        assert_eq!(helpers.next(false, later(4)), far, "what nobody answered does not");
        assert!(helpers.suspects.add(near, later(4)));
        assert_eq!(helpers.next(true, later(11)), far, "it is left alone for twice as long");
        assert_eq!(helpers.next(true, later(12)), near);
        helpers.suspects.remove(near);
        assert_eq!(helpers.next(false, later(12)), near);
    }
}
