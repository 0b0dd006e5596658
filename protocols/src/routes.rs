//! The voters and the leader of each partition, as far as this node knows.

use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::Time;

use crate::replication::Index;

/// A cache of leaders and voters. It starts with the placement.
#[derive(Debug)]
pub struct Routes {
    cluster: Arc<Cluster>,
    known: OrdMap<PartitionId, Route>,
    /// Voters that differ from the placement, and the log entry that named them.
    voters: OrdMap<PartitionId, (Index, Vec<NodeId>)>,
}

#[derive(Clone, Copy, Debug)]
struct Route {
    leader: NodeId,
    /// When the last message of the leader arrived, or when it was first supposed to lead.
    heard: Time,
    /// True if this node's own replica knows the leader: its election timer then decides whether
    /// the leader has failed.
    is_followed: bool,
    /// The number of redirections followed since a leader last answered.
    redirections: u8,
    /// The number of replicas tried in turn since a leader last answered.
    tries: usize,
}

impl Route {
    fn new(leader: NodeId, heard: Time) -> Self {
        Self { leader, heard, is_followed: false, redirections: 0, tries: 0 }
    }
}

/// The most redirections followed at once. Replicas of different terms may each name the other, and
/// every hop between them would multiply the request.
const REDIRECTIONS_MAX: u8 = 3;

impl Routes {
    /// Knows the placement only.
    #[must_use]
    pub fn new(cluster: Arc<Cluster>) -> Self {
        Self { cluster, known: OrdMap::new(), voters: OrdMap::new() }
    }

    /// The node to which messages for the leader of `partition` are sent.
    pub fn leader(&self, partition: PartitionId) -> NodeId {
        self.known.get(&partition).map(|route| route.leader).unwrap_or_else(|| {
            self.cluster.partition(partition).map(|p| p.preferred_leader).unwrap_or_default()
        })
    }

    /// The leader of `partition`, if this node has learned it and has no reason to doubt it.
    pub fn learnt_leader(&self, partition: PartitionId) -> Option<NodeId> {
        self.known.get(&partition).filter(|route| route.tries == 0).map(|route| route.leader)
    }

    /// The voters of `partition`.
    pub fn voters(&self, partition: PartitionId) -> &[NodeId] {
        if let Some((_, voters)) = self.voters.get(&partition) {
            return voters;
        }
        self.cluster.partition(partition).map_or(&[], |placed| &placed.replicas)
    }

    /// The voters of `partition` that this node has learned, and the log entry that named them.
    pub fn learnt_voters(&self, partition: PartitionId) -> Option<(Index, &[NodeId])> {
        self.voters.get(&partition).map(|(since, voters)| (*since, voters.as_slice()))
    }

    /// Learns the voters of `partition` since the chosen log entry `since`. Of two such statements,
    /// the one about the later entry is newer.
    pub fn learn_voters(&mut self, partition: PartitionId, since: Index, voters: &[NodeId]) {
        let is_known = self.voters.get(&partition).is_some_and(|(known, _)| *known >= since);
        if !voters.is_empty() && !is_known {
            self.voters.insert(partition, (since, voters.to_vec()));
        }
    }

    /// This node has a replica of `partition`, which knows the leader better than this cache, if it
    /// knows one at all.
    pub fn follow(&mut self, partition: PartitionId, leader: Option<NodeId>, now: Time) {
        let route = leader.map(|leader| Route { is_followed: true, ..Route::new(leader, now) });
        match (route, self.known.get_mut(&partition)) {
            (Some(route), Some(known)) => *known = route,
            (Some(route), None) => drop(self.known.insert(partition, route)),
            (None, Some(known)) => known.is_followed = false,
            (None, None) => {}
        }
    }

    /// `leader` leads: it answered as leader, or a node that knows named it.
    pub fn learn(&mut self, partition: PartitionId, leader: NodeId, heard: Time) {
        self.replace(partition, Route::new(leader, heard));
    }

    /// `from` does not lead `partition`, and names the leader if it knows it. Returns true if the
    /// request should be sent again at once. It should not if it would return to `from`, which
    /// would give the same answer, or if this has happened several times in a row. Then the
    /// sender's own timer sends it later.
    pub fn redirect(
        &mut self,
        partition: PartitionId,
        from: NodeId,
        leader: Option<NodeId>,
        now: Time,
    ) -> bool {
        let supposed = self.leader(partition);
        let Some(leader) = leader else {
            return supposed == from && self.on_no_leader(partition, from, now);
        };
        let known = self.known.get(&partition).copied().unwrap_or(Route::new(leader, now));
        let mut redirections = known.redirections;
        if leader != supposed {
            redirections = redirections.saturating_add(1);
            let route = Route { redirections, tries: known.tries, ..Route::new(leader, now) };
            self.replace(partition, route);
        }
        redirections <= REDIRECTIONS_MAX && self.leader(partition) != from
    }

    /// `from` was supposed to lead, but does not, and knows no leader. If it does not vote any
    /// more, the next node may lead and is worth asking at once. If it votes, there will be a
    /// leader soon.
    fn on_no_leader(&mut self, partition: PartitionId, from: NodeId, now: Time) -> bool {
        let redirections = self.known.get(&partition).map_or(0, |route| route.redirections);
        let is_voter = self.voters(partition).contains(&from);
        self.try_next(partition, now);
        let next = self.leader(partition);
        if is_voter || next == from {
            return false;
        }
        let redirections = redirections.saturating_add(1);
        if let Some(route) = self.known.get_mut(&partition) {
            route.redirections = redirections;
        }
        redirections <= REDIRECTIONS_MAX
    }

    fn replace(&mut self, partition: PartitionId, route: Route) {
        if self.known.get(&partition).is_none_or(|known| !known.is_followed) {
            self.known.insert(partition, route);
        }
    }

    /// The supposed leader of `partition` has not answered a request sent at `asked`. Tries the
    /// next replica, unless a message of the leader has arrived since, or the leader was chosen
    /// only later.
    pub fn suspect(&mut self, partition: PartitionId, asked: Time, now: Time) {
        if self.known.get(&partition).is_none_or(|route| route.heard < asked) {
            self.try_next(partition, now);
        }
    }

    /// Tries the voters in turn. If none of them has led for two turns, all may have been replaced
    /// or lost without this node's knowledge. From then on every second try goes to another server:
    /// any server that has held the partition since, or has communicated with it, knows more.
    fn try_next(&mut self, partition: PartitionId, now: Time) {
        let silent = self.leader(partition);
        let tries = self.known.get(&partition).map_or(0, |route| route.tries);
        let voters = self.voters(partition);
        let beyond = tries.checked_sub(voters.len().saturating_mul(2));
        let next = match beyond {
            Some(turn) if turn.is_multiple_of(2) => self.stranger(voters, turn / 2),
            Some(turn) => by_turns(voters, turn / 2),
            None => {
                let at = voters.iter().position(|&node| node == silent).map_or(0, |at| at + 1);
                voters.get(at).or_else(|| voters.first()).copied()
            }
        };
        let Some(next) = next.or_else(|| voters.first().copied()) else { return };
        let route = Route { tries: tries.saturating_add(1), ..Route::new(next, now) };
        self.replace(partition, route);
    }

    /// One of the servers that are not among `voters`.
    fn stranger(&self, voters: &[NodeId], turn: usize) -> Option<NodeId> {
        let servers = self.cluster.servers().map(|node| node.id);
        let others: Vec<NodeId> = servers.filter(|id| !voters.contains(id)).collect();
        by_turns(&others, turn)
    }
}

fn by_turns(nodes: &[NodeId], turn: usize) -> Option<NodeId> {
    nodes.get(turn.checked_rem(nodes.len())?).copied()
}

#[cfg(test)]
mod tests {
    use orthodrome_core::topology::Topology;

    use super::*;

    const P: PartitionId = PartitionId(0);

    fn routes() -> Routes {
        let map = Topology::built_in("local3").unwrap();
        Routes::new(Arc::new(Cluster::spread(map, 1, 1, 1, 3).unwrap()))
    }

    #[test]
    fn replicas_that_name_each_other_are_not_asked_for_ever() {
        let (mut routes, [a, b]) = (routes(), [NodeId(1), NodeId(2)]);
        assert_eq!(routes.leader(P), a);
        let mut followed = 0;
        for turn in 0..100 {
            let (from, named) = if turn % 2 == 0 { (a, b) } else { (b, a) };
            followed += u32::from(routes.redirect(P, from, Some(named), Time(turn)));
        }
        assert_eq!(followed, u32::from(REDIRECTIONS_MAX));
        // An answer of a leader starts a new count.
        routes.learn(P, a, Time(200));
        assert!(routes.redirect(P, a, Some(b), Time(201)));
        assert_eq!(routes.leader(P), b);
    }

    #[test]
    fn voters_are_those_that_the_log_named_last() {
        let (mut routes, [a, b]) = (routes(), [NodeId(1), NodeId(2)]);
        assert_eq!(routes.voters(P), [a, b, NodeId(3)]);
        routes.learn_voters(P, Index(9), &[b]);
        routes.learn_voters(P, Index(5), &[a]);
        assert_eq!(routes.voters(P), [b]);
        routes.suspect(P, Time(1), Time(2));
        assert_eq!(routes.leader(P), b, "one that votes no more is not tried");
        let mut routes = self::routes();
        routes.learn_voters(P, Index(9), &[b]);
        assert!(routes.redirect(P, a, None, Time(1)), "it votes no more: the next one is asked");
        assert_eq!(routes.leader(P), b);
    }

    /// All original voters have been replaced, and this node does not know it.
    #[test]
    fn every_server_is_asked_in_time() {
        let map = Topology::built_in("local3").unwrap();
        let mut routes = Routes::new(Arc::new(Cluster::spread(map, 2, 1, 1, 3).unwrap()));
        let mut asked = orthodrome_core::ordered::OrdSet::new();
        for turn in 0..6 {
            routes.suspect(P, Time(turn + 1), Time(turn + 1));
            asked.insert(routes.leader(P));
        }
        assert_eq!(asked.len(), 3, "the voters first: {asked:?}");
        for turn in 6..12 {
            routes.suspect(P, Time(turn + 1), Time(turn + 1));
            asked.insert(routes.leader(P));
        }
        assert_eq!(asked.len(), 6, "then the others too: {asked:?}");
        // An answer of a leader ends the search.
        routes.learn(P, NodeId(1), Time(100));
        routes.suspect(P, Time(101), Time(102));
        assert!(routes.voters(P).contains(&routes.leader(P)));
    }

    #[test]
    fn a_replica_that_just_refused_is_not_asked_again() {
        let (mut routes, [a, b]) = (routes(), [NodeId(1), NodeId(2)]);
        assert!(!routes.redirect(P, a, Some(a), Time(1)), "it names itself");
        assert!(!routes.redirect(P, a, None, Time(1)), "it knows nobody");
        assert_eq!(routes.leader(P), b, "but the next replica may");
        // The node's own knowledge stays, even if other nodes contradict it.
        routes.follow(P, Some(a), Time(2));
        assert!(!routes.redirect(P, a, Some(b), Time(3)));
        assert!(routes.redirect(P, b, Some(NodeId(3)), Time(3)), "ask the one that is followed");
        assert_eq!(routes.leader(P), a);
        routes.follow(P, None, Time(4));
        assert!(routes.redirect(P, a, Some(b), Time(5)));
    }
}
