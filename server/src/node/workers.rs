//! Threads that help a machine during one step.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use orthodrome_core::workers::Workers;

/// Number of keys that justify one more thread: a read of the state engine takes about 4 µs, and
/// the start of a thread some 20 µs.
const KEYS_PER_THREAD: usize = 64;

/// The machine's own thread, and as many others as there is work for.
#[derive(Clone, Copy, Debug)]
pub struct Threads {
    /// Maximum number of threads, including the machine's own.
    most: NonZero<usize>,
}

impl Threads {
    /// Uses at most this number of threads; by default one for each processor.
    pub fn new(most: Option<NonZero<usize>>) -> Self {
        let processors = || thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
        Self { most: most.unwrap_or_else(processors) }
    }
}

impl Workers for Threads {
    fn each(&self, costs: &[usize], work: &(dyn Fn(usize) + Sync)) {
        let keys = costs.iter().sum::<usize>();
        let threads = self.most.get().min(keys / KEYS_PER_THREAD).min(costs.len());
        let next = AtomicUsize::new(0);
        let go_on = || {
            loop {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                if piece >= costs.len() {
                    return;
                }
                work(piece);
            }
        };
        thread::scope(|scope| {
            for number in 1..threads {
                let thread = thread::Builder::new().name(format!("worker {number}"));
                // If the thread cannot start, the others do its work.
                drop(thread.spawn_scoped(scope, go_on));
            }
            go_on();
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use orthodrome_core::ordered::OrdSet;

    use super::*;

    #[test]
    fn every_piece_is_done_once_and_by_several_threads_if_there_is_enough() {
        for (most, pieces, keys) in
            [(1, 500, 10), (4, 500, 10), (4, 3, 1_000), (4, 3, 1), (4, 0, 0)]
        {
            let threads = Threads::new(NonZero::new(most));
            let expected = if pieces * keys < 2 * KEYS_PER_THREAD { 1 } else { most.min(pieces) };
            let (done, by) = (Mutex::new(vec![0; pieces]), Mutex::new(OrdSet::new()));
            threads.each(&vec![keys; pieces], &|piece| {
                done.lock().unwrap()[piece] += 1;
                by.lock().unwrap().insert(format!("{:?}", thread::current().id()));
                // Waits until a second thread has started, if there is one.
                for _ in 0..10_000 {
                    if by.lock().unwrap().len() >= expected.min(2) {
                        break;
                    }
                    thread::sleep(std::time::Duration::from_millis(1));
                }
            });
            assert_eq!(done.into_inner().unwrap(), vec![1; pieces], "{threads:?}");
            let by = by.into_inner().unwrap().len();
            assert!(
                by <= expected.max(1) && (by > 1) == (expected > 1),
                "{by} of {expected} threads"
            );
        }
    }
}
