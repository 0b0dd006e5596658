//! How long transactions stand in line for hot keys. A transaction of low priority spends most of that
//! time at its gateway, before it gets a place, so that one of high priority finds a short line.

use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::{Duration, Time, nanos};
use orthodrome_core::txn::Key;

/// The lines that a gateway knows of.
#[derive(Debug, Default)]
pub(super) struct Lines {
    by_key: OrdMap<Key, Line>,
    /// When this gateway last began a transaction of high priority.
    high_at: Option<Time>,
}

/// The line for one key.
#[derive(Clone, Copy, Debug)]
struct Line {
    /// How long transactions of low priority waited lately, at their gateway and after that.
    wait: Duration,
    /// When that was last measured.
    at: Time,
}

impl Line {
    /// What is left of the estimate: it halves each second, because the line may be gone.
    fn wait(&self, now: Time) -> Duration {
        let since = now.since(self.at);
        let halved = nanos(self.wait).checked_shr(u32::try_from(since.as_secs()).unwrap_or(64));
        let halved = halved.unwrap_or(0);
        let more = u128::from(halved / 2) * u128::from(since.subsec_nanos()) / 1_000_000_000;
        Duration::from_nanos(halved - u64::try_from(more).unwrap_or(halved))
    }
}

impl Lines {
    /// A transaction of high priority begins.
    pub(super) fn saw_high(&mut self, now: Time) {
        self.high_at = Some(now);
    }

    /// How long a transaction of low priority that uses these keys waits before it gets its place: not at
    /// all if nobody uses priorities.
    pub(super) fn hold<'a>(&self, keys: impl Iterator<Item = &'a Key>, now: Time) -> Duration {
        if self.high_at.is_none_or(|at| now.since(at) > HIGH_LASTS) {
            return Duration::ZERO;
        }
        let waits = keys.filter_map(|key| Some(self.by_key.get(key)?.wait(now)));
        let longest = waits.max().unwrap_or_default();
        (longest * SHARE.0 / SHARE.1).min(HOLD_MAX)
    }

    /// A transaction of low priority that uses `keys` waited for so long, and stood in line for `hot`.
    pub(super) fn saw<'a>(
        &mut self,
        keys: impl Iterator<Item = &'a Key>,
        is_hot: impl Fn(&Key) -> bool,
        waited: Duration,
        now: Time,
    ) {
        for key in keys {
            if let Some(line) = self.by_key.get_mut(key) {
                let known = line.wait(now);
                *line = Line { wait: (known * 3 + waited) / 4, at: now };
            } else if is_hot(key) && nanos(waited) > 0 {
                if self.by_key.len() >= LINES_MAX {
                    self.by_key.retain(|_, line| line.wait(now) >= SHORTEST);
                }
                if self.by_key.len() < LINES_MAX {
                    self.by_key.insert(key.clone(), Line { wait: waited, at: now });
                }
            }
        }
    }
}

/// The share of the time in line that low priority waits at its gateway. The rest covers what the
/// estimate is wrong by: a key for which nobody stands in line is idle.
const SHARE: (u32, u32) = (3, 4);

/// So long after a transaction of high priority those of low priority still wait.
const HIGH_LASTS: Duration = Duration::from_secs(10);

/// The longest wait at a gateway.
const HOLD_MAX: Duration = Duration::from_secs(5);

/// The most keys whose lines a gateway remembers.
const LINES_MAX: usize = 4_096;

/// Shorter lines are forgotten first.
const SHORTEST: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(ms: u32) -> Time {
        Time::ZERO + MS * ms
    }

    /// What a transaction of low priority would wait for, with one of high priority just begun.
    fn hold(lines: &mut Lines, keys: &[Key], now: Time) -> Duration {
        lines.saw_high(now);
        lines.hold(keys.iter(), now)
    }

    #[test]
    fn without_high_priority_nobody_waits() {
        let hot = [Key::from("hot")];
        let mut lines = Lines::default();
        lines.saw(hot.iter(), |_| true, MS * 400, at(0));
        assert_eq!(lines.hold(hot.iter(), at(0)), Duration::ZERO);
        assert_eq!(hold(&mut lines, &hot, at(0)), MS * 300);
        lines.saw(hot.iter(), |_| true, MS * 400, at(20_000));
        assert_eq!(lines.hold(hot.iter(), at(20_000)), Duration::ZERO, "that was long ago");
    }

    #[test]
    fn low_priority_waits_for_a_share_of_the_longest_line() {
        let (hot, cold) = ([Key::from("hot")], [Key::from("cold")]);
        let both = [hot[0].clone(), cold[0].clone()];
        let mut lines = Lines::default();
        lines.saw(both.iter(), |key| *key == hot[0], MS * 400, at(0));
        assert_eq!(hold(&mut lines, &hot, at(0)), MS * 300);
        assert_eq!(hold(&mut lines, &both, at(0)), MS * 300);
        assert_eq!(hold(&mut lines, &cold, at(0)), Duration::ZERO, "nobody stood in line for it");
        lines.saw(hot.iter(), |_| true, Duration::ZERO, at(0));
        assert_eq!(hold(&mut lines, &hot, at(0)), MS * 225, "the line is shorter");
    }

    #[test]
    fn a_line_that_nobody_sees_any_more_is_gone() {
        let hot = [Key::from("hot")];
        let mut lines = Lines::default();
        lines.saw(hot.iter(), |_| true, MS * 400, at(0));
        let holds = [0, 500, 1_000, 2_000].map(|ms| hold(&mut lines, &hot, at(ms)));
        assert_eq!(holds, [MS * 300, MS * 225, MS * 150, MS * 75]);
        assert_eq!(hold(&mut lines, &hot, at(200_000)), Duration::ZERO);
    }

    #[test]
    fn what_is_remembered_and_how_long_anybody_waits_are_bounded() {
        let mut lines = Lines::default();
        for number in 0..LINES_MAX + 10 {
            let key = [Key::from(format!("k{number}"))];
            lines.saw(key.iter(), |_| true, Duration::from_secs(100), at(0));
        }
        assert_eq!(lines.by_key.len(), LINES_MAX);
        assert_eq!(hold(&mut lines, &[Key::from("k0")], at(0)), HOLD_MAX);
        let late = [Key::from("late")];
        lines.saw(late.iter(), |_| true, MS, at(60_000));
        assert_eq!(lines.by_key.len(), 1, "lines that are gone make room");
    }
}
