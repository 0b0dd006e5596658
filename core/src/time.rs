//! Two clocks with two types. [`Time`] is monotonic, for timers and measurements. [`Timestamp`] is
//! a reading of a node's physical clock, and the only source of protocol timestamps.

use std::fmt;
use std::ops::{Add, Sub};

use serde::{Deserialize, Serialize};

/// A duration in whole nanoseconds.
pub type Duration = std::time::Duration;

/// Nanoseconds since the run (or the process) started; monotonic, comparable only within one run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Time(pub u64);

impl Time {
    /// The start of the run.
    pub const ZERO: Self = Self(0);
    /// Later than every other time.
    pub const MAX: Self = Self(u64::MAX);

    /// The time that is `millis` milliseconds after the start.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// Time passed since `earlier`; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Whole microseconds since the start.
    #[must_use]
    pub fn as_micros(self) -> u64 {
        self.0 / 1_000
    }
}

impl Add<Duration> for Time {
    type Output = Self;
    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(nanos(span)))
    }
}

impl Sub<Duration> for Time {
    type Output = Self;
    fn sub(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(span)))
    }
}

impl fmt::Display for Time {
    /// Milliseconds with three decimals, truncated to the microsecond.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.as_micros();
        write!(f, "{}.{:03}ms", micros / 1_000, micros % 1_000)
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// `span` in nanoseconds, saturating after 584 years.
#[must_use]
pub fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// Nanoseconds since the Unix epoch by some node's physical clock, or a value derived from such
/// readings by a protocol. Not comparable with [`Time`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// Before every other timestamp: the version of a key that was never written.
    pub const ZERO: Self = Self(0);
    /// After every other timestamp.
    pub const MAX: Self = Self(u64::MAX);

    /// The smallest timestamp after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;
    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(nanos(span)))
    }
}

impl Sub<Duration> for Timestamp {
    type Output = Self;
    fn sub(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(span)))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "@{}", self.0)
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One reading of a node's physical clock.
///
/// The contract: once [`Clock::has_passed_everywhere`] holds for a timestamp at one node, no node
/// reads that timestamp or less. In the simulator all clocks are within one `error` of true time. In
/// servers each node has a bound of its own, or all nodes share a clock (ADR 38). A node whose clock
/// may have broken the contract must not serve. Hosts ensure that, and protocols may rely on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// The clock's reading.
    pub now: Timestamp,
    /// Half of how far before `now` a timestamp must be to have passed at every node.
    pub error: Duration,
}

impl Clock {
    /// True if `timestamp` lies in the past by every clock in the cluster: the wait that makes
    /// timestamp order agree with real time.
    #[must_use]
    pub fn has_passed_everywhere(&self, timestamp: Timestamp) -> bool {
        timestamp + self.error * 2 < self.now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates_instead_of_wrapping() {
        assert_eq!(Time::ZERO - Duration::from_secs(1), Time::ZERO);
        assert_eq!(Time::MAX + Duration::from_secs(1), Time::MAX);
        assert_eq!(Timestamp(5) - Duration::from_nanos(9), Timestamp::ZERO);
        assert_eq!(Time(1_234_567).to_string(), "1.234ms");
    }

    #[test]
    fn a_timestamp_has_passed_only_when_the_slowest_clock_agrees() {
        let clock = Clock { now: Timestamp(1_000), error: Duration::from_nanos(100) };
        assert!(clock.has_passed_everywhere(Timestamp(799)));
        assert!(!clock.has_passed_everywhere(Timestamp(800)));
    }
}
