//! Finds positions in a list by hash.

/// Positions of a list, found by the hashes of what is there. Open addressing; the caller counts
/// the steps of a search as work, because a script may choose keys whose hashes collide.
#[derive(Debug, Default)]
pub(crate) struct Index {
    /// Positions plus one; 0 if free. The length is a power of two, or 0.
    slots: Vec<u32>,
    used: usize,
}

impl Index {
    /// Whether one more position needs [`Index::rebuild`] first.
    pub(crate) fn is_full(&self) -> bool {
        (self.used + 1) * 2 > self.slots.len()
    }

    /// The position with this hash for which `is_wanted` holds, and the steps of the search.
    pub(crate) fn find(&self, hash: u64, is_wanted: impl Fn(u32) -> bool) -> (Option<u32>, u64) {
        let mask = self.slots.len().wrapping_sub(1);
        let mut at = low(hash) & mask;
        let mut steps = 1;
        while let Some(slot) = self.slots.get(at)
            && let Some(position) = slot.checked_sub(1)
        {
            if is_wanted(position) {
                return (Some(position), steps);
            }
            at = (at + 1) & mask;
            steps += 1;
        }
        (None, steps)
    }

    /// Adds a position that is not there. The index must not be full.
    pub(crate) fn insert(&mut self, hash: u64, position: u32) {
        let mask = self.slots.len().wrapping_sub(1);
        let mut at = low(hash) & mask;
        while self.slots.get(at).is_some_and(|slot| *slot != 0) {
            at = (at + 1) & mask;
        }
        if let Some(slot) = self.slots.get_mut(at) {
            *slot = position.saturating_add(1);
            self.used += 1;
        }
    }

    /// Holds the positions `0..count`, with room for as many more.
    pub(crate) fn rebuild(&mut self, count: u32, hash_of: impl Fn(u32) -> u64) {
        let room = (count as usize + 1).saturating_mul(4).next_power_of_two();
        self.slots.clear();
        self.slots.resize(room, 0);
        self.used = 0;
        for position in 0..count {
            self.insert(hash_of(position), position);
        }
    }
}

fn low(hash: u64) -> usize {
    usize::try_from(hash & u64::from(u32::MAX)).unwrap_or(0)
}
