//! Which names of transactions were used at a gateway.
//!
//! Protocols rely on it that one gateway submits a transaction, once, and that a client makes its next
//! attempt when the one before has aborted (ADR 46). A gateway checks both: an id that it takes belongs
//! to a client that it registered in this run, and was not used before.

use orthodrome_core::id::Content;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::txn::AbortReason;
use orthodrome_core::{ClientId, Outcome, Txn, TxnId};

/// So many counters of one client are remembered one by one.
const COUNTERS_MAX: usize = 4_096;
/// The same once the gateway remembers many.
const COUNTERS_FEW: usize = 16;
/// So many are many.
const MANY: usize = 1 << 20;
/// So many clients are remembered. Those that registered longest ago have to register again.
const CLIENTS_MAX: usize = 1 << 18;

/// The names that clients of this gateway have used.
#[derive(Debug, Default)]
pub(super) struct Used {
    clients: OrdMap<ClientId, Counters>,
    /// Counters of all clients together.
    counters: usize,
    /// The clients below are forgotten.
    clients_from: ClientId,
}

/// What a name stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Name {
    /// Nothing yet; it is used now.
    New,
    /// The same transaction, so its outcome is the answer.
    Same,
    /// Something else, or an attempt before it is not known to have aborted.
    Used,
    /// Nobody knows any more: its client has to register again.
    Forgotten,
}

/// The names that one client has used.
#[derive(Debug, Default)]
struct Counters {
    /// All below count as used.
    below: u64,
    /// The last attempt of each, from there on.
    last: OrdMap<u64, Attempt>,
}

/// The last attempt at a transaction.
#[derive(Clone, Copy, Debug)]
struct Attempt {
    number: u32,
    content: Content,
    /// True if this gateway has said that it aborted, or it only reads.
    is_aborted: bool,
}

impl Used {
    /// Uses the name of a transaction, if that can be done.
    pub(super) fn take(&mut self, txn: &Txn) -> Name {
        let TxnId { client, counter, attempt, content } = txn.id;
        if client < self.clients_from {
            return Name::Forgotten;
        }
        let Self { clients, counters, clients_from } = self;
        let used = clients.entry(client).or_default();
        let before = used.last.len();
        if used.below < txn.acknowledged_below {
            used.below = txn.acknowledged_below;
            used.last = used.last.split_off(&used.below);
        }
        let is_new = counter >= used.below
            && used.last.get(&counter).is_none_or(|last| last.is_aborted && last.number < attempt);
        let is_same = |last: &Attempt| last.number == attempt && last.content == content;
        let is_same = used.last.get(&counter).is_some_and(is_same);
        if is_new {
            let is_aborted = txn.is_read_only();
            used.last.insert(counter, Attempt { number: attempt, content, is_aborted });
        }
        let most = if *counters < MANY { COUNTERS_MAX } else { COUNTERS_FEW };
        while used.last.len() > most {
            let Some((oldest, _)) = used.last.pop_first() else { break };
            used.below = oldest + 1;
        }
        *counters = (*counters + used.last.len()).saturating_sub(before);
        // It may have been older than all that are remembered.
        let name = match (is_new && counter >= used.below, is_same) {
            (true, _) => Name::New,
            (false, true) => Name::Same,
            (false, false) => Name::Used,
        };
        while clients.len() > CLIENTS_MAX {
            let Some((oldest, used)) = clients.pop_first() else { break };
            *counters = counters.saturating_sub(used.last.len());
            *clients_from = ClientId(oldest.0 + 1);
        }
        name
    }

    /// This gateway says how an attempt ended.
    pub(super) fn finish(&mut self, txn: TxnId, outcome: Outcome) {
        let Outcome::Aborted(reason) = outcome else { return };
        let Some(used) = self.clients.get_mut(&txn.client) else { return };
        let Some(last) = used.last.get_mut(&txn.counter) else { return };
        if last.number != txn.attempt {
            return;
        }
        last.is_aborted = true;
        // A client repeats what had no effect because the cluster was busy.
        if reason == AbortReason::Overload {
            match last.number.checked_sub(1) {
                Some(before) => last.number = before,
                None => {
                    used.last.remove(&txn.counter);
                    self.counters = self.counters.saturating_sub(1);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::RegionId;
    use orthodrome_core::{Key, Timestamp};

    use super::*;

    fn txn(counter: u64, attempt: u32, acknowledged_below: u64) -> Txn {
        let id = TxnId { attempt, ..TxnId::new(ClientId(7), counter) };
        let keys = vec![Key::from("a")];
        let txn = Txn::interactive(id, RegionId(0), keys.clone(), keys);
        Txn { acknowledged_below, ..txn }
    }

    /// Whether the name was new.
    fn takes(used: &mut Used, txn: &Txn) -> bool {
        used.take(txn) == Name::New
    }

    #[test]
    fn a_transaction_that_is_sent_again_is_the_same() {
        let mut used = Used::default();
        let content = |text: &str| {
            let mut txn = txn(1, 0, 0);
            txn.id.content = Content::of(text.as_bytes());
            txn
        };
        assert_eq!(used.take(&content("a")), Name::New);
        assert_eq!(used.take(&content("a")), Name::Same);
        assert_eq!(used.take(&content("b")), Name::Used);
        used.finish(content("a").id, Outcome::Aborted(AbortReason::Conflict));
        assert_eq!(used.take(&content("a")), Name::Same, "it aborted");
    }

    #[test]
    fn clients_beyond_a_bound_register_again() {
        let mut used = Used::default();
        let of = |client: u64| Txn { id: TxnId::new(ClientId(client), 1), ..txn(1, 0, 0) };
        for client in 1..=CLIENTS_MAX as u64 + 2 {
            assert_eq!(used.take(&of(client)), Name::New);
        }
        assert_eq!(used.take(&of(2)), Name::Forgotten);
        assert_eq!(used.take(&of(3)), Name::Same);
        assert_eq!((used.clients.len(), used.counters), (CLIENTS_MAX, CLIENTS_MAX));
    }

    #[test]
    fn a_read_is_repeated_under_the_next_attempt() {
        let mut used = Used::default();
        let read = |attempt| {
            let id = TxnId { attempt, ..TxnId::new(ClientId(7), 1) };
            Txn::read_only(id, RegionId(0), vec![Key::from("a")])
        };
        assert!(
            takes(&mut used, &read(0)) && takes(&mut used, &read(1)) && !takes(&mut used, &read(1))
        );
        assert!(takes(&mut used, &txn(1, 2, 0)) && !takes(&mut used, &read(3)), "it may write");
    }

    #[test]
    fn a_name_is_used_once() {
        let mut used = Used::default();
        assert!(takes(&mut used, &txn(2, 0, 0)) && takes(&mut used, &txn(1, 0, 0)));
        assert!(!takes(&mut used, &txn(2, 0, 0)) && !takes(&mut used, &txn(1, 0, 0)));
        used.finish(txn(1, 0, 0).id, Outcome::Committed(Timestamp(1)));
        used.finish(txn(2, 0, 0).id, Outcome::Unknown);
        assert!(!takes(&mut used, &txn(2, 0, 0)) && !takes(&mut used, &txn(1, 0, 0)));
    }

    #[test]
    fn the_next_attempt_follows_an_abort() {
        let mut used = Used::default();
        let aborted = Outcome::Aborted(AbortReason::Conflict);
        assert!(takes(&mut used, &txn(1, 0, 0)));
        assert!(!takes(&mut used, &txn(1, 1, 0)), "the first is pending");
        used.finish(txn(1, 0, 0).id, aborted);
        assert!(!takes(&mut used, &txn(1, 0, 0)), "it was used");
        assert!(takes(&mut used, &txn(1, 3, 0)), "numbers may be left out");
        used.finish(txn(1, 0, 0).id, aborted);
        assert!(!takes(&mut used, &txn(1, 4, 0)), "an old answer says nothing of the last attempt");
        used.finish(txn(1, 3, 0).id, Outcome::Committed(Timestamp(1)));
        assert!(!takes(&mut used, &txn(1, 4, 0)), "it committed");
    }

    #[test]
    fn what_was_shed_is_repeated_under_its_name() {
        let mut used = Used::default();
        let shed = Outcome::Aborted(AbortReason::Overload);
        for _ in 0..3 {
            assert!(takes(&mut used, &txn(1, 0, 0)));
            used.finish(txn(1, 0, 0).id, shed);
        }
        assert!(takes(&mut used, &txn(1, 1, 0)));
        used.finish(txn(1, 1, 0).id, shed);
        assert!(!takes(&mut used, &txn(1, 0, 0)) && takes(&mut used, &txn(1, 1, 0)));
    }

    #[test]
    fn acknowledged_counters_and_too_many_are_remembered_together() {
        let mut used = Used::default();
        assert!(takes(&mut used, &txn(1, 0, 0)) && takes(&mut used, &txn(9, 0, 5)));
        assert!(!takes(&mut used, &txn(4, 0, 0)) && takes(&mut used, &txn(5, 0, 0)));
        assert_eq!(used.counters, 2);
        for counter in 10..=10_000 {
            assert!(takes(&mut used, &txn(counter, 0, 5)));
        }
        assert_eq!(used.counters, COUNTERS_MAX);
        assert!(
            !takes(&mut used, &txn(9, 0, 5)) && !takes(&mut used, &txn(6, 0, 5)),
            "they are too old"
        );
        assert_eq!(used.counters, COUNTERS_MAX);
    }
}
