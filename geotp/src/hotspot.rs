//! What is known of hot records: how long transactions take for them and how many of those get through
//! (GeoTP §IV-C), bounded by forgetting the record that was used least recently.

use std::collections::{BTreeMap, BTreeSet};

use orthodrome_core::id::NodeId;
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, nanos};
use orthodrome_core::txn::Key;

/// A record of a source.
pub type Place = (NodeId, Key);

/// What is kept of one record; names as in the paper.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Spot {
    /// `w_lat`: weighted average latency of what touches it, in nanoseconds.
    pub latency_ns: u64,
    /// `t_cnt`: transactions that accessed it and have ended.
    pub ended: u64,
    /// `c_cnt`: of those, the ones that committed.
    pub committed: u64,
    /// `a_cnt`: transactions that are accessing it.
    pub active: u64,
    /// When it was last used, by this table's own count.
    used: u64,
}

/// The hotspot footprint.
#[derive(Clone, Debug)]
pub struct Hotspots {
    spots: BTreeMap<Place, Spot>,
    /// By last use, for forgetting.
    order: BTreeSet<(u64, Place)>,
    uses: u64,
    capacity: usize,
    /// α of Eq. 4, in per cent: how much of the old average stays.
    keep_percent: u64,
}

/// A probability of one, in the fixed point of this module.
const ONE: u64 = 1 << 32;

/// When both counters of a record reach this they are halved, so that what happened long ago counts less and less.
const MEMORY: u64 = 256;

impl Hotspots {
    /// A table of at most `capacity` records.
    #[must_use]
    pub fn new(capacity: usize, keep_percent: u64) -> Self {
        Self {
            spots: BTreeMap::new(),
            order: BTreeSet::new(),
            uses: 0,
            capacity,
            keep_percent: keep_percent.min(100),
        }
    }

    /// What is known of a record.
    #[must_use]
    pub fn get(&self, place: &Place) -> Option<&Spot> {
        self.spots.get(place)
    }

    /// The hottest records: those with the most transactions on them, then with the longest latency.
    #[must_use]
    pub fn hottest(&self, count: usize) -> Vec<(Place, Spot)> {
        let mut all: Vec<_> =
            self.spots.iter().map(|(place, spot)| (place.clone(), *spot)).collect();
        all.sort_by(|(a, x), (b, y)| (y.active, y.latency_ns, a).cmp(&(x.active, x.latency_ns, b)));
        all.truncate(count);
        all
    }

    /// How many records are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.spots.len()
    }

    /// True if none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.spots.is_empty()
    }

    /// Transactions that are on some record: zero when none is under way.
    #[must_use]
    pub fn active(&self) -> u64 {
        self.spots.values().map(|spot| spot.active).sum()
    }

    fn touch(&mut self, place: &Place) -> &mut Spot {
        self.uses += 1;
        let uses = self.uses;
        if let Some(spot) = self.spots.get(place) {
            self.order.remove(&(spot.used, place.clone()));
        } else if self.spots.len() >= self.capacity {
            self.evict();
        }
        self.order.insert((uses, place.clone()));
        let spot = self.spots.entry(place.clone()).or_default();
        spot.used = uses;
        spot
    }

    /// Forgets the record that was used least recently. One that transactions are on has been used by them, so in a
    /// table larger than what is under way it is not the oldest; were it, its count would start again from zero.
    fn evict(&mut self) {
        if let Some((_, place)) = self.order.pop_first() {
            self.spots.remove(&place);
        }
    }

    /// Statements that touch these records have been sent.
    pub fn enter<'a>(&mut self, places: impl Iterator<Item = &'a Place>) {
        for place in places {
            let spot = self.touch(place);
            spot.active = spot.active.saturating_add(1);
        }
    }

    /// The statements of one source took so long there: Eq. 4.
    pub fn measured(&mut self, places: &[Place], took: Duration) {
        let took = nanos(took);
        let sum: u64 = places
            .iter()
            .filter_map(|place| self.spots.get(place))
            .map(|spot| spot.latency_ns)
            .sum();
        let count = places.len().max(1) as u64;
        let keep = self.keep_percent;
        for place in places {
            // Of records of which nothing is known yet, each has an equal share: the weight of Eq. 4 would be 0/0, and 0 for ever.
            let Some(spot) = self.spots.get_mut(place) else { continue };
            let share = if sum == 0 || spot.latency_ns == 0 {
                took / count
            } else {
                u64::try_from(u128::from(took) * u128::from(spot.latency_ns) / u128::from(sum))
                    .unwrap_or(u64::MAX)
            };
            spot.latency_ns = if spot.latency_ns == 0 {
                share
            } else {
                (spot.latency_ns / 100)
                    .saturating_mul(keep)
                    .saturating_add((share / 100).saturating_mul(100 - keep))
            };
        }
    }

    /// A transaction that touched these records has ended.
    pub fn leave<'a>(&mut self, places: impl Iterator<Item = &'a Place>, is_committed: bool) {
        for place in places {
            let Some(spot) = self.spots.get_mut(place) else { continue };
            spot.active = spot.active.saturating_sub(1);
            spot.ended += 1;
            spot.committed += u64::from(is_committed);
            if spot.ended >= MEMORY {
                spot.ended /= 2;
                spot.committed /= 2;
            }
        }
    }

    /// The forecast local execution latency of statements that touch these records: Eq. 5.
    #[must_use]
    pub fn forecast<'a>(&self, places: impl Iterator<Item = &'a Place>) -> Duration {
        let known = places.filter_map(|place| self.spots.get(place));
        Duration::from_nanos(known.map(|spot| spot.latency_ns).fold(0, u64::saturating_add))
    }

    /// The probability that a transaction on these records gets all its locks, one minus Eq. 9, in units of 2^-32.
    fn passes<'a>(&self, places: impl Iterator<Item = &'a Place>) -> u64 {
        let mut probability = ONE;
        for spot in places.filter_map(|place| self.spots.get(place)) {
            if spot.ended == 0 {
                continue;
            }
            let one = spot.committed.saturating_mul(ONE) / spot.ended;
            // `active` does not count the transaction itself yet: it is the queue before it, with whoever holds the record.
            let mut power = spot.active.saturating_sub(1).min(1_000);
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
    pub fn abort_permille<'a>(&self, places: impl Iterator<Item = &'a Place>) -> u64 {
        1_000 - self.passes(places).saturating_mul(1_000) / ONE
    }

    /// True if a transaction on these records may start now (Alg. 2 l. 17).
    pub fn admits<'a>(&self, places: impl Iterator<Item = &'a Place>, rng: &mut Rng) -> bool {
        let passes = self.passes(places);
        passes >= ONE || rng.below(ONE) < passes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(name: &str) -> Place {
        (NodeId(1), Key::from(name))
    }

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn latency_is_shared_out_by_what_is_known() {
        let mut spots = Hotspots::new(10, 80);
        let both = [place("a"), place("b")];
        spots.enter(both.iter());
        spots.measured(&both, ms(100));
        assert_eq!(spots.forecast(both.iter()), ms(100));
        // Alone, `a` turns out to be what takes long.
        for _ in 0..30 {
            spots.measured(&both[..1], ms(90));
        }
        let (a, b) =
            (spots.get(&both[0]).unwrap().latency_ns, spots.get(&both[1]).unwrap().latency_ns);
        assert!(a > 89_000_000 && b == 50_000_000, "{a} {b}");
        // Eq. 4 gives `a` its share of 90/140.
        spots.measured(&both, ms(140));
        let a = spots.get(&both[0]).unwrap().latency_ns;
        assert!((89_000_000..=90_100_000).contains(&a), "{a}");
    }

    #[test]
    fn the_abort_rate_is_that_of_equation_9() {
        let mut spots = Hotspots::new(10, 80);
        let hot = [place("hot")];
        for committed in [true, true, true, false] {
            spots.enter(hot.iter());
            spots.leave(hot.iter(), committed);
        }
        // Nobody is on it, and one: max(a_cnt - 1, 0) is 0.
        assert_eq!(spots.abort_permille(hot.iter()), 0);
        spots.enter(hot.iter());
        assert_eq!(spots.abort_permille(hot.iter()), 0);
        // Three: 1 - 0.75^2.
        spots.enter(hot.iter());
        spots.enter(hot.iter());
        assert_eq!(spots.abort_permille(hot.iter()), 438);
        let mut rng = Rng::stream(1, "admission", 0);
        let admitted = (0..10_000).filter(|_| spots.admits(hot.iter(), &mut rng)).count();
        assert!((5_400..5_850).contains(&admitted), "{admitted}");
        assert_eq!(spots.active(), 3);
        for _ in 0..3 {
            spots.leave(hot.iter(), true);
        }
        assert_eq!(spots.active(), 0);
    }

    #[test]
    fn what_was_used_least_recently_is_forgotten() {
        let mut spots = Hotspots::new(2, 80);
        for name in ["a", "b", "a", "c"] {
            spots.enter([place(name)].iter());
        }
        assert_eq!(spots.len(), 2);
        assert!(spots.get(&place("b")).is_none() && spots.get(&place("a")).is_some());
        // Of what was forgotten nothing is known, and nothing breaks.
        spots.leave([place("b")].iter(), true);
        spots.measured(&[place("b")], ms(5));
        assert_eq!(spots.forecast([place("b")].iter()), Duration::ZERO);
        assert_eq!(spots.hottest(1)[0].0, place("a"));
    }

    #[test]
    fn old_outcomes_fade() {
        let mut spots = Hotspots::new(2, 80);
        let hot = [place("hot")];
        for _ in 0..10_000 {
            spots.enter(hot.iter());
            spots.leave(hot.iter(), false);
        }
        for _ in 0..1_000 {
            spots.enter(hot.iter());
            spots.leave(hot.iter(), true);
        }
        for _ in 0..3 {
            spots.enter(hot.iter());
        }
        assert!(spots.abort_permille(hot.iter()) < 40, "{}", spots.abort_permille(hot.iter()));
    }
}
