//! A queue to a thread: many senders, and one receiver that takes all items at once and can wait
//! until a deadline with the precision of the operating system (tokio's timers round to 1 ms).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// The queue. Shared through an `Arc`.
pub struct Inbox<T> {
    state: Mutex<State<T>>,
    ready: Condvar,
    /// Notified when the receiver has taken items.
    room: Notify,
    /// Number of senders that may be waiting for room.
    in_line: AtomicUsize,
}

struct State<T> {
    /// Taken before `items`.
    urgent: VecDeque<T>,
    items: VecDeque<T>,
    is_closed: bool,
    is_waiting: bool,
    /// [`Inbox::wake`] was called.
    is_woken: bool,
    /// When [`Inbox::rest`] ends of itself.
    alarm: Option<Instant>,
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
            is_woken: false,
            alarm: None,
        };
        Self {
            state: Mutex::new(state),
            ready: Condvar::new(),
            room: Notify::new(),
            in_line: AtomicUsize::new(0),
        }
    }
}

impl<T> Inbox<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        // A panic elsewhere leaves the queue consistent, because every change to it is one call.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an item; false if the receiver is gone. For senders that are bounded otherwise.
    pub fn push(&self, item: T) -> bool {
        let mut state = self.state();
        let is_open = state.add(item, |state| &mut state.items);
        let is_waiting = state.is_waiting;
        drop(state);
        if is_open && is_waiting {
            self.ready.notify_one();
        }
        is_open
    }

    /// Adds an item if fewer than `limit` are queued, otherwise returns it. False in the result:
    /// the receiver is gone.
    pub fn push_if_room(&self, item: T, limit: usize) -> Result<bool, T> {
        if self.state().items.len() >= limit {
            return Err(item);
        }
        Ok(self.push(item))
    }

    async fn push_in_line(&self, mut item: T, limit: usize) -> bool {
        let _place = InLine::take(&self.in_line);
        loop {
            let room = self.room.notified();
            match self.push_if_room(item, limit) {
                Ok(is_open) => return is_open,
                Err(back) => item = back,
            }
            room.await;
        }
    }

    /// Adds an item without waking the receiver: the sender must ensure that it is taken soon.
    /// False if the receiver is gone.
    pub fn put(&self, item: T) -> bool {
        self.state().add(item, |state| &mut state.items)
    }

    /// The same for an item that goes before all others but those added so.
    pub fn put_urgent(&self, item: T) -> bool {
        self.state().add(item, |state| &mut state.urgent)
    }

    /// The same once fewer than `limit` wait. This is how a connection stops reading when its receiver
    /// is behind; until there is room, the receiver's own thread is at work.
    pub async fn put_when_room(&self, item: T, limit: usize) -> bool {
        if self.state().items.len() < limit {
            return self.put(item);
        }
        self.wake();
        let is_open = self.push_in_line(item, limit).await;
        self.wake();
        is_open
    }

    /// Takes up to `limit` items, as many as there are.
    pub fn take(&self, into: &mut Vec<T>, limit: usize) {
        self.state().take(into, limit);
        self.make_room();
    }

    /// Ends a [`Inbox::rest`], or the next one.
    pub fn wake(&self) {
        let mut state = self.state();
        state.is_woken = true;
        let is_waiting = state.is_waiting;
        drop(state);
        if is_waiting {
            self.ready.notify_one();
        }
    }

    /// Sets the time at which [`Inbox::rest`] ends by itself.
    pub fn set_alarm(&self, at: Option<Instant>) {
        let mut state = self.state();
        let is_sooner = match (at, state.alarm) {
            (Some(at), Some(before)) => at < before,
            (Some(_), None) => true,
            (None, _) => false,
        };
        state.alarm = at;
        let is_waiting = state.is_waiting;
        drop(state);
        if is_sooner && is_waiting {
            self.ready.notify_one();
        }
    }

    /// Waits until [`Inbox::wake`], the alarm or the end. False: the queue is closed.
    pub fn rest(&self) -> bool {
        let mut state = self.state();
        loop {
            if state.is_closed {
                return false;
            }
            if std::mem::take(&mut state.is_woken) {
                return true;
            }
            let span = state.alarm.map(|at| at.saturating_duration_since(Instant::now()));
            state.is_waiting = true;
            state = match span {
                None => self.ready.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => {
                    (state.is_waiting, state.alarm) = (false, None);
                    return true;
                }
                Some(span) => {
                    let waited = self.ready.wait_timeout(state, span);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
            state.is_waiting = false;
        }
    }

    fn make_room(&self) {
        if self.in_line.load(Ordering::SeqCst) > 0 {
            self.room.notify_waiters();
        }
    }

    /// Takes up to `limit` items. Waits until there is one, or until `deadline` if there is one.
    /// False: the queue is closed and empty.
    pub fn drain(&self, into: &mut Vec<T>, limit: usize, deadline: Option<Instant>) -> bool {
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
        state.take(into, limit);
        drop(state);
        self.make_room();
        true
    }

    /// Refuses further items; queued ones can still be taken.
    pub fn close(&self) {
        self.state().is_closed = true;
        self.ready.notify_one();
        self.room.notify_waiters();
    }

    /// The number of queued items.
    pub(crate) fn len(&self) -> usize {
        let state = self.state();
        state.urgent.len() + state.items.len()
    }
}

impl<T> State<T> {
    /// False, and nothing is added, if the receiver is gone.
    fn add(&mut self, item: T, to: impl FnOnce(&mut Self) -> &mut VecDeque<T>) -> bool {
        if !self.is_closed {
            to(self).push_back(item);
        }
        !self.is_closed
    }

    fn take(&mut self, into: &mut Vec<T>, limit: usize) {
        let count = limit.min(self.urgent.len());
        into.extend(self.urgent.drain(..count));
        let count = (limit - count).min(self.items.len());
        into.extend(self.items.drain(..count));
    }

    fn is_empty(&self) -> bool {
        self.urgent.is_empty() && self.items.is_empty()
    }
}

/// Counts a sender that waits for room.
struct InLine<'a>(&'a AtomicUsize);

impl<'a> InLine<'a> {
    fn take(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

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
    fn a_rest_ends_by_a_call_the_alarm_or_the_end() {
        let inbox = Arc::new(Inbox::default());
        assert!(inbox.put(1), "nobody is woken for it");
        inbox.wake();
        assert!(inbox.rest());
        let start = Instant::now();
        inbox.set_alarm(Some(start + Duration::from_millis(20)));
        assert!(inbox.rest() && start.elapsed() >= Duration::from_millis(20));
        // An earlier alarm applies to a thread that is already resting; a later one does not wake
        // it.
        inbox.set_alarm(Some(start + Duration::from_secs(3_600)));
        let other = inbox.clone();
        let thread = std::thread::spawn(move || other.rest());
        inbox.set_alarm(Some(Instant::now()));
        assert!(thread.join().unwrap());
        let mut got = Vec::new();
        inbox.take(&mut got, 10);
        inbox.close();
        assert!(!inbox.rest() && !inbox.put(2));
        inbox.take(&mut got, 10);
        assert_eq!(got, [1]);
    }

    #[tokio::test]
    async fn a_full_inbox_wakes_the_thread_that_empties_it() {
        let inbox = Arc::new(Inbox::default());
        assert!(inbox.put_when_room(1, 1).await);
        let sender = inbox.clone();
        let waiting = tokio::spawn(async move { sender.put_when_room(2, 1).await });
        let receiver = inbox.clone();
        let taken = tokio::task::spawn_blocking(move || {
            let mut got = Vec::new();
            while got.len() < 2 && receiver.rest() {
                receiver.take(&mut got, 10);
            }
            got
        });
        assert!(waiting.await.unwrap());
        assert_eq!(taken.await.unwrap(), [1, 2]);
    }

    #[test]
    fn what_is_urgent_is_taken_first_and_in_its_order() {
        let (inbox, mut got) = (Inbox::default(), Vec::new());
        assert!(inbox.push(1) && inbox.put_urgent(2) && inbox.push(3) && inbox.put_urgent(4));
        assert_eq!(inbox.len(), 4);
        assert!(inbox.drain(&mut got, 3, None));
        assert_eq!(got, [2, 4, 1]);
        assert!(inbox.drain(&mut got, 3, None));
        assert_eq!(got, [2, 4, 1, 3]);
    }

    #[tokio::test]
    async fn a_full_inbox_makes_its_senders_wait() {
        let inbox = Arc::new(Inbox::default());
        assert!(inbox.put_when_room(1, 1).await);
        let sender = inbox.clone();
        let waiting = tokio::spawn(async move { sender.put_when_room(2, 1).await });
        tokio::task::yield_now().await;
        assert_eq!(inbox.len(), 1);
        let mut got = Vec::new();
        assert!(inbox.drain(&mut got, 10, None));
        assert!(waiting.await.unwrap());
        assert!(inbox.drain(&mut got, 10, None));
        assert_eq!(got, [1, 2]);
    }
}
