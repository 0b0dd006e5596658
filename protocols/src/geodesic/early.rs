//! Answers that need not wait until a timestamp has passed on every clock (D20), where a partition has
//! one replica.
//!
//! A transaction T may be answered early if nothing that begins afterwards can come before it. What
//! conflicts with T itself gets a stamp above it (D2). So only something at another partition could,
//! before a transaction X of several partitions that is before T here. If the order of X has passed on
//! every clock, nothing that begins now comes before X. So this replica remembers, for each key, up to
//! when such an X may be before whoever touches the key next.

use orthodrome_core::id::TxnId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::is_fence;
use orthodrome_core::time::{Duration, Timestamp};
use orthodrome_core::txn::Key;

use super::pending::Closings;

/// What the only replica of a partition remembers for early answers.
#[derive(Debug)]
pub(super) struct Early {
    /// Up to when each key is closed to those who read it, too: it was written there, and that may have
    /// been answered.
    written: Closings,
    traces: OrdMap<Key, Traces>,
    /// A scan has read everything here: its place.
    scanned: Timestamp,
    /// A replica that restarts has lost its traces. They were below this.
    floor: Timestamp,
}

/// What has touched a key.
#[derive(Debug, Default)]
struct Traces {
    read: Trace,
    written: Trace,
}

/// Transactions of several partitions that touched a key, or came before one that did.
#[derive(Debug, Default)]
struct Trace {
    /// These are pending, or came after one that was pending then.
    pending: OrdSet<TxnId>,
    /// All others have places up to here.
    until: Timestamp,
}

/// Where transactions of several partitions may stand that come before another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Before {
    /// Anywhere: one is pending.
    Pending,
    /// At most here.
    Until(Timestamp),
}

/// What a transaction touches here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touched<'a> {
    /// The keys that it reads.
    pub reads: &'a [Key],
    /// The keys that it may write.
    pub writes: &'a [Key],
}

impl Touched<'_> {
    fn all(&self) -> impl Iterator<Item = &Key> {
        self.reads.iter().chain(self.writes)
    }
}

/// Traces of places that have passed by so much by every clock are forgotten.
const TRACES_KEPT: Duration = Duration::from_secs(1);

impl Early {
    /// Nothing is remembered of what was at or below `floor`.
    pub(super) fn new(floor: Timestamp) -> Self {
        let (traces, scanned) = (OrdMap::new(), Timestamp::ZERO);
        Self { written: Closings::new(floor), traces, scanned, floor }
    }

    /// Nobody who touches these keys gets a stamp at or below this.
    pub(super) fn closed<'a>(&self, keys: impl IntoIterator<Item = &'a Key>) -> Timestamp {
        self.written.of(keys)
    }

    /// Nothing has been written later than this.
    pub(super) fn newest(&self) -> Timestamp {
        self.written.newest().max(self.floor)
    }

    /// What may be before a transaction that touches this.
    pub(super) fn before(&self, txn: TxnId, touched: Touched<'_>) -> Before {
        let of = |key: &Key, is_write: bool| {
            let traces = self.traces.get(key);
            let read = traces.map(|it| &it.read).filter(|_| is_write);
            [traces.map(|it| &it.written), read]
        };
        let reads = touched.reads.iter().flat_map(|key| of(key, false));
        let known = reads.chain(touched.writes.iter().flat_map(|key| of(key, true))).flatten();
        let scanned = if touched.writes.is_empty() { Timestamp::ZERO } else { self.scanned };
        let mut until = self.floor.max(scanned);
        for trace in known {
            if trace.pending.iter().any(|pending| *pending != txn) {
                return Before::Pending;
            }
            until = until.max(trace.until);
        }
        Before::Until(until)
    }

    /// The transaction has a stamp here. One that has no other partition may be answered early, so
    /// nothing comes before it here any more.
    pub(super) fn stamp(
        &mut self,
        txn: TxnId,
        touched: Touched<'_>,
        (at, is_single): (Timestamp, bool),
    ) {
        if is_single {
            self.written.close(touched.writes, at);
        }
        match self.before(txn, touched) {
            Before::Until(until) if is_single => self.raise(touched, until),
            Before::Until(_) | Before::Pending => {
                self.each(touched, |trace| {
                    trace.pending.insert(txn);
                });
            }
        }
    }

    /// A transaction that only reads has this place, or an earlier one.
    pub(super) fn read(&mut self, txn: TxnId, keys: &[Key], (at, is_single): (Timestamp, bool)) {
        let is_scan = keys.iter().any(is_fence);
        if is_scan {
            self.scanned = self.scanned.max(at);
        }
        let touched = Touched { reads: keys, writes: &[] };
        let until = match self.before(txn, touched) {
            Before::Until(until) if is_single && !is_scan => until.min(at),
            Before::Until(_) | Before::Pending => at,
        };
        self.raise(touched, until);
    }

    /// The transaction has ended; its place is at most `until`.
    pub(super) fn end(&mut self, txn: TxnId, touched: Touched<'_>, until: Timestamp) {
        for key in touched.all() {
            let Some(traces) = self.traces.get_mut(key) else { continue };
            for trace in [&mut traces.read, &mut traces.written] {
                if trace.pending.remove(&txn) {
                    trace.until = trace.until.max(until);
                }
            }
        }
    }

    fn raise(&mut self, touched: Touched<'_>, until: Timestamp) {
        if until > self.floor {
            self.each(touched, |trace| trace.until = trace.until.max(until));
        }
    }

    fn each(&mut self, touched: Touched<'_>, mut change: impl FnMut(&mut Trace)) {
        for key in touched.reads {
            change(&mut self.traces.entry(key.clone()).or_default().read);
        }
        for key in touched.writes {
            change(&mut self.traces.entry(key.clone()).or_default().written);
        }
    }

    /// Forgets what has passed on every clock.
    pub(super) fn collect(&mut self, now: Timestamp, error: Duration) {
        self.written.collect(now);
        let floor = now - error * 4 - TRACES_KEPT;
        self.floor = self.floor.max(floor);
        let is_old = |trace: &Trace| trace.pending.is_empty() && trace.until <= floor;
        self.traces.retain(|_, it| !(is_old(&it.read) && is_old(&it.written)));
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::ClientId;

    use super::*;

    fn txn(client: u64) -> TxnId {
        TxnId::new(ClientId(client), 1)
    }

    fn keys(names: &[&str]) -> Vec<Key> {
        names.iter().map(|name| Key::from(*name)).collect()
    }

    /// One after the other: (name, keys read, keys written, stamp, whether it has one partition).
    type Stamped = (u64, &'static [&'static str], &'static [&'static str], u64, bool);

    fn stamp(early: &mut Early, (name, reads, writes, at, is_single): Stamped) {
        let (reads, writes) = (keys(reads), keys(writes));
        let touched = Touched { reads: &reads, writes: &writes };
        early.stamp(txn(name), touched, (Timestamp(at), is_single));
    }

    fn end(early: &mut Early, (name, reads, writes, ..): Stamped, until: u64) {
        let (reads, writes) = (keys(reads), keys(writes));
        early.end(txn(name), Touched { reads: &reads, writes: &writes }, Timestamp(until));
    }

    fn before(early: &Early, reads: &[&str], writes: &[&str]) -> Before {
        let (reads, writes) = (keys(reads), keys(writes));
        early.before(txn(99), Touched { reads: &reads, writes: &writes })
    }

    const UNTIL_ZERO: Before = Before::Until(Timestamp::ZERO);

    #[test]
    fn who_shares_a_key_with_something_of_two_partitions_waits_for_its_place() {
        let mut early = Early::new(Timestamp::ZERO);
        let wide: Stamped = (1, &["a"], &["b"], 10, false);
        stamp(&mut early, wide);
        assert_eq!(before(&early, &["a", "c"], &["c"]), UNTIL_ZERO, "both only read a");
        assert_eq!(before(&early, &[], &["a"]), Before::Pending);
        assert_eq!(before(&early, &["b"], &[]), Before::Pending);
        end(&mut early, wide, 12);
        assert_eq!(before(&early, &[], &["a"]), Before::Until(Timestamp(12)), "its place");
        assert_eq!(before(&early, &["b"], &[]), Before::Until(Timestamp(12)));
        early.collect(Timestamp(12) + TRACES_KEPT + Duration::from_nanos(5), Duration::ZERO);
        assert!(early.traces.is_empty(), "it has passed on every clock");
    }

    #[test]
    fn traces_go_on_through_transactions_of_one_partition() {
        let mut early = Early::new(Timestamp::ZERO);
        let wide: Stamped = (1, &[], &["a"], 10, false);
        let between: Stamped = (2, &["a"], &["b"], 11, true);
        stamp(&mut early, wide);
        stamp(&mut early, between);
        assert_eq!(before(&early, &["b"], &[]), Before::Pending);
        end(&mut early, wide, 10);
        assert_eq!(before(&early, &["b"], &[]), Before::Pending, "it came after a pending one");
        end(&mut early, between, 11);
        assert_eq!(before(&early, &["b"], &[]), Before::Until(Timestamp(11)));
        stamp(&mut early, (3, &["b"], &["c"], 15, true));
        assert_eq!(before(&early, &["c"], &[]), Before::Until(Timestamp(11)));
        assert_eq!(before(&early, &["d"], &["e"]), UNTIL_ZERO);
    }

    #[test]
    fn what_was_written_is_closed_to_readers_if_its_answer_may_be_early() {
        let mut early = Early::new(Timestamp(3));
        stamp(&mut early, (1, &["a"], &["b"], 10, true));
        stamp(&mut early, (2, &[], &["c"], 11, false));
        let closed = |key: &str| early.closed(&keys(&[key]));
        assert_eq!(closed("b"), Timestamp(10));
        assert_eq!((closed("a"), closed("c")), (Timestamp(3), Timestamp(3)));
        assert_eq!(early.newest(), Timestamp(10));
    }

    #[test]
    fn reads_leave_traces() {
        let mut early = Early::new(Timestamp::ZERO);
        early.read(txn(1), &keys(&["a"]), (Timestamp(10), true));
        assert_eq!(before(&early, &[], &["a"]), UNTIL_ZERO, "nothing is before it");
        early.read(txn(2), &keys(&["a"]), (Timestamp(11), false));
        assert_eq!(before(&early, &[], &["a"]), Before::Until(Timestamp(11)));
        assert_eq!(before(&early, &["a"], &[]), UNTIL_ZERO);
        early.read(txn(3), &[Key::from("m\0fence12")], (Timestamp(12), true));
        assert_eq!(before(&early, &[], &["z"]), Before::Until(Timestamp(12)), "it read all keys");
    }

    #[test]
    fn a_restart_forgets_traces_and_waits_for_all_of_them() {
        let early = Early::new(Timestamp(7));
        assert_eq!(before(&early, &["a"], &[]), Before::Until(Timestamp(7)));
        assert_eq!(early.newest(), Timestamp(7));
    }
}
