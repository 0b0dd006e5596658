//! How clients react when they receive reads or an outcome, and when a gateway dies.

use orthodrome_core::id::TxnId;
use orthodrome_core::machine::UNKNOWABLE;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Decision, Kind, Outcome, Reads};
use orthodrome_eval::workload::Step;

use super::active::{Action, Client};
use super::{BACK_OFF, Load};

impl Load {
    /// A gateway answered with reads.
    pub fn on_reads(&mut self, now: Time, gateway: u32, txn: TxnId, reads: Reads, hops: u16) {
        let Some(slot) = self.holder(txn, gateway) else { return };
        let Self { clients, workload, .. } = self;
        let Some(client) = clients.get_mut(slot as usize) else { return };
        let Some(active) = client.active.as_mut() else { return };
        if active.scan.as_ref().is_some_and(|scanning| !scanning.is_reading()) {
            return;
        }
        if active.reads.is_some() && active.decision.is_some() {
            // A resolved attempt reports its reads again. The decision remains.
            return;
        }
        let missing = active.round.iter().find(|key| !reads.contains_key(*key));
        if let Some(key) = missing {
            let problem = format!("{txn} received its reads without {key}, which it requested");
            self.failure.get_or_insert(problem);
            return;
        }
        active.hops = hops;
        let is_open = matches!(active.request.kind, Kind::Interactive | Kind::General);
        if is_open && !self.model.no_sessions && client.session.is_ahead_of(&reads) {
            // No client sees this: the gateway or the client library gives the attempt up.
            active.is_behind = true;
            active.decision = Some(Decision::Abort);
            self.schedule(slot, now, Action::Decide);
            return;
        }
        let mut all = active.reads.take().unwrap_or_default();
        all.extend(reads);
        let next = match active.request.kind {
            Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly => None,
            Kind::Interactive => {
                active.decision = Some(match &mut active.ahead {
                    Some(ahead) => ahead.decide(&all, &**workload),
                    None => workload.decide(&active.request, &all),
                });
                Some(Action::Decide)
            }
            Kind::General => Some(match workload.step(&active.request, &all) {
                Step::Read(keys) => {
                    active.round = keys;
                    Action::Read
                }
                Step::Decide(decision) => {
                    active.decision = Some(decision);
                    Action::Decide
                }
            }),
        };
        active.reads = Some(all);
        if let Some(next) = next {
            let at = now + self.model.decide;
            self.schedule(slot, at, next);
        }
    }

    /// A gateway answered with an outcome.
    pub fn on_finish(
        &mut self,
        now: Time,
        gateway: u32,
        (txn, outcome, path): (TxnId, Outcome, &'static str),
        hops: u16,
    ) {
        let told = self.oracle.as_mut().map_or(Ok(()), |oracle| oracle.told(txn, outcome));
        self.note_failure(told);
        let Some(slot) = self.holder(txn, gateway) else { return };
        if self.measured.contains(&now) && outcome != Outcome::Unknown {
            match self.counters.path.get_mut(path) {
                Some(count) => *count += 1,
                None => drop(self.counters.path.insert(path.into(), 1)),
            }
        }
        if self.client(slot).active.as_ref().is_some_and(|active| active.scan.is_some()) {
            self.on_scan_outcome(slot, now, outcome, hops);
            return;
        }
        match outcome {
            Outcome::Committed(at) => {
                self.check_commit(slot, at);
                self.remember(slot, at);
                self.write_history(slot, Some((now, outcome)), false);
                if !self.look_further(slot, now, hops) {
                    self.count_commit(slot, now, hops);
                    self.end(slot, now, false);
                }
            }
            Outcome::Aborted(reason) => self.on_aborted(slot, now, reason),
            Outcome::Unknown if path == UNKNOWABLE => self.on_unknowable(slot, now),
            // Nobody asked to commit it, so it has not committed and never will.
            Outcome::Unknown if self.is_undecided(slot) => {
                self.on_aborted(slot, now, AbortReason::Client);
            }
            Outcome::Unknown => self.schedule(slot, now + BACK_OFF, Action::Resolve),
        }
    }

    /// True if a transaction waits for its client's decision, or for what the client decides from.
    fn is_undecided(&mut self, slot: u32) -> bool {
        let is_open = |kind: &Kind| matches!(kind, Kind::Interactive | Kind::General);
        let active = self.client(slot).active.as_ref();
        active.is_some_and(|active| active.decision.is_none() && is_open(&active.request.kind))
    }

    /// From now on the client knows the reads and writes of its transaction (R11).
    pub(super) fn remember(&mut self, slot: u32, at: Timestamp) {
        let Client { active, session, .. } = self.client(slot);
        let Some(active) = active else { return };
        let nothing = Reads::new();
        let reads = active.reads.as_ref().unwrap_or(&nothing);
        session.read(reads);
        match (&active.request.kind, &active.decision) {
            (Kind::Interactive | Kind::General, Some(Decision::Commit(writes))) => {
                session.wrote(at, writes);
            }
            (Kind::Procedure(ops), _) => session.ran(at, ops),
            (Kind::Interactive | Kind::General, Some(Decision::Abort) | None)
            | (Kind::ReadOnly | Kind::StaleReadOnly, _) => {}
        }
    }

    /// A part of a general transaction committed. The next part follows, unless it was the last.
    fn look_further(&mut self, slot: u32, now: Time, hops: u16) -> bool {
        let Self { clients, workload, .. } = self;
        let Some(client) = clients.get_mut(slot as usize) else { return false };
        let Some(active) = &mut client.active else { return false };
        let Some(ahead) = active.ahead.as_mut().filter(|ahead| ahead.decision.is_none()) else {
            return false;
        };
        ahead.hops = ahead.hops.saturating_add(hops);
        ahead.seen.extend(active.reads.take().unwrap_or_default());
        active.request = ahead.next(&**workload);
        self.rename(slot);
        self.schedule(slot, now, Action::Begin);
        true
    }

    /// The client begins its next part under a new name.
    pub(super) fn rename(&mut self, slot: u32) {
        let client = self.client(slot);
        client.counter += 1;
        let txn = TxnId::new(client.id, client.counter);
        if let Some(active) = &mut client.active {
            active.start_over(txn);
        }
    }

    fn on_aborted(&mut self, slot: u32, now: Time, reason: AbortReason) {
        let retry = self.model.retry;
        let measured = self.measured.contains(&now);
        let Some(active) = self.client(slot).active.as_ref() else { return };
        let (txn, priority, is_final) = (active.txn, active.request.priority, active.is_final);
        let is_stale = active.ahead.as_ref().is_some_and(|ahead| ahead.is_stale);
        // It gave up because of older reads.
        let reason = if is_stale || active.is_behind { AbortReason::StaleRead } else { reason };
        let tries = active.ahead.as_ref().map_or(txn.attempt, |ahead| ahead.tries);
        // Clients may receive outcomes before participants do, so an audit may have to be retried.
        // The drain's limit ensures that it ends.
        let next = if is_final {
            Some(txn.retry())
        } else {
            retry.after(TxnId { attempt: tries, ..txn }, priority, reason)
        };
        self.write_history(slot, Some((now, Outcome::Aborted(reason))), next.is_some());
        if measured && !is_final {
            *self.counters.aborted.entry(reason).or_default() += 1;
        }
        if reason == AbortReason::Invalid {
            self.failure.get_or_insert(format!("{txn} was rejected as invalid"));
        }
        let Some(next) = next else {
            if measured {
                self.counters.failed += 1;
            }
            self.end(slot, now, false);
            return;
        };
        let Self { clients, workload, .. } = self;
        let Some(active) = clients.get_mut(slot as usize).and_then(|c| c.active.as_mut()) else {
            return;
        };
        if let Some(ahead) = &mut active.ahead {
            ahead.again();
            active.request = ahead.next(&**workload);
            self.rename(slot);
        } else {
            active.start_over(next);
        }
        let wait = match (is_final, reason == AbortReason::Overload) {
            (true, _) => BACK_OFF * 5,
            (false, true) => BACK_OFF,
            (false, false) => Duration::ZERO,
        };
        self.schedule(slot, now + wait, Action::Begin);
    }

    /// No node will ever know the outcome. The client accepts that.
    fn on_unknowable(&mut self, slot: u32, now: Time) {
        if self.client(slot).active.as_ref().is_some_and(|active| active.is_final) {
            // It only reads, so it can read again.
            self.on_aborted(slot, now, AbortReason::Recovery);
            return;
        }
        self.write_history(slot, None, false);
        if self.measured.contains(&now) {
            self.counters.failed += 1;
        }
        self.end(slot, now, true);
    }

    /// A gateway died with its pending transactions: their clients use another gateway, or die too.
    pub fn on_gateway_crash(&mut self, now: Time, gateway: u32) {
        for slot in 0..u32::try_from(self.clients.len()).unwrap_or(u32::MAX) {
            let client = self.clients.get(slot as usize);
            let Some(active) = client.and_then(|client| client.active.as_ref()) else { continue };
            // A transaction that has not been submitted yet goes to another gateway without further
            // action.
            if active.gateway != gateway {
                continue;
            }
            if self.rng.unit() < self.model.die_with_gateway && !active.is_final {
                self.write_unknown(slot);
                if self.measured.contains(&now) {
                    self.counters.failed += 1;
                }
                self.end(slot, now, true);
            } else if active.scan.is_some() {
                self.move_scan(slot, now);
            } else if active.next != Action::Begin || active.attempt_began < now {
                self.schedule(slot, now + BACK_OFF, Action::Resolve);
            }
        }
    }
}
