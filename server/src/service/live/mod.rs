//! What operators see of the transactions of this gateway: rates and latencies of the last minutes,
//! hot keys, and the journeys of slow and of recent transactions.
//!
//! A transaction that ends adds to atomic counters. It takes a lock only if it is among the slowest,
//! is the first one to end in a second, or is one of the few whose keys are counted; and it never
//! waits for one. Once a second, [`Live::tick`] turns the counters into history. All state is
//! bounded.

use std::sync::{Mutex, MutexGuard, PoisonError};

use orthodrome_core::{Key, Outcome, Txn};
use tokio::time::Instant;

mod history;
mod journeys;
mod keys;

pub(super) use history::{Class, HISTORY, REASONS, Second, WINDOW};
pub(super) use journeys::{Journey, KEPT};
pub(super) use keys::{HotKey, SHOWN};

use history::{Counters, History};
use journeys::Journeys;
use keys::HotKeys;

use super::metrics::Timing;

/// The measurements of one gateway.
#[derive(Debug)]
pub(super) struct Live {
    counters: Counters,
    history: Mutex<History>,
    keys: HotKeys,
    journeys: Journeys,
}

/// A copy of what was measured.
#[derive(Debug)]
pub(super) struct Seen {
    /// Each second, oldest first; at most [`HISTORY`].
    pub(super) seconds: Vec<Second>,
    /// The keys that were accessed most often lately.
    pub(super) keys: Vec<HotKey>,
    /// The slowest transactions of the last one or two minutes, slowest first.
    pub(super) slow: Vec<Journey>,
    /// One transaction of each of the last seconds, newest first.
    pub(super) recent: Vec<Journey>,
}

/// No code that holds one of these locks can leave its content inconsistent.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Default for Live {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            counters: Counters::default(),
            history: Mutex::new(History::new(now)),
            keys: HotKeys::default(),
            journeys: Journeys::new(now),
        }
    }
}

impl Live {
    /// Counts the keys of a transaction that begins, if it is in the sample.
    pub(super) fn begin(&self, txn: &Txn) {
        self.keys.sample(&txn.reads, &txn.writes);
    }

    /// Counts the keys of a further round of reads, if it is in the sample.
    pub(super) fn read(&self, keys: &[Key]) {
        self.keys.sample(keys, &[]);
    }

    /// Counts a transaction that ended.
    pub(super) fn end(&self, timing: &Timing, path: &'static str, outcome: Outcome) {
        let now = Instant::now();
        let took = now.saturating_duration_since(timing.began);
        self.counters.add(timing.is_high(), took, outcome);
        self.journeys.offer(timing, took, path, outcome, now);
    }

    /// Ends a second.
    pub(super) fn tick(&self, now: Instant) {
        let ended = locked(&self.history).tick(&self.counters, now);
        self.keys.tick(ended);
        self.journeys.tick(now);
    }

    /// A copy of what was measured.
    pub(super) fn seen(&self) -> Seen {
        let (slow, recent) = self.journeys.seen();
        let seconds = locked(&self.history).seconds();
        Seen { seconds, keys: self.keys.seen(), slow, recent }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use orthodrome_core::{ClientId, RegionId, Timestamp, TxnId};

    use super::*;

    /// A development build on a busy machine takes 0.7 microseconds, with making the transaction.
    #[test]
    fn recording_a_transaction_costs_microseconds_at_most() {
        let (live, count) = (Live::default(), 100_000u32);
        let began = Instant::now();
        for number in 0..count {
            let id = TxnId::new(ClientId(1), number.into());
            let txn = Txn::read_only(id, RegionId(0), vec!["k".into()]);
            live.begin(&txn);
            live.end(&Timing::start(&txn), "fast", Outcome::Committed(Timestamp(1)));
            if number % 10_000 == 0 {
                live.tick(Instant::now());
            }
        }
        let each = began.elapsed() / count;
        println!("{each:?} for each transaction");
        assert!(each < Duration::from_micros(20), "{each:?}");
    }
}
