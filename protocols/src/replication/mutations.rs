//! Mutations of the replicated log. Each is a mistake that some real system has made (ADR 35).

use crate::mutation::mutations;

mutations! {
    /// Votes and terms are sent before they are durable.
    vote_not_durable;
    /// Entries of older terms are chosen by counting (Raft §5.4.2, Figure 8).
    choose_old_term;
    /// A lease is compared with the time of the last input instead of the current time, so a pause
    /// does not count.
    lease_ignores_pauses;
    /// Votes of nodes that are not voters count (YugabyteDB 1.1.9).
    count_non_voters;
    /// Truncations are not persisted.
    forget_truncation;
    /// An append is acknowledged before it is durable.
    ack_not_durable;
    /// A voter does not protect the leader after a restart, although a leader may have a lease from
    /// it.
    vote_after_restart;
    /// A leader answers reads without confirming that it still leads.
    read_unconfirmed;
    /// The longest log wins an election, whatever the term of its last entry.
    longest_log;
    /// A leader that receives no answer of a quorum continues to lead, as in the paper. That is
    /// safe for the log, but not for reads without a lease.
    lead_without_quorum;
}
