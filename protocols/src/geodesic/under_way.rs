//! How much of large transactions one node has under way. A link drops what its queue has no room
//! for, and a text that is sent again only lengthens the queue: so a node starts few large
//! transactions at once, and waits for answers for as long as all of that may be on its way.

use orthodrome_core::id::TxnId;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::Duration;

use super::Config;

/// Large transactions that one node drives, with the bytes that one receiver may get of each.
#[derive(Debug, Default)]
pub(super) struct UnderWay {
    by_txn: OrdMap<TxnId, Driven>,
    /// Of all.
    bytes: usize,
    /// Of those for which others wait.
    awaited: usize,
}

#[derive(Clone, Copy, Debug)]
struct Driven {
    bytes: usize,
    is_awaited: bool,
}

impl UnderWay {
    /// True if a transaction of so many bytes is a large one. Smaller ones never wait.
    pub(super) fn counts(bytes: usize, config: &Config) -> bool {
        bytes > config.under_way_bytes_max / SMALL_FRACTION
    }

    /// True if a transaction of so many bytes need not wait for another one.
    pub(super) fn has_room(&self, bytes: usize, config: &Config) -> bool {
        let fits = self.awaited.saturating_add(bytes) <= config.under_way_bytes_max;
        !Self::counts(bytes, config) || self.awaited == 0 || fits
    }

    /// This node drives `txn`, or drives it with more bytes than it knew of.
    pub(super) fn add(&mut self, txn: TxnId, bytes: usize, config: &Config) {
        let known = self.by_txn.get(&txn).copied();
        if !Self::counts(bytes, config) || known.is_some_and(|known| known.bytes >= bytes) {
            return;
        }
        self.remove(txn);
        let is_awaited = known.is_none_or(|known| known.is_awaited);
        self.by_txn.insert(txn, Driven { bytes, is_awaited });
        self.bytes += bytes;
        self.awaited += if is_awaited { bytes } else { 0 };
    }

    /// Others need not wait for `txn` any more.
    pub(super) fn make_room(&mut self, txn: TxnId) {
        if let Some(driven) = self.by_txn.get_mut(&txn)
            && std::mem::replace(&mut driven.is_awaited, false)
        {
            self.awaited -= driven.bytes;
        }
    }

    /// This node does not drive `txn` any more.
    pub(super) fn remove(&mut self, txn: TxnId) {
        self.make_room(txn);
        if let Some(driven) = self.by_txn.remove(&txn) {
            self.bytes -= driven.bytes;
        }
    }

    /// How long all of it may be on its way. Whoever sends it again no more often than this never
    /// sends more than the rate that [`Config::per_mebibyte`] says.
    pub(super) fn span(&self, config: &Config) -> Duration {
        config.span_of(self.bytes)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_txn.len()
    }
}

/// A transaction is a small one if so many of them fit.
const SMALL_FRACTION: usize = 512;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use orthodrome_core::Cluster;
    use orthodrome_core::id::ClientId;
    use orthodrome_core::machine::Protocol as _;
    use orthodrome_core::topology::Topology;

    use super::super::Geodesic;
    use super::*;

    const MIB: usize = 1 << 20;

    fn config() -> Config {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Cluster::spread(map, 1, 1, 1, 3).unwrap();
        let per_mebibyte = Duration::from_millis(100);
        let under_way_bytes_max = 32 * MIB;
        Config { under_way_bytes_max, per_mebibyte, ..Geodesic::configure(&cluster, "geodesic") }
    }

    fn txn(counter: u64) -> TxnId {
        TxnId::new(ClientId(1), counter)
    }

    #[test]
    fn large_ones_wait_for_room_and_small_ones_do_not() {
        let (config, mut under_way) = (config(), UnderWay::default());
        assert!(under_way.has_room(90 * MIB, &config), "one alone never waits");
        for counter in 0..3 {
            assert!(under_way.has_room(9 * MIB, &config));
            under_way.add(txn(counter), 9 * MIB, &config);
        }
        assert!(!under_way.has_room(9 * MIB, &config) && under_way.has_room(1_000, &config));
        under_way.add(txn(3), 1_000, &config);
        assert_eq!((under_way.len(), under_way.bytes), (3, 27 * MIB), "small ones do not count");
        under_way.make_room(txn(0));
        under_way.make_room(txn(0));
        assert!(under_way.has_room(9 * MIB, &config));
        assert_eq!(under_way.span(&config), Duration::from_millis(2_700), "it may be sent again");
        under_way.remove(txn(0));
        under_way.add(txn(1), 10 * MIB, &config);
        under_way.add(txn(1), 8 * MIB, &config);
        assert_eq!((under_way.bytes, under_way.awaited), (19 * MIB, 19 * MIB));
        under_way.remove(txn(1));
        under_way.remove(txn(2));
        assert_eq!((under_way.bytes, under_way.awaited, under_way.len()), (0, 0, 0));
        assert_eq!(under_way.span(&config), Duration::ZERO);
    }
}
