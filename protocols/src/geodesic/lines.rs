//! Who may stand in line for hot keys. A gateway gives places to few transactions of low priority at
//! a time and keeps the others back, so that one of high priority finds a short line.

use orthodrome_core::id::TxnId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::{Duration, Time};
use orthodrome_core::txn::Key;

/// The lines that a gateway knows of, and its transactions of low priority in them and before them.
#[derive(Debug, Default)]
pub(super) struct Lines {
    by_key: OrdMap<Key, Line>,
    /// Transactions of low priority that have a place, with their hot keys, until their turn comes.
    placed: OrdMap<TxnId, Vec<Key>>,
    /// Transactions of low priority without a place, and their keys, in the order in which they came.
    held: OrdMap<u64, (TxnId, Vec<Key>)>,
    /// Their numbers in that order.
    numbers: OrdMap<TxnId, u64>,
    /// The number of the next one that is kept back.
    next: u64,
    /// When this gateway last began a transaction of high priority.
    high_at: Option<Time>,
    /// A place may have become free since held transactions were last looked at.
    has_news: bool,
}

/// The line for one key.
#[derive(Clone, Copy, Debug)]
struct Line {
    /// How many places transactions of low priority may have at a time, in parts of [`ONE`]. One that
    /// reads and writes the key takes two, if one is free.
    room: u32,
    /// How many are taken.
    placed: u32,
    /// How many are wanted by transactions that are kept back.
    held: u32,
    /// When the room was last made smaller.
    reduced_at: Time,
}

impl Line {
    fn has_room(&self) -> bool {
        self.placed.saturating_mul(ONE) < self.room
    }
}

impl Lines {
    /// A transaction of high priority begins.
    pub(super) fn saw_high(&mut self, now: Time) {
        self.high_at = Some(now);
    }

    /// A transaction of low priority wants a place in the lines for `keys`. If it has to wait for one,
    /// [`Self::next`] says when its turn has come.
    pub(super) fn may_begin<'a>(
        &mut self,
        id: TxnId,
        keys: impl Iterator<Item = &'a Key>,
        now: Time,
    ) -> bool {
        let hot: Vec<Key> = keys.filter(|key| self.by_key.contains_key(*key)).cloned().collect();
        // Who comes later does not pass those who are kept back and want one of its keys.
        let has_room = |key| self.by_key.get(key).is_none_or(|it| it.held == 0 && it.has_room());
        if self.is_open(now) || hot.iter().all(has_room) {
            self.place(id, hot);
            return true;
        }
        for key in &hot {
            if let Some(line) = self.by_key.get_mut(key) {
                line.held += 1;
            }
        }
        self.numbers.insert(id, self.next);
        self.held.insert(self.next, (id, hot));
        self.next += 1;
        false
    }

    /// A transaction of low priority begins, whether there is room or not.
    pub(super) fn begin<'a>(&mut self, id: TxnId, keys: impl Iterator<Item = &'a Key>) {
        let hot = keys.filter(|key| self.by_key.contains_key(*key)).cloned().collect();
        self.place(id, hot);
    }

    fn place(&mut self, id: TxnId, hot: Vec<Key>) {
        if hot.is_empty() {
            return;
        }
        for key in &hot {
            if let Some(line) = self.by_key.get_mut(key) {
                line.placed += 1;
            }
        }
        self.placed.insert(id, hot);
    }

    /// Whether everybody gets a place, because nobody uses priorities.
    fn is_open(&self, now: Time) -> bool {
        self.high_at.is_none_or(|at| now.since(at) > HIGH_LASTS)
    }

    /// Removes one of those who are kept back.
    fn release(&mut self, number: u64) -> Option<(TxnId, Vec<Key>)> {
        let (id, keys) = self.held.remove(&number)?;
        self.numbers.remove(&id);
        for key in &keys {
            if let Some(line) = self.by_key.get_mut(key) {
                line.held = line.held.saturating_sub(1);
            }
        }
        Some((id, keys))
    }

    /// The turn of a transaction has come, or it has ended: it is in no line any more, and waits for
    /// none.
    pub(super) fn left(&mut self, id: TxnId) {
        if let Some(keys) = self.placed.remove(&id) {
            for key in keys {
                if let Some(line) = self.by_key.get_mut(&key) {
                    line.placed = line.placed.saturating_sub(1);
                }
            }
            self.has_news = true;
        } else if let Some(number) = self.numbers.get(&id).copied() {
            self.release(number);
            self.has_news = true;
        }
    }

    /// Takes the next held transaction for which there is room, and gives it a place.
    pub(super) fn next(&mut self, now: Time) -> Option<TxnId> {
        if !self.has_news {
            return None;
        }
        let is_open = self.is_open(now);
        let mut taken = OrdSet::new();
        let mut found = None;
        for (number, (_, keys)) in self.held.iter().take(LOOK_AT) {
            let has_room =
                |key: &Key| self.by_key.get(key).is_none_or(Line::has_room) && !taken.contains(key);
            if is_open || keys.iter().all(has_room) {
                found = Some(*number);
                break;
            }
            taken.extend(keys);
        }
        let Some((id, keys)) = found.and_then(|number| self.release(number)) else {
            self.has_news = false;
            return None;
        };
        self.place(id, keys);
        Some(id)
    }

    /// The turn of a transaction of low priority has come, after it stood in line for `hot` for
    /// `waited`. Alone, it would have taken `alone`.
    pub(super) fn saw<'a>(
        &mut self,
        hot: impl Iterator<Item = &'a Key>,
        (waited, alone): (Duration, Duration),
        now: Time,
    ) {
        for key in hot {
            if !self.by_key.contains_key(key) {
                if self.by_key.len() >= LINES_MAX {
                    self.by_key.retain(|_, line| line.placed > 0 || line.held > 0);
                }
                if self.by_key.len() >= LINES_MAX {
                    continue;
                }
            }
            let new = Line { room: FIRST * ONE, placed: 0, held: 0, reduced_at: Time::ZERO };
            let line = self.by_key.entry(key.clone()).or_insert(new);
            if waited <= alone {
                let more = ONE * ONE / line.room;
                line.room = (line.room + more).min(ROOM_MAX * ONE);
                self.has_news = true;
            } else if now.since(line.reduced_at) > waited {
                // Those who wait now got their places before: they show nothing about the new room.
                line.room = (line.room / 4 * 3).max(ONE);
                line.reduced_at = now;
            }
        }
    }
}

/// One place.
const ONE: u32 = 1_024;

/// The places for a key when it turns out to be hot.
const FIRST: u32 = 8;

/// The most places.
const ROOM_MAX: u32 = 1_024;

/// So long after a transaction of high priority those of low priority still wait.
const HIGH_LASTS: Duration = Duration::from_secs(10);

/// The most keys whose lines a gateway remembers.
const LINES_MAX: usize = 4_096;

/// How many held transactions are looked at when a place becomes free.
const LOOK_AT: usize = 256;

#[cfg(test)]
mod tests {
    use orthodrome_core::id::ClientId;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(ms: u32) -> Time {
        Time::ZERO + MS * ms
    }

    fn txn(counter: u64) -> TxnId {
        TxnId::new(ClientId(1), counter)
    }

    fn hot() -> [Key; 1] {
        [Key::from("hot")]
    }

    /// Lines of a gateway that has seen a line for the key and high priority.
    fn lines() -> Lines {
        let mut lines = Lines::default();
        lines.saw(hot().iter(), (MS, MS), at(0));
        lines.saw_high(at(0));
        lines
    }

    /// Lets so many transactions begin, and returns how many of them have to wait.
    fn begin(lines: &mut Lines, counters: std::ops::Range<u64>, keys: &[Key], now: Time) -> usize {
        counters.filter(|&counter| !lines.may_begin(txn(counter), keys.iter(), now)).count()
    }

    fn next(lines: &mut Lines, now: Time) -> Vec<u64> {
        std::iter::from_fn(|| lines.next(now)).map(|id| id.counter).collect()
    }

    #[test]
    fn without_high_priority_nobody_waits() {
        let mut lines = Lines::default();
        lines.saw(hot().iter(), (MS, MS), at(0));
        assert_eq!(begin(&mut lines, 0..100, &hot(), at(0)), 0);
        lines.saw_high(at(0));
        assert_eq!(begin(&mut lines, 100..200, &hot(), at(10_000)), 100);
        assert_eq!(begin(&mut lines, 200..300, &hot(), at(10_001)), 0, "that was long ago");
        lines.left(txn(0));
        assert_eq!(next(&mut lines, at(10_001)), (100..200).collect::<Vec<_>>());
    }

    #[test]
    fn who_waits_longest_gets_the_next_place() {
        let mut lines = lines();
        assert_eq!(begin(&mut lines, 0..12, &hot(), at(0)), 3, "nine have a place");
        assert_eq!(next(&mut lines, at(0)), [0_u64; 0]);
        lines.left(txn(4));
        assert_eq!(begin(&mut lines, 12..13, &hot(), at(0)), 1, "others wait already");
        lines.left(txn(10));
        assert_eq!(next(&mut lines, at(0)), [9]);
        for counter in 0..4 {
            lines.left(txn(counter));
        }
        assert_eq!(next(&mut lines, at(0)), [11, 12]);
        assert_eq!(begin(&mut lines, 13..17, &hot(), at(0)), 2);
    }

    #[test]
    fn only_those_with_the_same_keys_wait() {
        let (cold, mut lines) = ([Key::from("cold")], lines());
        let both = [hot()[0].clone(), Key::from("warm")];
        lines.saw(both[1..].iter(), (MS, MS), at(0));
        assert_eq!(begin(&mut lines, 0..9, &hot(), at(0)), 0);
        assert_eq!(begin(&mut lines, 9..10, &both, at(0)), 1);
        assert_eq!(begin(&mut lines, 10..30, &cold, at(0)), 0);
        assert_eq!(begin(&mut lines, 30..31, &both[1..], at(0)), 1, "it would pass the other one");
        lines.left(txn(9));
        assert_eq!(next(&mut lines, at(0)), [30]);
    }

    #[test]
    fn a_long_wait_takes_places_once_and_short_waits_give_them_back() {
        let mut lines = lines();
        let room = |lines: &Lines| lines.by_key[&hot()[0]].room;
        assert_eq!(room(&lines), 8 * ONE + ONE / 8);
        lines.saw(hot().iter(), (MS * 400, MS * 200), at(1_000));
        let less = room(&lines);
        assert!((6 * ONE..7 * ONE).contains(&less));
        lines.saw(hot().iter(), (MS * 401, MS * 200), at(1_400));
        assert_eq!(room(&lines), less, "it stood in line since before");
        for second in 2..100 {
            lines.saw(hot().iter(), (MS * 400, MS * 200), at(second * 1_000));
        }
        assert_eq!(room(&lines), ONE, "one always has a place");
        for _ in 0..10 {
            lines.saw(hot().iter(), (MS * 200, MS * 200), at(100_000));
        }
        assert!(room(&lines) > 4 * ONE);
        for _ in 0..1_000_000 {
            lines.saw(hot().iter(), (MS, MS * 200), at(100_000));
        }
        assert!(room(&lines) <= ROOM_MAX * ONE);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut lines = lines();
        assert_eq!(begin(&mut lines, 0..1, &hot(), at(0)), 0);
        for number in 0..LINES_MAX * 2 {
            lines.saw([Key::from(format!("k{number}"))].iter(), (MS, MS), at(0));
            assert!(lines.by_key.len() <= LINES_MAX);
        }
        assert!(lines.by_key.contains_key(&hot()[0]), "somebody is in that line");
    }
}
