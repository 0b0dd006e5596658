//! Tracks which caller waits for which transaction. The gateway machine knows only transactions.
//!
//! Callers know a transaction by its name, machines by an id that also has its content (ADR 46). The
//! content grows when the client decides, so what a machine reports is found by its name.

use orthodrome_core::ordered::OrdMap;
use orthodrome_core::session::{Floors, is_below};
use orthodrome_core::txn::{AbortReason, Kind, Priority, Reads, Txn};
use orthodrome_core::{Decision, Input, Key, Outcome, Protocol, Time, TxnId};
use tokio::sync::oneshot::Sender;

use crate::gateway::{
    Begun, Command, Finished, GatewayError, HeldBytes, Pending, PendingTxns, Slot, Stage,
    is_interactive, name_of,
};

use super::used::{Name, Used};

type Reply<T> = Sender<Result<T, GatewayError>>;

enum State {
    /// Its caller waits for reads, or for the outcome if there is only one round.
    Reading(Reply<Begun>),
    /// Its reads were delivered; its caller is deciding.
    Undecided,
    /// It will end without further input; these callers wait for the outcome.
    Ending { replies: Vec<Reply<Finished>>, abort_once_read: bool },
    /// It ended while its caller was deciding. The caller decides within its lease, which the service
    /// keeps and ends.
    Ended(Finished),
}

struct Entry {
    /// The id that the machine was given.
    id: TxnId,
    /// True if it waits for its caller after a round.
    is_interactive: bool,
    /// True if it may have many rounds.
    is_general: bool,
    /// Versions below which its caller must not see reads (R11).
    floors: Floors,
    /// Its reads of all rounds.
    reads: Option<Reads>,
    state: State,
    slot: Slot,
    journey: Journey,
}

/// What operators see of a transaction.
#[derive(Clone, Copy)]
struct Journey {
    kind: &'static str,
    priority: Priority,
    /// True if its first request also asks for its outcome: it has one round and may write.
    is_in_doubt_at_once: bool,
    began: Time,
    /// When its state last changed.
    changed: Time,
}

impl Entry {
    fn new(txn: &Txn, state: State, slot: Slot, now: Time) -> Self {
        let is_general = matches!(txn.kind, Kind::General);
        let (is_interactive, floors) = (is_interactive(txn), txn.floors.clone());
        let journey = Journey {
            kind: name_of(&txn.kind),
            priority: txn.priority,
            is_in_doubt_at_once: matches!(txn.kind, Kind::Procedure(_)),
            began: now,
            changed: now,
        };
        Self { id: txn.id, is_interactive, is_general, floors, reads: None, state, slot, journey }
    }

    fn turn(&mut self, state: State, now: Time) {
        (self.state, self.journey.changed) = (state, now);
    }

    fn stage(&self) -> Stage {
        match &self.state {
            State::Reading(_) if self.journey.is_in_doubt_at_once => Stage::Outcome,
            State::Reading(_) => Stage::Reads,
            State::Undecided | State::Ended(_) => Stage::Client,
            State::Ending { .. } => Stage::Outcome,
        }
    }

    fn pending(&self, txn: TxnId, now: Time) -> Pending {
        let Journey { kind, priority, began, changed, .. } = self.journey;
        let (waits, age) = (now.since(changed), now.since(began));
        Pending { txn, kind, priority, stage: self.stage(), waits, age }
    }
}

/// All transactions in flight at one gateway.
#[derive(Default)]
pub(super) struct Callers {
    /// By name.
    entries: OrdMap<TxnId, Entry>,
    used: Used,
    /// The time of this turn.
    now: Time,
}

fn abort<P: Protocol>(txn: TxnId) -> Input<P> {
    Input::Decide { txn, decision: Decision::Abort }
}

/// Answers a caller, unless it is gone.
fn answer<T>(reply: Reply<T>, result: Result<T, GatewayError>) {
    let _ = reply.send(result);
}

impl Callers {
    /// Begins a turn.
    pub(super) fn set_time(&mut self, now: Time) {
        self.now = now;
    }

    /// The transactions in flight, for operators.
    pub(super) fn pending(&self) -> PendingTxns {
        let mut found = PendingTxns::default();
        let mut all: Vec<_> = self.entries.iter().collect();
        for (_, entry) in &all {
            let Journey { began, changed, .. } = entry.journey;
            match entry.stage() {
                Stage::Reads => {}
                Stage::Client => {
                    found.open += 1;
                    found.open_age_max = found.open_age_max.max(self.now.since(began));
                }
                Stage::Outcome => {
                    found.in_doubt += 1;
                    found.in_doubt_age_max = found.in_doubt_age_max.max(self.now.since(changed));
                }
            }
        }
        let most = PendingTxns::LISTED_MAX;
        if all.len() > most {
            all.select_nth_unstable_by_key(most, |(id, entry)| (entry.journey.began, **id));
            all.truncate(most);
        }
        all.sort_unstable_by_key(|(id, entry)| (entry.journey.began, **id));
        found.oldest = all.into_iter().map(|(id, entry)| entry.pending(*id, self.now)).collect();
        found
    }

    /// Handles a caller's command, and returns the input for the machine, if any.
    pub(super) fn command<P: Protocol>(&mut self, command: Command) -> Option<Input<P>> {
        match command {
            Command::Begin { txn, slot, reply } => {
                let name = txn.id.name();
                if self.entries.contains_key(&name) {
                    answer(reply, Err(GatewayError::AlreadyBegun(name)));
                    return None;
                }
                let is_whole = matches!(txn.kind, Kind::Procedure(_));
                let is_new = match self.used.take(&txn) {
                    Name::New => true,
                    Name::Same if is_whole => false,
                    Name::Same | Name::Used => {
                        answer(reply, Err(GatewayError::Used(name)));
                        return None;
                    }
                    Name::Forgotten => {
                        answer(reply, Err(GatewayError::Unregistered(name.client)));
                        return None;
                    }
                };
                let entry = Entry::new(&txn, State::Reading(reply), slot, self.now);
                self.entries.insert(name, entry);
                Some(if is_new {
                    Input::Begin(txn)
                } else {
                    // Its client may not have got the answer.
                    Input::Resolve { txn, reads: Reads::new(), decision: None }
                })
            }
            Command::Read { txn, keys, reply } => self.read_on(txn, keys, reply),
            Command::Decide { txn, decision, held, reply } => {
                self.decide(txn, (decision, held), reply)
            }
            Command::Resolve { txn, reads, decision, slot, reply } => {
                let name = txn.id.name();
                if self.entries.contains_key(&name) {
                    return self.join(&txn, decision, reply);
                }
                let state = State::Ending { replies: vec![reply], abort_once_read: false };
                let entry = Entry::new(&txn, state, slot, self.now);
                self.entries.insert(name, entry);
                Some(Input::Resolve { txn, reads, decision })
            }
            Command::Abandon(txn) => self.abandon(txn),
        }
    }

    /// The next round of a general transaction.
    fn read_on<P: Protocol>(
        &mut self,
        txn: TxnId,
        keys: Vec<Key>,
        reply: Reply<Begun>,
    ) -> Option<Input<P>> {
        let now = self.now;
        let Some(entry) = self.entries.get_mut(&txn) else {
            answer(reply, Err(GatewayError::UnknownTransaction(txn)));
            return None;
        };
        let why = match &entry.state {
            State::Undecided if entry.is_general => {
                entry.turn(State::Reading(reply), now);
                return Some(Input::Read { txn: entry.id, keys });
            }
            State::Ended(_) => {
                if let Some(finished) = self.take_ended(txn) {
                    answer(reply, Ok(Begun::Finished(finished)));
                }
                return None;
            }
            State::Undecided => "it declared its keys when it began",
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
        reply: Reply<Finished>,
    ) -> Option<Input<P>> {
        let now = self.now;
        let Some(entry) = self.entries.get_mut(&txn) else {
            answer(reply, Err(GatewayError::UnknownTransaction(txn)));
            return None;
        };
        let why = match &entry.state {
            State::Undecided => {
                entry.turn(State::Ending { replies: vec![reply], abort_once_read: false }, now);
                entry.slot.hold(held);
                return Some(Input::Decide { txn: entry.id, decision });
            }
            State::Ended(_) => {
                if let Some(finished) = self.take_ended(txn) {
                    answer(reply, Ok(finished));
                }
                return None;
            }
            State::Reading(_) => "it has not finished its reads",
            State::Ending { .. } => "it is already decided",
        };
        answer(reply, Err(GatewayError::NotUndecided(txn, why)));
        None
    }

    /// A caller asks for the outcome of a transaction that is in flight here.
    fn join<P: Protocol>(
        &mut self,
        asked: &Txn,
        decision: Option<Decision>,
        reply: Reply<Finished>,
    ) -> Option<Input<P>> {
        let (now, name) = (self.now, asked.id.name());
        let entry = self.entries.get_mut(&name)?;
        let txn = entry.id;
        if txn != asked.id {
            answer(reply, Err(GatewayError::AlreadyBegun(name)));
            return None;
        }
        match &mut entry.state {
            State::Reading(_) => {
                // The caller that began it is not waiting any more; otherwise it would not ask. Its
                // reads may never arrive, so nothing waits for them.
                let abort_once_read = entry.is_interactive;
                entry.turn(State::Ending { replies: vec![reply], abort_once_read }, now);
                abort_once_read.then(|| abort(txn))
            }
            State::Undecided => {
                entry.turn(State::Ending { replies: vec![reply], abort_once_read: false }, now);
                // The caller's decision was lost on the way here, or there was none.
                Some(Input::Decide { txn, decision: decision.unwrap_or(Decision::Abort) })
            }
            State::Ending { replies, .. } => {
                replies.push(reply);
                None
            }
            State::Ended(_) => {
                if let Some(finished) = self.take_ended(name) {
                    answer(reply, Ok(finished));
                }
                None
            }
        }
    }

    /// Takes the outcome that was kept for the caller; it is delivered once.
    fn take_ended(&mut self, txn: TxnId) -> Option<Finished> {
        let State::Ended(finished) = self.entries.remove(&txn)?.state else {
            return None;
        };
        Some(finished)
    }

    fn abandon<P: Protocol>(&mut self, name: TxnId) -> Option<Input<P>> {
        let now = self.now;
        let entry = self.entries.get_mut(&name)?;
        let txn = entry.id;
        match &mut entry.state {
            State::Reading(reply) if reply.is_closed() => {
                // A partition without a majority may never answer. Meanwhile the keys at the others
                // would stay locked.
                let abort_once_read = entry.is_interactive;
                entry.turn(State::Ending { replies: Vec::new(), abort_once_read }, now);
                abort_once_read.then(|| abort(txn))
            }
            // The caller that gave up is not the one that is waiting now.
            State::Reading(_) => None,
            State::Undecided => {
                // Its reads were being delivered when the caller left.
                entry.turn(State::Ending { replies: Vec::new(), abort_once_read: false }, now);
                Some(abort(txn))
            }
            State::Ending { replies, .. } => {
                replies.retain(|reply| !reply.is_closed());
                None
            }
            // Its reads were being delivered when the caller left.
            State::Ended(_) => {
                self.entries.remove(&name);
                None
            }
        }
    }

    /// The machine reports the transaction's reads.
    pub(super) fn reads<P: Protocol>(&mut self, txn: TxnId, reads: Reads) -> Option<Input<P>> {
        let (now, name) = (self.now, txn.name());
        let entry = self.entries.get_mut(&name)?;
        // Machines keep reads fresh. If a machine cannot, its reads are not delivered.
        let is_behind = entry.is_interactive && is_below(&entry.floors, &reads);
        if !is_behind {
            entry.reads.get_or_insert_default().extend(reads.clone());
        }
        if !entry.is_interactive {
            return None;
        }
        let ending = State::Ending { replies: Vec::new(), abort_once_read: false };
        match std::mem::replace(&mut entry.state, ending) {
            State::Reading(reply) if is_behind => {
                entry.journey.changed = now;
                let outcome = Outcome::Aborted(AbortReason::StaleRead);
                self.used.finish(name, outcome);
                let finished = Finished { outcome, reads: None, path: "behind" };
                answer(reply, Ok(Begun::Finished(finished)));
                Some(abort(txn))
            }
            State::Reading(reply) => {
                if reply.send(Ok(Begun::Reads(reads))).is_err() {
                    return Some(abort(txn));
                }
                entry.turn(State::Undecided, now);
                None
            }
            State::Ending { replies, abort_once_read } => {
                entry.state = State::Ending { replies, abort_once_read: false };
                abort_once_read.then(|| abort(txn))
            }
            other @ (State::Undecided | State::Ended(_)) => {
                entry.state = other;
                None
            }
        }
    }

    /// The machine reports the transaction's outcome.
    pub(super) fn finish(&mut self, txn: TxnId, outcome: Outcome, path: &'static str) {
        let name = txn.name();
        self.used.finish(name, outcome);
        let Some(entry) = self.entries.remove(&name) else { return };
        let Entry { id, is_interactive, is_general, floors, reads, state, slot, journey } = entry;
        let finished = Finished { outcome, reads, path };
        match state {
            State::Reading(reply) => answer(reply, Ok(Begun::Finished(finished))),
            State::Ending { replies, .. } => {
                for reply in replies {
                    answer(reply, Ok(finished.clone()));
                }
            }
            // An early abort: its caller learns of it when it decides or reads more.
            State::Undecided | State::Ended(_) => {
                let (state, reads) = (State::Ended(finished), None);
                let entry =
                    Entry { id, is_interactive, is_general, floors, reads, state, slot, journey };
                self.entries.insert(name, entry);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use orthodrome_core::id::{ClientId, RegionId};
    use orthodrome_protocols::carousel::Carousel;
    use tokio::sync::oneshot;

    use super::*;

    fn txn() -> Txn {
        let id = TxnId::new(ClientId(1), 1);
        Txn::interactive(id, RegionId(0), vec![Key::from("a")], vec![Key::from("a")])
    }

    /// A transaction that reads, and its caller.
    fn reading(callers: &mut Callers) -> oneshot::Receiver<Result<Begun, GatewayError>> {
        let (reply, waiting) = oneshot::channel();
        let begin = Command::Begin { txn: txn(), slot: Slot::only(), reply };
        let begun: Option<Input<Carousel>> = callers.command(begin);
        assert!(matches!(begun, Some(Input::Begin(_))));
        waiting
    }

    fn is_abort(input: Option<Input<Carousel>>) -> bool {
        matches!(input, Some(Input::Decide { decision: Decision::Abort, .. }))
    }

    #[test]
    fn who_gives_up_while_reading_aborts_at_once() {
        let mut callers = Callers::default();
        let waiting = reading(&mut callers);
        assert!(!is_abort(callers.command(Command::Abandon(txn().id))), "it is waiting");
        drop(waiting);
        assert!(is_abort(callers.command(Command::Abandon(txn().id))));
    }

    #[test]
    fn who_resolves_while_reading_aborts_at_once() {
        let mut callers = Callers::default();
        let _waiting = reading(&mut callers);
        let (reply, mut resolved) = oneshot::channel();
        let reads = Reads::default();
        let resolve =
            Command::Resolve { txn: txn(), reads, decision: None, slot: Slot::only(), reply };
        assert!(is_abort(callers.command(resolve)));
        callers.finish(txn().id, Outcome::Aborted(AbortReason::Client), "abort");
        assert!(resolved.try_recv().is_ok());
    }

    #[test]
    fn who_decides_late_learns_of_an_early_abort() {
        let mut callers = Callers::default();
        let _waiting = reading(&mut callers);
        let told: Option<Input<Carousel>> = callers.reads(txn().id, Reads::default());
        assert!(told.is_none());
        callers.finish(txn().id, Outcome::Aborted(AbortReason::Conflict), "conflict");
        let (reply, mut resolved) = oneshot::channel();
        let reads = Reads::default();
        let resolve =
            Command::Resolve { txn: txn(), reads, decision: None, slot: Slot::only(), reply };
        let input: Option<Input<Carousel>> = callers.command(resolve);
        assert!(input.is_none());
        let outcome = resolved.try_recv().unwrap().unwrap().outcome;
        assert_eq!(outcome, Outcome::Aborted(AbortReason::Conflict));
        assert!(callers.entries.is_empty());
    }

    #[test]
    fn who_leaves_while_an_early_abort_is_told_leaves_nothing_behind() {
        let mut callers = Callers::default();
        let _waiting = reading(&mut callers);
        let _: Option<Input<Carousel>> = callers.reads(txn().id, Reads::default());
        callers.finish(txn().id, Outcome::Aborted(AbortReason::Conflict), "conflict");
        assert!(!is_abort(callers.command(Command::Abandon(txn().id))));
        assert!(callers.entries.is_empty());
    }

    #[test]
    fn pending_transactions_are_counted_by_what_they_wait_for() {
        let mut callers = Callers::default();
        callers.set_time(Time::from_millis(1));
        let _waiting = reading(&mut callers);
        callers.set_time(Time::from_millis(5));
        let found = callers.pending();
        assert_eq!((found.open, found.in_doubt), (0, 0), "it reads");
        let waits = Duration::from_millis(4);
        assert_eq!(found.oldest[0].stage, Stage::Reads);
        assert_eq!((found.oldest[0].waits, found.oldest[0].age), (waits, waits));

        let _: Option<Input<Carousel>> = callers.reads(txn().id, Reads::default());
        callers.set_time(Time::from_millis(8));
        let found = callers.pending();
        assert_eq!((found.open, found.in_doubt), (1, 0), "its client decides");
        assert_eq!(found.open_age_max, Duration::from_millis(7));

        let (reply, _outcome) = oneshot::channel();
        let slot = Slot::only();
        let resolve =
            Command::Resolve { txn: txn(), reads: Reads::default(), decision: None, slot, reply };
        let _: Option<Input<Carousel>> = callers.command(resolve);
        callers.set_time(Time::from_millis(10));
        let found = callers.pending();
        assert_eq!((found.open, found.in_doubt), (0, 1), "its outcome is not known");
        assert_eq!(found.in_doubt_age_max, Duration::from_millis(2));
        assert_eq!(found.oldest[0].age, Duration::from_millis(9));

        callers.finish(txn().id, Outcome::Aborted(AbortReason::Client), "abort");
        assert_eq!(callers.pending(), PendingTxns::default());
    }

    #[test]
    fn the_list_of_pending_transactions_has_the_oldest_and_is_bounded() {
        let mut callers = Callers::default();
        let mut waiting = Vec::new();
        // The ids fall while time passes, so that the order of ids is not the order of ages.
        for at in 1..=100 {
            callers.set_time(Time::from_millis(at));
            let id = TxnId::new(ClientId(1), 200 - at);
            let txn = Txn { id, ..txn() };
            let (reply, answer) = oneshot::channel();
            let begin = Command::Begin { txn, slot: Slot::only(), reply };
            let _: Option<Input<Carousel>> = callers.command(begin);
            waiting.push(answer);
        }
        let listed: Vec<_> = callers.pending().oldest.iter().map(|txn| txn.txn.counter).collect();
        let expected: Vec<_> = (1..=20).map(|at| 200 - at).collect();
        assert_eq!(listed, expected);
    }
}
