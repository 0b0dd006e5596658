//! Distributes work over threads, in order.

use std::num::NonZero;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::output;

/// The settings of a pool of threads.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    /// Number of threads; none: one for each processor.
    pub threads: Option<u16>,
    /// Time after which no new work is started; none: no limit.
    pub minutes: Option<Duration>,
}

impl Pool {
    /// A pool with this number of threads, without a time limit.
    pub fn of(threads: Option<u16>) -> Self {
        Self { threads, minutes: None }
    }

    /// Calls `work` for the numbers below `jobs` and `take` for each result, as [`Pool::run`] does,
    /// and shows a progress bar with the label `what`. The first error ends it: no further work is
    /// started.
    pub fn shown<T: Send>(
        self,
        what: &str,
        jobs: u64,
        work: impl Fn(u64) -> anyhow::Result<T> + Sync,
        mut take: impl FnMut(T) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let bar = output::progress(Some(jobs), "{spinner} {msg}: {pos}/{len} {bar:20} {elapsed}")?;
        bar.set_message(what.to_owned());
        let mut outcome = Ok(());
        self.run(0..jobs, work, |result| {
            bar.inc(1);
            let taken = result.and_then(&mut take);
            if outcome.is_ok() {
                outcome = taken;
            }
            outcome.is_ok()
        });
        bar.finish_and_clear();
        outcome
    }

    /// Calls `work` for each number, on several threads, and `take` on this thread for each result
    /// as it comes. Numbers are started in order. When `take` has returned false, or time is up, no
    /// further number is started; results of numbers that were started are still taken.
    pub fn run<T: Send>(
        self,
        numbers: Range<u64>,
        work: impl Fn(u64) -> T + Sync,
        mut take: impl FnMut(T) -> bool,
    ) {
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        let threads = self.threads.map_or(processors, usize::from);
        let (next, is_over) = (AtomicU64::new(numbers.start), AtomicBool::new(false));
        let began = Instant::now();
        let is_late = || self.minutes.is_some_and(|limit| began.elapsed() >= limit);
        let (results, inbox) = mpsc::sync_channel(threads);
        thread::scope(|scope| {
            for _ in 0..threads {
                let results = results.clone();
                scope.spawn(|| {
                    let results = results;
                    while !is_over.load(Ordering::Relaxed) && !is_late() {
                        let after = |number| (number < numbers.end).then(|| number + 1);
                        let order = Ordering::Relaxed;
                        let Ok(number) = next.fetch_update(order, order, after) else { break };
                        // The receiver is gone only if `take` panicked.
                        if results.send(work(number)).is_err() {
                            break;
                        }
                    }
                });
            }
            drop(results);
            for result in inbox {
                if !take(result) {
                    is_over.store(true, Ordering::Relaxed);
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use anyhow::{anyhow, bail};

    use super::*;

    #[test]
    fn everything_is_done_once_unless_there_is_enough() {
        let pool = Pool { threads: Some(4), minutes: None };
        let mut taken = Vec::new();
        pool.run(
            10..200,
            |number| number,
            |number| {
                taken.push(number);
                true
            },
        );
        taken.sort_unstable();
        assert_eq!(taken, (10..200).collect::<Vec<_>>());

        let last = u64::MAX - 2..u64::MAX;
        let mut count = 0;
        pool.run(
            last,
            |number| number,
            |_| {
                count += 1;
                true
            },
        );
        assert_eq!(count, 2, "no number follows the largest");

        let mut taken = Vec::new();
        pool.run(
            0..1_000_000,
            |number| number,
            |number| {
                taken.push(number);
                false
            },
        );
        assert!(taken.contains(&0), "numbers are begun in order");
        assert!(taken.len() < 100, "{} were begun after there was enough", taken.len());

        let pool = Pool { threads: Some(2), minutes: Some(Duration::ZERO) };
        pool.run(0..10, |number| number, |_| unreachable!("time was up before it began"));
    }

    #[test]
    fn the_first_error_of_either_side_ends_it() {
        let pool = Pool::of(Some(1));
        let mut taken = Vec::new();
        let odd = |number: u64| match number {
            3 => Err(anyhow!("three")),
            _ => Ok(number),
        };
        let mut take = |number| {
            taken.push(number);
            Ok(())
        };
        assert_eq!(pool.shown("all", 3, odd, &mut take).map_err(|error| error.to_string()), Ok(()));
        let error = pool.shown("all", 1_000_000, odd, &mut take).unwrap_err();
        assert_eq!(error.to_string(), "three");
        assert!(taken.len() < 20, "{} were taken after an error", taken.len());
        let error = pool.shown("all", 3, odd, |number| bail!("not {number}")).unwrap_err();
        assert_eq!(error.to_string(), "not 0");
    }
}
