//! Deliberate mistakes. Each one drops one invariant; the model must then find a counterexample.

macro_rules! mutations {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+) => {
        /// One invariant of the protocol, dropped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Mutation {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Mutation {
            /// Every mutation, in the order of the page.
            pub const ALL: &[Mutation] = &[$(Mutation::$variant,)+];

            /// The name on the command line and of the trace's file.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Mutation::$variant => $name,)+ }
            }

            /// What goes wrong, as one sentence.
            #[must_use]
            pub fn sentence(self) -> String {
                match self { $(Mutation::$variant => [$($doc.trim()),+].join(" "),)+ }
            }
        }
    };
}

mutations! {
    // One transaction at one partition (`stamp.rs`).
    /// The client takes the stamp of y as the decision, without the record of h.
    LearnFromSecond = "learn_from_second",
    /// Recovery takes the largest stamp that it finds; a replica without a stamp gives none.
    NoRecoveryStamp = "no_recovery_stamp",
    /// h decides its own stamp and ignores the stamp of y.
    IgnoreSecond = "ignore_second",
    /// y stamps without regard to the stamp that h forwarded.
    SecondBelowFirst = "second_below_first",
    /// A replica stamps at its closing instead of above it.
    StampAtClosing = "stamp_at_closing",
    /// A promise overwrites the ballot of the accepted value: promised and accepted are one.
    PromiseIsAccept = "promise_is_accept",
    /// Recovery takes a recovery stamp of y for its ballot-0 stamp.
    RecoveryStampCounts = "recovery_stamp_counts",
    /// h records a decision at ballot 0 after it has promised a ballot.
    RecordAfterPromise = "record_after_promise",
    /// A replica gives a ballot-0 stamp after it has promised a ballot.
    StampAfterPromise = "stamp_after_promise",
    /// h takes the stamp of any other replica, not of the named one.
    UnnamedPair = "unnamed_pair",
    /// Recovery takes an accepted value of any ballot, not of the highest.
    LowestAccepted = "lowest_accepted",
    /// Recovery chooses after the answer of one replica.
    OneAnswer = "one_answer",
    /// A replica accepts a value below the ballot that it promised.
    AcceptBelowPromise = "accept_below_promise",
    /// A restarted replica has lost its closings.
    LoseClosings = "lose_closings",
    /// A restarted replica has lost its ballot-0 stamps.
    LoseStamps = "lose_stamps",
    /// A restarted replica has lost its promises.
    LosePromises = "lose_promises",
    /// A restarted h has lost its record of the decision.
    LoseRecord = "lose_record",
    /// Recovery waits for all replicas, also for dead ones.
    WaitForAll = "wait_for_all",

    // One replica has lost its disk.
    /// Peers of the lost disk give stamps to a transaction from before that they did not know.
    NoSeal = "no_seal",
    /// The replica with the new disk reads while a transaction from before is pending.
    ReadsEarly = "reads_early",

    // Another server takes the place of a member, which goes on.
    /// Members give stamps to a transaction from before the change that they did not know.
    MemberNoSeal = "member_no_seal",
    /// The new member reads while a transaction from before the change is pending.
    MemberReadsEarly = "member_reads_early",

    // Direct mode.
    /// The client learns from any two equal stamps.
    DirectTwoEqual = "direct_two_equal",
    /// h decides on a stamp of y that y has not confirmed.
    DirectUnconfirmed = "direct_unconfirmed",
    /// y confirms its own stamp without raising it to the stamp of h.
    DirectNoRaise = "direct_no_raise",
    /// Recovery without h does not look for equal stamps of the two others.
    DirectNoEqualRule = "direct_no_equal_rule",
    /// Recovery without h takes a stamp of y that y has not confirmed.
    DirectUnconfirmedRecovered = "direct_unconfirmed_recovered",

    // Raises by priority.
    /// h raises its stamp before y has raised its own.
    RaiseFirstAlone = "raise_first_alone",
    /// y raises its stamp by itself after it has acknowledged it.
    RaiseAfterAck = "raise_after_ack",
    /// A replica raises a stamp after it has promised a ballot.
    RaiseAfterPromise = "raise_after_promise",
    /// A transaction in direct mode is raised.
    RaiseDirect = "raise_direct",

    // f = 2.
    /// h decides the largest stamp although fewer than f named replicas gave it.
    FiveNoThreshold = "five_no_threshold",
    /// h decides on the stamps of a bare majority.
    FiveSmallQuorum = "five_small_quorum",
    /// Recovery takes the largest stamp of all answers where the named ones may have decided.
    FiveUnnamedStamps = "five_unnamed_stamps",

    // Two partitions, several transactions (`order.rs`).
    /// The client does not wait for predecessors.
    NoPredecessors = "no_predecessors",
    /// A partition whose stamp differs from the agreed one is not closed again.
    NoSecondClosing = "no_second_closing",
    /// One closed replica is enough.
    OneCloser = "one_closer",
    /// The client reads the predecessors of one of the two closers only.
    OneReport = "one_report",
    /// A predecessor is final when one of its partitions has decided.
    HalfFinal = "half_final",
    /// The order ignores ids: equal timestamps are not ordered.
    TiesIgnored = "ties_ignored",

    // Real time (`reads.rs`).
    /// The gateway answers without waiting for the bound of the clocks.
    NoClockWait = "no_clock_wait",
    /// The gateway answers at the bound of the clocks instead of past it.
    ClockWaitAtBound = "clock_wait_at_bound",
    /// A read-only transaction answers without waiting for the bound of the clocks.
    ReadNoClockWait = "read_no_clock_wait",
    /// A read-only transaction does not close what it reads.
    ReadNoClosing = "read_no_closing",
    /// A read-only transaction does not wait for predecessors.
    ReadNoPredecessors = "read_no_predecessors",
    /// A clock leaves its bound.
    BrokenClock = "broken_clock",
    /// A write is acknowledged without the stamp of the lease holder.
    LeaseIgnored = "lease_ignored",
    /// The stamp of the lease holder does not raise the decision.
    LeaseStampIgnored = "lease_stamp_ignored",
    /// A write without the lease holder is put at the end of the lease, not above it.
    LeaseAtEnd = "lease_at_end",
    /// The holder reads after the end of its lease.
    LeaseReadLate = "lease_read_late",

    // Interactive values (`values.rs`).
    /// The client is answered before the values of its predecessor are decided.
    ValueBeforePredecessor = "value_before_predecessor",
    /// The client is answered although its reads are stale.
    ValueStale = "value_stale",
    /// Recovery decides that a client has vanished without a promise from a majority.
    ValueNoFence = "value_no_fence",
    /// A replica stores a client's value after a promise.
    ValueAfterPromise = "value_after_promise",
    /// Recovery keeps a value whose reads are stale.
    ValueStaleRecovered = "value_stale_recovered",
    /// Recovery drops values that a majority may hold.
    ValueDropped = "value_dropped",
    /// Acknowledgements of an earlier value of the same client count for its later one.
    ValueOldAttempt = "value_old_attempt",
    /// A repaired value does not replace a stale one.
    ValueFirstWins = "value_first_wins",

    // Priorities (`priority.rs`).
    /// The number of raises has no bound.
    RaiseUnbounded = "raise_unbounded",

    // Told early, at one partition of one replica (`alone.rs`).
    /// A transaction at one partition never waits for the bound of the clocks.
    EarlyAlways = "early_always",
    /// A transaction at one partition leaves no trace, whatever came before it.
    EarlyDirectOnly = "early_direct_only",
    /// A transaction that reads may get a stamp below a write that was told.
    EarlyReadsBelow = "early_reads_below",
    /// A server answers a read-only transaction that may miss a write that was told.
    EarlyNoRefusal = "early_no_refusal",
    /// A transaction at two partitions leaves no trace when it ends.
    EarlyEndDropped = "early_end_dropped",
    /// A trace counts only transactions that have ended.
    EarlyPendingIgnored = "early_pending_ignored",
    /// A read-only transaction leaves no trace.
    EarlyReadNoTrace = "early_read_no_trace",
}
