//! Decides when a server makes its next checkpoint.

/// Counts the bytes that a server has persisted since its last checkpoint. A checkpoint repeats
/// what is still needed, so a few new records must not cause a large checkpoint. The next one is
/// due when the records are as large as the last checkpoint. So checkpoints take no more bytes than
/// the records, except for the growth of the state.
#[derive(Debug, Default)]
pub struct CheckpointPace {
    /// Bytes of records since the last checkpoint.
    written: usize,
    /// Bytes of the last checkpoint.
    last: usize,
}

impl CheckpointPace {
    /// A record of this many bytes was persisted.
    pub fn wrote(&mut self, bytes: usize) {
        self.written = self.written.saturating_add(bytes);
    }

    /// A record of this many bytes was recovered. `is_state` says that only checkpoints have such
    /// records. All others count as written since the checkpoint, so the log of a node that often
    /// starts again does not grow without a checkpoint.
    pub fn recovered(&mut self, bytes: usize, is_state: bool) {
        let count = if is_state { &mut self.last } else { &mut self.written };
        *count = count.saturating_add(bytes);
    }

    /// True if a checkpoint is due; never before `least` bytes of records.
    pub fn is_due(&self, least: usize) -> bool {
        self.written >= least.max(self.last)
    }

    /// A checkpoint of this many bytes was made.
    pub fn made(&mut self, bytes: usize) {
        *self = Self { written: 0, last: bytes };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Records of any sizes, of which any part is still needed at a checkpoint, together with
        /// any part of what was needed before.
        #[test]
        fn checkpoints_take_no_more_than_twice_the_records(
            records in proptest::collection::vec((1_usize..5_000, 0_usize..=100, 0_usize..=100), 1..300),
            least in 1_usize..20_000,
        ) {
            let mut pace = CheckpointPace::default();
            let (mut written, mut since, mut needed, mut checkpoints) = (0, 0, 0, 0);
            for (bytes, of_new, of_old) in records {
                pace.wrote(bytes);
                written += bytes;
                since += bytes;
                if pace.is_due(least) {
                    needed = needed * of_old / 100 + since * of_new / 100;
                    checkpoints += needed;
                    since = 0;
                    pace.made(needed);
                }
            }
            prop_assert!(checkpoints <= 2 * written, "{checkpoints} of {written}");
        }
    }

    #[test]
    fn a_node_that_starts_often_makes_checkpoints() {
        let mut log = 0;
        for _ in 0..5 {
            let mut pace = CheckpointPace::default();
            pace.recovered(30, true);
            pace.recovered(log, false);
            if pace.is_due(20) {
                pace.made(30);
                log = 0;
            }
            pace.wrote(15);
            assert!(!pace.is_due(20));
            log += 15;
        }
        assert_eq!(log, 15, "after 15, 30 and 45 bytes it made a checkpoint, which took 30");
    }

    #[test]
    fn the_next_checkpoint_is_due_after_as_much_as_the_last_one_took() {
        let mut pace = CheckpointPace::default();
        pace.wrote(10);
        assert!(pace.is_due(10) && !pace.is_due(11));
        pace.made(30);
        pace.wrote(29);
        assert!(!pace.is_due(10));
        pace.wrote(1);
        assert!(pace.is_due(10));
        pace.made(0);
        pace.wrote(9);
        assert!(!pace.is_due(10), "small states are not written for every record");
    }
}
