//! Messages and bytes by kind of message, by role and by region.

use orthodrome_core::cluster::Role;
use orthodrome_core::id::RegionId;
use orthodrome_core::ordered::OrdMap;
use serde::Serialize;

/// Messages and bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Count {
    /// The number of messages.
    pub messages: u64,
    /// The sum of their sizes.
    pub bytes: u64,
}

impl Count {
    fn add(&mut self, bytes: usize) {
        self.messages += 1;
        self.bytes += bytes as u64;
    }
}

/// Messages and bytes that one node sent and received.
#[derive(Clone, Copy, Debug)]
struct OfNode {
    role: Role,
    region: RegionId,
    sent: Count,
    received: Count,
    /// The part of the sent messages that crossed regions.
    wide_area: Count,
}

/// Traffic of the measured part of a run.
#[derive(Clone, Default, Debug)]
pub struct Traffic {
    /// There are few kinds, and each message looks one up: a list with the most frequent kind in
    /// front is faster than a map.
    kinds: Vec<(&'static str, Count)>,
    nodes: Vec<OfNode>,
}

impl Traffic {
    /// No traffic yet, between nodes of these roles and in these regions.
    pub fn between(nodes: impl IntoIterator<Item = (Role, RegionId)>) -> Self {
        let none = Count::default();
        let node =
            |(role, region)| OfNode { role, region, sent: none, received: none, wide_area: none };
        Self { kinds: Vec::new(), nodes: nodes.into_iter().map(node).collect() }
    }

    /// Counts one message from one node to another, by their positions in the list of nodes.
    pub fn count(&mut self, kind: &'static str, from: u32, to: u32, is_wan: bool, bytes: usize) {
        if let Some(node) = self.nodes.get_mut(from as usize) {
            node.sent.add(bytes);
            if is_wan {
                node.wide_area.add(bytes);
            }
        }
        if let Some(node) = self.nodes.get_mut(to as usize) {
            node.received.add(bytes);
        }
        let same = |(name, _): &(&'static str, Count)| {
            // Equal strings are nearly always the same constant.
            std::ptr::eq(name.as_ptr(), kind.as_ptr()) && name.len() == kind.len() || *name == kind
        };
        match self.kinds.iter().position(same) {
            Some(at) => {
                if let Some((_, count)) = self.kinds.get_mut(at) {
                    count.add(bytes);
                }
                if at > 0
                    && self.kinds.get(at).map(|kind| kind.1.messages)
                        > self.kinds.get(at - 1).map(|kind| kind.1.messages)
                {
                    self.kinds.swap(at, at - 1);
                }
            }
            None => self.kinds.push((kind, Count { messages: 1, bytes: bytes as u64 })),
        }
    }

    fn sum(&self, of: impl Fn(&OfNode) -> Option<Count>) -> Count {
        self.nodes.iter().filter_map(of).fold(Count::default(), |sum, one| Count {
            messages: sum.messages + one.messages,
            bytes: sum.bytes + one.bytes,
        })
    }

    /// All traffic.
    #[must_use]
    pub fn total(&self) -> Count {
        self.sum(|node| Some(node.sent))
    }

    /// Traffic that left this region for another.
    #[must_use]
    pub fn leaving(&self, region: RegionId) -> Count {
        self.sum(|node| (node.region == region).then_some(node.wide_area))
    }

    /// Mean number of bytes that a node of this role sent and received; none without such nodes.
    #[must_use]
    pub fn of_each(&self, role: Role) -> Option<(f64, f64)> {
        let count = self.nodes.iter().filter(|node| node.role == role).count();
        let all = |of: fn(&OfNode) -> Count| {
            self.sum(|node| (node.role == role).then(|| of(node))).bytes as f64 / count as f64
        };
        (count > 0).then(|| (all(|node| node.sent), all(|node| node.received)))
    }

    /// By kind of message.
    #[must_use]
    pub fn by_kind(&self) -> OrdMap<&'static str, Count> {
        self.kinds.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_counted_once_by_kind_and_at_both_ends() {
        let (server, gateway) = (Role::Server, Role::Gateway);
        let (near, far) = (RegionId(0), RegionId(1));
        let mut traffic = Traffic::between([(server, near), (server, far), (gateway, near)]);
        for number in 0..100 {
            let kind = if number % 3 == 0 { "Vote" } else { "Append" };
            let (from, to) = if number % 4 == 0 { (0, 1) } else { (2, 0) };
            traffic.count(kind, from, to, number % 4 == 0, 10);
        }
        assert_eq!(traffic.total(), Count { messages: 100, bytes: 1_000 });
        assert_eq!(traffic.by_kind()["Vote"].messages, 34);
        assert_eq!(traffic.by_kind()["Append"].messages, 66);
        assert_eq!(traffic.leaving(near), Count { messages: 25, bytes: 250 });
        assert_eq!(traffic.leaving(far), Count::default());
        assert_eq!(traffic.of_each(server), Some((125.0, 500.0)));
        assert_eq!(traffic.of_each(gateway), Some((750.0, 0.0)));
        assert_eq!(Traffic::between([(server, near)]).of_each(gateway), None);
    }
}
