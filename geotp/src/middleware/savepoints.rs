//! Savepoints of a transaction: which of them each branch has, and when it acts on them.
//!
//! A savepoint by itself causes no message. The session's actions on savepoints are remembered, and
//! sent with the next statements of each branch ([`Mark`]), or with its prepare or commit. A branch
//! that begins after a savepoint was set has the savepoint from its beginning on. The round of a
//! message decides whether it has been carried out, so a repeated message has no effect.

use orthodrome_core::id::NodeId;

use super::{Branch, Middleware, Out, Phase};
use crate::contract::{Effect, Mark, Note, Then, ToAgent, Work, Xid};

impl<W: Work> Middleware<W> {
    /// Sets a savepoint. Its number is above all that the transaction had before.
    pub fn set_savepoint(&mut self, xid: Xid, savepoint: u32) {
        if let Some(open) = self.open.get_mut(&xid) {
            open.savepoints.push(savepoint);
        }
    }

    /// Rolls back to a savepoint, which remains set. This is allowed after a statement has failed.
    pub fn roll_back_to(&mut self, xid: Xid, savepoint: u32) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        if open.phase != Phase::Idle {
            return;
        }
        open.savepoints.retain(|other| *other <= savepoint);
        for branch in open.branches.values_mut() {
            branch.go_back(savepoint);
        }
    }

    /// Releases a savepoint and those after it. Changes since then remain.
    pub fn release_savepoint(&mut self, xid: Xid, savepoint: u32) {
        if let Some(open) = self.open.get_mut(&xid) {
            open.savepoints.retain(|other| *other < savepoint);
        }
    }

    /// The request to a branch that has no more statements but must roll back to a savepoint before
    /// it ends.
    pub(super) fn end_after_going_back(
        &mut self,
        xid: Xid,
        source: NodeId,
        peers: Vec<NodeId>,
        then: Then,
        io: Out<'_, '_, W>,
    ) -> Option<ToAgent<W>> {
        let open = self.open.get_mut(&xid)?;
        let isolation = open.isolation;
        let branch = open.branches.get_mut(&source)?;
        if self.config.mutations.forgets_savepoints {
            branch.back = None;
        }
        let marks = vec![Mark::Back(branch.back.take()?)];
        io.push(Effect::Note(Note::WentBack));
        let (round, statements) = (branch.rounds, Vec::new());
        branch.rounds += 1;
        let (life, writes) = (0, false);
        Some(ToAgent::Execute {
            xid,
            round,
            life,
            peers,
            isolation,
            marks,
            statements,
            writes,
            then,
        })
    }
}

impl<W: Work> Branch<W> {
    /// Notes that changes since this savepoint of the session must be undone.
    fn go_back(&mut self, savepoint: u32) {
        // Before the first statement after that savepoint, the branch set a savepoint of its own.
        let Some(place) = self.marks.iter().position(|mark| *mark >= savepoint) else { return };
        self.back = self.marks.get(place).copied();
        self.marks.truncate(place + 1);
    }

    /// The actions on savepoints before the next statements, if these are the session's savepoints.
    pub(super) fn marks_before(&mut self, savepoints: &[u32]) -> Vec<Mark> {
        let mut found: Vec<Mark> = self.back.take().map(Mark::Back).into_iter().collect();
        let mut released = None;
        while let Some((&last, before)) = self.marks.split_last() {
            let before = before.last().copied().unwrap_or(0);
            // It stands for the session's savepoints that were set after the branch's previous one.
            if savepoints.iter().any(|one| (before + 1..=last).contains(one)) {
                break;
            }
            released = self.marks.pop();
        }
        found.extend(released.map(Mark::Release));
        let newest = savepoints.last().copied();
        if let Some(newest) = newest.filter(|one| self.marks.last().is_none_or(|last| last < one)) {
            self.marks.push(newest);
            found.push(Mark::Set(newest));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::source::Model;

    /// A source that does what it is told: what a branch has done there, and what it had done at each of its savepoints.
    #[derive(Default)]
    struct There {
        done: Vec<usize>,
        marks: Vec<(u32, usize)>,
    }

    impl There {
        fn mark(&mut self, mark: Mark) {
            let place = |number| self.marks.iter().position(|(other, _)| *other == number);
            match mark {
                Mark::Set(number) => self.marks.push((number, self.done.len())),
                Mark::Release(number) => {
                    let place = place(number).expect("released and not set");
                    self.marks.truncate(place);
                }
                Mark::Back(number) => {
                    let place = place(number).expect("gone back to and not set");
                    self.marks.truncate(place + 1);
                    self.done.truncate(self.marks[place].1);
                }
            }
        }
    }

    proptest! {
        /// Whatever a session does with savepoints, each of several branches ends with what one database would have kept of
        /// its statements, and never has more savepoints than the session.
        #[test]
        fn branches_keep_what_one_database_keeps(steps in prop::collection::vec((0..5_u8, 0..8_usize), 1..60)) {
            let mut branches: Vec<Branch<Model>> = (0..2).map(|_| Branch::new()).collect();
            let mut there = [There::default(), There::default()];
            let mut wanted: [Vec<usize>; 2] = [Vec::new(), Vec::new()];
            let mut savepoints: Vec<(u32, [usize; 2])> = Vec::new();
            let mut last = 0;
            for (number, (step, which)) in steps.into_iter().enumerate() {
                let chosen = (!savepoints.is_empty()).then(|| which % savepoints.len());
                match (step, chosen) {
                    (0, _) => {
                        last += 1;
                        savepoints.push((last, [wanted[0].len(), wanted[1].len()]));
                    }
                    (1, Some(place)) => {
                        let (savepoint, kept) = savepoints[place];
                        savepoints.truncate(place + 1);
                        for (at, branch) in branches.iter_mut().enumerate() {
                            branch.go_back(savepoint);
                            wanted[at].truncate(kept[at]);
                        }
                    }
                    (2, Some(place)) => savepoints.truncate(place),
                    _ => {
                        let at = which % 2;
                        let numbers: Vec<u32> = savepoints.iter().map(|(one, _)| *one).collect();
                        for mark in branches[at].marks_before(&numbers) {
                            there[at].mark(mark);
                        }
                        there[at].done.push(number);
                        wanted[at].push(number);
                        prop_assert!(there[at].marks.len() <= numbers.len());
                        prop_assert_eq!(&there[at].done, &wanted[at]);
                    }
                }
            }
            for (at, branch) in branches.iter_mut().enumerate() {
                if let Some(back) = branch.back.take() {
                    there[at].mark(Mark::Back(back));
                }
                prop_assert_eq!(&there[at].done, &wanted[at]);
            }
        }
    }
}
