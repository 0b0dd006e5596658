//! The names of the transactions of all Redis clients of a node. They count as one client of the
//! database, which runs many transactions at once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use orthodrome_core::ordered::OrdSet;
use orthodrome_core::{ClientId, TxnId};

/// Gives names. A clone gives names of the same client.
#[derive(Clone, Debug, Default)]
pub(super) struct Names(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    last: u64,
    /// Counters of transactions that are pending.
    live: OrdSet<u64>,
}

/// The name of a transaction that is pending. The cluster keeps its outcome until this is
/// dropped.
#[derive(Debug)]
pub(super) struct Name {
    names: Names,
    counter: u64,
}

impl Drop for Name {
    fn drop(&mut self) {
        self.names.lock().live.remove(&self.counter);
    }
}

impl Name {
    /// The first attempt of the transaction, by this client.
    pub(super) fn of(&self, client: ClientId) -> TxnId {
        TxnId::new(client, self.counter)
    }
}

impl Names {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that holds the lock can leave the state half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next name.
    pub(super) fn take(&self) -> Name {
        let mut state = self.lock();
        state.last += 1;
        let counter = state.last;
        state.live.insert(counter);
        Name { names: self.clone(), counter }
    }

    /// All transactions below this counter have ended.
    pub(super) fn acknowledged_below(&self) -> u64 {
        let state = self.lock();
        state.live.first().copied().unwrap_or(state.last + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_below_every_live_name_are_acknowledged() {
        let names = Names::default();
        assert_eq!(names.acknowledged_below(), 1);
        let (first, second) = (names.take(), names.take());
        assert_eq!(second.of(ClientId(4)).to_string(), "c4.2");
        drop(second);
        assert_eq!(names.acknowledged_below(), 1);
        drop(first);
        assert_eq!(names.acknowledged_below(), 3);
    }
}
