//! Compares the lock table with a naive model, and tests systems of several tables for deadlocks.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::collections::VecDeque;

use orthodrome_core::id::ClientId;
use orthodrome_core::rng::Rng;

use super::*;

fn txn(counter: u64) -> TxnId {
    TxnId::new(ClientId(1), counter)
}

fn key(number: u64) -> Key {
    Key::from(format!("k{number}"))
}

/// A request for one key, waiting or granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Wish {
    txn: TxnId,
    key: u64,
    mode: Mode,
    is_held: bool,
}

/// The definition of the table without regard to cost: a list of requests, searched each time.
#[derive(Default)]
struct Model {
    preemption: Preemption,
    wishes: Vec<Wish>,
    ranks: OrdMap<TxnId, Rank>,
    prepared: OrdSet<TxnId>,
    elsewhere: OrdSet<TxnId>,
}

impl Model {
    fn older(&self, a: TxnId, b: TxnId) -> bool {
        (self.ranks[&a].age, a) < (self.ranks[&b].age, b)
    }

    fn higher(&self, a: TxnId, b: TxnId) -> bool {
        self.ranks[&a].priority > self.ranks[&b].priority
    }

    fn first(&self, a: TxnId, b: TxnId) -> bool {
        match self.preemption {
            Preemption::Never => self.older(a, b),
            Preemption::Always | Preemption::OnWait => {
                self.higher(a, b) || (!self.higher(b, a) && self.older(a, b))
            }
        }
    }

    fn waits(&self, txn: TxnId) -> bool {
        self.elsewhere.contains(&txn) || self.wishes.iter().any(|w| w.txn == txn && !w.is_held)
    }

    fn takes_from(&self, txn: TxnId, holder: TxnId) -> bool {
        !self.prepared.contains(&holder)
            && match self.preemption {
                Preemption::Never => self.older(txn, holder),
                Preemption::Always => self.first(txn, holder),
                Preemption::OnWait => {
                    (self.higher(txn, holder) && self.waits(holder))
                        || (!self.higher(holder, txn) && self.older(txn, holder))
                }
            }
    }

    fn clash(a: &Wish, b: &Wish) -> bool {
        a.key == b.key && a.txn != b.txn && a.mode.conflicts(b.mode)
    }

    fn drop_txn(&mut self, txn: TxnId) {
        self.wishes.retain(|wish| wish.txn != txn);
        self.prepared.remove(&txn);
        self.elsewhere.remove(&txn);
    }

    /// Grants requests while some waiter conflicts neither with a holder nor with an earlier
    /// waiter.
    fn grant(&mut self) {
        loop {
            let next = self.wishes.iter().position(|wish| {
                !wish.is_held
                    && !self.wishes.iter().any(|other| {
                        Self::clash(wish, other)
                            && (other.is_held || self.first(other.txn, wish.txn))
                    })
            });
            let Some(next) = next else { return };
            let wish = self.wishes[next];
            // An upgrade replaces the lock that is already held.
            self.wishes.retain(|w| w.txn != wish.txn || w.key != wish.key);
            self.wishes.push(Wish { is_held: true, ..wish });
        }
    }

    fn request(&mut self, txn: TxnId, rank: Rank, wanted: &[(u64, Mode)]) -> OrdSet<TxnId> {
        self.ranks.insert(txn, rank);
        for &(key, mode) in wanted {
            let has = |w: &&Wish| w.txn == txn && w.key == key && w.mode >= mode;
            if self.wishes.iter().find(has).is_none() {
                self.wishes.retain(|w| w.txn != txn || w.key != key || w.is_held);
                self.wishes.push(Wish { txn, key, mode, is_held: false });
            }
        }
        let mine: Vec<Wish> =
            self.wishes.iter().filter(|w| w.txn == txn && !w.is_held).copied().collect();
        let mut lost = OrdSet::new();
        for wish in &mine {
            for other in self.wishes.iter().filter(|other| Self::clash(wish, other)) {
                let is_turned_away = self.preemption == Preemption::Always
                    && !other.is_held
                    && self.higher(txn, other.txn)
                    && self.older(other.txn, txn);
                if (other.is_held && self.takes_from(txn, other.txn)) || is_turned_away {
                    lost.insert(other.txn);
                }
            }
        }
        for &victim in &lost {
            self.drop_txn(victim);
        }
        self.grant();
        lost.extend(self.lose_if_waiting(txn));
        lost
    }

    fn lose_if_waiting(&mut self, txn: TxnId) -> Option<TxnId> {
        let is_in_the_way = self.preemption == Preemption::OnWait
            && !self.prepared.contains(&txn)
            && self.waits(txn)
            && self.wishes.iter().filter(|w| w.txn == txn && w.is_held).any(|mine| {
                self.wishes.iter().any(|other| {
                    !other.is_held && Self::clash(mine, other) && self.higher(other.txn, txn)
                })
            });
        is_in_the_way.then(|| {
            self.drop_txn(txn);
            self.grant();
            txn
        })
    }

    fn granted(&self) -> OrdSet<TxnId> {
        let all: OrdSet<TxnId> = self.wishes.iter().map(|wish| wish.txn).collect();
        let waiting = |txn: &TxnId| self.wishes.iter().any(|w| w.txn == *txn && !w.is_held);
        all.into_iter().filter(|txn| !waiting(txn)).collect()
    }
}

fn rank(rng: &mut Rng) -> Rank {
    Rank {
        priority: if rng.chance(1, 3) { Priority::HIGH } else { Priority::LOW },
        age: Timestamp(rng.below(40)),
    }
}

fn wishes(rng: &mut Rng) -> Vec<(u64, Mode)> {
    let mut all: OrdMap<u64, Mode> = OrdMap::new();
    for _ in 0..=rng.below(3) {
        let mode = if rng.chance(1, 2) { Mode::Shared } else { Mode::Exclusive };
        all.insert(rng.below(6), mode);
    }
    all.into_iter().collect()
}

/// Events that a random history of one table reached.
#[derive(Default, Debug)]
struct Reached {
    granted: u64,
    lost: u64,
    upgrades: u64,
}

fn compare(preemption: Preemption, seed: u64, reached: &mut Reached) {
    let mut rng = Rng::stream(seed, "locks", 0);
    let rng = &mut rng;
    let mut table = LockTable::new(preemption, false);
    let mut model = Model { preemption, ..Model::default() };
    let mut counter = 0;
    for _ in 0..300 {
        let known: Vec<TxnId> = table.owners().collect();
        let picked = rng.pick(&known).copied();
        let (expected, found) = match (rng.below(7), picked) {
            (0..=2, _) | (_, None) => {
                counter += 1;
                let (id, rank, wanted) = (txn(counter), rank(rng), wishes(rng));
                let keys: Vec<_> = wanted.iter().map(|&(k, mode)| (key(k), mode)).collect();
                (model.request(id, rank, &wanted), table.request(id, rank, keys))
            }
            // More locks, or stronger ones, for a transaction that has some.
            (3, Some(id)) if !model.prepared.contains(&id) => {
                let (rank, wanted) = (model.ranks[&id], wishes(rng));
                reached.upgrades += 1;
                let keys: Vec<_> = wanted.iter().map(|&(k, mode)| (key(k), mode)).collect();
                (model.request(id, rank, &wanted), table.request(id, rank, keys))
            }
            (4, Some(id)) if table.is_granted(id) => {
                model.prepared.insert(id);
                table.prepare(id);
                continue;
            }
            (5, Some(id)) if !model.prepared.contains(&id) => {
                let waits = rng.chance(1, 2);
                if waits {
                    model.elsewhere.insert(id)
                } else {
                    model.elsewhere.remove(&id)
                };
                let found = table.set_waits_elsewhere(id, waits);
                (model.lose_if_waiting(id).into_iter().collect(), found.into_iter().collect())
            }
            (_, Some(id)) => {
                model.drop_txn(id);
                model.grant();
                table.release(id);
                (OrdSet::new(), Vec::new())
            }
        };
        table.assert_invariants();
        reached.lost += found.len() as u64;
        assert_eq!(found.iter().map(|(txn, _)| *txn).collect::<OrdSet<_>>(), expected);
        let granted: OrdSet<TxnId> = table.owners().filter(|&t| table.is_granted(t)).collect();
        assert_eq!(granted, model.granted());
        reached.granted += table.take_granted().len() as u64;
    }
    for id in table.owners().collect::<Vec<_>>() {
        table.release(id);
    }
    assert!(table.locks.is_empty() && table.owners.is_empty());
}

#[test]
fn agrees_with_the_definition() {
    for preemption in [Preemption::Never, Preemption::Always, Preemption::OnWait] {
        let mut reached = Reached::default();
        for seed in 0..200 {
            compare(preemption, seed, &mut reached);
        }
        assert!(reached.granted > 5_000, "{reached:?}");
        assert!(reached.lost > 1_000 && reached.upgrades > 1_000, "{reached:?}");
    }
}

/// One transaction over several tables. It asks each table in its own order, more than once if it
/// reads before it knows its writes, and retries when it loses.
#[derive(Debug)]
struct Job {
    rank: Rank,
    /// The locks that it requests: rounds for three tables, in the order of their numbers, then
    /// again.
    wanted: Vec<Vec<(u64, Mode)>>,
    attempt: u32,
    /// Tables that have been asked in this attempt.
    asked: Vec<usize>,
    to_ask: VecDeque<usize>,
    is_long: bool,
    is_done: bool,
}

/// Every transaction over several tables ends, in whatever order its requests arrive: no cycle of
/// the waits-for graph lasts.
fn run_to_the_end(preemption: Preemption, seed: u64) -> u64 {
    let mut rng = Rng::stream(seed, "deadlock", 0);
    let rng = &mut rng;
    let mut tables: Vec<LockTable> = (0..3).map(|_| LockTable::new(preemption, false)).collect();
    let mut jobs: OrdMap<u64, Job> = OrdMap::new();
    for number in 1..=12 {
        let wanted: Vec<Vec<(u64, Mode)>> = (0..9).map(|_| wishes(rng)).collect();
        // One round, or three. A later round may strengthen a lock of an earlier one.
        let is_long = rng.chance(1, 2);
        let mut order: Vec<usize> = (0..if is_long { 9 } else { 3 }).collect();
        rng.shuffle(&mut order);
        let to_ask = order.into();
        let (rank, asked) = (rank(rng), Vec::new());
        let job = Job { rank, wanted, attempt: 0, asked, to_ask, is_long, is_done: false };
        jobs.insert(number, job);
    }
    let mut losses = 0;
    for step in 0_u64.. {
        assert!(step < 20_000, "{preemption:?}, seed {seed}: no end");
        let open: Vec<u64> = jobs.iter().filter(|(_, job)| !job.is_done).map(|(n, _)| *n).collect();
        let Some(&number) = rng.pick(&open) else { return losses };
        let job = jobs.get_mut(&number).unwrap();
        let id = TxnId { attempt: job.attempt, ..txn(number) };
        let mut lost = Vec::new();
        let has_all = job.asked.iter().all(|&at| tables[at].is_granted(id));
        if let Some(round) = job.to_ask.front().copied()
            // It knows its next request only after an answer. The first round is sent as a whole.
            && (has_all || job.asked.len() < 3)
        {
            let at = round % 3;
            job.to_ask.pop_front();
            job.asked.push(at);
            let keys: Vec<_> = job.wanted[round].iter().map(|&(k, mode)| (key(k), mode)).collect();
            lost.extend(tables[at].request(id, job.rank, keys));
        } else if has_all && job.to_ask.is_empty() {
            // It has every lock, so it prepares and ends.
            for table in &mut tables {
                table.prepare(id);
                table.release(id);
            }
            job.is_done = true;
        }
        // The messages of preempt-on-wait to the other tables.
        if !jobs[&number].is_done {
            for at in jobs[&number].asked.clone() {
                let waits =
                    jobs[&number].asked.iter().any(|&b| b != at && !tables[b].is_granted(id));
                lost.extend(tables[at].set_waits_elsewhere(id, waits));
            }
        }
        for (victim, _) in lost {
            let job = jobs.get_mut(&victim.counter).unwrap();
            assert!(!job.is_done, "{victim} lost locks after its end");
            if job.attempt != victim.attempt {
                // It lost locks in two tables at the same time.
                continue;
            }
            losses += 1;
            for table in &mut tables {
                table.release(victim);
            }
            job.attempt += 1;
            job.asked.clear();
            job.to_ask = (0..if job.is_long { 9 } else { 3 }).collect();
        }
        for table in &tables {
            table.assert_invariants();
        }
    }
    losses
}

#[test]
fn nobody_waits_for_ever() {
    for preemption in [Preemption::Never, Preemption::Always, Preemption::OnWait] {
        let losses: u64 = (0..300).map(|seed| run_to_the_end(preemption, seed)).sum();
        assert!(losses > 300, "{preemption:?}: only {losses} lost their locks");
    }
}

#[test]
fn a_prepared_transaction_keeps_its_locks_and_those_that_wait_get_them_in_order() {
    for preemption in [Preemption::Never, Preemption::Always, Preemption::OnWait] {
        let mut table = LockTable::new(preemption, false);
        let at = |priority, age| Rank { priority, age: Timestamp(age) };
        let want = |mode| [(key(1), mode)];
        assert!(table.seize(txn(1), want(Mode::Exclusive)));
        assert!(!table.seize(txn(2), want(Mode::Shared)));
        for (number, rank) in
            [(3, at(Priority::LOW, 30)), (4, at(Priority::LOW, 40)), (5, at(Priority::HIGH, 35))]
        {
            let lost = table.request(txn(number), rank, want(Mode::Exclusive));
            let turned_away = preemption == Preemption::Always && number == 5;
            let expected = turned_away.then_some((txn(3), Loss::Preempted));
            assert_eq!(lost, Vec::from_iter(expected), "{preemption:?}");
        }
        let mut order = Vec::new();
        let mut holder = txn(1);
        while !table.locks.is_empty() {
            assert_eq!(table.prepared_writers(&[key(1)]), [holder].into());
            table.release(holder);
            for next in table.take_granted() {
                order.push(next.counter);
                table.prepare(next);
                holder = next;
            }
        }
        let expected: &[u64] = match preemption {
            Preemption::Never => &[3, 5, 4],
            Preemption::Always => &[5, 4],
            Preemption::OnWait => &[5, 3, 4],
        };
        assert_eq!(order, expected, "{preemption:?}");
    }
}

#[test]
fn a_later_round_with_another_age_keeps_its_place_and_leaves_it() {
    let age = |age| Rank { priority: Priority::LOW, age: Timestamp(age) };
    let mut table = LockTable::new(Preemption::Never, false);
    let [holder, waiter, last] = [1, 2, 3].map(txn);
    table.request(holder, age(1), [(key(0), Mode::Exclusive)]);
    table.request(waiter, age(5), [(key(1), Mode::Exclusive)]);
    table.request(waiter, age(9), [(key(0), Mode::Exclusive)]);
    table.assert_invariants();
    table.release(waiter);
    table.release(holder);
    table.request(last, age(7), [(key(0), Mode::Exclusive)]);
    assert!(table.is_granted(last), "nobody else is left");
}
