//! What is not written down and follows from what is: closings of keys, who may yet write them, and
//! questions that wait for those.

use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::{KeyRange, is_fence};
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::Key;

/// A place in the order of everything: F, then the name.
pub type Place = (Timestamp, TxnId);

/// Up to when each key is closed: nobody who writes it gets a stamp at or below (D2). A replica that
/// restarts has lost this, and closes everything up to its ceiling.
#[derive(Debug)]
pub(super) struct Closings {
    by_key: OrdMap<Key, Timestamp>,
    /// Every key is closed up to here.
    floor: Timestamp,
    /// And up to here, because somebody read a fence.
    fenced: Timestamp,
    newest: Timestamp,
}

/// Closings older than this by the newest are not told apart any more.
const CLOSINGS_KEPT: Duration = Duration::from_secs(5);

impl Closings {
    /// Everything is closed up to `floor`.
    pub(super) fn new(floor: Timestamp) -> Self {
        Self { by_key: OrdMap::new(), floor, fenced: Timestamp::ZERO, newest: Timestamp::ZERO }
    }

    /// Closes keys. A scan must see every key below its timestamp, also keys that nobody has named to
    /// it. So its fence stands for all keys of the partition.
    pub(super) fn close<'a>(&mut self, keys: impl IntoIterator<Item = &'a Key>, at: Timestamp) {
        for key in keys {
            if is_fence(key) {
                self.fenced = self.fenced.max(at);
            }
            match self.by_key.get_mut(key) {
                Some(known) => *known = (*known).max(at),
                None => drop(self.by_key.insert(key.clone(), at)),
            }
        }
        self.newest = self.newest.max(at);
    }

    /// The highest closing of a key.
    pub(super) fn newest(&self) -> Timestamp {
        self.newest
    }

    /// Every key is closed up to here.
    pub(super) fn floor(&self) -> Timestamp {
        self.floor
    }

    /// The highest closing of these keys.
    pub(super) fn of<'a>(&self, keys: impl IntoIterator<Item = &'a Key>) -> Timestamp {
        let known = keys.into_iter().map(|key| self.by_key.get(key).copied().unwrap_or_default());
        known.max().unwrap_or_default().max(self.floor).max(self.fenced)
    }

    /// Forgets closings of long ago, and closes everything up to there. `now` bounds that: a closing
    /// may be in the future, and everything must not be.
    pub(super) fn collect(&mut self, now: Timestamp) {
        let floor = self.newest.min(now) - CLOSINGS_KEPT;
        if floor > self.floor {
            self.floor = floor;
            self.by_key.retain(|_, at| *at > floor);
        }
    }
}

/// Timestamps that one node makes. Two nodes never make the same one: the lowest bits are the node's
/// name. So no two transactions that write one key have one timestamp, whoever stamped them.
#[derive(Debug)]
pub(super) struct Maker {
    node: u64,
    /// Those made above `floor`.
    made: OrdSet<Timestamp>,
    /// None is made at or below this any more.
    floor: Timestamp,
}

/// Timestamps are so many nanoseconds apart for each node; node ids are below this.
const GRAIN: u64 = 4_096;

impl Maker {
    pub(super) fn new(node: NodeId) -> Self {
        let (made, floor) = (OrdSet::new(), Timestamp::ZERO);
        Self { node: u64::from(node.0) % GRAIN, made, floor }
    }

    /// A new timestamp at or above `least`.
    pub(super) fn at_least(&mut self, least: Timestamp) -> Timestamp {
        let least = least.max(self.floor.next());
        let rest = least.0 % GRAIN;
        let up = if rest <= self.node { self.node - rest } else { GRAIN + self.node - rest };
        let mut at = Timestamp(least.0.saturating_add(up));
        while !self.made.insert(at) {
            at = Timestamp(at.0.saturating_add(GRAIN));
        }
        at
    }

    /// Forgets what was made up to `floor`, and makes nothing there any more.
    pub(super) fn forget(&mut self, floor: Timestamp) {
        if floor > self.floor {
            self.floor = floor;
            self.made = self.made.split_off(&floor.next());
        }
    }
}

/// Transactions that have not ended, by the keys that they may write.
#[derive(Debug, Default)]
pub(super) struct Writers(OrdMap<Key, OrdSet<TxnId>>);

impl Writers {
    /// `txn` may write these.
    pub(super) fn add<'a>(&mut self, txn: TxnId, keys: impl IntoIterator<Item = &'a Key>) {
        for key in keys {
            self.0.entry(key.clone()).or_default().insert(txn);
        }
    }

    /// `txn` has ended.
    pub(super) fn remove<'a>(&mut self, txn: TxnId, keys: impl IntoIterator<Item = &'a Key>) {
        for key in keys {
            if let Some(writers) = self.0.get_mut(key) {
                writers.remove(&txn);
                if writers.is_empty() {
                    self.0.remove(key);
                }
            }
        }
    }

    /// Who may write one of these. A fence stands for the keys of `fenced`; none: for all.
    pub(super) fn of(&self, keys: &[Key], fenced: Option<&KeyRange>) -> OrdSet<TxnId> {
        let own = keys.iter().filter_map(|key| self.0.get(key)).flatten().copied();
        match fenced {
            _ if !keys.iter().any(is_fence) => own.collect(),
            None => self.0.values().flatten().copied().collect(),
            Some(range) => own.chain(self.within(range).flat_map(|(_, of)| of).copied()).collect(),
        }
    }

    /// The keys of a range that have a writer.
    pub(super) fn keys_in<'a>(&'a self, range: &'a KeyRange) -> impl Iterator<Item = &'a Key> {
        self.within(range).map(|(key, _)| key)
    }

    fn within<'a>(
        &'a self,
        range: &'a KeyRange,
    ) -> impl Iterator<Item = (&'a Key, &'a OrdSet<TxnId>)> {
        self.0.range(range.from.clone()..).take_while(|(key, _)| range.contains(key))
    }

    /// How many keys have a writer.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Writers that this replica has only heard of: their gateways named others. Who reads what they write
/// should wait for them rather than read what is about to change. Nothing depends on a hint.
#[derive(Debug, Default)]
pub(super) struct Hints {
    by_key: OrdMap<Key, OrdMap<TxnId, NodeId>>,
    by_txn: OrdMap<TxnId, (Time, Vec<Key>)>,
}

/// Further hints are ignored.
const HINTS_MAX: usize = 1 << 16;

impl Hints {
    /// `txn` of this gateway may write these.
    pub(super) fn add(&mut self, txn: TxnId, gateway: NodeId, keys: Vec<Key>, now: Time) {
        if self.by_txn.len() >= HINTS_MAX {
            return;
        }
        for key in &keys {
            self.by_key.entry(key.clone()).or_default().insert(txn, gateway);
        }
        self.by_txn.insert(txn, (now, keys));
    }

    /// `txn` has ended, or is better known now.
    pub(super) fn remove(&mut self, txn: TxnId) {
        let Some((_, keys)) = self.by_txn.remove(&txn) else { return };
        for key in keys {
            if let Some(writers) = self.by_key.get_mut(&key) {
                writers.remove(&txn);
                if writers.is_empty() {
                    self.by_key.remove(&key);
                }
            }
        }
    }

    /// Forgets what was heard before `then`.
    pub(super) fn expire(&mut self, then: Time) {
        let old = self.by_txn.iter().filter(|(_, (heard, _))| *heard < then);
        let old: Vec<TxnId> = old.map(|(txn, _)| *txn).collect();
        for txn in old {
            self.remove(txn);
        }
    }

    /// Who may write one of these, with their gateways.
    pub(super) fn of(&self, keys: &[Key]) -> OrdMap<TxnId, NodeId> {
        let writers = keys.iter().filter_map(|key| self.by_key.get(key)).flatten();
        writers.map(|(txn, gateway)| (*txn, *gateway)).collect()
    }

    /// Whether `txn` may write this.
    pub(super) fn writes(&self, txn: TxnId, key: &Key) -> bool {
        self.by_key.get(key).is_some_and(|writers| writers.contains_key(&txn))
    }
}

/// Somebody wants to know what keys hold below a place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Question {
    /// In the name of which transaction.
    pub txn: TxnId,
    /// Who asks.
    pub to: NodeId,
    /// As of when.
    pub at: Timestamp,
    /// The keys.
    pub keys: Vec<Key>,
    /// What the fences among them stand for; none: for all keys.
    pub fenced: Option<KeyRange>,
    /// The transaction only reads, and has no place of its own: it sees everything up to `at`.
    pub is_read_only: bool,
}

/// The name of a question: about which transaction, by whom, as of when.
pub(super) type Name = (TxnId, NodeId, Timestamp);

impl Question {
    /// Everything below this is seen.
    pub(super) fn place(&self) -> Place {
        if self.is_read_only { (self.at.next(), TxnId::default()) } else { (self.at, self.txn) }
    }

    /// Its name.
    pub(super) fn name(&self) -> Name {
        (self.txn, self.to, self.at)
    }
}

/// Questions that wait for predecessors to end, or to prove to be none.
#[derive(Debug, Default)]
pub(super) struct Questions {
    open: OrdMap<Name, (Question, OrdSet<TxnId>)>,
    blocked_by: OrdMap<TxnId, OrdSet<Name>>,
}

impl Questions {
    /// If a question with this name waits already, adds that question's keys: whoever asks again may
    /// ask in portions.
    pub(super) fn widen(&self, question: &mut Question) {
        if let Some((before, _)) = self.open.get(&question.name()) {
            let keys = before.keys.iter().cloned().chain(std::mem::take(&mut question.keys));
            question.keys = keys.collect::<OrdSet<Key>>().into_iter().collect();
        }
    }

    /// True if a question with this name waits already, for all these keys.
    pub(super) fn has(&self, question: &Question) -> bool {
        self.open.get(&question.name()).is_some_and(|(before, _)| {
            before.keys == question.keys
                || question.keys.iter().all(|key| before.keys.contains(key))
        })
    }

    /// Waits for all of these.
    pub(super) fn wait(&mut self, question: Question, blockers: OrdSet<TxnId>) {
        let name = question.name();
        for blocker in &blockers {
            self.blocked_by.entry(*blocker).or_default().insert(name);
        }
        self.open.insert(name, (question, blockers));
    }

    /// A question, with whom it waits for.
    pub(super) fn get(&self, name: Name) -> Option<(&Question, &OrdSet<TxnId>)> {
        self.open.get(&name).map(|(question, blockers)| (question, blockers))
    }

    /// Those that wait for `txn`, with their places.
    pub(super) fn blocked_by(&self, txn: TxnId) -> Vec<(Name, Place)> {
        let names = self.blocked_by.get(&txn).into_iter().flatten();
        let place = |name: &Name| Some((*name, self.open.get(name)?.0.place()));
        names.filter_map(place).collect()
    }

    /// This question need not wait for `txn` any more. It, if it waits for nobody else.
    pub(super) fn release(&mut self, name: Name, txn: TxnId) -> Option<Question> {
        if let Some(names) = self.blocked_by.get_mut(&txn) {
            names.remove(&name);
            if names.is_empty() {
                self.blocked_by.remove(&txn);
            }
        }
        let (_, blockers) = self.open.get_mut(&name)?;
        blockers.remove(&txn);
        if !blockers.is_empty() {
            return None;
        }
        self.open.remove(&name).map(|(question, _)| question)
    }

    /// Nobody wants to know about `txn` any more.
    pub(super) fn forget(&mut self, txn: TxnId) {
        let from = (txn, NodeId(0), Timestamp::ZERO);
        let to = (txn, NodeId(u32::MAX), Timestamp::MAX);
        let names: Vec<Name> = self.open.range(from..=to).map(|(name, _)| *name).collect();
        for name in names {
            let Some((_, blockers)) = self.open.remove(&name) else { continue };
            for blocker in blockers {
                if let Some(names) = self.blocked_by.get_mut(&blocker) {
                    names.remove(&name);
                    if names.is_empty() {
                        self.blocked_by.remove(&blocker);
                    }
                }
            }
        }
    }

    /// The earliest time that somebody asks about.
    pub(super) fn least(&self) -> Option<Timestamp> {
        self.open.keys().map(|(_, _, at)| *at).min()
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// Every question with whom it waits for.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Question, &OrdSet<TxnId>)> {
        self.open.values().map(|(question, blockers)| (question, blockers))
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::ClientId;

    use super::*;

    #[test]
    fn a_question_in_portions_is_answered_for_all_its_keys() {
        let (reader, writer) = (TxnId::new(ClientId(1), 1), TxnId::new(ClientId(2), 1));
        let mut questions = Questions::default();
        let (txn, to, at, is_read_only) = (reader, NodeId(4), Timestamp(9), true);
        for key in ["b", "a", "b"] {
            let keys = vec![Key::from(key)];
            let mut question = Question { txn, to, at, keys, fenced: None, is_read_only };
            questions.widen(&mut question);
            questions.wait(question, OrdSet::from([writer]));
        }
        let told = questions.release((reader, to, at), writer).map(|question| question.keys);
        assert_eq!(told, Some(vec![Key::from("a"), Key::from("b")]));
    }

    #[test]
    fn a_question_that_waits_is_known_by_its_name_and_keys() {
        let (reader, writer) = (TxnId::new(ClientId(1), 1), TxnId::new(ClientId(2), 1));
        let ask = |to, keys: &[&str]| {
            let keys = keys.iter().map(|key| Key::from(*key)).collect();
            let (txn, to, at) = (reader, NodeId(to), Timestamp(9));
            Question { txn, to, at, keys, fenced: None, is_read_only: true }
        };
        let mut questions = Questions::default();
        questions.wait(ask(4, &["a", "b"]), OrdSet::from([writer]));
        let has = [ask(4, &["a", "b"]), ask(4, &["b"]), ask(4, &["b", "c"]), ask(5, &["a"])];
        assert_eq!(has.map(|question| questions.has(&question)), [true, true, false, false]);
        questions.release((reader, NodeId(4), Timestamp(9)), writer);
        assert!(!questions.has(&ask(4, &["b"])), "it is answered, and the answer may be lost");
    }

    #[test]
    fn a_fence_closes_every_key_and_waits_for_every_writer() {
        let (fence, key) = (Key::from("m\0fence12"), Key::from("a"));
        assert!(is_fence(&fence) && !is_fence(&key) && !is_fence(&Key::from("fence12")));
        let mut closings = Closings::new(Timestamp(3));
        closings.close([&key], Timestamp(5));
        assert_eq!(closings.of([&Key::from("b")]), Timestamp(3));
        closings.close([&fence], Timestamp(4));
        assert_eq!(closings.of([&Key::from("b")]), Timestamp(4));
        assert_eq!(closings.of([&key]), Timestamp(5));
        let (one, other) = (TxnId::new(ClientId(1), 1), TxnId::new(ClientId(2), 1));
        let mut writers = Writers::default();
        writers.add(one, [&key]);
        writers.add(other, [&Key::from("z")]);
        assert_eq!(writers.of(&[Key::from("b")], None), OrdSet::new());
        let fences = [fence];
        assert_eq!(writers.of(&fences, None), OrdSet::from([one, other]));
        // A scan names the keys for which its fences stand.
        let of = |keys: &[Key], from: &str, until: &str| {
            let range = KeyRange { from: from.into(), until: Some(until.into()) };
            writers.of(keys, Some(&range))
        };
        assert_eq!(of(&fences, "a", "b"), OrdSet::from([one]));
        assert_eq!(of(&fences, "b", "z"), OrdSet::new());
        assert_eq!(of(&fences, "z", "a"), OrdSet::new(), "a range that ends first");
        assert_eq!(
            of(std::slice::from_ref(&key), "b", "zz"),
            OrdSet::from([one]),
            "without a fence"
        );
        let both = [fences[0].clone(), key];
        assert_eq!(of(&both, "b", "zz"), OrdSet::from([one, other]));
    }

    #[test]
    fn no_timestamp_is_made_twice_by_whichever_node() {
        let mut makers = [Maker::new(NodeId(1)), Maker::new(NodeId(7))];
        let mut made = OrdSet::new();
        for round in 0..200 {
            for maker in &mut makers {
                let least = Timestamp(1_000_000 + round % 3);
                let at = maker.at_least(least);
                assert!(at >= least && made.insert(at), "{at} was made twice");
            }
            if round == 100 {
                makers.iter_mut().for_each(|maker| maker.forget(Timestamp(1_100_000)));
            }
        }
    }
}
