//! Version numbers: unique, increasing, and never below a published watermark (§3.3, §3.6).

use orthodrome_core::ordered::OrdSet;
use orthodrome_core::time::Timestamp;

/// The low bits of a version number contain the server that created it.
pub(super) const SLOTS: u64 = 1 << 12;

/// The server's `TidMgr`: creates version numbers, and knows which of them are in their S-phase.
///
/// New numbers and published watermarks come from the same object in one step. So no version is
/// ever created below a watermark that excludes it (V7).
#[derive(Debug)]
pub struct Tids {
    slot: u64,
    /// The last created version number.
    last: Timestamp,
    /// The highest seen watermark: all later numbers are above it (V6, V13).
    seen: Timestamp,
    /// No number is created above this ceiling, which the directory holds durably (R8).
    ceiling: Timestamp,
    storing: OrdSet<Timestamp>,
}

impl Tids {
    /// The numbers of server `slot` above `floor`; earlier incarnations may have created any number
    /// below it.
    #[must_use]
    pub fn new(slot: u64, floor: Timestamp) -> Self {
        assert!(slot < SLOTS, "a version number has no room for server {slot}");
        let last = Timestamp(floor.0 / SLOTS * SLOTS + slot);
        Self { slot, last, seen: last, ceiling: floor, storing: OrdSet::new() }
    }

    /// The server that created a version number.
    #[must_use]
    pub fn slot_of(ts: Timestamp) -> u64 {
        ts.0 % SLOTS
    }

    /// Creates a version number; none while the ceiling has to be raised first.
    pub fn create(&mut self, clock: Timestamp) -> Option<Timestamp> {
        let least = self.last.max(self.seen).0.saturating_add(SLOTS).max(clock.0);
        let ts = Timestamp(least / SLOTS * SLOTS + self.slot);
        if ts > self.ceiling {
            return None;
        }
        self.last = ts;
        Some(ts)
    }

    /// Creates the version number of a transaction, which is in its S-phase until
    /// [`Tids::stored`].
    pub fn begin(&mut self, clock: Timestamp) -> Option<Timestamp> {
        let ts = self.create(clock)?;
        self.storing.insert(ts);
        Some(ts)
    }

    /// Ends the S-phase of a transaction: it is stored, or aborted, at all partitions that it
    /// writes.
    pub fn stored(&mut self, ts: Timestamp) {
        self.storing.remove(&ts);
    }

    /// Svw: all versions of this server below it have completed their S-phase, and no version will
    /// be created below it.
    pub fn svw(&mut self, clock: Timestamp) -> Timestamp {
        if let Some(&least) = self.storing.first() {
            return least;
        }
        // While the ceiling must be raised, the last number is the highest possible watermark.
        self.create(clock).unwrap_or(self.last)
    }

    /// Notes a watermark: later numbers are above it.
    pub fn observe(&mut self, watermark: Timestamp) {
        self.seen = self.seen.max(watermark);
    }

    /// Raises the ceiling: no number above it is created until it is raised again.
    pub fn raise(&mut self, ceiling: Timestamp) {
        self.ceiling = self.ceiling.max(ceiling);
    }

    /// The lowest version number in its S-phase.
    #[must_use]
    pub fn least_storing(&self) -> Option<Timestamp> {
        self.storing.first().copied()
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::rng::Rng;

    use super::*;

    /// Even if clocks jump, numbers are unique, increase, and are never below a published or seen
    /// watermark.
    #[test]
    fn numbers_grow_and_keep_to_what_was_published() {
        let mut rng = Rng::stream(7, "tids", 0);
        let mut all = OrdSet::new();
        let mut servers: Vec<Tids> = (0..3).map(|slot| Tids::new(slot, Timestamp(0))).collect();
        let mut published = [Timestamp::ZERO; 3];
        for _ in 0..20_000 {
            let at = usize::try_from(rng.below(3)).unwrap();
            let clock = Timestamp(1_000_000 + rng.below(5_000_000));
            let others = *published.iter().min().unwrap();
            let tids = &mut servers[at];
            match rng.below(5) {
                0 | 1 => {
                    if let Some(ts) = tids.begin(clock) {
                        assert!(all.insert(ts), "{ts} was created twice");
                        assert!(ts >= published[at], "{ts} is below what was published");
                        assert_eq!(Tids::slot_of(ts), at as u64);
                    }
                }
                2 => {
                    let first = tids.storing.first().copied();
                    first.into_iter().for_each(|ts| tids.stored(ts));
                }
                3 => {
                    let svw = tids.svw(clock);
                    assert!(svw >= published[at], "Svw went back");
                    assert!(tids.storing.first().is_none_or(|&least| svw <= least));
                    published[at] = svw;
                }
                _ => {
                    tids.observe(others);
                    tids.raise(Timestamp(clock.0 + rng.below(3_000_000)));
                }
            }
        }
        assert!(all.len() > 1_000, "hardly any was created: {}", all.len());
    }

    #[test]
    fn nothing_is_created_above_the_ceiling_or_below_the_floor_of_a_life() {
        let clock = Timestamp(10_000_000);
        let mut tids = Tids::new(5, Timestamp(20_000_000));
        assert_eq!(tids.create(clock), None, "an earlier life may have created anything up to it");
        assert!(tids.svw(clock) <= Timestamp(20_000_000));
        tids.raise(Timestamp(21_000_000));
        let first = tids.create(clock).unwrap();
        assert!(first > Timestamp(20_000_000) && first <= Timestamp(21_000_000));
        assert_eq!(tids.create(Timestamp(30_000_000)), None);
    }
}
