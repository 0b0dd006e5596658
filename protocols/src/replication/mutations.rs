//! Mutations of the replicated log, each made by some real system (ADR 35).

use crate::mutation::mutations;

mutations! {
    /// Votes and terms are told before they are durable.
    vote_not_durable;
    /// Entries of older terms are chosen by counting (Raft §5.4.2, Figure 8).
    choose_old_term;
    /// A lease is compared with the time of the last input instead of now, so that a pause is free.
    lease_ignores_pauses;
    /// Votes of nodes that are not voters count (YugabyteDB 1.1.9).
    count_non_voters;
    /// Truncation is not remembered.
    forget_truncation;
    /// An append is acknowledged before it is durable.
    ack_not_durable;
    /// A voter protects no leader after a restart, though one may hold a lease from it.
    vote_after_restart;
    /// Reads are answered by a leader that did not confirm that it still leads.
    read_unconfirmed;
    /// The longest log leads, whatever the term of its last entry.
    longest_log;
    /// A leader that hears no quorum goes on leading, as the paper's does. The log is safe with that;
    /// who reads without a lease is not.
    lead_without_quorum;
}
