//! Every configuration, and for every mutation the configuration that catches it.

use crate::alone::{self, A, Alone, B, C, D};
use crate::mutation::Mutation;
use crate::order::{ALL_PAIRS, Orders};
use crate::priority::Priorities;
use crate::reads::{Op, Times};
use crate::run::{Report, check};
use crate::slot::Rules;
use crate::stamp::Stamps;
use crate::values::Values;

/// Where a configuration runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Size {
    /// In the tests, and in the full run.
    Small,
    /// In the full run only: up to some minutes.
    Large,
}

/// One configuration.
#[derive(Clone, Copy, Debug)]
pub struct Configuration {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it covers, for the table.
    pub covers: &'static str,
    /// Where it runs.
    pub size: Size,
    run: fn(Option<Mutation>, Option<usize>) -> Report,
}

impl Configuration {
    /// Checks it, with one mutation or none, and with at most this many steps.
    #[must_use]
    pub fn check(&self, mutation: Option<Mutation>, steps: Option<usize>) -> Report {
        (self.run)(mutation, steps)
    }

    /// The configuration with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Configuration> {
        CONFIGURATIONS.iter().find(|it| it.name == name)
    }
}

const fn rules(f: u8, ballots: u8, mutation: Option<Mutation>) -> Rules {
    Rules { f, ballots, direct: false, raises: 0, stamp_max: 6, mutation }
}

const fn direct(ballots: u8, mutation: Option<Mutation>) -> Rules {
    Rules { direct: true, ..rules(1, ballots, mutation) }
}

const fn raised(ballots: u8, raises: u8, mutation: Option<Mutation>) -> Rules {
    Rules { raises, ..rules(1, ballots, mutation) }
}

const fn stamps<const N: usize>(rules: Rules, closing_max: u8, heals: bool) -> Stamps<N> {
    Stamps { rules, closing_max, heals, loses_disk: false, goes_on: false }
}

const fn lost<const N: usize>(rules: Rules, closing_max: u8, heals: bool) -> Stamps<N> {
    Stamps { loses_disk: true, ..stamps(rules, closing_max, heals) }
}

const fn moved<const N: usize>(rules: Rules, closing_max: u8) -> Stamps<N> {
    Stamps { goes_on: true, ..lost(rules, closing_max, false) }
}

/// Three pairs: with the first transaction's pair they cover every overlap except a swap.
const TURNS: &[(u8, u8)] = &[(0, 1), (1, 2), (2, 0)];

const fn write(at: u8, slack: u8) -> Op {
    Op::Write { at, slack }
}

const fn times(ops: [Op; 4], lease_end: u8, ticks: u8, mutation: Option<Mutation>) -> Times {
    Times { ops, lease_end, ticks, mutation }
}

/// A transaction that reads the first keys and writes the second.
const fn txn(reads: u8, writes: u8) -> alone::Op {
    alone::Op { reads, writes }
}

const fn early(ops: [alone::Op; 4], ticks: u8, mutation: Option<Mutation>) -> Alone {
    Alone { ops, ticks, mutation }
}

macro_rules! configurations {
    ($($size:ident $name:literal $covers:literal = |$mutation:ident| $model:expr;)+) => {
        /// Every configuration.
        pub const CONFIGURATIONS: &[Configuration] = &[$(Configuration {
            name: $name,
            covers: $covers,
            size: Size::$size,
            run: |$mutation, steps| check($model, steps),
        },)+];
    };
}

configurations! {
    Small "stamp-pair" "a named pair, 2 ballots, closings to 3" =
        |m| stamps::<3>(rules(1, 2, m), 3, false);
    Small "stamp-few" "a named pair, 2 ballots, closings to 1" =
        |m| stamps::<3>(rules(1, 2, m), 1, false);
    Small "stamp-ballots" "a named pair, 3 ballots, no closings" =
        |m| stamps::<3>(rules(1, 3, m), 0, false);
    Large "stamp-pair-3" "a named pair, 3 ballots, closings to 2" =
        |m| stamps::<3>(rules(1, 3, m), 2, false);
    Small "stamp-direct" "direct mode, 1 ballot, closings to 3" =
        |m| stamps::<3>(direct(1, m), 3, false);
    Large "stamp-direct-2" "direct mode, 2 ballots, closings to 3" =
        |m| stamps::<3>(direct(2, m), 3, false);
    Small "stamp-raise" "1 raise, 1 ballot, closings to 3" =
        |m| stamps::<3>(raised(1, 1, m), 3, false);
    Small "stamp-raise-direct" "1 raise beside direct mode, 1 ballot" =
        |m| stamps::<3>(Rules { raises: 1, ..direct(1, m) }, 2, false);
    Large "stamp-raise-2" "2 raises, 2 ballots, closings to 2" =
        |m| stamps::<3>(raised(2, 2, m), 2, false);
    Small "stamp-five" "f = 2, 1 ballot, closings to 1" =
        |m| stamps::<5>(rules(2, 1, m), 1, false);
    Large "stamp-five-2" "f = 2, 1 ballot, closings to 2" =
        |m| stamps::<5>(rules(2, 1, m), 2, false);
    Small "heal-pair" "a named pair, healing with one dead replica, 2 ballots" =
        |m| stamps::<3>(rules(1, 2, m), 2, true);
    Large "heal-pair-3" "the same, 3 ballots" =
        |m| stamps::<3>(rules(1, 3, m), 2, true);
    Large "heal-direct" "direct mode, healing with one dead replica, 2 ballots" =
        |m| stamps::<3>(direct(2, m), 3, true);
    Large "heal-five" "f = 2, healing with two dead replicas, 1 ballot" =
        |m| stamps::<5>(rules(2, 1, m), 1, true);

    Small "lost-pair" "one of three disks lost, 1 ballot, closings to 2" =
        |m| lost::<3>(rules(1, 1, m), 2, false);
    Small "lost-ballots" "one of three disks lost, 2 ballots, closings to 1" =
        |m| lost::<3>(rules(1, 2, m), 1, false);
    Small "lost-heal" "one of three disks lost, and healing, 2 ballots, closings to 1" =
        |m| lost::<3>(rules(1, 2, m), 1, true);
    Small "lost-direct" "direct mode, one of three disks lost, 1 ballot, closings to 1" =
        |m| lost::<3>(direct(1, m), 1, false);
    Large "lost-direct-2" "the same, closings to 2" =
        |m| lost::<3>(direct(1, m), 2, false);
    Large "lost-direct-3" "direct mode, one of three disks lost, and healing, 2 ballots, closings to 1" =
        |m| lost::<3>(direct(2, m), 1, true);
    Large "lost-pair-2" "one of three disks lost, 2 ballots, closings to 2" =
        |m| lost::<3>(rules(1, 2, m), 2, false);
    Large "lost-five" "f = 2, one of five disks lost, 1 ballot, closings to 1" =
        |m| lost::<5>(rules(2, 1, m), 1, false);

    Small "moved-pair" "one of three members replaced, 1 ballot, closings to 2" =
        |m| moved::<3>(rules(1, 1, m), 2);
    Small "moved-ballots" "one of three members replaced, 2 ballots, closings to 1" =
        |m| moved::<3>(rules(1, 2, m), 1);
    Small "moved-direct" "direct mode, one of three members replaced, 1 ballot, closings to 1" =
        |m| moved::<3>(direct(1, m), 1);
    Large "moved-pair-3" "one of three members replaced, 1 ballot, closings to 3" =
        |m| moved::<3>(rules(1, 1, m), 3);
    Large "moved-direct-2" "direct mode, one of three members replaced, 1 ballot, closings to 2" =
        |m| moved::<3>(direct(1, m), 2);
    Large "moved-direct-3" "direct mode, one of three members replaced, 2 ballots, closings to 1" =
        |m| moved::<3>(direct(2, m), 1);
    Large "moved-five" "f = 2, one of five members replaced, 1 ballot, no closings" =
        |m| moved::<5>(rules(2, 1, m), 0);

    Small "order-one" "two transactions on one partition, one recovered" =
        |m| Orders::<2> { rules: rules(1, 1, m), at: [1, 1], times: &[[1, 1]],
            recovered: &[(0, 0)], pairs: ALL_PAIRS };
    Small "order-both" "two transactions on both partitions, three sets of timestamps" =
        |m| Orders::<2> { rules: rules(1, 0, m), at: [3, 3], times: &[[1, 1], [1, 2], [2, 1]],
            recovered: &[], pairs: ALL_PAIRS };
    Small "order-chain" "three transactions in a chain, the middle one on both partitions" =
        |m| Orders::<3> { rules: rules(1, 0, m), at: [1, 3, 2], times: &[[1, 1, 1]],
            recovered: &[], pairs: ALL_PAIRS };
    Small "order-three" "three transactions on one partition" =
        |m| Orders::<3> { rules: rules(1, 0, m), at: [1, 1, 1],
            times: &[[1, 1, 1], [1, 2, 1], [2, 1, 1]], recovered: &[], pairs: TURNS };
    Large "order-one-2" "two transactions on one partition, both recovered" =
        |m| Orders::<2> { rules: rules(1, 1, m), at: [1, 1], times: &[[1, 1]],
            recovered: &[(0, 0), (1, 0)], pairs: ALL_PAIRS };
    Large "order-chain-2" "the chain, the middle one recovered at one partition" =
        |m| Orders::<3> { rules: rules(1, 1, m), at: [1, 3, 2], times: &[[1, 1, 1]],
            recovered: &[(1, 0)], pairs: TURNS };
    Large "order-both-2" "two transactions on both partitions, one recovered at one of them" =
        |m| Orders::<2> { rules: rules(1, 1, m), at: [3, 3], times: &[[1, 1]],
            recovered: &[(0, 0)], pairs: &[(0, 1), (2, 0)] };
    Small "order-direct" "direct mode, two transactions on one partition, one recovered" =
        |m| Orders::<2> { rules: direct(1, m), at: [1, 1], times: &[[1, 1]],
            recovered: &[(0, 0)], pairs: TURNS };
    Large "order-direct-2" "direct mode, two transactions on both partitions" =
        |m| Orders::<2> { rules: direct(0, m), at: [3, 3], times: &[[1, 1]],
            recovered: &[], pairs: &[(0, 1), (1, 2)] };
    Large "order-direct-3" "direct mode, one transaction on both partitions, recovered at one" =
        |m| Orders::<2> { rules: direct(1, m), at: [1, 3], times: &[[1, 1]],
            recovered: &[(1, 0)], pairs: &[(0, 1), (1, 2)] };

    Small "time-writes" "three writes in a chain, clocks within the bound" =
        |m| times([write(2, 0), write(3, 1), write(1, 0), Op::Absent], 0, 4, m);
    Small "time-reads" "two writes; a read where only the first wrote" =
        |m| times([write(3, 1), write(2, 0), Op::Read { at: 1 }, Op::Absent], 0, 4, m);
    Small "time-reader" "two writes; a read where both wrote" =
        |m| times([write(3, 1), write(2, 0), Op::Read { at: 2 }, Op::Absent], 0, 4, m);
    Large "time-reads-2" "two writes and two readers, 3 ticks" =
        |m| times([write(3, 1), write(2, 0), Op::Read { at: 1 }, Op::Read { at: 2 }], 0, 3, m);
    Small "time-lease" "two writes and a local read at the holder of a lease" =
        |m| times([write(1, 0), write(1, 1), Op::Local, Op::Absent], 2, 5, m);
    Large "time-lease-2" "the same, one write on both partitions" =
        |m| times([write(3, 1), write(1, 0), Op::Local, Op::Absent], 2, 5, m);

    Small "values" "two interactive transactions, 2 attempts, 1 ballot each" =
        |m| Values { ballots: [1, 1], attempts: 2, mutation: m };
    Large "values-3" "the same, 3 attempts" =
        |m| Values { ballots: [1, 1], attempts: 3, mutation: m };
    Large "values-2" "the same, 1 attempt, 2 ballots for the second transaction" =
        |m| Values { ballots: [1, 2], attempts: 1, mutation: m };
    Small "priority" "one low transaction, 3 raises, endless high ones" =
        |m| Priorities { raises: 3, t: 1, mutation: m };

    Small "alone-chain" "blind writes: one at both partitions, one at each" =
        |m| early([txn(0, A | C), txn(0, A), txn(0, C), txn(0, 0)], 4, m);
    Large "alone-late" "the same, and another one at the first partition" =
        |m| early([txn(0, A | C), txn(0, A), txn(0, C), txn(0, A)], 3, m);
    Large "alone-step" "one at both partitions, one at each, and one between, which reads" =
        |m| early([txn(0, A | C), txn(A, B), txn(0, B), txn(0, C)], 3, m);
    Large "alone-blind" "the same with blind writes" =
        |m| early([txn(0, A | C), txn(0, A | B), txn(B, B), txn(0, C)], 3, m);
    Large "alone-both" "two at both partitions, one at each" =
        |m| early([txn(D, B | C), txn(C, A), txn(0, A), txn(0, B)], 3, m);
    Small "alone-write" "two that read and write at one partition, one blind write" =
        |m| early([txn(0, A), txn(A, B), txn(B, A), txn(0, 0)], 4, m);
    Small "alone-read" "a read-only one and two blind writes at one partition" =
        |m| early([txn(0, A), txn(A, 0), txn(0, A), txn(0, 0)], 4, m);
    Small "alone-reads" "a read-only one at both partitions, a write at each" =
        |m| early([txn(0, A), txn(A | C, 0), txn(0, C), txn(0, 0)], 4, m);
    Large "alone-reader" "one at both partitions, one at each, and one between, which only reads" =
        |m| early([txn(0, A | C), txn(A | B, 0), txn(0, B), txn(0, C)], 3, m);
}

/// The configuration that catches a mutation, and the property that fails.
#[must_use]
pub fn catches(mutation: Mutation) -> (&'static str, &'static str) {
    use Mutation::*;
    match mutation {
        LearnFromSecond | RecordAfterPromise | StampAfterPromise | UnnamedPair
        | AcceptBelowPromise | LosePromises | LoseRecord => ("stamp-few", "agreement"),
        NoRecoveryStamp | IgnoreSecond | SecondBelowFirst | StampAtClosing | OneAnswer
        | RecoveryStampCounts | LoseClosings | LoseStamps => ("stamp-pair", "visibility"),
        PromiseIsAccept | LowestAccepted => ("stamp-ballots", "agreement"),
        WaitForAll => ("heal-pair", "liveness"),
        NoSeal => ("lost-pair", "agreement"),
        ReadsEarly => ("lost-pair", "visibility"),
        DirectTwoEqual | DirectNoEqualRule => ("stamp-direct", "agreement"),
        DirectUnconfirmed | DirectNoRaise | DirectUnconfirmedRecovered => {
            ("stamp-direct", "visibility")
        }
        RaiseFirstAlone | RaiseAfterAck | RaiseAfterPromise => ("stamp-raise", "visibility"),
        RaiseDirect => ("stamp-raise-direct", "agreement"),
        FiveNoThreshold | FiveSmallQuorum | FiveUnnamedStamps => ("stamp-five", "agreement"),
        NoPredecessors | OneCloser | OneReport | TiesIgnored => ("order-three", "order"),
        NoSecondClosing | HalfFinal => ("order-chain", "order"),
        NoClockWait | ClockWaitAtBound | BrokenClock => ("time-writes", "strictness"),
        ReadNoClockWait | ReadNoClosing => ("time-reads", "strictness"),
        ReadNoPredecessors => ("time-reader", "strictness"),
        LeaseIgnored | LeaseStampIgnored | LeaseAtEnd | LeaseReadLate => {
            ("time-lease", "strictness")
        }
        ValueBeforePredecessor | ValueStale | ValueStaleRecovered => ("values", "freshness"),
        ValueNoFence | ValueAfterPromise | ValueDropped | ValueOldAttempt | ValueFirstWins => {
            ("values", "agreement")
        }
        MemberNoSeal => ("moved-pair", "agreement"),
        MemberReadsEarly => ("moved-pair", "visibility"),
        RaiseUnbounded => ("priority", "deadline"),
        EarlyAlways | EarlyPendingIgnored => ("alone-chain", "strictness"),
        EarlyEndDropped => ("alone-late", "strictness"),
        EarlyDirectOnly => ("alone-step", "strictness"),
        EarlyReadsBelow => ("alone-write", "strictness"),
        EarlyNoRefusal => ("alone-read", "strictness"),
        EarlyReadNoTrace => ("alone-reads", "strictness"),
    }
}
