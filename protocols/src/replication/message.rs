//! What replicas say to each other, and what each remembers.

use std::fmt;

use orthodrome_core::{NodeId, Time, Wire};

use super::checks::Sum;
use super::quorum::Members;
use super::{Entry, Index, Replicated, Term};

/// When a leader's message was sent. Followers send it back unchanged, which tells the leader what
/// their answer proves: that they still followed it at some moment after `sent_at`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Wire)]
pub struct Beat {
    /// The leader's count of rounds in its term, from 1; a read waits for answers of a round begun
    /// after it. 0 in an answer that proves nothing.
    pub round: u64,
    /// The leader's monotonic time when it sent the message: where a lease starts. Meaningless to
    /// anyone else.
    pub sent_at: Time,
}

/// What replicas of one group say to each other. Any message may be lost, repeated, reordered or
/// late.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
#[wire(bound = "")]
pub enum Message<R: Replicated> {
    /// A node whose election timer ran out asks every voter: would you vote for me? It promises
    /// nothing and changes nothing (thesis §9.6).
    PreVote {
        /// The term the sender would campaign in: one above its own.
        term: Term,
        /// Its last entry.
        last_index: Index,
        /// The term of that entry.
        last_term: Term,
    },
    /// The answer to a pre-vote; a *yes* promises nothing.
    PreVoteReply {
        /// If granted, the term asked about; otherwise the voter's own term.
        term: Term,
        /// Whether the voter would vote so.
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
        /// Whether it voted for the candidate in that term.
        granted: bool,
    },
    /// A leader's entries after `prev_index` (Raft §5.3), or a probe for where the logs agree.
    AppendEntries {
        /// The leader's term.
        term: Term,
        /// The entry before `entries`.
        prev_index: Index,
        /// The term of that entry.
        prev_term: Term,
        /// What follows it.
        entries: Vec<Entry<R::Command>>,
        /// Everything up to here is chosen.
        chosen: Index,
        /// When it was sent.
        beat: Beat,
    },
    /// A follower's log agrees with the leader's, *durably* up to `matched`.
    AppendReply {
        /// The follower's term.
        term: Term,
        /// Agrees and is durable up to here.
        matched: Index,
        /// Agrees up to here, though perhaps not yet durable.
        received: Index,
        /// The latest leader's message that the follower had seen.
        beat: Beat,
    },
    /// A follower cannot append: the leader's term is over, or the logs differ before `entries`.
    AppendReject {
        /// The follower's term.
        term: Term,
        /// The `prev_index` refused.
        prev_index: Index,
        /// The last place where the logs may still agree, and
        hint_index: Index,
        /// the term there.
        hint_term: Term,
        /// The follower's state is incomplete (an installation was cut short): it needs a snapshot,
        /// whatever its log says.
        wants_snapshot: bool,
        /// The latest leader's message that the follower had seen.
        beat: Beat,
    },
    /// A leader, at its interval and for every round of reads: I still lead. Never waits for a disk.
    Heartbeat {
        /// The leader's term.
        term: Term,
        /// Everything up to here is chosen; a follower may use it as far as its log agrees.
        chosen: Index,
        /// When it was sent.
        beat: Beat,
        /// What some entries came to, if members are comparing that.
        sum: Option<Sum>,
    },
    /// The answer to a heartbeat: I still follow you. Does not wait for entries to be durable.
    HeartbeatReply {
        /// The follower's term.
        term: Term,
        /// As in `AppendReply`.
        matched: Index,
        /// As in `AppendReply`; if it is short of what the leader sent before, a message was lost.
        received: Index,
        /// The heartbeat's.
        beat: Beat,
        /// What the same entries came to here, if the heartbeat told a sum and this node has come so
        /// far.
        sum: Option<Sum>,
    },
    /// One piece of a state snapshot, for a follower whose next entry the leader no longer has
    /// (Raft §7). Pieces may hold effects of entries after `index`.
    SnapshotPiece {
        /// The leader's term.
        term: Term,
        /// Which snapshot of that term.
        snapshot: u64,
        /// Which piece, from 0.
        piece: u64,
        /// The snapshot holds the effects of everything up to here.
        index: Index,
        /// The term of that entry.
        index_term: Term,
        /// The membership as of that entry.
        members: Members,
        /// Part of the state.
        chunk: R::Chunk,
        /// No piece follows.
        is_last: bool,
        /// When it was sent.
        beat: Beat,
    },
    /// A follower has the pieces before `next`; if that is all of them, the state is durable.
    SnapshotReply {
        /// The follower's term.
        term: Term,
        /// Which snapshot.
        snapshot: u64,
        /// The piece it waits for; 0 also says that it knows nothing of this snapshot.
        next: u64,
        /// A snapshot that covers less does not help: the follower's log starts there.
        at_least: Index,
        /// The latest leader's message that the follower had seen.
        beat: Beat,
    },
    /// The leader asks an up-to-date voter to campaign at once (thesis §3.10). It has given up its
    /// lease; the message is void once the receiver has seen a later round of the same leader.
    TimeoutNow {
        /// The leader's term.
        term: Term,
        /// The leader's round.
        round: u64,
    },
}

impl<R: Replicated> Message<R> {
    /// The name of the message, as in its paper.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::PreVote { .. } => "PreVote",
            Self::PreVoteReply { .. } => "PreVoteReply",
            Self::RequestVote { .. } => "RequestVote",
            Self::VoteReply { .. } => "VoteReply",
            Self::AppendEntries { .. } => "AppendEntries",
            Self::AppendReply { .. } => "AppendReply",
            Self::AppendReject { .. } => "AppendReject",
            Self::Heartbeat { .. } => "Heartbeat",
            Self::HeartbeatReply { .. } => "HeartbeatReply",
            Self::SnapshotPiece { .. } => "SnapshotPiece",
            Self::SnapshotReply { .. } => "SnapshotReply",
            Self::TimeoutNow { .. } => "TimeoutNow",
        }
    }
}

/// What a replica remembers. Replayed in the order persisted.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
#[wire(bound = "")]
pub enum Record<R: Replicated> {
    /// The log starts after `index`, with these members; comes before any entry. The state that
    /// the embedder made durable covers everything up to `index`.
    Base {
        /// The last entry that is not in the log.
        index: Index,
        /// Its term.
        term: Term,
        /// The membership as of it.
        members: Members,
    },
    /// The state is half installed: only a snapshot can complete it.
    Incomplete,
    /// The current term, and who got the vote in it.
    HardState {
        /// The term; never falls.
        term: Term,
        /// The vote, if given.
        vote: Option<NodeId>,
    },
    /// The entry at `index`, right after the one before.
    Entry {
        /// Where it is in the log.
        index: Index,
        /// The entry.
        entry: Entry<R::Command>,
    },
    /// Forget the entry at `from` and all after it: they conflict with a newer leader's.
    Truncate {
        /// The first entry to forget.
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
