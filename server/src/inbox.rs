//! A queue into a thread: many senders, one receiver that takes everything at once and can wait
//! until a deadline with the precision of the operating system (tokio's timers round to 1 ms).

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;

/// The queue. Shared through an `Arc`.
pub(crate) struct Inbox<T> {
    state: Mutex<State<T>>,
    ready: Condvar,
    /// Notified when the receiver has taken items.
    room: Notify,
}

struct State<T> {
    /// Taken before `items`.
    urgent: VecDeque<T>,
    items: VecDeque<T>,
    is_closed: bool,
    is_waiting: bool,
}

impl<T> std::fmt::Debug for Inbox<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state();
        f.debug_struct("Inbox")
            .field("urgent", &state.urgent.len())
            .field("items", &state.items.len())
            .field("is_closed", &state.is_closed)
            .finish()
    }
}

impl<T> Default for Inbox<T> {
    fn default() -> Self {
        let state = State {
            urgent: VecDeque::new(),
            items: VecDeque::new(),
            is_closed: false,
            is_waiting: false,
        };
        Self { state: Mutex::new(state), ready: Condvar::new(), room: Notify::new() }
    }
}

impl<T> Inbox<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        // A panic elsewhere leaves the queue whole: every change to it is one call.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an item; false if the receiver is gone. For senders that are bounded elsewhere.
    pub(crate) fn push(&self, item: T) -> bool {
        self.add(item, |state| &mut state.items)
    }

    /// Adds an item that goes before all others but those added so; false if the receiver is gone.
    pub(crate) fn push_urgent(&self, item: T) -> bool {
        self.add(item, |state| &mut state.urgent)
    }

    fn add(&self, item: T, to: impl FnOnce(&mut State<T>) -> &mut VecDeque<T>) -> bool {
        let mut state = self.state();
        if state.is_closed {
            return false;
        }
        to(&mut state).push_back(item);
        let is_waiting = state.is_waiting;
        drop(state);
        if is_waiting {
            self.ready.notify_one();
        }
        true
    }

    /// Adds an item if fewer than `limit` wait; gives it back if not. False in the result: the
    /// receiver is gone.
    pub(crate) fn push_if_room(&self, item: T, limit: usize) -> Result<bool, T> {
        if self.state().items.len() >= limit {
            return Err(item);
        }
        Ok(self.push(item))
    }

    /// Adds an item once fewer than `limit` wait; false if the receiver is gone. This is how a
    /// connection stops reading when its receiver is behind.
    pub(crate) async fn push_when_room(&self, mut item: T, limit: usize) -> bool {
        loop {
            let room = self.room.notified();
            match self.push_if_room(item, limit) {
                Ok(is_open) => return is_open,
                Err(back) => item = back,
            }
            room.await;
        }
    }

    /// Takes up to `limit` items, waiting until there is one or `deadline` has come; for ever, if
    /// there is none. False: the queue is closed and empty.
    pub(crate) fn drain(&self, into: &mut Vec<T>, limit: usize, deadline: Option<Instant>) -> bool {
        let mut state = self.state();
        while state.is_empty() {
            if state.is_closed {
                return false;
            }
            state.is_waiting = true;
            state = match deadline {
                None => self.ready.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let span = deadline.saturating_duration_since(Instant::now());
                    if span.is_zero() {
                        state.is_waiting = false;
                        return true;
                    }
                    let waited = self.ready.wait_timeout(state, span);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
            state.is_waiting = false;
        }
        let State { urgent, items, .. } = &mut *state;
        let count = limit.min(urgent.len());
        into.extend(urgent.drain(..count));
        let count = (limit - count).min(items.len());
        into.extend(items.drain(..count));
        drop(state);
        self.room.notify_waiters();
        true
    }

    /// Takes no more items; what is queued can still be drained.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.ready.notify_one();
        self.room.notify_waiters();
    }

    /// How many items wait.
    pub(crate) fn len(&self) -> usize {
        let state = self.state();
        state.urgent.len() + state.items.len()
    }
}

impl<T> State<T> {
    fn is_empty(&self) -> bool {
        self.urgent.is_empty() && self.items.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn a_drain_waits_for_an_item_or_the_deadline() {
        let inbox = Arc::new(Inbox::default());
        let mut got = Vec::new();
        let start = Instant::now();
        assert!(inbox.drain(&mut got, 10, Some(start + Duration::from_millis(20))));
        assert!(got.is_empty() && start.elapsed() >= Duration::from_millis(20));
        let sender = inbox.clone();
        let thread = std::thread::spawn(move || (0..3).all(|n| sender.push(n)));
        while got.len() < 3 {
            assert!(inbox.drain(&mut got, 2, None));
        }
        assert_eq!(got, [0, 1, 2]);
        assert!(thread.join().unwrap());
        inbox.push(9);
        inbox.close();
        assert!(!inbox.push(10));
        assert!(inbox.drain(&mut got, 10, None), "what was queued is still there");
        assert!(!inbox.drain(&mut got, 10, None));
        assert_eq!(got, [0, 1, 2, 9]);
    }

    #[test]
    fn what_is_urgent_is_taken_first_and_in_its_order() {
        let (inbox, mut got) = (Inbox::default(), Vec::new());
        assert!(inbox.push(1) && inbox.push_urgent(2) && inbox.push(3) && inbox.push_urgent(4));
        assert_eq!(inbox.len(), 4);
        assert!(inbox.drain(&mut got, 3, None));
        assert_eq!(got, [2, 4, 1]);
        assert!(inbox.drain(&mut got, 3, None));
        assert_eq!(got, [2, 4, 1, 3]);
    }

    #[tokio::test]
    async fn a_full_inbox_makes_its_senders_wait() {
        let inbox = Arc::new(Inbox::default());
        assert!(inbox.push_when_room(1, 1).await);
        let sender = inbox.clone();
        let waiting = tokio::spawn(async move { sender.push_when_room(2, 1).await });
        tokio::task::yield_now().await;
        assert_eq!(inbox.len(), 1);
        let mut got = Vec::new();
        assert!(inbox.drain(&mut got, 10, None));
        assert!(waiting.await.unwrap());
        assert!(inbox.drain(&mut got, 10, None));
        assert_eq!(got, [1, 2]);
    }
}
