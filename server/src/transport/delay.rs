//! An emulated wide-area link: frames wait at the sender for the one-way delay to their
//! destination, so that one machine can emulate many regions.
//!
//! There is one thread for each process, because tokio's timers round up to a millisecond. A thread
//! that waits on a condition variable wakes within about a tenth of that.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use crate::inbox::Inbox;

/// A waiting item, ordered by its due time, then by its arrival.
struct Waiting<T> {
    due: Instant,
    sequence: u64,
    item: T,
}

impl<T> PartialEq for Waiting<T> {
    fn eq(&self, other: &Self) -> bool {
        (self.due, self.sequence) == (other.due, other.sequence)
    }
}

impl<T> Eq for Waiting<T> {}

impl<T> PartialOrd for Waiting<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Waiting<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.sequence).cmp(&(other.due, other.sequence))
    }
}

/// A queue in which items wait until they are due. Items with the same due time leave in the order
/// of arrival. Dropping the queue drops its items.
pub(super) struct DelayLine<T> {
    inbox: Arc<Inbox<(Instant, T)>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> DelayLine<T> {
    /// Starts the thread, which passes each item to `release` when it is due.
    pub(super) fn start(mut release: impl FnMut(T) + Send + 'static) -> io::Result<Self> {
        let inbox: Arc<Inbox<(Instant, T)>> = Arc::default();
        let queue = inbox.clone();
        let thread = std::thread::Builder::new().name("wan".into()).spawn(move || {
            let mut heap: BinaryHeap<Reverse<Waiting<T>>> = BinaryHeap::new();
            let mut arrived = Vec::new();
            let mut sequence = 0;
            loop {
                let next = heap.peek().map(|Reverse(waiting)| waiting.due);
                if !queue.drain(&mut arrived, usize::MAX, next) {
                    break;
                }
                for (due, item) in arrived.drain(..) {
                    sequence += 1;
                    heap.push(Reverse(Waiting { due, sequence, item }));
                }
                let now = Instant::now();
                while heap.peek().is_some_and(|Reverse(waiting)| waiting.due <= now) {
                    if let Some(Reverse(waiting)) = heap.pop() {
                        release(waiting.item);
                    }
                }
            }
        })?;
        Ok(Self { inbox, thread: Some(thread) })
    }

    /// Releases `item` at `due`.
    pub(super) fn push(&self, due: Instant, item: T) {
        self.inbox.push((due, item));
    }
}

impl<T> Drop for DelayLine<T> {
    fn drop(&mut self) {
        self.inbox.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn items_leave_in_order_and_never_early() {
        let (sender, receiver) = mpsc::channel();
        let line = DelayLine::start(move |(number, due): (u32, Instant)| {
            let _ = sender.send((number, Instant::now().checked_duration_since(due)));
        })
        .unwrap();
        let left: Vec<(u32, Option<Duration>)> = loop {
            // Later items are due earlier, and some are due together.
            let start = Instant::now() + Duration::from_millis(100);
            for number in 0..200_u32 {
                let due = start + Duration::from_micros(u64::from(200 - number / 2 * 2) * 250);
                line.push(due, (number, due));
            }
            let all_waited = Instant::now() < start;
            let left = receiver.iter().take(200).collect();
            if all_waited {
                break left;
            }
        };
        let pairs: Vec<(u32, u32)> = left.chunks(2).map(|pair| (pair[0].0, pair[1].0)).collect();
        let expected: Vec<(u32, u32)> = (0..100).rev().map(|n| (2 * n, 2 * n + 1)).collect();
        assert_eq!(pairs, expected);
        assert!(left.iter().all(|(_, late)| late.is_some()), "early: {left:?}");
    }
}
