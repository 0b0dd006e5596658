//! Messages between replicas, and their durable records.

use std::fmt;

use orthodrome_core::machine::Kind;
use orthodrome_core::{NodeId, Time, Wire};

use super::checks::Sum;
use super::quorum::Members;
use super::{Entry, Index, Replicated, Term};

/// When a leader's message was sent. Followers return it unchanged. So the leader knows what their
/// answer proves: they still followed it at some moment after `sent_at`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Wire)]
pub struct Beat {
    /// The leader's count of rounds in its term, from 1. A read waits for answers of a round that
    /// began after it. 0 in an answer that proves nothing.
    pub round: u64,
    /// The leader's monotonic time when it sent the message: the start of a lease. It has no
    /// meaning for other nodes.
    pub sent_at: Time,
}

/// Messages between the replicas of one group. Any message may be lost, repeated, reordered or
/// late.
#[derive(Clone, PartialEq, Eq, Debug, Wire, Kind)]
#[wire(bound = "")]
pub enum Message<R: Replicated> {
    /// A node whose election timer expired asks every voter whether it would vote for it. This
    /// promises and changes nothing (thesis §9.6).
    PreVote {
        /// The term in which the sender would campaign: one above its own.
        term: Term,
        /// Its last entry.
        last_index: Index,
        /// The term of that entry.
        last_term: Term,
    },
    /// The answer to a pre-vote. A *yes* promises nothing.
    PreVoteReply {
        /// If granted, the term of the request; otherwise the voter's own term.
        term: Term,
        /// True if the voter would grant its vote.
        granted: bool,
    },
    /// A candidate asks for a vote (Raft §5.2). Its own term and vote are durable.
    RequestVote {
        /// The candidate's term.
        term: Term,
        /// Its last entry.
        last_index: Index,
        /// The term of that entry.
        last_term: Term,
        /// The leader itself asked for this election and has given up its lease, so voters need not
        /// protect it (thesis §4.2.3).
        transfer: bool,
    },
    /// The answer to a vote request. A *yes* is durable before it is sent.
    VoteReply {
        /// The voter's term.
        term: Term,
        /// True if it voted for the candidate in that term.
        granted: bool,
    },
    /// A leader's entries after `prev_index` (Raft §5.3), or a probe for the point where the logs
    /// agree.
    AppendEntries {
        /// The leader's term.
        term: Term,
        /// The entry before `entries`.
        prev_index: Index,
        /// The term of that entry.
        prev_term: Term,
        /// The entries that follow.
        entries: Vec<Entry<R::Command>>,
        /// All entries up to this index are chosen.
        chosen: Index,
        /// When it was sent.
        beat: Beat,
    },
    /// A follower's log agrees with the leader's, *durably* up to `matched`.
    AppendReply {
        /// The follower's term.
        term: Term,
        /// The log agrees and is durable up to this index.
        matched: Index,
        /// The log agrees up to this index, but may not be durable yet.
        received: Index,
        /// The latest message of the leader that the follower had received.
        beat: Beat,
    },
    /// A follower cannot append: the leader's term has ended, or the logs differ before `entries`.
    AppendReject {
        /// The follower's term.
        term: Term,
        /// The refused `prev_index`.
        prev_index: Index,
        /// The last index at which the logs may still agree.
        hint_index: Index,
        /// The term at that index.
        hint_term: Term,
        /// The follower's state is incomplete, because an installation was interrupted. It needs a
        /// snapshot in any case.
        wants_snapshot: bool,
        /// The latest message of the leader that the follower had received.
        beat: Beat,
    },
    /// A leader announces, at its interval and for every round of reads, that it still leads. It
    /// never waits for a disk.
    Heartbeat {
        /// The leader's term.
        term: Term,
        /// All entries up to this index are chosen. A follower may use it as far as its log agrees.
        chosen: Index,
        /// When it was sent.
        beat: Beat,
        /// The sum of a span, if members are comparing one.
        sum: Option<Sum>,
    },
    /// The answer to a heartbeat: the follower still follows the leader. It does not wait for
    /// entries to be durable.
    HeartbeatReply {
        /// The follower's term.
        term: Term,
        /// As in `AppendReply`.
        matched: Index,
        /// As in `AppendReply`. If it is less than the leader sent before, a message was lost.
        received: Index,
        /// The beat of the heartbeat.
        beat: Beat,
        /// This member's sum of the same span, if the heartbeat had a sum and this node has applied
        /// the span.
        sum: Option<Sum>,
    },
    /// One piece of a state snapshot, for a follower whose next entry the leader does not have any
    /// more (Raft §7). Pieces may contain effects of entries after `index`.
    SnapshotPiece {
        /// The leader's term.
        term: Term,
        /// The number of the snapshot in that term.
        snapshot: u64,
        /// The number of the piece, from 0.
        piece: u64,
        /// The snapshot contains the effects of all entries up to this index.
        index: Index,
        /// The term of that entry.
        index_term: Term,
        /// The membership as of that entry; in a box, so that other messages are short.
        members: Box<Members>,
        /// Part of the state.
        chunk: R::Chunk,
        /// True if no piece follows.
        is_last: bool,
        /// When it was sent.
        beat: Beat,
    },
    /// A follower has all pieces before `next`. If those are all pieces, the state is durable.
    SnapshotReply {
        /// The follower's term.
        term: Term,
        /// The number of the snapshot.
        snapshot: u64,
        /// The next piece that it expects. 0 also means that it knows nothing of this snapshot.
        next: u64,
        /// A snapshot must cover at least this index, because the follower's log starts there.
        at_least: Index,
        /// The latest message of the leader that the follower had received.
        beat: Beat,
    },
    /// The leader asks an up-to-date voter to campaign at once (thesis §3.10). The leader has given
    /// up its lease. The message is void once the receiver has received a later round of the same
    /// leader.
    TimeoutNow {
        /// The leader's term.
        term: Term,
        /// The leader's round.
        round: u64,
    },
}

/// Durable records of a replica, replayed in the order in which they were persisted.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
#[wire(bound = "")]
pub enum Record<R: Replicated> {
    /// The log starts after `index`, with these members. This record precedes all entries. The
    /// state that the embedder made durable covers everything up to `index`.
    Base {
        /// The last entry that is not in the log.
        index: Index,
        /// Its term.
        term: Term,
        /// The membership as of it; in a box, because most records are entries and all have one size.
        members: Box<Members>,
    },
    /// The state is only partly installed: only a snapshot can complete it.
    Incomplete,
    /// The current term, and this node's vote in it.
    HardState {
        /// The term. It never decreases.
        term: Term,
        /// The vote, if given.
        vote: Option<NodeId>,
    },
    /// The entry at `index`, which follows the previous one.
    Entry {
        /// Its index.
        index: Index,
        /// The entry.
        entry: Entry<R::Command>,
    },
    /// Drops the entry at `from` and all later ones: they conflict with a newer leader's.
    Truncate {
        /// The first entry to drop.
        from: Index,
    },
}

impl<R: Replicated> fmt::Display for Message<R> {
    /// One short line; entries as `index:term`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind())?;
        match self {
            Self::PreVote { term, last_index, last_term } => {
                write!(f, " {term} last {last_index}:{last_term}")
            }
            Self::PreVoteReply { term, granted } | Self::VoteReply { term, granted } => {
                write!(f, " {term} {}", if *granted { "yes" } else { "no" })
            }
            Self::RequestVote { term, last_index, last_term, transfer } => {
                let asked = if *transfer { " transfer" } else { "" };
                write!(f, " {term} last {last_index}:{last_term}{asked}")
            }
            Self::AppendEntries { term, prev_index, prev_term, entries, chosen, .. } => {
                write!(f, " {term} after {prev_index}:{prev_term} [")?;
                for (at, entry) in entries.iter().enumerate() {
                    let space = if at == 0 { "" } else { ", " };
                    write!(f, "{space}{entry}")?;
                }
                write!(f, "] chosen {chosen}")
            }
            Self::AppendReply { term, matched, received, .. } => {
                write!(f, " {term} matched {matched} received {received}")
            }
            Self::HeartbeatReply { term, matched, received, sum, .. } => {
                write!(f, " {term} matched {matched} received {received}")?;
                sum.map_or(Ok(()), |sum| write!(f, " {sum}"))
            }
            Self::AppendReject {
                term, prev_index, hint_index, hint_term, wants_snapshot, ..
            } => {
                let wants = if *wants_snapshot { " wants snapshot" } else { "" };
                write!(f, " {term} not after {prev_index}, try {hint_index}:{hint_term}{wants}")
            }
            Self::Heartbeat { term, chosen, beat, sum } => {
                write!(f, " {term} chosen {chosen} round {}", beat.round)?;
                sum.map_or(Ok(()), |sum| write!(f, " {sum}"))
            }
            Self::SnapshotPiece { term, snapshot, piece, index, index_term, is_last, .. } => {
                let last = if *is_last { " last" } else { "" };
                write!(f, " {term} #{snapshot}.{piece} of {index}:{index_term}{last}")
            }
            Self::SnapshotReply { term, snapshot, next, .. } => {
                write!(f, " {term} #{snapshot} next {next}")
            }
            Self::TimeoutNow { term, round } => write!(f, " {term} round {round}"),
        }
    }
}
