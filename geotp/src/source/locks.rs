//! The lock table of a modelled source: who holds a row, who waits for it, and for how long.

use std::collections::VecDeque;

use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Time;
use orthodrome_core::txn::Key;

use super::Source;
use super::types::{Desk, Mode, Order, Timer};
use crate::contract::{FromSource, Kind, Note, Reason, Wait, Xid};

#[derive(Clone, Default, Debug)]
pub(super) struct Lock {
    pub(super) holders: OrdMap<Xid, Mode>,
    pub(super) queue: VecDeque<(Xid, Mode)>,
}

impl Lock {
    fn admits(&self, xid: Xid, mode: Mode) -> bool {
        self.holders
            .iter()
            .all(|(&holder, &held)| holder == xid || (held == Mode::Shared && mode == Mode::Shared))
    }
}

impl Source {
    /// True if the lock is held now. A single holder may upgrade its lock; others wait behind
    /// earlier requests.
    pub(super) fn acquire(&mut self, xid: Xid, key: &Key, mode: Mode) -> bool {
        let lock = self.locks.entry(key.clone()).or_default();
        let held = lock.holders.get(&xid).copied();
        if held.is_some_and(|held| held >= mode) {
            return true;
        }
        if !lock.admits(xid, mode) || (held.is_none() && !lock.queue.is_empty()) {
            return false;
        }
        lock.holders.insert(xid, mode);
        if let Some(session) = self.sessions.get_mut(&xid) {
            session.held.insert(key.clone(), mode);
        }
        true
    }

    pub(super) fn wait(&mut self, xid: Xid, key: Key, mode: Mode, now: Time, desk: &mut Desk) {
        let lock = self.locks.entry(key.clone()).or_default();
        if lock.holders.contains_key(&xid) {
            // A lock upgrade goes before all other requests.
            lock.queue.push_front((xid, mode));
        } else {
            lock.queue.push_back((xid, mode));
        }
        if let Some(session) = self.sessions.get_mut(&xid) {
            session.wanted = Some((key, mode));
        }
        desk.orders.push(Order::Note(Note::LockWait));
        if self.kind == Kind::MariaDb {
            if self.waits_in_cycle(xid) {
                self.fail_waiting(xid, Reason::Deadlock, desk);
                return;
            }
        } else {
            desk.orders
                .push(Order::SetTimer(Timer::Deadlock(xid), now + self.config.deadlock_after));
        }
        desk.orders.push(Order::SetTimer(Timer::Lock(xid), now + self.config.lock_timeout));
        if let (Some(every), false) = (self.config.look_every, self.is_watched) {
            self.is_watched = true;
            desk.orders.push(Order::SetTimer(Timer::Look, now + every));
        }
    }

    /// The transactions for which it waits: the holders of the lock, and earlier requests.
    pub(super) fn blockers(&self, waiter: Xid) -> Vec<Xid> {
        let Some((key, mode)) =
            self.sessions.get(&waiter).and_then(|session| session.wanted.as_ref())
        else {
            return Vec::new();
        };
        let Some(lock) = self.locks.get(key) else { return Vec::new() };
        let clash = |other: Mode| *mode == Mode::Exclusive || other == Mode::Exclusive;
        let holders =
            lock.holders.iter().filter(|(_, held)| clash(**held)).map(|(&holder, _)| holder);
        let before = lock.queue.iter().take_while(|(other, _)| *other != waiter);
        let before = before.filter(|(_, wanted)| clash(*wanted)).map(|&(other, _)| other);
        holders.chain(before).filter(|&other| other != waiter).collect()
    }

    /// Reports the waits, if they have changed.
    pub(super) fn look(&mut self, now: Time, desk: &mut Desk) {
        let of = |&waiter: &Xid| {
            let blockers = self.blockers(waiter);
            blockers.into_iter().map(move |holder| Wait { waiter, holder })
        };
        let waits: Vec<Wait> = self.sessions.keys().flat_map(of).collect();
        self.is_watched = !waits.is_empty();
        if let (Some(every), true) = (self.config.look_every, self.is_watched) {
            desk.orders.push(Order::SetTimer(Timer::Look, now + every));
        }
        if waits != self.told {
            self.told.clone_from(&waits);
            desk.answers.push(FromSource::Waits { waits });
        }
    }

    /// True if it is part of a cycle of waits.
    pub(super) fn waits_in_cycle(&self, xid: Xid) -> bool {
        let mut seen = OrdSet::new();
        let mut next = vec![xid];
        while let Some(waiter) = next.pop() {
            for other in self.blockers(waiter) {
                if other == xid {
                    return true;
                }
                if seen.insert(other) {
                    next.push(other);
                }
            }
        }
        false
    }

    pub(super) fn fail_waiting(&mut self, xid: Xid, reason: Reason, desk: &mut Desk) {
        desk.orders.push(Order::CancelTimer(Timer::Lock(xid)));
        desk.orders.push(Order::CancelTimer(Timer::Deadlock(xid)));
        // It stays in the queue until it is rolled back, which happens at once.
        self.fail(xid, reason, desk);
    }

    /// Releases locks, and grants them to waiting transactions.
    pub(super) fn release(&mut self, xid: Xid, keys: &[Key], now: Time, desk: &mut Desk) {
        for key in keys {
            let Some(lock) = self.locks.get_mut(key) else { continue };
            lock.holders.remove(&xid);
            lock.queue.retain(|(other, _)| *other != xid);
        }
        self.serve_all(keys, now, desk);
    }

    /// Gives free locks to those who wait for them.
    pub(super) fn serve(&mut self, key: &Key, now: Time, desk: &mut Desk) {
        self.serve_all(std::slice::from_ref(key), now, desk);
    }

    pub(super) fn serve_all(&mut self, keys: &[Key], now: Time, desk: &mut Desk) {
        let mut served = Vec::new();
        for key in keys {
            let Some(lock) = self.locks.get_mut(key) else { continue };
            while let Some(&(next, mode)) = lock.queue.front() {
                if !lock.admits(next, mode) {
                    break;
                }
                lock.queue.pop_front();
                lock.holders.insert(next, mode);
                served.push((next, key.clone(), mode));
            }
            if lock.holders.is_empty() && lock.queue.is_empty() {
                self.locks.remove(key);
            }
        }
        for (next, key, mode) in served {
            let Some(session) = self.sessions.get_mut(&next) else { continue };
            session.held.insert(key, mode);
            session.wanted = None;
            desk.orders.push(Order::CancelTimer(Timer::Lock(next)));
            desk.orders.push(Order::CancelTimer(Timer::Deadlock(next)));
            self.go_on(next, now, desk);
        }
    }

    /// A timer expired.
    pub fn on_timer(&mut self, timer: Timer, now: Time, desk: &mut Desk) {
        self.now = now;
        match timer {
            Timer::Lock(xid) => {
                if self.sessions.get(&xid).is_some_and(|session| session.wanted.is_some()) {
                    self.fail_waiting(xid, Reason::LockTimeout, desk);
                }
            }
            Timer::Deadlock(xid) => {
                if self.waits_in_cycle(xid) {
                    self.fail_waiting(xid, Reason::Deadlock, desk);
                } else if self.sessions.get(&xid).is_some_and(|session| session.wanted.is_some()) {
                    // Cycles can close later: through an upgrade, behind a waiter's back.
                    desk.orders.push(Order::SetTimer(
                        Timer::Deadlock(xid),
                        now + self.config.deadlock_after,
                    ));
                }
            }
            Timer::Look => self.look(now, desk),
        }
    }
}
