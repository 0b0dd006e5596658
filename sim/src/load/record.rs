//! Records transactions that have ended: figures, the history, and the oracle's findings.

use std::borrow::Cow;

use orthodrome_core::ordered::OrdMap;
use orthodrome_core::scan::is_fence;
use orthodrome_core::time::{Time, Timestamp, nanos};
use orthodrome_core::txn::{Decision, Key, Kind, Op, Outcome, Reads, Txn, Writes};
use orthodrome_eval::record::{Attempt, deletes, entry};

use super::active::{Active, LOOK};
use super::scanning::without_fences;
use super::{Arrival, FINAL_READ, Load};

impl Load {
    pub(super) fn count_commit(&mut self, slot: u32, now: Time, hops: u16) {
        let Self { clients, counters, latencies, measured, .. } = self;
        let Some(client) = clients.get(slot as usize) else { return };
        let Some(active) = &client.active else { return };
        if active.is_final || !measured.contains(&now) {
            return;
        }
        let latency = now.since(active.began);
        counters.committed += 1;
        latencies.record_kind(active.request.name, latency);
        if active.request.is_watch() {
            return;
        }
        latencies.record(active.request.priority, client.region, latency);
        let reach = self.floor.reach(client.region, &active.request);
        latencies.record_kind(reach.name(), latency);
        let hops = active.ahead.as_ref().map_or(hops, |ahead| ahead.hops.saturating_add(hops));
        let floor = nanos(active.floor).max(1);
        counters.floor_ratio_millis.record(nanos(latency).saturating_mul(1_000) / floor);
        counters.wan_round_trip_millis.record(u64::from(hops) * 500);
    }

    /// Gives everything that is pending at the end of the run an unknown outcome.
    pub fn abandon(&mut self) {
        for slot in 0..u32::try_from(self.clients.len()).unwrap_or(u32::MAX) {
            if self.client(slot).active.is_some() {
                self.write_unknown(slot);
                self.client(slot).active = None;
                self.outstanding -= 1;
            }
        }
    }

    /// The client's transaction has ended; in a closed loop the next one follows. A client with an
    /// unknown outcome continues under another id, because its old id promises that it knows the
    /// outcomes of all its transactions.
    pub(super) fn end(&mut self, slot: u32, now: Time, is_unknown: bool) {
        if is_unknown {
            let id = self.incarnate(slot);
            let client = self.client(slot);
            (client.id, client.counter) = (id, 0);
        }
        let client = self.client(slot);
        client.serial += 1;
        let gateway = client.gateway;
        let Some(active) = client.active.take() else { return };
        self.outstanding -= 1;
        if active.is_final {
            return;
        }
        match self.model.arrival {
            Arrival::Open { .. } => self.idle.entry(gateway).or_default().push(slot),
            Arrival::Closed { think, .. } => self.next_transaction(slot, now + think),
        }
    }

    pub(super) fn note_failure(&mut self, result: Result<(), String>) {
        if let Err(problem) = result {
            self.failure.get_or_insert(problem);
        }
    }

    pub(super) fn check_commit(&mut self, slot: u32, at: Timestamp) {
        let Some(active) = self.clients.get(slot as usize).and_then(|c| c.active.as_ref()) else {
            return;
        };
        let nothing = Reads::new();
        if self.workload.has_scans() && !active.request.writes.is_empty() {
            let written = written(active, active.reads.as_ref().unwrap_or(&nothing));
            let txn = active.txn.name();
            self.check_watches(at, txn, written);
        }
        let Some(active) = self.clients.get(slot as usize).and_then(|c| c.active.as_ref()) else {
            return;
        };
        let result = match &active.reads {
            None if !active.request.reads.is_empty() && !active.has_lost_reads() => {
                Err(format!("{} committed, but its client received no reads", active.txn))
            }
            reads => {
                let reads = reads.as_ref().unwrap_or(&nothing);
                let is_own = [FINAL_READ, LOOK].contains(&active.request.name);
                if active.is_final && !is_own {
                    self.final_state.extend(reads.clone());
                }
                let audit = if is_own || active.has_lost_reads() {
                    Ok(())
                } else {
                    self.workload.audit(&active.request, reads)
                };
                let audit = audit.map_err(|problem| format!("{}: {problem}", active.txn));
                match &mut self.oracle {
                    None => audit,
                    Some(oracle) if active.is_final => audit.and(oracle.judge_final(reads)),
                    Some(oracle) => {
                        let written = written(active, reads);
                        let element = active.request.parameter;
                        audit.and(oracle.committed(active.txn, at, reads, &written, element))
                    }
                }
            }
        };
        self.note_failure(result);
    }

    /// Records that the outcome of the client's transaction is unknown. Of a scan, only reads that
    /// committed are recorded.
    pub(super) fn write_unknown(&mut self, slot: u32) {
        if self.client(slot).active.as_ref().is_some_and(|active| active.scan.is_some()) {
            self.record_read(slot, None);
        } else {
            self.write_history(slot, None, false);
        }
    }

    pub(super) fn write_history(
        &mut self,
        slot: u32,
        completed: Option<(Time, Outcome)>,
        is_retried: bool,
    ) {
        let Some(client) = self.clients.get(slot as usize) else { return };
        let Some(active) = &client.active else { return };
        if let (None, Some(oracle)) = (completed, &mut self.oracle) {
            oracle.may_delete(active.txn, maybe_deleted(active));
        }
        let Some(sink) = &mut self.history else { return };
        let mut request = Cow::Borrowed(&active.request);
        if active.has_lost_reads() {
            request.to_mut().reads.clear();
        }
        let mut reads = active.reads.as_ref().map(Cow::Borrowed);
        if active.scan.is_some() {
            request.to_mut().reads.retain(|key| !is_fence(key));
            reads = reads.map(|reads| Cow::Owned(without_fences(reads.into_owned())));
        }
        let region = self.regions.get(usize::from(client.region.0));
        let attempt = Attempt {
            request: &request,
            txn: active.txn,
            region: region.map_or("?", String::as_str),
            invoked: active.attempt_began,
            completed,
            reads: reads.as_deref(),
            decision: active.decision.as_ref(),
            is_retried,
        };
        match entry(&attempt, self.workload.values()) {
            Ok(entry) => sink(entry),
            Err(problem) => drop(self.failure.get_or_insert(problem.to_string())),
        }
    }
}

/// True if its reads are shown before it is known to commit, or may be old: the client's session
/// checks those. Other kinds are checked against the order of all transactions.
pub(super) fn shows_reads(kind: &Kind) -> bool {
    match kind {
        Kind::Interactive | Kind::General | Kind::StaleReadOnly => true,
        Kind::Procedure(_) | Kind::ReadOnly => false,
    }
}

/// The keys that a transaction with those reads wrote if it committed, and whether it deleted them.
fn written(active: &Active, reads: &Reads) -> OrdMap<Key, bool> {
    let keys = |writes: &Writes| {
        writes.iter().map(|(key, value)| (key.clone(), value.is_none())).collect()
    };
    match (&active.request.kind, &active.decision) {
        (Kind::ReadOnly | Kind::StaleReadOnly, _) => OrdMap::new(),
        (Kind::Interactive | Kind::General, None | Some(Decision::Abort)) => OrdMap::new(),
        (Kind::Interactive | Kind::General, Some(Decision::Commit(writes))) => keys(writes),
        // Its guards held, so it writes every key that it declared.
        (Kind::Procedure(ops), _) if active.has_lost_reads() => declared(active, ops),
        (Kind::Procedure(ops), _) => {
            Txn::execute(ops, reads).map_or_else(|_| OrdMap::new(), |writes| keys(&writes))
        }
    }
}

/// The keys that a procedure declared to write, and whether it deletes them.
fn declared(active: &Active, ops: &[Op]) -> OrdMap<Key, bool> {
    active.request.writes.iter().map(|key| (key.clone(), deletes(ops, key))).collect()
}

/// The keys that a transaction without outcome may have deleted.
fn maybe_deleted(active: &Active) -> Vec<Key> {
    let written = match &active.request.kind {
        Kind::Procedure(ops) => declared(active, ops),
        Kind::Interactive | Kind::General | Kind::ReadOnly | Kind::StaleReadOnly => {
            written(active, &Reads::new())
        }
    };
    written.into_iter().filter_map(|(key, deleted)| deleted.then_some(key)).collect()
}
