//! A node's two clocks: the monotonic one, and the operating system's with its stated error.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use orthodrome_core::time::nanos;
use orthodrome_core::{Clock, Time, Timestamp};

/// The clock broke its promise; the node must stop before it uses another reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the system clock was moved by {moved_ms} ms, more than `clock_error_ms` = {allowed_ms} allows; \
     correct the clock, then start the node again"
)]
pub struct ClockError {
    /// How far, in milliseconds; negative: back.
    pub moved_ms: i64,
    /// How far it may be off.
    pub allowed_ms: u64,
}

/// A node's clocks. Shared by the threads of its machines.
#[derive(Debug)]
pub(crate) struct NodeClock {
    start: Instant,
    error: Duration,
    /// Readings never go back, also not below those of an earlier life of this node.
    last: AtomicU64,
    /// The system clock minus the monotonic one, in nanoseconds, at the last check.
    offset: AtomicI64,
    /// Added to the system clock: how tests move one node's clock and not the machine's.
    skew: Arc<AtomicI64>,
}

impl NodeClock {
    /// Clocks that start now and never read less than `floor`.
    pub(crate) fn start(error: Duration, floor: Timestamp, skew: Arc<AtomicI64>) -> Self {
        let clock = Self {
            start: Instant::now(),
            error,
            last: AtomicU64::new(floor.0),
            offset: AtomicI64::new(0),
            skew,
        };
        let (monotonic, system, _) = clock.sample();
        clock.offset.store(difference(system, monotonic), Ordering::Relaxed);
        clock
    }

    /// The system clock as it is.
    pub(crate) fn system(skew: &AtomicI64) -> Timestamp {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp(nanos(since).saturating_add_signed(skew.load(Ordering::Relaxed)))
    }

    /// The monotonic and the system clock at about the same moment, and whether the moments were
    /// close enough to compare: a thread that is preempted between two readings, or a process that
    /// is paused there, sees a gap that no clock made.
    fn sample(&self) -> (u64, u64, bool) {
        let close = nanos(self.error) / 8;
        let mut sampled = (0, 0, false);
        for _ in 0..8 {
            let before = nanos(self.start.elapsed());
            let system = Self::system(&self.skew).0;
            let after = nanos(self.start.elapsed());
            sampled = (before, system, after - before <= close);
            if sampled.2 {
                break;
            }
        }
        sampled
    }

    /// Both clocks now.
    ///
    /// # Errors
    /// The system clock was moved by more than its error since the last [`NodeClock::follow`].
    pub(crate) fn read(&self) -> Result<(Time, Clock), ClockError> {
        let (monotonic, system, is_comparable) = self.sample();
        if is_comparable {
            self.check(difference(system, monotonic))?;
        }
        let now = system.max(self.last.fetch_max(system, Ordering::Relaxed));
        Ok((Time(monotonic), Clock { now: Timestamp(now), error: self.error }))
    }

    fn check(&self, offset: i64) -> Result<(), ClockError> {
        let moved = offset.saturating_sub(self.offset.load(Ordering::Relaxed));
        if moved.unsigned_abs() <= nanos(self.error) {
            return Ok(());
        }
        let allowed_ms = u64::try_from(self.error.as_millis()).unwrap_or(u64::MAX);
        Err(ClockError { moved_ms: moved / 1_000_000, allowed_ms })
    }

    /// Called often: lets the reference follow a clock that is being corrected slowly, as time
    /// daemons do, so that only a step counts as a fault.
    ///
    /// # Errors
    /// As [`NodeClock::read`].
    pub(crate) fn follow(&self) -> Result<Timestamp, ClockError> {
        let (_, clock) = self.read()?;
        let (monotonic, system, is_comparable) = self.sample();
        if is_comparable {
            let offset = difference(system, monotonic);
            self.check(offset)?;
            self.offset.store(offset, Ordering::Relaxed);
        }
        Ok(clock.now)
    }

    /// The moment of the operating system's monotonic clock that is `time`.
    pub(crate) fn instant(&self, time: Time) -> Option<Instant> {
        self.start.checked_add(Duration::from_nanos(time.0))
    }
}

fn difference(a: u64, b: u64) -> i64 {
    i64::try_from(i128::from(a) - i128::from(b)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_never_go_back_and_a_step_is_an_error() {
        let skew = Arc::new(AtomicI64::new(0));
        let error = Duration::from_millis(50);
        let floor = NodeClock::system(&skew) + Duration::from_secs(1);
        let clock = NodeClock::start(error, floor, skew.clone());
        assert_eq!(clock.read().unwrap().1.now, floor);
        let clock = NodeClock::start(error, Timestamp::ZERO, skew.clone());
        let first = clock.read().unwrap().1.now;
        skew.store(-20_000_000, Ordering::Relaxed);
        assert!(clock.read().unwrap().1.now >= first, "a small step back is hidden");
        clock.follow().unwrap();
        skew.store(-60_000_000, Ordering::Relaxed);
        assert!(clock.read().is_ok(), "many small steps are a slow correction");
        for far in [200_000_000, -200_000_000] {
            skew.store(far, Ordering::Relaxed);
            let error = clock.read().unwrap_err();
            assert_eq!(error.moved_ms.signum(), far.signum());
        }
    }
}
