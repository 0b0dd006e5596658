//! The periodic work of a server: it repeats overdue requests, and compares sums.

use std::sync::Arc;

use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::time::{Duration, Time};

use super::super::checks::Span;
use super::super::message::{Msg, Sequenced};
use super::super::{Cx, Note, Timer};
use super::Server;
use crate::waiting::RetryState;

/// The window in which repetitions are counted, see [`Again`].
const AGAIN_WINDOW: Duration = Duration::from_millis(250);
/// The least and the largest number of repetitions allowed in a window.
const AGAIN: std::ops::RangeInclusive<usize> = 4..=1_024;
/// The interval at which streams exchange acknowledgements. It examines everything that they
/// remember.
const ACKNOWLEDGE_AFTER: Duration = Duration::from_secs(1);
/// In the long run, no transaction is sent again at shorter intervals than this, unless the
/// settings say so.
const AGAIN_AFTER: Duration = Duration::from_secs(4);

/// True if a transaction should be sent again: after `timeout` at first, then after twice as long
/// each time.
fn is_due(asked: &RetryState, timeout: Duration, now: Time) -> bool {
    let wait = (timeout * (1 << asked.times.min(10))).min(AGAIN_AFTER.max(timeout));
    now.since(asked.at) >= wait
}

/// How many transactions may be sent again: twice as many as ran in the previous window, and a few
/// more. A saturated link must not be filled with repetitions, and a slow server must not be made
/// slower.
#[derive(Debug)]
pub(super) struct Again {
    /// How long transactions have lately taken from their submission until they ran here.
    typical: Duration,
    since: Time,
    most: usize,
    pub(super) ran: usize,
    forwarded: usize,
    asked: usize,
}

impl Again {
    pub(super) fn new(now: Time) -> Self {
        let (typical, most) = (Duration::ZERO, *AGAIN.start());
        Self { typical, since: now, most, ran: 0, forwarded: 0, asked: 0 }
    }

    /// Begins a new window, if the current one has ended.
    fn turn(&mut self, now: Time) {
        if now.since(self.since) >= AGAIN_WINDOW {
            let most = (2 * self.ran).clamp(*AGAIN.start(), *AGAIN.end());
            *self = Self { most, typical: self.typical, ..Self::new(now) };
        }
    }

    /// A transaction ran this long after a gateway submitted it.
    pub(super) fn answered_after(&mut self, took: Duration) {
        self.typical = self.typical - self.typical / 8 + took / 8;
    }

    /// How long to wait before a sequencer is asked again: `timeout`, or twice as long as
    /// transactions take now if that is longer. Under load, requests for transactions that only wait
    /// for their turn would make the wait longer.
    fn patience(&self, timeout: Duration) -> Duration {
        timeout.max((self.typical * 2).min(AGAIN_AFTER))
    }
}

impl Server {
    pub(super) fn on_sweep_timeout(&mut self, cx: &mut Cx<'_>) {
        self.again.turn(cx.now());
        self.forward(cx);
        self.ask_again(cx);
        self.sweep_exchange(cx);
        if cx.now().since(self.compared_at) >= self.config.compare_interval {
            self.compare(cx);
        }
        let acknowledges = cx.now().since(self.acknowledged_at) >= ACKNOWLEDGE_AFTER;
        for stream in self.placement.streams() {
            self.sequencing(stream, cx, |sequencer, view| sequencer.reopen(view));
            if acknowledges {
                self.acknowledged_at = cx.now();
                self.acknowledge(stream, cx);
            }
            self.disk.unflushed.insert(stream);
        }
        cx.set_timer(Timer::Sweep, cx.now() + self.config.sweep_interval);
    }

    /// Servers with the same data exchange sums. A server whose sums differ must stop, because
    /// other parts of its state may be wrong too.
    fn compare(&mut self, cx: &mut Cx<'_>) {
        self.compared_at = cx.now();
        let covered = self.state.covered();
        let checks = &mut self.state.checks;
        covered.into_iter().for_each(|(stream, index)| checks.close(stream, index));
        let digests: Vec<(Span, u64)> = checks.take_news();
        if let Some(difference) = checks.judge() {
            panic!("{}: {difference}", self.node);
        }
        if digests.is_empty() {
            return;
        }
        let share = self.placement.share();
        for server in self.cluster.servers().filter(|server| server.id != self.node) {
            if !self.placement.is_divided() || self.cluster.share_at(server.id).0 == share {
                cx.send(server.id, Msg::Digests { digests: digests.clone() });
            }
        }
    }

    /// Transactions for which gateways have waited too long: a message was lost, or a sequencer has
    /// failed.
    fn ask_again(&mut self, cx: &mut Cx<'_>) {
        let (now, timeout) = (cx.now(), self.again.patience(self.config.resend_after));
        let waits = self.waiting.iter();
        let mut due: Vec<(Time, TxnId)> = waits
            .filter(|(_, waiting)| is_due(&waiting.asked, timeout, now))
            .map(|(&txn, waiting)| (waiting.asked.at, txn))
            .collect();
        due.sort_unstable();
        due.truncate(self.again.most.saturating_sub(self.again.asked));
        for (asked, txn) in due {
            let Some(waiting) = self.waiting.get_mut(&txn) else { continue };
            waiting.asked = waiting.asked.again(now);
            let supposed = waiting.entry.clone();
            if let Some(answer) = self.known(&supposed.functor) {
                // It is part of a state that this server took from another.
                let Some(waiting) = self.stop_waiting(txn) else { continue };
                self.send(waiting.gateway, answer, cx);
            } else if self.state.is_acknowledged(txn) {
                self.stop_waiting(txn);
            } else if self.state.shares.is_any_due(txn) {
                // It has its position, and waits for other shares. Under another name, as after a
                // move of its keys, it would get a second one.
            } else {
                cx.note(Note::AskedAgain);
                self.again.asked += 1;
                // Keys may have moved since, and this server may have taken over a state that says
                // so.
                let mut entry = self.plan(supposed.functor.clone(), supposed.origin, cx);
                if entry.name() == supposed.name() {
                    entry = supposed;
                } else if let Some(waiting) = self.waiting.get_mut(&txn) {
                    waiting.entry = entry.clone();
                }
                for stream in self.asked(&entry) {
                    self.routes.suspect(stream, asked, now);
                }
                self.sequence(&entry, cx);
            }
        }
    }

    /// S6: the leader of a stream that has a transaction ensures that the transaction is in its
    /// other streams too.
    fn forward(&mut self, cx: &mut Cx<'_>) {
        let (now, timeout) = (cx.now(), self.config.forward_after);
        self.forwarded.retain(|name, _| self.state.merge.contains(*name));
        let leads = |home: &PartitionId| {
            self.streams.get(home).is_some_and(|held| held.replica.is_leader())
        };
        let mut due: Vec<(Time, Arc<Sequenced>)> = Vec::new();
        for entry in self.state.merge.incomplete_since(now - timeout) {
            let name = entry.name();
            let missing = self.state.merge.missing(name).unwrap_or_default();
            let asked = self.forwarded.get(&name);
            let is_next = asked.is_none_or(|asked| is_due(asked, timeout, now));
            if is_next && entry.homes.iter().any(|home| !missing.contains(home) && leads(home)) {
                due.push((asked.map(|asked| asked.at).unwrap_or_default(), entry.clone()));
            }
        }
        // Other streams take what an orderer has from the orderer.
        if self.config.mutations.forwards_nothing() || self.placement.orderer().is_some() {
            return;
        }
        due.sort_by_key(|(asked, entry)| (*asked, entry.name()));
        due.truncate(self.again.most.saturating_sub(self.again.forwarded));
        for (_, entry) in due {
            cx.note(Note::Forwarded);
            self.again.forwarded += 1;
            let forwarded = self.forwarded.entry(entry.name());
            let asked = forwarded.and_modify(|asked| *asked = asked.again(now));
            asked.or_insert(RetryState::new(now));
            self.sequence(&entry, cx);
        }
    }

    /// Streams that a client does not use any more learn its acknowledgements from other streams.
    fn acknowledge(&mut self, stream: PartitionId, cx: &mut Cx<'_>) {
        let takes = self
            .streams
            .get(&stream)
            .is_some_and(|held| held.replica.is_ready() && held.replica.takes_commands());
        if !takes {
            return;
        }
        let news = self.sequencing(stream, cx, |sequencer, view| sequencer.acknowledgement(view));
        let Some(Some(command)) = news else { return };
        cx.note(Note::Acknowledged);
        self.with(stream, cx, |held, io| {
            if let Some((index, _)) = held.replica.propose(command, io) {
                held.sequencer.acknowledging(index);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_under_load_waits_longer_before_it_asks_again() {
        let timeout = Duration::from_millis(160);
        let mut again = Again::new(Time(0));
        again.answered_after(Duration::from_millis(400));
        assert_eq!(again.patience(timeout), timeout, "one slow transaction");
        (0..40).for_each(|_| again.answered_after(Duration::from_millis(400)));
        again.turn(Time(1 << 40));
        let patience = again.patience(timeout);
        assert!(patience > Duration::from_millis(780) && patience <= Duration::from_millis(800));
        (0..40).for_each(|_| again.answered_after(Duration::from_secs(60)));
        assert_eq!(again.patience(timeout), AGAIN_AFTER, "bounded");
        (0..60).for_each(|_| again.answered_after(Duration::from_millis(10)));
        assert_eq!(again.patience(timeout), timeout, "the load has ended");
    }
}
