//! Tracks which caller waits for which transaction. The gateway machine knows only transactions.

use std::collections::{BTreeMap, BTreeSet};

use orthodrome_core::session::{Floors, is_below};
use orthodrome_core::time::Duration;
use orthodrome_core::txn::{AbortReason, Kind, Reads, Txn};
use orthodrome_core::{Decision, Input, Key, Outcome, Protocol, Time, TxnId};
use tokio::sync::oneshot::Sender;

use crate::gateway::{
    Begun, Command, Decided, Finished, GatewayError, HeldBytes, Slot, is_interactive,
};

/// How long an interactive transaction may stay undecided, and how long an outcome is kept until
/// its caller asks for it. The service gives its clients less time.
const DECIDE_WITHIN: Duration = Duration::from_secs(60);

type Reply<T> = Sender<Result<T, GatewayError>>;

/// A caller that waits for the outcome.
enum Waiter {
    /// It has no more to say.
    Outcome(Reply<Finished>),
    /// It decides again if it has to.
    Decider(Reply<Decided>),
}

impl Waiter {
    fn is_closed(&self) -> bool {
        match self {
            Self::Outcome(reply) => reply.is_closed(),
            Self::Decider(reply) => reply.is_closed(),
        }
    }

    fn finish(self, finished: Finished) {
        match self {
            Self::Outcome(reply) => answer(reply, Ok(finished)),
            Self::Decider(reply) => answer(reply, Ok(Decided::Finished(finished))),
        }
    }

    fn fail(self, error: GatewayError) {
        match self {
            Self::Outcome(reply) => answer(reply, Err(error)),
            Self::Decider(reply) => answer(reply, Err(error)),
        }
    }
}

enum State {
    /// Its caller waits for reads, or for the outcome if there is only one round.
    Reading(Reply<Begun>),
    /// Its reads were delivered; its caller is deciding.
    Undecided { until: Time },
    /// It will end without further input; these callers wait for the outcome.
    Ending { replies: Vec<Waiter>, abort_once_read: bool },
    /// It ended while its caller was deciding, or before the reads were delivered.
    Ended { finished: Finished, until: Time },
}

struct Entry {
    /// True if it waits for its caller after a round.
    is_interactive: bool,
    /// True if it may have many rounds.
    is_general: bool,
    /// Versions below which its caller must not see reads (R11).
    floors: Floors,
    /// Its reads of all rounds.
    reads: Option<Reads>,
    /// Its caller decided on reads that were not what it reads, and it is being aborted.
    is_stale: bool,
    state: State,
    slot: Slot,
}

impl Entry {
    fn new(txn: &Txn, state: State, slot: Slot) -> Self {
        let is_general = matches!(txn.kind, Kind::General);
        let (is_interactive, floors) = (is_interactive(txn), txn.floors.clone());
        Self { is_interactive, is_general, floors, reads: None, is_stale: false, state, slot }
    }
}

/// All transactions in flight at one gateway.
#[derive(Default)]
pub(super) struct Callers {
    entries: BTreeMap<TxnId, Entry>,
    expiries: BTreeSet<(Time, TxnId)>,
}

fn abort<P: Protocol>(txn: TxnId) -> Input<P> {
    Input::Decide { txn, decision: Decision::Abort }
}

/// Answers a caller, unless it is gone.
fn answer<T>(reply: Reply<T>, result: Result<T, GatewayError>) {
    let _ = reply.send(result);
}

impl Callers {
    /// Handles a caller's command, and returns the input for the machine, if any.
    pub(super) fn command<P: Protocol>(&mut self, now: Time, command: Command) -> Option<Input<P>> {
        match command {
            Command::Begin { txn, slot, reply } => {
                if self.entries.contains_key(&txn.id) {
                    answer(reply, Err(GatewayError::AlreadyBegun(txn.id)));
                    return None;
                }
                let entry = Entry::new(&txn, State::Reading(reply), slot);
                self.entries.insert(txn.id, entry);
                Some(Input::Begin(txn))
            }
            Command::Read { txn, keys, reply } => self.read_on(txn, keys, reply),
            Command::Decide { txn, decision, held, reply } => {
                self.decide(txn, (decision, held), Waiter::Outcome(reply))
            }
            Command::Commit { txn, writes, held, reply } => {
                self.decide(txn, (Decision::Commit(writes), held), Waiter::Decider(reply))
            }
            Command::Resolve { txn, reads, decision, slot, reply } => {
                if self.entries.contains_key(&txn.id) {
                    return self.join(txn.id, decision, reply);
                }
                let replies = vec![Waiter::Outcome(reply)];
                let state = State::Ending { replies, abort_once_read: false };
                let entry = Entry::new(&txn, state, slot);
                self.entries.insert(txn.id, entry);
                Some(Input::Resolve { txn, reads, decision })
            }
            Command::Abandon(txn) => self.abandon(now, txn),
        }
    }

    /// The next round of a general transaction.
    fn read_on<P: Protocol>(
        &mut self,
        txn: TxnId,
        keys: Vec<Key>,
        reply: Reply<Begun>,
    ) -> Option<Input<P>> {
        let Some(entry) = self.entries.get_mut(&txn) else {
            answer(reply, Err(GatewayError::UnknownTransaction(txn)));
            return None;
        };
        let why = match &entry.state {
            State::Undecided { until } if entry.is_general => {
                self.expiries.remove(&(*until, txn));
                entry.state = State::Reading(reply);
                return Some(Input::Read { txn, keys });
            }
            State::Ended { .. } => {
                if let Some(finished) = self.take_ended(txn) {
                    answer(reply, Ok(Begun::Finished(finished)));
                }
                return None;
            }
            State::Undecided { .. } => "it declared its keys when it began",
            State::Reading(_) => "it is reading",
            State::Ending { .. } => "it is already decided",
        };
        answer(reply, Err(GatewayError::NotUndecided(txn, why)));
        None
    }

    fn decide<P: Protocol>(
        &mut self,
        txn: TxnId,
        (decision, held): (Decision, HeldBytes),
        reply: Waiter,
    ) -> Option<Input<P>> {
        let Some(entry) = self.entries.get_mut(&txn) else {
            reply.fail(GatewayError::UnknownTransaction(txn));
            return None;
        };
        let why = match &entry.state {
            State::Undecided { until } => {
                self.expiries.remove(&(*until, txn));
                entry.state = State::Ending { replies: vec![reply], abort_once_read: false };
                entry.slot.hold(held);
                return Some(Input::Decide { txn, decision });
            }
            State::Ended { .. } => {
                if let Some(finished) = self.take_ended(txn) {
                    reply.finish(finished);
                }
                return None;
            }
            State::Reading(_) => "it has not finished its reads",
            State::Ending { .. } => "it is already decided",
        };
        reply.fail(GatewayError::NotUndecided(txn, why));
        None
    }

    /// A caller asks for the outcome of a transaction that is in flight here.
    fn join<P: Protocol>(
        &mut self,
        txn: TxnId,
        decision: Option<Decision>,
        reply: Reply<Finished>,
    ) -> Option<Input<P>> {
        let entry = self.entries.get_mut(&txn)?;
        match &mut entry.state {
            State::Reading(_) => {
                // The caller that began it is not waiting any more; otherwise it would not ask.
                let abort_once_read = entry.is_interactive;
                let replies = vec![Waiter::Outcome(reply)];
                entry.state = State::Ending { replies, abort_once_read };
                None
            }
            State::Undecided { until } => {
                self.expiries.remove(&(*until, txn));
                let replies = vec![Waiter::Outcome(reply)];
                entry.state = State::Ending { replies, abort_once_read: false };
                // The caller's decision was lost on the way here, or there was none.
                Some(Input::Decide { txn, decision: decision.unwrap_or(Decision::Abort) })
            }
            State::Ending { replies, .. } => {
                replies.push(Waiter::Outcome(reply));
                None
            }
            State::Ended { .. } => {
                if let Some(finished) = self.take_ended(txn) {
                    answer(reply, Ok(finished));
                }
                None
            }
        }
    }

    /// Takes the outcome that was kept for the caller; it is delivered once.
    fn take_ended(&mut self, txn: TxnId) -> Option<Finished> {
        let State::Ended { finished, until } = self.entries.remove(&txn)?.state else {
            return None;
        };
        self.expiries.remove(&(until, txn));
        Some(finished)
    }

    fn abandon<P: Protocol>(&mut self, now: Time, txn: TxnId) -> Option<Input<P>> {
        let entry = self.entries.get_mut(&txn)?;
        match &mut entry.state {
            State::Reading(reply) if reply.is_closed() => {
                let abort_once_read = entry.is_interactive;
                entry.state = State::Ending { replies: Vec::new(), abort_once_read };
                None
            }
            // The caller that gave up is not the one that is waiting now.
            State::Reading(_) => None,
            State::Undecided { until } => {
                // Its reads were being delivered when the caller left.
                self.expiries.remove(&(*until, txn));
                entry.state = State::Ending { replies: Vec::new(), abort_once_read: false };
                Some(abort(txn))
            }
            State::Ending { replies, .. } => {
                replies.retain(|waiter| !waiter.is_closed());
                None
            }
            // The outcome is kept for a caller that asks again.
            State::Ended { until, .. } => {
                debug_assert!(*until >= now, "an outcome outlived its term");
                None
            }
        }
    }

    /// The machine reports the transaction's reads.
    pub(super) fn reads<P: Protocol>(
        &mut self,
        now: Time,
        txn: TxnId,
        reads: Reads,
    ) -> Option<Input<P>> {
        let entry = self.entries.get_mut(&txn)?;
        // Machines keep reads fresh. If a machine cannot, its reads are not delivered.
        let is_behind = entry.is_interactive && is_below(&entry.floors, &reads);
        if matches!(entry.state, State::Ending { abort_once_read: false, .. })
            && entry.is_interactive
        {
            return self.read_again(now, txn, (reads, is_behind));
        }
        if !is_behind {
            entry.reads.get_or_insert_default().extend(reads.clone());
        }
        if !entry.is_interactive {
            return None;
        }
        let ending = State::Ending { replies: Vec::new(), abort_once_read: false };
        match std::mem::replace(&mut entry.state, ending) {
            State::Reading(reply) if is_behind => {
                let outcome = Outcome::Aborted(AbortReason::StaleRead);
                let finished = Finished { outcome, reads: None, path: "behind", run: 0 };
                answer(reply, Ok(Begun::Finished(finished)));
                Some(abort(txn))
            }
            State::Reading(reply) => {
                if reply.send(Ok(Begun::Reads(reads))).is_err() {
                    return Some(abort(txn));
                }
                let until = now + DECIDE_WITHIN;
                self.expiries.insert((until, txn));
                entry.state = State::Undecided { until };
                None
            }
            State::Ending { replies, .. } => {
                // Its caller left before it had read.
                entry.state = State::Ending { replies, abort_once_read: false };
                Some(abort(txn))
            }
            other @ (State::Undecided { .. } | State::Ended { .. }) => {
                entry.state = other;
                None
            }
        }
    }

    /// A decision cannot count, because the transaction reads this. Its caller decides again, if it
    /// is there and can; otherwise the transaction is aborted, and may be retried.
    fn read_again<P: Protocol>(
        &mut self,
        now: Time,
        txn: TxnId,
        (reads, is_behind): (Reads, bool),
    ) -> Option<Input<P>> {
        let entry = self.entries.get_mut(&txn)?;
        let State::Ending { replies, .. } = &mut entry.state else { return None };
        if let (false, [Waiter::Decider(_)]) = (is_behind, &replies[..])
            && let Some(Waiter::Decider(reply)) = replies.pop()
            && reply.send(Ok(Decided::Again(reads.clone()))).is_ok()
        {
            entry.reads = Some(reads);
            let until = now + DECIDE_WITHIN;
            self.expiries.insert((until, txn));
            entry.state = State::Undecided { until };
            return None;
        }
        entry.is_stale = true;
        Some(abort(txn))
    }

    /// The machine reports the transaction's outcome.
    pub(super) fn finish(
        &mut self,
        now: Time,
        txn: TxnId,
        (outcome, run): (Outcome, u32),
        path: &'static str,
    ) {
        let Some(Entry { is_interactive, is_general, floors, reads, is_stale, state, slot }) =
            self.entries.remove(&txn)
        else {
            return;
        };
        let outcome = match outcome {
            Outcome::Aborted(_) if is_stale => Outcome::Aborted(AbortReason::StaleRead),
            Outcome::Committed(_) | Outcome::Aborted(_) | Outcome::Unknown => outcome,
        };
        let finished = Finished { outcome, reads, path, run };
        match state {
            State::Reading(reply) => answer(reply, Ok(Begun::Finished(finished))),
            State::Ending { replies, .. } => {
                for waiter in replies {
                    waiter.finish(finished.clone());
                }
            }
            State::Undecided { until } => {
                // An early abort: its caller learns of it when it decides or reads more.
                self.expiries.remove(&(until, txn));
                let until = now + DECIDE_WITHIN;
                self.expiries.insert((until, txn));
                let state = State::Ended { finished, until };
                let reads = None;
                let entry =
                    Entry { is_interactive, is_general, floors, reads, is_stale, state, slot };
                self.entries.insert(txn, entry);
            }
            State::Ended { finished, until } => {
                let state = State::Ended { finished, until };
                let reads = None;
                let entry =
                    Entry { is_interactive, is_general, floors, reads, is_stale, state, slot };
                self.entries.insert(txn, entry);
            }
        }
    }

    /// The next time at which [`Callers::expire`] has something to do.
    pub(super) fn next_expiry(&self) -> Option<Time> {
        self.expiries.first().map(|&(at, _)| at)
    }

    /// Ends transactions whose callers took too long, and drops outcomes that no caller asked for.
    pub(super) fn expire<P: Protocol>(&mut self, now: Time) -> Vec<Input<P>> {
        let mut inputs = Vec::new();
        while let Some(&(at, txn)) = self.expiries.first().filter(|&&(at, _)| at <= now) {
            self.expiries.remove(&(at, txn));
            let Some(entry) = self.entries.get_mut(&txn) else { continue };
            if let State::Undecided { .. } = entry.state {
                entry.state = State::Ending { replies: Vec::new(), abort_once_read: false };
                inputs.push(abort(txn));
            } else {
                self.entries.remove(&txn);
            }
        }
        inputs
    }
}
