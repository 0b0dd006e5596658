//! Work spread over threads, handed out in order.

use std::num::NonZero;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// How work is spread.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    /// How many threads; none: one for each processor.
    pub threads: Option<u16>,
    /// How long new work is begun; none: until there is none left.
    pub minutes: Option<Duration>,
}

impl Pool {
    /// Calls `work` for each number, on several threads at once, and `take` on this thread for each
    /// result as it comes. Numbers are begun in order. Once `take` has answered false, or time is
    /// up, none is begun; what has been begun is still taken.
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
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        // The receiver is gone only if `take` panicked.
                        if number >= numbers.end || results.send(work(number)).is_err() {
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
}
