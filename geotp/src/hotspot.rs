//! Statistics of hot records: how long transactions take on them, and how many of those commit
//! (GeoTP §IV-C). The table is bounded: it forgets the record that was used least recently.

use orthodrome_core::id::NodeId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, nanos};
use orthodrome_core::txn::Key;

/// A record of a source.
pub type SourceKey = (NodeId, Key);

/// The statistics of one record; names as in the paper.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct HotRecord {
    /// `w_lat`: weighted average latency of statements that access it, in nanoseconds.
    pub latency_ns: u64,
    /// `t_cnt`: transactions that accessed it and have ended.
    pub ended: u64,
    /// `c_cnt`: the number of those that committed.
    pub committed: u64,
    /// `a_cnt`: transactions that are accessing it.
    pub active: u64,
    /// When it was last used, by the table's own counter.
    used: u64,
}

/// The hotspot footprint.
#[derive(Clone, Debug)]
pub struct Hotspots {
    records: OrdMap<SourceKey, HotRecord>,
    /// Records by last use.
    order: OrdSet<(u64, SourceKey)>,
    uses: u64,
    capacity: usize,
    /// α of Eq. 4, in per cent: the weight of the old average.
    keep_percent: u64,
}

/// The probability 1, in the fixed point of this module.
const ONE: u64 = 1 << 32;

/// When both counters of a record reach this, they are halved, so that old events count less and
/// less.
const MEMORY: u64 = 256;

impl Hotspots {
    /// A table of at most `capacity` records.
    #[must_use]
    pub fn new(capacity: usize, keep_percent: u64) -> Self {
        Self {
            records: OrdMap::new(),
            order: OrdSet::new(),
            uses: 0,
            capacity,
            keep_percent: keep_percent.min(100),
        }
    }

    /// The statistics of a record.
    #[must_use]
    pub fn get(&self, key: &SourceKey) -> Option<&HotRecord> {
        self.records.get(key)
    }

    /// The hottest records: most active transactions first, then longest latency.
    #[must_use]
    pub fn hottest(&self, count: usize) -> Vec<(SourceKey, HotRecord)> {
        let mut all: Vec<_> =
            self.records.iter().map(|(key, record)| (key.clone(), *record)).collect();
        all.sort_by(|(a, x), (b, y)| (y.active, y.latency_ns, a).cmp(&(x.active, x.latency_ns, b)));
        all.truncate(count);
        all
    }

    /// The number of records.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The number of active transactions on records: zero when none is pending.
    #[must_use]
    pub fn active(&self) -> u64 {
        self.records.values().map(|record| record.active).sum()
    }

    fn touch(&mut self, key: &SourceKey) -> &mut HotRecord {
        self.uses += 1;
        let uses = self.uses;
        if let Some(record) = self.records.get(key) {
            self.order.remove(&(record.used, key.clone()));
        } else if self.records.len() >= self.capacity {
            self.evict();
        }
        self.order.insert((uses, key.clone()));
        let record = self.records.entry(key.clone()).or_default();
        record.used = uses;
        record
    }

    /// Forgets the record that was used least recently. A record with active transactions has been
    /// used by them, so it is not the oldest if the table is larger than the number of pending
    /// accesses. If it were, its counters would start again from zero.
    fn evict(&mut self) {
        if let Some((_, key)) = self.order.pop_first() {
            self.records.remove(&key);
        }
    }

    /// Statements that access these records have been sent.
    pub fn enter<'a>(&mut self, keys: impl Iterator<Item = &'a SourceKey>) {
        for key in keys {
            let record = self.touch(key);
            record.active = record.active.saturating_add(1);
        }
    }

    /// Stores how long the statements took at their source: Eq. 4.
    pub fn measured(&mut self, keys: &[SourceKey], took: Duration) {
        let took = nanos(took);
        let sum: u64 = keys
            .iter()
            .filter_map(|key| self.records.get(key))
            .map(|record| record.latency_ns)
            .sum();
        let count = keys.len().max(1) as u64;
        let keep = self.keep_percent;
        for key in keys {
            // New records get equal shares: the weight of Eq. 4 would be 0/0, and 0 for ever.
            let Some(record) = self.records.get_mut(key) else { continue };
            let share = if sum == 0 || record.latency_ns == 0 {
                took / count
            } else {
                u64::try_from(u128::from(took) * u128::from(record.latency_ns) / u128::from(sum))
                    .unwrap_or(u64::MAX)
            };
            record.latency_ns = if record.latency_ns == 0 {
                share
            } else {
                (record.latency_ns / 100)
                    .saturating_mul(keep)
                    .saturating_add((share / 100).saturating_mul(100 - keep))
            };
        }
    }

    /// A transaction that accessed these records has ended.
    pub fn leave<'a>(&mut self, keys: impl Iterator<Item = &'a SourceKey>, is_committed: bool) {
        for key in keys {
            let Some(record) = self.records.get_mut(key) else { continue };
            record.active = record.active.saturating_sub(1);
            record.ended += 1;
            record.committed += u64::from(is_committed);
            if record.ended >= MEMORY {
                record.ended /= 2;
                record.committed /= 2;
            }
        }
    }

    /// The predicted local execution latency of statements that access these records: Eq. 5.
    #[must_use]
    pub fn forecast<'a>(&self, keys: impl Iterator<Item = &'a SourceKey>) -> Duration {
        let known = keys.filter_map(|key| self.records.get(key));
        Duration::from_nanos(known.map(|record| record.latency_ns).fold(0, u64::saturating_add))
    }

    /// The probability that a transaction on these records gets all its locks, one minus Eq. 9, in
    /// units of 2^-32.
    fn passes<'a>(&self, keys: impl Iterator<Item = &'a SourceKey>) -> u64 {
        let mut probability = ONE;
        for record in keys.filter_map(|key| self.records.get(key)) {
            if record.ended == 0 {
                continue;
            }
            let one = record.committed.saturating_mul(ONE) / record.ended;
            // `active` does not include the transaction itself yet: it is the queue before it, with
            // the holder of the record.
            let mut power = record.active.saturating_sub(1).min(1_000);
            while power > 0 && probability > 0 {
                probability =
                    u64::try_from(u128::from(probability) * u128::from(one) / u128::from(ONE))
                        .unwrap_or(ONE);
                power -= 1;
            }
        }
        probability
    }

    /// The predicted abort rate of a transaction on these records, in thousandths: Eq. 9.
    #[must_use]
    pub fn abort_permille<'a>(&self, keys: impl Iterator<Item = &'a SourceKey>) -> u64 {
        1_000 - self.passes(keys).saturating_mul(1_000) / ONE
    }

    /// True if a transaction on these records may start now (Alg. 2 l. 17).
    pub fn admits<'a>(&self, keys: impl Iterator<Item = &'a SourceKey>, rng: &mut Rng) -> bool {
        let passes = self.passes(keys);
        passes >= ONE || rng.below(ONE) < passes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> SourceKey {
        (NodeId(1), Key::from(name))
    }

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn latency_is_shared_out_by_what_is_known() {
        let mut records = Hotspots::new(10, 80);
        let both = [key("a"), key("b")];
        records.enter(both.iter());
        records.measured(&both, ms(100));
        assert_eq!(records.forecast(both.iter()), ms(100));
        // By itself, `a` turns out to be slow.
        for _ in 0..30 {
            records.measured(&both[..1], ms(90));
        }
        let (a, b) =
            (records.get(&both[0]).unwrap().latency_ns, records.get(&both[1]).unwrap().latency_ns);
        assert!(a > 89_000_000 && b == 50_000_000, "{a} {b}");
        // Eq. 4 gives `a` its share of 90/140.
        records.measured(&both, ms(140));
        let a = records.get(&both[0]).unwrap().latency_ns;
        assert!((89_000_000..=90_100_000).contains(&a), "{a}");
    }

    #[test]
    fn the_abort_rate_is_that_of_equation_9() {
        let mut records = Hotspots::new(10, 80);
        let hot = [key("hot")];
        for committed in [true, true, true, false] {
            records.enter(hot.iter());
            records.leave(hot.iter(), committed);
        }
        // Without and with one active transaction, max(a_cnt - 1, 0) is 0.
        assert_eq!(records.abort_permille(hot.iter()), 0);
        records.enter(hot.iter());
        assert_eq!(records.abort_permille(hot.iter()), 0);
        // Three: 1 - 0.75^2.
        records.enter(hot.iter());
        records.enter(hot.iter());
        assert_eq!(records.abort_permille(hot.iter()), 438);
        let mut rng = Rng::stream(1, "admission", 0);
        let admitted = (0..10_000).filter(|_| records.admits(hot.iter(), &mut rng)).count();
        assert!((5_400..5_850).contains(&admitted), "{admitted}");
        assert_eq!(records.active(), 3);
        for _ in 0..3 {
            records.leave(hot.iter(), true);
        }
        assert_eq!(records.active(), 0);
    }

    #[test]
    fn what_was_used_least_recently_is_forgotten() {
        let mut records = Hotspots::new(2, 80);
        for name in ["a", "b", "a", "c"] {
            records.enter([key(name)].iter());
        }
        assert_eq!(records.len(), 2);
        assert!(records.get(&key("b")).is_none() && records.get(&key("a")).is_some());
        // A forgotten record has no statistics, and nothing fails.
        records.leave([key("b")].iter(), true);
        records.measured(&[key("b")], ms(5));
        assert_eq!(records.forecast([key("b")].iter()), Duration::ZERO);
        assert_eq!(records.hottest(1)[0].0, key("a"));
    }

    #[test]
    fn old_outcomes_fade() {
        let mut records = Hotspots::new(2, 80);
        let hot = [key("hot")];
        for _ in 0..10_000 {
            records.enter(hot.iter());
            records.leave(hot.iter(), false);
        }
        for _ in 0..1_000 {
            records.enter(hot.iter());
            records.leave(hot.iter(), true);
        }
        for _ in 0..3 {
            records.enter(hot.iter());
        }
        assert!(records.abort_permille(hot.iter()) < 40, "{}", records.abort_permille(hot.iter()));
    }
}
