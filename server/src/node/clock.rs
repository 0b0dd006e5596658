//! A node's two clocks: the monotonic one, and the one that timestamps come from, with its bound.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use orthodrome_core::time::nanos;
use orthodrome_core::{Clock, NodeId, Time, Timestamp};

use crate::kernel;
use crate::shared_clock::{Offsets, SharedClock};

/// The clock broke its promise; the node must stop before it uses another reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the system clock was moved by {moved_ms} ms, more than `clock_error_ms` = {allowed_ms} allows; \
     correct the clock, then start the node again"
)]
pub struct ClockError {
    /// The size of the step in milliseconds; negative if it was set back.
    pub moved_ms: i64,
    /// The maximum step.
    pub allowed_ms: u64,
}

/// A node's clocks. Shared by the threads of its machines.
///
/// Its readings keep the contract of [`Clock`]: once `has_passed_everywhere(t)` holds at one node, no
/// node reads `t` or less. Nodes of one machine keep it by a clock that they share (see
/// [`SharedClock`]). Other nodes read the latest time that it may be, and take for passed what is
/// before the earliest time that it may be, each by its own bound; so true time is between what one
/// takes for passed and what another reads, and nobody needs the bounds of others (ADR 38).
#[derive(Debug)]
pub(crate) struct NodeClock {
    /// A reading of the monotonic clock, and the same moment as an `Instant`.
    start: (u64, Instant),
    /// The configured error bound of the system clock.
    error: Duration,
    /// The last reading. Readings never decrease, also not below those of an earlier incarnation of
    /// this node.
    last: AtomicU64,
    /// The system clock minus the monotonic one, in nanoseconds, at the last check.
    offset: AtomicI64,
    /// The kernel's last bound, less the growth until now: see [`drifted`].
    measured: AtomicI64,
    /// An offset added to the system clock, with which tests move one node's clock.
    skew: Arc<AtomicI64>,
    /// Set if all nodes run on this machine.
    shared: Option<Arc<SharedClock>>,
}

/// Both clocks at about the same moment.
struct Sample {
    monotonic: u64,
    system: u64,
    /// True if the two readings were close enough to compare: if the thread is preempted between
    /// them, there is a gap that no clock has caused.
    is_comparable: bool,
}

impl Sample {
    fn offset(&self) -> i64 {
        difference(self.system, self.monotonic)
    }
}

/// No bound was measured.
const UNMEASURED: i64 = i64::MAX / 2;

/// The growth of a bound until `monotonic`, in nanoseconds: half a millisecond a second, as in the
/// kernel.
fn drifted(monotonic: u64) -> i64 {
    i64::try_from(monotonic / 2_000).unwrap_or(i64::MAX / 4)
}

impl NodeClock {
    /// Clocks that start now and never read less than `floor`.
    pub(crate) fn start(
        error: Duration,
        floor: Timestamp,
        skew: Arc<AtomicI64>,
        shared: Option<Arc<SharedClock>>,
    ) -> Self {
        let clock = Self {
            start: (kernel::monotonic(), Instant::now()),
            error,
            last: AtomicU64::new(floor.0),
            offset: AtomicI64::new(0),
            measured: AtomicI64::new(UNMEASURED),
            skew,
            shared,
        };
        let sample = clock.sample();
        clock.offset.store(sample.offset(), Ordering::Relaxed);
        clock.measure(sample.monotonic);
        clock
    }

    /// The clock that all nodes share, for one of them; `peers` are the others. None if this system
    /// does not report which processes share its monotonic clock.
    pub(crate) fn share(
        error: Duration,
        skew: &AtomicI64,
        peers: impl Iterator<Item = NodeId>,
    ) -> Option<Arc<SharedClock>> {
        let machine = kernel::machine()?;
        // The closest of several pairs, because a thread may be preempted between two readings.
        let mut best = (u64::MAX, 0);
        for _ in 0..32 {
            let before = kernel::monotonic();
            let system = Self::system(skew).0;
            let gap = kernel::monotonic() - before;
            best = best.min((gap, difference(system, before)));
        }
        // Offsets differ from true time by at most the bound, and by steps.
        let apart_max = signed(error).saturating_mul(3);
        Some(Arc::new(SharedClock::new(machine, best.1, apart_max, peers)))
    }

    /// The system clock.
    pub(crate) fn system(skew: &AtomicI64) -> Timestamp {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp(nanos(since).saturating_add_signed(skew.load(Ordering::Relaxed)))
    }

    fn sample(&self) -> Sample {
        let close = nanos(self.error) / 8;
        let mut sampled = Sample { monotonic: 0, system: 0, is_comparable: false };
        for _ in 0..8 {
            let monotonic = kernel::monotonic();
            let system = Self::system(&self.skew).0;
            let is_comparable = kernel::monotonic().saturating_sub(monotonic) <= close;
            sampled = Sample { monotonic, system, is_comparable };
            if is_comparable {
                break;
            }
        }
        sampled
    }

    /// Reads both clocks.
    ///
    /// # Errors
    /// The system clock was moved by more than its error since the last [`NodeClock::follow`].
    pub(crate) fn read(&self) -> Result<(Time, Clock), ClockError> {
        let sample = self.sample();
        if sample.is_comparable {
            self.check(sample.offset())?;
        }
        let (reads, passed) = match &self.shared {
            Some(shared) => self.on_one_machine(&sample, shared.offsets()),
            None => {
                let error = nanos(self.bound(sample.monotonic));
                (sample.system.saturating_add(error), sample.system.saturating_sub(error))
            }
        };
        let now = reads.max(self.last.fetch_max(reads, Ordering::Relaxed));
        // Rounded up, so that `now - 2 * error` is no later than what has passed.
        let error = Duration::from_nanos(now.saturating_sub(passed).div_ceil(2));
        let since = sample.monotonic.saturating_sub(self.start.0);
        Ok((Time(since), Clock { now: Timestamp(now), error }))
    }

    /// The reading of the shared clock, and the time that has passed at all nodes.
    fn on_one_machine(&self, sample: &Sample, offsets: Offsets) -> (u64, u64) {
        let error = nanos(self.error);
        let at = |offset| sample.monotonic.saturating_add_signed(offset);
        // After steps back that exceed the bound in total, a starting node reads less than the
        // running ones. Until it has met them, it allows for twice the bound.
        let passed = at(offsets.least).min(sample.system.saturating_add(error));
        if offsets.is_complete {
            return (at(offsets.own), passed);
        }
        let reads = at(offsets.own).max(sample.system.saturating_add(2 * error));
        (reads, passed.min(sample.system.saturating_sub(2 * error)))
    }

    /// The current error bound of the system clock: the kernel's, at most the configured one.
    fn bound(&self, monotonic: u64) -> Duration {
        let measured = self.measured.load(Ordering::Relaxed).saturating_add(drifted(monotonic));
        self.error.min(Duration::from_nanos(u64::try_from(measured).unwrap_or(0)))
    }

    /// Asks the kernel for its bound. If a test has moved the clock, the kernel's bound does not
    /// apply.
    fn measure(&self, monotonic: u64) {
        let stated = kernel::clock_error().filter(|_| self.skew.load(Ordering::Relaxed) == 0);
        let measured = stated.map_or(UNMEASURED, |error| signed(error) - drifted(monotonic));
        self.measured.store(measured, Ordering::Relaxed);
    }

    /// A readable description of the bound's origin.
    pub(crate) fn describe(&self) -> String {
        if self.shared.is_some() {
            return "shared by all nodes, which run on this machine".into();
        }
        let bound = self.bound(kernel::monotonic());
        let of = if bound < self.error { "measured by the kernel" } else { "as configured" };
        format!("at most {bound:?} from true time, {of}")
    }

    fn check(&self, offset: i64) -> Result<(), ClockError> {
        let moved = offset.saturating_sub(self.offset.load(Ordering::Relaxed));
        if moved.unsigned_abs() <= nanos(self.error) {
            return Ok(());
        }
        let allowed_ms = u64::try_from(self.error.as_millis()).unwrap_or(u64::MAX);
        Err(ClockError { moved_ms: moved / 1_000_000, allowed_ms })
    }

    /// Must be called often: follows a clock that a daemon corrects slowly, so that only a step
    /// counts as a fault; and measures the bound again.
    ///
    /// # Errors
    /// As [`NodeClock::read`].
    pub(crate) fn follow(&self) -> Result<Timestamp, ClockError> {
        let (_, clock) = self.read()?;
        let sample = self.sample();
        if sample.is_comparable {
            let offset = sample.offset();
            self.check(offset)?;
            self.offset.store(offset, Ordering::Relaxed);
            if let Some(shared) = &self.shared
                && offset.saturating_sub(shared.offset()) > signed(self.error)
            {
                // After many small steps, readings stay within the bound of the system clock.
                shared.raise(offset);
            }
        }
        self.measure(sample.monotonic);
        Ok(clock.now)
    }

    /// The moment of the operating system's monotonic clock that is `time`.
    pub(crate) fn instant(&self, time: Time) -> Option<Instant> {
        self.start.1.checked_add(Duration::from_nanos(time.0))
    }
}

fn signed(span: Duration) -> i64 {
    i64::try_from(nanos(span)).unwrap_or(i64::MAX)
}

fn difference(a: u64, b: u64) -> i64 {
    i64::try_from(i128::from(a) - i128::from(b)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ERROR: Duration = Duration::from_millis(50);

    fn by_itself(floor: Timestamp, skew: &Arc<AtomicI64>) -> NodeClock {
        NodeClock::start(ERROR, floor, skew.clone(), None)
    }

    /// A node of a cluster of two on this machine.
    fn one_of_two(me: u32, skew: &Arc<AtomicI64>) -> (NodeClock, Arc<SharedClock>) {
        let shared = NodeClock::share(ERROR, skew, [NodeId(3 - me)].into_iter()).unwrap();
        let clock = NodeClock::start(ERROR, Timestamp::ZERO, skew.clone(), Some(shared.clone()));
        (clock, shared)
    }

    /// As a handshake does: the acceptor adopts the higher offset before it answers.
    fn meet((dialer, me): (&SharedClock, u32), (acceptor, other): (&SharedClock, u32)) {
        assert!(acceptor.meet(NodeId(me), dialer.offset()));
        assert!(dialer.meet(NodeId(other), acceptor.offset()));
    }

    #[test]
    fn readings_never_go_back_and_a_step_is_an_error() {
        let skew = Arc::new(AtomicI64::new(0));
        let floor = NodeClock::system(&skew) + Duration::from_secs(1);
        let clock = by_itself(floor, &skew);
        assert_eq!(clock.read().unwrap().1.now, floor);
        let clock = by_itself(Timestamp::ZERO, &skew);
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

    #[test]
    fn the_bound_is_what_the_kernel_stated_and_grows_until_it_states_another() {
        let clock = by_itself(Timestamp::ZERO, &Arc::default());
        let at = kernel::monotonic();
        clock.measured.store(2_000_000 - drifted(at), Ordering::Relaxed);
        assert_eq!(clock.bound(at), Duration::from_millis(2));
        assert_eq!(clock.bound(at + 4_000_000_000), Duration::from_millis(4));
        assert_eq!(clock.bound(at + 1_000_000_000_000), ERROR, "at most what is configured");
        clock.measured.store(UNMEASURED, Ordering::Relaxed);
        assert_eq!(clock.bound(at), ERROR);
    }

    #[test]
    fn what_has_passed_at_one_node_is_below_what_another_reads_within_their_bounds() {
        // Each clock has the error that its own bound allows; the bounds differ.
        for (bound_a, off_a, bound_b, off_b) in
            [(30, 30, 2, -2), (30, 30, 2, 2), (2, 2, 30, -30), (5, -5, 5, 5), (0, 0, 40, -40)]
        {
            let millis = |ms: i64| Arc::new(AtomicI64::new(ms * 1_000_000));
            let [a, b] = [(bound_a, off_a), (bound_b, off_b)].map(|(bound, off)| {
                let clock = by_itself(Timestamp::ZERO, &millis(off));
                let at = kernel::monotonic();
                clock.measured.store(bound * 1_000_000 - drifted(at), Ordering::Relaxed);
                clock
            });
            let (first, second) = (a.read().unwrap().1, b.read().unwrap().1);
            assert!(!first.has_passed_everywhere(second.now));
            // The last moment that has passed for `a` is no later than what `b` reads afterwards.
            let passed = first.now - first.error * 2;
            assert!(passed < second.now, "{bound_a} {off_a} {bound_b} {off_b}");
            // A wrong bound is detected, so the check is not vacuous.
            b.skew.store(-100_000_000, Ordering::Relaxed);
            b.offset.store(b.sample().offset(), Ordering::Relaxed);
            b.last.store(0, Ordering::Relaxed);
            let first = a.read().unwrap().1;
            let passed = first.now - first.error * 2;
            assert!(passed > b.read().unwrap().1.now);
        }
    }

    #[test]
    fn nodes_of_one_machine_wait_for_nothing_once_they_have_met() {
        let skew = Arc::default();
        let ((a, of_a), (b, of_b)) = (one_of_two(1, &skew), one_of_two(2, &skew));
        let alone = a.read().unwrap().1;
        assert!(alone.error >= ERROR * 2, "one that knows nobody allows for steps");
        meet((&of_a, 1), (&of_b, 2));
        // Later readings are never below those before the handshake.
        assert!(a.read().unwrap().1.now >= alone.now);
        std::thread::sleep(ERROR * 3);
        let (of_first, of_second) = (a.read().unwrap().1, b.read().unwrap().1);
        assert!(of_first.error < Duration::from_micros(100), "{of_first:?}");
        let stamp = of_second.now;
        std::thread::sleep(Duration::from_millis(1));
        assert!(a.read().unwrap().1.has_passed_everywhere(stamp));
        assert!(b.read().unwrap().1.has_passed_everywhere(of_first.now));
    }

    #[test]
    fn steps_of_the_system_clock_do_not_move_a_shared_clock() {
        let skew = Arc::new(AtomicI64::new(0));
        let ((a, of_a), (_, of_b)) = (one_of_two(1, &skew), one_of_two(2, &skew));
        meet((&of_a, 1), (&of_b, 2));
        meet((&of_b, 2), (&of_a, 1));
        std::thread::sleep(ERROR * 3);
        // The clock is set back within its bound. The second node starts again, and its offset is
        // lower than what the first relies on.
        skew.store(-40_000_000, Ordering::Relaxed);
        let (b, of_b) = one_of_two(2, &skew);
        assert!(of_b.offset() < of_a.offsets().least);
        let passed = |clock: &NodeClock| {
            let clock = clock.read().unwrap().1;
            clock.now - clock.error * 2
        };
        assert!(passed(&a) < b.read().unwrap().1.now, "before the handshake");
        meet((&of_b, 2), (&of_a, 1));
        assert!(passed(&a) < b.read().unwrap().1.now, "after it");
        std::thread::sleep(ERROR * 3);
        for _ in 0..1_000 {
            assert!(passed(&a) < b.read().unwrap().1.now);
            assert!(passed(&b) < a.read().unwrap().1.now);
        }
        assert!(b.read().unwrap().1.error < Duration::from_micros(100));
    }

    #[test]
    fn many_steps_forward_raise_a_shared_clock() {
        let skew = Arc::new(AtomicI64::new(0));
        let (clock, shared) = one_of_two(1, &skew);
        let first = shared.offset();
        for step in 1..=3 {
            skew.store(step * 40_000_000, Ordering::Relaxed);
            clock.follow().unwrap();
        }
        assert!(shared.offset() >= first + 40_000_000);
    }
}
