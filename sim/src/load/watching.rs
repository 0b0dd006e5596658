//! Watches of clients, and their checks: a watch shows every acknowledged change of its range, once, in
//! the order of commit timestamps, also if it ends and goes on later.

use orthodrome_core::id::{RegionId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::scan::KeyRange;
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::Key;
use orthodrome_core::watch::{Batch, Step, WatchError, Watcher};

use super::active::Action;
use super::ranging::Watched;
use super::scanning::Driven;
use super::{BACK_OFF, Load};

/// A pending watch of a client.
#[derive(Debug)]
pub(super) struct Watching {
    pub(super) watcher: Watcher,
    range: KeyRange,
    /// The watch ends after so many batches at the earliest.
    batches_left: u32,
    /// It ends when it has shown everything up to here: what was acknowledged when it began.
    goal: Timestamp,
}

impl Load {
    /// The client's watch begins, from where its previous one ended.
    pub(super) fn begin_watch(
        &mut self,
        slot: u32,
        (range, batches): (KeyRange, u32),
        home: RegionId,
        now: Time,
    ) {
        if self.is_final(slot) && self.client(slot).watched.is_none() {
            // It goes on where another client has ended.
            let watched = self.clients.iter_mut().find_map(|client| client.watched.take());
            self.client(slot).watched = watched;
        }
        let watched = self.client(slot).watched.as_ref();
        let range = watched.map_or(range, |watched| watched.range().clone());
        let after = watched.map(Watched::through);
        let shares = self.abilities.shares;
        let goal = self.committed.last_key_value().map(|((at, _), _)| *at).unwrap_or_default();
        let watched = (range.clone(), after);
        match Watcher::new(self.floor.cluster(), shares, home, watched, now) {
            Ok((mut watcher, steps)) => {
                if self.model.hasty_watches {
                    watcher.without_waiting();
                }
                let watching = Watching { watcher, range, batches_left: batches, goal };
                if let Some(scanning) = self.scanning(slot) {
                    scanning.driven = Some(Driven::Watch(Box::new(watching)));
                }
                self.take_watch_steps(slot, steps, now);
            }
            Err(error) => self.note_failure(Err(error.to_string())),
        }
    }

    fn is_final(&mut self, slot: u32) -> bool {
        self.client(slot).active.as_ref().is_some_and(|active| active.is_final)
    }

    pub(super) fn take_watch_steps(&mut self, slot: u32, steps: Vec<Step>, now: Time) {
        for step in steps {
            match step {
                Step::Ask(to, ask) => self.ask(slot, to, ask),
                Step::Read(keys) => self.begin_read(slot, keys, now),
                Step::Batch(batch) => {
                    if self.on_batch(slot, batch, now) {
                        return;
                    }
                }
                Step::Failed(error) => return self.on_watch_failed(slot, error, now),
            }
        }
        self.await_deadline(slot);
    }

    /// Takes a batch. True if the watch has ended.
    fn on_batch(&mut self, slot: u32, batch: Batch, now: Time) -> bool {
        let Self { clients, committed, .. } = self;
        let Some(client) = clients.get_mut(slot as usize) else { return true };
        let scanning = client.active.as_mut().and_then(|active| active.scan.as_deref_mut());
        let Some(scanning) = scanning else { return true };
        let hops = scanning.hops();
        let Some(Driven::Watch(watching)) = &mut scanning.driven else { return true };
        watching.batches_left = watching.batches_left.saturating_sub(1);
        let through = batch.through;
        let has_ended = watching.batches_left == 0 && watching.goal <= through;
        let taken = match &mut client.watched {
            Some(watched) => watched.take(batch, committed),
            None => {
                client.watched = Some(Watched::new(watching.range.clone(), through));
                Ok(())
            }
        };
        self.note_failure(taken);
        if has_ended {
            self.count_commit(slot, now, hops);
            self.end(slot, now, false);
        }
        has_ended
    }

    /// Nobody remembers where the watch should go on, or its read cannot run. It begins again, from now on.
    fn on_watch_failed(&mut self, slot: u32, error: WatchError, now: Time) {
        match error {
            WatchError::TooOld { .. } => {
                *self.counters.path.entry("watch-too-old".into()).or_default() += 1;
            }
            WatchError::Future { .. } | WatchError::Refused(_) | WatchError::NoFence => {
                self.note_failure(Err(error.to_string()));
            }
        }
        self.client(slot).watched = None;
        if let Some(scanning) = self.scanning(slot) {
            scanning.reset();
        }
        self.schedule(slot, now + BACK_OFF * 5, Action::Begin);
    }

    /// A transaction was acknowledged: watches that have passed it must have shown it.
    pub(super) fn check_watches(&mut self, at: Timestamp, txn: TxnId, written: OrdMap<Key, bool>) {
        let mut checked = Ok(());
        for (key, deleted) in written {
            for watched in self.clients.iter().filter_map(|client| client.watched.as_ref()) {
                checked = checked.and_then(|()| watched.check(at, &key, txn, deleted));
            }
            self.committed.insert((at, key), (txn, deleted));
        }
        self.note_failure(checked);
    }
}
