//! Who leads which partition, as far as this node knows.

use std::collections::BTreeMap;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::time::Time;

/// A cache of leaders: the placement's preferred leader until something better is known.
#[derive(Debug)]
pub struct Routes {
    cluster: Arc<Cluster>,
    known: BTreeMap<PartitionId, Route>,
}

#[derive(Clone, Copy, Debug)]
struct Route {
    leader: NodeId,
    /// When the leader was last heard of, or first supposed to be one.
    heard: Time,
    /// This node's own replica knows the leader: its election timer is what doubts.
    is_followed: bool,
    /// Followed by redirection this many times since a leader was last heard.
    redirections: u8,
}

/// Redirections that are followed at once. Replicas of different terms may each name the other, and
/// every turn between them multiplies what was asked.
const REDIRECTIONS_MAX: u8 = 3;

impl Routes {
    pub fn new(cluster: Arc<Cluster>) -> Self {
        Self { cluster, known: BTreeMap::new() }
    }

    /// Where to send what is for the leader of `partition`.
    pub fn leader(&self, partition: PartitionId) -> NodeId {
        self.known.get(&partition).map(|route| route.leader).unwrap_or_else(|| {
            self.cluster.partition(partition).map(|p| p.preferred_leader).unwrap_or_default()
        })
    }

    /// This node holds a replica of `partition`, which knows best who leads, if it knows at all.
    pub fn follow(&mut self, partition: PartitionId, leader: Option<NodeId>, now: Time) {
        match (leader, self.known.get_mut(&partition)) {
            (Some(leader), Some(route)) => {
                *route = Route { leader, heard: now, is_followed: true, redirections: 0 };
            }
            (Some(leader), None) => {
                self.known.insert(
                    partition,
                    Route { leader, heard: now, is_followed: true, redirections: 0 },
                );
            }
            (None, Some(route)) => route.is_followed = false,
            (None, None) => {}
        }
    }

    /// `leader` leads: it answered as one, or somebody who should know says so.
    pub fn learn(&mut self, partition: PartitionId, leader: NodeId, heard: Time) {
        self.replace(partition, Route { leader, heard, is_followed: false, redirections: 0 });
    }

    /// `from` says that it does not lead `partition`, and who does if it knows. True if what it was
    /// asked should go out again at once: not if it would come back to `from`, which would answer
    /// the same, nor if this has happened several times in a row. What is not sent now is when the
    /// asker's own timer expires.
    pub fn redirect(
        &mut self,
        partition: PartitionId,
        from: NodeId,
        leader: Option<NodeId>,
        now: Time,
    ) -> bool {
        let supposed = self.leader(partition);
        let Some(leader) = leader else {
            if supposed == from {
                self.try_next(partition, now);
            }
            return false;
        };
        let mut redirections = self.known.get(&partition).map_or(0, |route| route.redirections);
        if leader != supposed {
            redirections = redirections.saturating_add(1);
            self.replace(partition, Route { leader, heard: now, is_followed: false, redirections });
        }
        redirections <= REDIRECTIONS_MAX && self.leader(partition) != from
    }

    fn replace(&mut self, partition: PartitionId, route: Route) {
        if self.known.get(&partition).is_none_or(|known| !known.is_followed) {
            self.known.insert(partition, route);
        }
    }

    /// The supposed leader of `partition` was asked something at `asked` and has not answered: try
    /// the next replica, unless it was heard of since, or has only been supposed since.
    pub fn suspect(&mut self, partition: PartitionId, asked: Time, now: Time) {
        if self.known.get(&partition).is_none_or(|route| route.heard < asked) {
            self.try_next(partition, now);
        }
    }

    fn try_next(&mut self, partition: PartitionId, now: Time) {
        let silent = self.leader(partition);
        let Some(placed) = self.cluster.partition(partition) else { return };
        let at = placed.replicas.iter().position(|&node| node == silent).map_or(0, |at| at + 1);
        if let Some(&next) = placed.replicas.get(at).or_else(|| placed.replicas.first()) {
            self.learn(partition, next, now);
        }
    }
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
        // A leader's answer begins a new count.
        routes.learn(P, a, Time(200));
        assert!(routes.redirect(P, a, Some(b), Time(201)));
        assert_eq!(routes.leader(P), b);
    }

    #[test]
    fn nobody_is_asked_again_who_has_just_said_no() {
        let (mut routes, [a, b]) = (routes(), [NodeId(1), NodeId(2)]);
        assert!(!routes.redirect(P, a, Some(a), Time(1)), "it names itself");
        assert!(!routes.redirect(P, a, None, Time(1)), "it knows nobody");
        assert_eq!(routes.leader(P), b, "but the next replica may");
        // Own knowledge stays, even if others contradict it.
        routes.follow(P, Some(a), Time(2));
        assert!(!routes.redirect(P, a, Some(b), Time(3)));
        assert!(routes.redirect(P, b, Some(NodeId(3)), Time(3)), "ask the one that is followed");
        assert_eq!(routes.leader(P), a);
        routes.follow(P, None, Time(4));
        assert!(routes.redirect(P, a, Some(b), Time(5)));
    }
}
