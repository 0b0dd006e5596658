//! One clock for all nodes of one machine (ADR 38).
//!
//! Processes of one machine share its monotonic clock. A node reads that clock plus its *offset*, and
//! an offset never falls while the node runs. Two nodes that meet in a handshake tell each other
//! their offsets and both keep the higher one. So a node knows what every other node reads at least,
//! and needs to allow for no error.
//!
//! A node that has not met every other node since its start knows less, and allows for steps of the
//! system clock, from which offsets are taken at the start.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Mutex, PoisonError};

use orthodrome_core::NodeId;
use orthodrome_core::ordered::OrdMap;

/// A node's knowledge of the shared clock. All offsets are in nanoseconds, from the machine's
/// monotonic clock to readings.
#[derive(Debug)]
pub struct SharedClock {
    machine: String,
    /// The maximum difference of the offsets of nodes that share a clock.
    apart_max: i64,
    /// This node's own offset. It never decreases.
    offset: AtomicI64,
    /// The minimum of the known offsets of the other nodes.
    least: AtomicI64,
    /// True if this node has met every other node that runs.
    is_complete: AtomicBool,
    /// The known offset of each other node; none before the first handshake.
    peers: Mutex<OrdMap<NodeId, Peer>>,
}

#[derive(Debug, Default)]
struct Peer {
    offset: Option<i64>,
    /// True if it was met, or is not running; if it starts, it meets this node before it relies on
    /// anything.
    is_settled: bool,
}

/// The offsets that a node may rely on at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offsets {
    /// This node's own offset.
    pub own: i64,
    /// Every known node reads at least the monotonic clock plus this.
    pub least: i64,
    /// True if every running node is known.
    pub is_complete: bool,
}

impl SharedClock {
    /// For a process on `machine` with the initial offset `offset`, among `peers`.
    #[must_use]
    pub fn new(
        machine: String,
        offset: i64,
        apart_max: i64,
        peers: impl Iterator<Item = NodeId>,
    ) -> Self {
        let peers: OrdMap<_, _> = peers.map(|peer| (peer, Peer::default())).collect();
        Self {
            machine,
            apart_max,
            offset: AtomicI64::new(offset),
            least: AtomicI64::new(i64::MAX),
            is_complete: AtomicBool::new(peers.is_empty()),
            peers: Mutex::new(peers),
        }
    }

    /// The identity of the machine.
    #[must_use]
    pub fn machine(&self) -> &str {
        &self.machine
    }

    /// This node's offset, for handshakes.
    #[must_use]
    pub fn offset(&self) -> i64 {
        self.offset.load(Ordering::SeqCst)
    }

    /// Raises this node's own offset.
    pub(crate) fn raise(&self, to: i64) {
        self.offset.fetch_max(to, Ordering::SeqCst);
    }

    /// Handles a handshake with another node of this machine, whose offset is at least `theirs`,
    /// and which knows this node's offset. False: the offsets differ too much for one clock.
    #[must_use]
    pub fn meet(&self, peer: NodeId, theirs: i64) -> bool {
        if theirs.saturating_sub(self.offset()).saturating_abs() > self.apart_max {
            return false;
        }
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        // The own offset is raised first, so that all later readings are high enough.
        self.raise(theirs);
        if let Some(known) = peers.get_mut(&peer) {
            known.offset = known.offset.max(Some(theirs));
            known.is_settled = true;
        }
        self.settle(&peers);
        true
    }

    /// Notes that another node is not running, because nothing listens at its address. If it starts
    /// later, it meets this node before it relies on anything.
    pub fn absent(&self, peer: NodeId) {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = peers.get_mut(&peer) {
            known.is_settled = true;
        }
        self.settle(&peers);
    }

    fn settle(&self, peers: &OrdMap<NodeId, Peer>) {
        let least = peers.values().filter_map(|peer| peer.offset).min();
        self.least.store(least.unwrap_or(i64::MAX), Ordering::SeqCst);
        let is_complete = peers.values().all(|peer| peer.is_settled);
        self.is_complete.store(is_complete, Ordering::SeqCst);
    }

    /// The offsets that may be relied on now.
    #[must_use]
    pub fn offsets(&self) -> Offsets {
        // In this order: if complete, the own offset includes the results of the handshakes.
        let is_complete = self.is_complete.load(Ordering::SeqCst);
        let least = self.least.load(Ordering::SeqCst);
        let own = self.offset();
        Offsets { own, least: least.min(own), is_complete }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(offset: i64) -> SharedClock {
        SharedClock::new("m".into(), offset, 1_000, [NodeId(2), NodeId(3)].into_iter())
    }

    #[test]
    fn a_node_knows_all_once_it_met_each_or_found_it_absent() {
        let clock = node(100);
        assert!(!clock.offsets().is_complete);
        assert!(clock.meet(NodeId(2), 130));
        let offsets = Offsets { own: 130, least: 130, is_complete: false };
        assert_eq!(clock.offsets(), offsets, "the higher of two offsets counts");
        clock.absent(NodeId(3));
        assert_eq!(clock.offsets(), Offsets { is_complete: true, ..offsets });
        assert!(clock.meet(NodeId(3), 90));
        assert_eq!(clock.offsets(), Offsets { own: 130, least: 90, is_complete: true });
        // Later it has heard of the higher offset.
        assert!(clock.meet(NodeId(3), 130));
        assert_eq!(clock.offsets().least, 130);
    }

    #[test]
    fn offsets_far_apart_are_not_one_clock() {
        let clock = node(100);
        assert!(!clock.meet(NodeId(2), 1_101) && !clock.meet(NodeId(2), -901));
        assert_eq!(clock.offset(), 100);
        assert!(!clock.offsets().is_complete);
    }

    #[test]
    fn a_node_by_itself_knows_all() {
        let clock = SharedClock::new("m".into(), 5, 1, std::iter::empty());
        assert_eq!(clock.offsets(), Offsets { own: 5, least: 5, is_complete: true });
    }
}
