//! Names of transactions, and which names are no longer needed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use orthodrome_core::ordered::OrdSet;
use orthodrome_core::{ClientId, RegionId, TxnId};

/// Assigns the names of one client incarnation: those for one gateway, which registered it.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    client: ClientId,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    next: u64,
    /// Counters of transactions whose outcome a caller may still ask for.
    live: OrdSet<u64>,
}

/// The name of one attempt at a transaction. While a clone of it exists, the cluster keeps the
/// outcome.
#[derive(Clone, Debug)]
pub(crate) struct Name {
    id: TxnId,
    /// The region in which it began, once it has begun.
    home: Option<RegionId>,
    live: Arc<Live>,
}

#[derive(Debug)]
struct Live {
    counter: u64,
    names: Names,
    /// True if another request than the one that began an attempt told its outcome. Its gateway may not
    /// know the outcome, and then refuses the next attempt.
    is_resolved: AtomicBool,
}

impl Drop for Live {
    fn drop(&mut self) {
        self.names.lock().live.remove(&self.counter);
    }
}

impl Names {
    pub(crate) fn new(client: ClientId) -> Self {
        let state = State { next: 1, live: OrdSet::new() };
        Self { client, state: Arc::new(Mutex::new(state)) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that holds the lock can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn take(&self) -> Name {
        let mut state = self.lock();
        let counter = state.next;
        state.next += 1;
        state.live.insert(counter);
        let live = Live { counter, names: self.clone(), is_resolved: AtomicBool::new(false) };
        Name { id: TxnId::new(self.client, counter), home: None, live: Arc::new(live) }
    }

    /// True if both assign the same names.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// All transactions below this counter have ended, and nobody will ask for their outcomes
    /// (`acknowledged_below` of the API).
    pub(crate) fn acknowledged_below(&self) -> u64 {
        let state = self.lock();
        state.live.first().copied().unwrap_or(state.next)
    }
}

impl Name {
    pub(crate) fn id(&self) -> TxnId {
        self.id
    }

    /// Names an attempt that begins in region `home`, at the gateway that takes `names`. All attempts
    /// at a transaction begin at one gateway. So at another one the work continues as a new
    /// transaction; the earlier attempts are known to have had no effect.
    pub(crate) fn begin_at(&mut self, names: &Names, home: RegionId) {
        let has_moved = self.home.is_some_and(|begun_in| begun_in != home);
        if has_moved || !self.live.names.is(names) {
            *self = names.take();
        }
        self.home = Some(home);
    }

    /// Another request than the one that began the attempt told its outcome.
    pub(crate) fn was_resolved(&self) {
        self.live.is_resolved.store(true, Ordering::Relaxed);
    }

    /// Names the next attempt; the last one is known to have had no effect.
    pub(crate) fn retry(&mut self) {
        if self.live.is_resolved.load(Ordering::Relaxed) {
            *self = self.live.names.take();
        } else {
            self.id = self.id.retry();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_below_every_live_name_are_acknowledged() {
        let names = Names::new(ClientId(4));
        assert_eq!(names.acknowledged_below(), 1);
        let (first, mut second, third) = (names.take(), names.take(), names.take());
        drop(first);
        assert_eq!(names.acknowledged_below(), 2);
        drop(third);
        second.retry();
        assert_eq!(second.id().to_string(), "c4.2#1");
        assert_eq!(names.acknowledged_below(), 2, "the second may still be asked about");
        drop(second);
        assert_eq!(names.acknowledged_below(), 4);
    }

    #[test]
    fn a_name_stays_at_its_gateway_and_in_its_region() {
        let names = Names::new(ClientId(4));
        let mut name = names.take();
        name.begin_at(&names, RegionId(0));
        name.retry();
        name.begin_at(&names, RegionId(0));
        assert_eq!(name.id().to_string(), "c4.1#1");
        name.begin_at(&names, RegionId(2));
        assert_eq!(name.id().to_string(), "c4.2");
        assert_eq!(names.acknowledged_below(), 2, "the first is over");
        name.begin_at(&Names::new(ClientId(5)), RegionId(2));
        assert_eq!(name.id().to_string(), "c5.1");
    }

    #[test]
    fn the_attempt_after_one_that_was_resolved_has_a_new_counter() {
        let mut name = Names::new(ClientId(4)).take();
        let copy = name.clone();
        copy.was_resolved();
        name.retry();
        assert_eq!(name.id().to_string(), "c4.2");
        name.retry();
        assert_eq!(name.id().to_string(), "c4.2#1");
    }
}
