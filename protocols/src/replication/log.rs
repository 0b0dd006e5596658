//! The log in memory: the entries after a base, and the memberships among them.

use std::collections::VecDeque;

use super::quorum::Members;
use super::{Entry, Index, Payload, Replicated, Term};

/// Entries `base + 1 ..= last`, and what is known about the base.
#[derive(Debug, Clone)]
pub(super) struct Log<R: Replicated> {
    base: Index,
    base_term: Term,
    base_members: Members,
    entries: VecDeque<Entry<R::Command>>,
    /// Memberships among `entries`, by index. The last one is in force (Raft §6: a server uses the
    /// latest one in its log, chosen or not).
    changes: Vec<(Index, Members)>,
}

impl<R: Replicated> Log<R> {
    pub(super) fn new(base: Index, base_term: Term, base_members: Members) -> Self {
        Self { base, base_term, base_members, entries: VecDeque::new(), changes: Vec::new() }
    }

    pub(super) fn base(&self) -> (Index, Term, &Members) {
        (self.base, self.base_term, &self.base_members)
    }

    pub(super) fn base_index(&self) -> Index {
        self.base
    }

    pub(super) fn last(&self) -> Index {
        self.base.plus(self.entries.len())
    }

    pub(super) fn last_term(&self) -> Term {
        self.entries.back().map_or(self.base_term, |entry| entry.term)
    }

    fn slot(&self, index: Index) -> Option<usize> {
        usize::try_from(index.0.checked_sub(self.base.0)?.checked_sub(1)?).ok()
    }

    pub(super) fn get(&self, index: Index) -> Option<&Entry<R::Command>> {
        self.entries.get(self.slot(index)?)
    }

    /// The term of the entry at `index`; none if it was compacted or does not exist yet.
    pub(super) fn term_at(&self, index: Index) -> Option<Term> {
        if index == self.base { Some(self.base_term) } else { self.get(index).map(|e| e.term) }
    }

    /// Every entry from `from` on, with its index.
    pub(super) fn from(
        &self,
        from: Index,
    ) -> impl Iterator<Item = (Index, &Entry<R::Command>)> + '_ {
        let first = self.slot(from).unwrap_or(0).min(self.entries.len());
        let start = self.base.plus(first + 1);
        self.entries.range(first..).enumerate().map(move |(at, entry)| (start.plus(at), entry))
    }

    pub(super) fn append(&mut self, entry: Entry<R::Command>) -> Index {
        let index = self.last().next();
        if let Payload::Members(members) = &entry.payload {
            self.changes.push((index, members.as_ref().clone()));
        }
        self.entries.push_back(entry);
        index
    }

    /// Replaces the entry at `index` and keeps later ones: the result of a replay that does not
    /// know about truncations. Only for a mutation.
    pub(super) fn overwrite(&mut self, index: Index, entry: Entry<R::Command>) {
        if let Some(slot) = self.slot(index)
            && let Some(old) = self.entries.get_mut(slot)
        {
            *old = entry;
        }
    }

    /// Drops `from` and all later entries, memberships included.
    pub(super) fn truncate(&mut self, from: Index) {
        self.entries.truncate(self.slot(from).unwrap_or(0));
        self.changes.retain(|&(index, _)| index < from);
    }

    /// Drops everything up to `through`.
    pub(super) fn compact(&mut self, through: Index) {
        let Some(term) = self.term_at(through) else { return };
        self.base_members = self.members_at(through).clone();
        self.base_term = term;
        let drop = usize::try_from(through.0 - self.base.0).unwrap_or(usize::MAX);
        self.entries.drain(..drop.min(self.entries.len()));
        self.base = through;
        self.changes.retain(|&(index, _)| index > through);
    }

    /// Moves the base to that of a snapshot. Later entries stay if the log agrees with the snapshot
    /// at its last entry; otherwise all are dropped (Raft §7, Figure 13, rules 6 and 7). Returns
    /// whether they stayed.
    pub(super) fn install(&mut self, base: Index, term: Term, members: Members) -> bool {
        if self.term_at(base) == Some(term) {
            self.compact(base);
            self.base_members = members;
            return true;
        }
        *self = Self::new(base, term, members);
        false
    }

    /// The membership in force.
    pub(super) fn members(&self) -> &Members {
        self.changes.last().map_or(&self.base_members, |(_, members)| members)
    }

    /// The index of the membership in force; the base if it is older than the log.
    pub(super) fn members_index(&self) -> Index {
        self.changes.last().map_or(self.base, |&(index, _)| index)
    }

    /// The membership in force as of `index`.
    pub(super) fn members_at(&self, index: Index) -> &Members {
        let change = self.changes.iter().rev().find(|&&(at, _)| at <= index);
        change.map_or(&self.base_members, |(_, members)| members)
    }

    /// The membership as of `index` and every later one: those that may be in force if nothing
    /// after `index` is known to be chosen.
    pub(super) fn members_since(&self, index: Index) -> impl Iterator<Item = &Members> {
        let later = self.changes.iter().filter(move |&&(at, _)| at > index);
        std::iter::once(self.members_at(index)).chain(later.map(|(_, members)| members))
    }

    /// True if a log that ends with (`term`, `index`) is at least as up to date (Raft §5.4.1).
    pub(super) fn is_covered_by(&self, index: Index, term: Term) -> bool {
        (term, index) >= (self.last_term(), self.last())
    }

    /// The highest index up to `from` whose term is at most `term`: where two logs may agree if one
    /// has `term` at `from`. Both sides skip whole terms with it (Raft §5.3, end), so the number of
    /// probes is bounded by the number of terms, not of entries. Terms never decrease along a log,
    /// hence the binary search.
    pub(super) fn agreeable(&self, from: Index, term: Term) -> (Index, Term) {
        let upper = from.min(self.last());
        let within = self.slot(upper).map_or(0, |slot| slot + 1).min(self.entries.len());
        let count = self.entries.partition_point(|entry| entry.term <= term).min(within);
        let index = self.base.plus(count);
        (index.min(upper), self.term_at(index).unwrap_or(self.base_term))
    }

    pub(super) fn assert_invariants(&self) {
        let terms = self.entries.iter().rev().take(64).map(|entry| entry.term);
        assert!(terms.is_sorted_by(|later, earlier| later >= earlier), "terms fall along the log");
        assert!(self.changes.is_sorted_by(|(a, _), (b, _)| a < b), "memberships out of order");
        assert!(
            self.changes.iter().all(|&(at, _)| at > self.base && at <= self.last()),
            "a membership lies outside the log"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::Shared;
    use super::*;
    use orthodrome_core::NodeId;
    use proptest::prelude::*;

    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    struct Words;

    impl Replicated for Words {
        type Command = u64;
        type Chunk = u64;
        type Cursor = u64;
    }

    fn log_of(terms: &[u64]) -> Log<Words> {
        let members = Members::settled(vec![NodeId(1)], Vec::new());
        let mut log = Log::new(Index(0), Term(0), members);
        for (at, &term) in terms.iter().enumerate() {
            log.append(Entry {
                term: Term(term),
                payload: Payload::Command(Shared::new(at as u64)),
            });
        }
        log
    }

    /// The `count` commands from `base` on, in the order of the log.
    fn commands(log: &Log<Words>) -> Vec<(u64, u64)> {
        let entries = log.from(log.base_index().next());
        entries
            .filter_map(|(index, entry)| match &entry.payload {
                Payload::Command(command) => Some((index.0, **command)),
                Payload::Noop | Payload::Members(_) => None,
            })
            .collect()
    }

    proptest! {
        /// Compared with a plain vector: any mix of appends, truncations and compactions.
        #[test]
        fn behaves_like_a_vector_with_its_front_cut_off(
            steps in proptest::collection::vec((0_u8..4, 0_u64..12), 1..60)
        ) {
            let mut log = log_of(&[]);
            let mut model: Vec<u64> = Vec::new();
            let mut base = 0_usize;
            for (kind, value) in steps {
                match kind {
                    0 | 1 => {
                        log.append(Entry { term: Term(1), payload: Payload::Command(Shared::new(value)) });
                        model.push(value);
                    }
                    2 => {
                        let from = base + 1 + value as usize;
                        log.truncate(Index(from as u64));
                        model.truncate(from - 1);
                    }
                    _ => {
                        let through = (base + value as usize).min(model.len());
                        log.compact(Index(through as u64));
                        base = through;
                    }
                }
                log.assert_invariants();
                prop_assert_eq!(log.last(), Index(model.len() as u64));
                prop_assert_eq!(log.base_index(), Index(base as u64));
                let expected: Vec<(u64, u64)> = model.iter().enumerate().skip(base)
                    .map(|(at, &value)| (at as u64 + 1, value)).collect();
                prop_assert_eq!(commands(&log), expected);
                prop_assert_eq!(log.get(Index(base as u64)), None);
                prop_assert_eq!(log.term_at(Index(base as u64)).is_some(), true);
            }
        }

        /// Two logs that agree up to some point find a point of agreement in a number of steps
        /// bounded by the number of terms.
        #[test]
        fn probing_jumps_over_terms(
            shared in proptest::collection::vec(1_u64..4, 0..8),
            mut left in proptest::collection::vec(4_u64..12, 0..8),
            mut right in proptest::collection::vec(4_u64..12, 0..8),
        ) {
            let mut shared = shared;
            shared.sort_unstable();
            left.sort_unstable();
            // Odd and even terms: after the shared part the logs never agree.
            left.iter_mut().for_each(|term| *term = *term * 2 + 1);
            right.sort_unstable();
            right.iter_mut().for_each(|term| *term *= 2);
            let leader = log_of(&[shared.clone(), left].concat());
            let follower = log_of(&[shared.clone(), right].concat());
            let mut prev = leader.last();
            let mut probes = 0;
            while follower.term_at(prev) != leader.term_at(prev) {
                let term = leader.term_at(prev).unwrap();
                let (hint, hint_term) = follower.agreeable(prev, term);
                let (next, _) = leader.agreeable(hint, hint_term);
                prop_assert!(next < prev || hint < prev, "no progress at {prev:?}");
                prev = next;
                probes += 1;
                prop_assert!(probes <= 12, "more probes than terms");
            }
            prop_assert!(prev.0 <= shared.len() as u64);
        }
    }

    #[test]
    fn memberships_follow_the_log() {
        let mut log = log_of(&[1, 1]);
        let wider = Members::settled(vec![NodeId(1), NodeId(2)], Vec::new());
        log.append(Entry { term: Term(1), payload: Payload::Members(Arc::new(wider.clone())) });
        assert_eq!((log.members(), log.members_index()), (&wider, Index(3)));
        assert_eq!(log.members_at(Index(2)).voters, [NodeId(1)]);
        log.truncate(Index(3));
        assert_eq!(log.members().voters, [NodeId(1)]);
        log.append(Entry { term: Term(2), payload: Payload::Members(Arc::new(wider.clone())) });
        log.compact(Index(3));
        assert_eq!((log.members(), log.members_index()), (&wider, Index(3)));
    }

    #[test]
    fn a_snapshot_keeps_the_tail_only_if_the_logs_agree_at_its_end() {
        let members = Members::settled(vec![NodeId(7)], Vec::new());
        let mut log = log_of(&[1, 1, 2, 2]);
        assert!(log.install(Index(3), Term(2), members.clone()));
        assert_eq!((log.last(), log.last_term()), (Index(4), Term(2)));
        let mut log = log_of(&[1, 1, 2, 2]);
        assert!(!log.install(Index(3), Term(3), members));
        assert_eq!((log.last(), log.last_term()), (Index(3), Term(3)));
    }
}
