//! The replicated log that protocols embed: its messages and records.

use std::sync::Arc;

use bytes::Bytes;
use orthodrome_core::{NodeId, Time};
use orthodrome_protocols::replication::{
    Beat, Entry, Index, Members, Message, Payload, Record, Replicated, Term,
};

use super::common::{need, nodes_from_wire, nodes_to_wire};
use super::{WireError, replication_schema as wire};

/// A protocol's log: bytes of its commands and of pieces of its state.
pub trait WireReplicated: Replicated {
    /// The bytes of a command.
    fn encode_command(command: &Self::Command) -> Bytes;
    /// A command from its bytes.
    ///
    /// # Errors
    /// The bytes are not of a command.
    fn decode_command(bytes: Bytes) -> Result<Self::Command, WireError>;
    /// The bytes of a piece of state.
    fn encode_chunk(chunk: &Self::Chunk) -> Bytes;
    /// A piece of state from its bytes.
    ///
    /// # Errors
    /// The bytes are not of a piece of state.
    fn decode_chunk(bytes: Bytes) -> Result<Self::Chunk, WireError>;
}

fn members_to_wire(members: &Members) -> wire::Members {
    let Members { voters, outgoing, learners } = members;
    wire::Members {
        voters: nodes_to_wire(voters),
        outgoing: nodes_to_wire(outgoing),
        learners: nodes_to_wire(learners),
    }
}

fn members_from_wire(members: wire::Members) -> Result<Members, WireError> {
    let set = |nodes: Vec<u32>, field| {
        let nodes: Vec<NodeId> = nodes_from_wire(nodes).collect();
        if nodes.is_sorted_by(|a, b| a < b) {
            return Ok(nodes);
        }
        let found = format!("{nodes:?}");
        Err(WireError::Value { field, found, wanted: "sorted node ids, each once" })
    };
    Ok(Members {
        voters: set(members.voters, "Members.voters")?,
        outgoing: set(members.outgoing, "Members.outgoing")?,
        learners: set(members.learners, "Members.learners")?,
    })
}

fn entry_to_wire<R: WireReplicated>(entry: &Entry<R::Command>) -> wire::Entry {
    let payload = match &entry.payload {
        Payload::Noop => wire::entry::Payload::Noop(wire::entry::Noop {}),
        Payload::Members(members) => wire::entry::Payload::Members(members_to_wire(members)),
        Payload::Command(command) => wire::entry::Payload::Command(R::encode_command(command)),
    };
    wire::Entry { term: entry.term.0, payload: Some(payload) }
}

fn entry_from_wire<R: WireReplicated>(entry: wire::Entry) -> Result<Entry<R::Command>, WireError> {
    let payload = match need(entry.payload, "Entry.payload")? {
        wire::entry::Payload::Noop(wire::entry::Noop {}) => Payload::Noop,
        wire::entry::Payload::Members(members) => {
            Payload::Members(Arc::new(members_from_wire(members)?))
        }
        wire::entry::Payload::Command(bytes) => {
            Payload::Command(Arc::new(R::decode_command(bytes)?))
        }
    };
    Ok(Entry { term: Term(entry.term), payload })
}

fn beat_to_wire(beat: &Beat) -> wire::Beat {
    wire::Beat { round: beat.round, sent_at: beat.sent_at.0 }
}

fn beat_from_wire(beat: Option<wire::Beat>) -> Result<Beat, WireError> {
    let beat = need(beat, "Message.beat")?;
    Ok(Beat { round: beat.round, sent_at: Time(beat.sent_at) })
}

/// To the wire.
#[must_use]
pub fn message_to_wire<R: WireReplicated>(message: &Message<R>) -> wire::Message {
    use wire::message as m;
    use wire::message::Message as Wire;
    let message = match message {
        Message::PreVote { term, last_index, last_term } => Wire::PreVote(m::PreVote {
            term: term.0,
            last_index: last_index.0,
            last_term: last_term.0,
        }),
        Message::PreVoteReply { term, granted } => {
            Wire::PreVoteReply(m::PreVoteReply { term: term.0, granted: *granted })
        }
        Message::RequestVote { term, last_index, last_term, transfer } => {
            Wire::RequestVote(m::RequestVote {
                term: term.0,
                last_index: last_index.0,
                last_term: last_term.0,
                transfer: *transfer,
            })
        }
        Message::VoteReply { term, granted } => {
            Wire::VoteReply(m::VoteReply { term: term.0, granted: *granted })
        }
        Message::AppendEntries { term, prev_index, prev_term, entries, chosen, beat } => {
            Wire::AppendEntries(m::AppendEntries {
                term: term.0,
                prev_index: prev_index.0,
                prev_term: prev_term.0,
                entries: entries.iter().map(entry_to_wire::<R>).collect(),
                chosen: chosen.0,
                beat: Some(beat_to_wire(beat)),
            })
        }
        Message::AppendReply { term, matched, received, beat } => {
            Wire::AppendReply(m::AppendReply {
                term: term.0,
                matched: matched.0,
                received: received.0,
                beat: Some(beat_to_wire(beat)),
            })
        }
        Message::AppendReject { term, prev_index, hint_index, hint_term, wants_snapshot, beat } => {
            Wire::AppendReject(m::AppendReject {
                term: term.0,
                prev_index: prev_index.0,
                hint_index: hint_index.0,
                hint_term: hint_term.0,
                wants_snapshot: *wants_snapshot,
                beat: Some(beat_to_wire(beat)),
            })
        }
        Message::Heartbeat { term, chosen, beat } => Wire::Heartbeat(m::Heartbeat {
            term: term.0,
            chosen: chosen.0,
            beat: Some(beat_to_wire(beat)),
        }),
        Message::HeartbeatReply { term, matched, received, beat } => {
            Wire::HeartbeatReply(m::HeartbeatReply {
                term: term.0,
                matched: matched.0,
                received: received.0,
                beat: Some(beat_to_wire(beat)),
            })
        }
        Message::SnapshotPiece { .. } | Message::SnapshotReply { .. } => snapshot_to_wire(message),
        Message::TimeoutNow { term, round } => {
            Wire::TimeoutNow(m::TimeoutNow { term: term.0, round: *round })
        }
    };
    wire::Message { message: Some(message) }
}

/// The messages of a snapshot's installation.
///
/// # Panics
/// On any other message; [`message_to_wire`] passes only these.
fn snapshot_to_wire<R: WireReplicated>(message: &Message<R>) -> wire::message::Message {
    use wire::message as m;
    match message {
        Message::SnapshotPiece {
            term,
            snapshot,
            piece,
            index,
            index_term,
            members,
            chunk,
            is_last,
            beat,
        } => m::Message::SnapshotPiece(m::SnapshotPiece {
            term: term.0,
            snapshot: *snapshot,
            piece: *piece,
            index: index.0,
            index_term: index_term.0,
            members: Some(members_to_wire(members)),
            chunk: R::encode_chunk(chunk),
            is_last: *is_last,
            beat: Some(beat_to_wire(beat)),
        }),
        Message::SnapshotReply { term, snapshot, next, at_least, beat } => {
            m::Message::SnapshotReply(m::SnapshotReply {
                term: term.0,
                snapshot: *snapshot,
                next: *next,
                at_least: at_least.0,
                beat: Some(beat_to_wire(beat)),
            })
        }
        other @ (Message::PreVote { .. }
        | Message::PreVoteReply { .. }
        | Message::RequestVote { .. }
        | Message::VoteReply { .. }
        | Message::AppendEntries { .. }
        | Message::AppendReply { .. }
        | Message::AppendReject { .. }
        | Message::Heartbeat { .. }
        | Message::HeartbeatReply { .. }
        | Message::TimeoutNow { .. }) => unreachable!("{} is not of a snapshot", other.kind()),
    }
}

/// From the wire.
///
/// # Errors
/// A field is missing or holds what it cannot hold.
pub fn message_from_wire<R: WireReplicated>(
    message: wire::Message,
) -> Result<Message<R>, WireError> {
    use wire::message::Message as Wire;
    Ok(match need(message.message, "Message.message")? {
        Wire::PreVote(m) => Message::PreVote {
            term: Term(m.term),
            last_index: Index(m.last_index),
            last_term: Term(m.last_term),
        },
        Wire::PreVoteReply(m) => Message::PreVoteReply { term: Term(m.term), granted: m.granted },
        Wire::RequestVote(m) => Message::RequestVote {
            term: Term(m.term),
            last_index: Index(m.last_index),
            last_term: Term(m.last_term),
            transfer: m.transfer,
        },
        Wire::VoteReply(m) => Message::VoteReply { term: Term(m.term), granted: m.granted },
        Wire::AppendEntries(m) => {
            let entries = m.entries.into_iter().map(entry_from_wire::<R>);
            Message::AppendEntries {
                term: Term(m.term),
                prev_index: Index(m.prev_index),
                prev_term: Term(m.prev_term),
                entries: entries.collect::<Result<_, _>>()?,
                chosen: Index(m.chosen),
                beat: beat_from_wire(m.beat)?,
            }
        }
        Wire::AppendReply(m) => Message::AppendReply {
            term: Term(m.term),
            matched: Index(m.matched),
            received: Index(m.received),
            beat: beat_from_wire(m.beat)?,
        },
        Wire::AppendReject(m) => Message::AppendReject {
            term: Term(m.term),
            prev_index: Index(m.prev_index),
            hint_index: Index(m.hint_index),
            hint_term: Term(m.hint_term),
            wants_snapshot: m.wants_snapshot,
            beat: beat_from_wire(m.beat)?,
        },
        Wire::Heartbeat(m) => Message::Heartbeat {
            term: Term(m.term),
            chosen: Index(m.chosen),
            beat: beat_from_wire(m.beat)?,
        },
        Wire::HeartbeatReply(m) => Message::HeartbeatReply {
            term: Term(m.term),
            matched: Index(m.matched),
            received: Index(m.received),
            beat: beat_from_wire(m.beat)?,
        },
        Wire::SnapshotPiece(m) => Message::SnapshotPiece {
            term: Term(m.term),
            snapshot: m.snapshot,
            piece: m.piece,
            index: Index(m.index),
            index_term: Term(m.index_term),
            members: members_from_wire(need(m.members, "SnapshotPiece.members")?)?,
            chunk: R::decode_chunk(m.chunk)?,
            is_last: m.is_last,
            beat: beat_from_wire(m.beat)?,
        },
        Wire::SnapshotReply(m) => Message::SnapshotReply {
            term: Term(m.term),
            snapshot: m.snapshot,
            next: m.next,
            at_least: Index(m.at_least),
            beat: beat_from_wire(m.beat)?,
        },
        Wire::TimeoutNow(m) => Message::TimeoutNow { term: Term(m.term), round: m.round },
    })
}

/// To the wire.
#[must_use]
pub fn record_to_wire<R: WireReplicated>(record: &Record<R>) -> wire::Record {
    use wire::record as r;
    let record = match record {
        Record::Base { index, term, members } => r::Record::Base(r::Base {
            index: index.0,
            term: term.0,
            members: Some(members_to_wire(members)),
        }),
        Record::Incomplete => r::Record::Incomplete(r::Incomplete {}),
        Record::HardState { term, vote } => {
            r::Record::HardState(r::HardState { term: term.0, vote: vote.map(|node| node.0) })
        }
        Record::Entry { index, entry } => {
            r::Record::Entry(r::Logged { index: index.0, entry: Some(entry_to_wire::<R>(entry)) })
        }
        Record::Truncate { from } => r::Record::Truncate(r::Truncate { from: from.0 }),
    };
    wire::Record { record: Some(record) }
}

/// From the wire.
///
/// # Errors
/// A field is missing or holds what it cannot hold.
pub fn record_from_wire<R: WireReplicated>(record: wire::Record) -> Result<Record<R>, WireError> {
    use wire::record::Record as Wire;
    Ok(match need(record.record, "Record.record")? {
        Wire::Base(r) => Record::Base {
            index: Index(r.index),
            term: Term(r.term),
            members: members_from_wire(need(r.members, "Base.members")?)?,
        },
        Wire::Incomplete(wire::record::Incomplete {}) => Record::Incomplete,
        Wire::HardState(r) => Record::HardState { term: Term(r.term), vote: r.vote.map(NodeId) },
        Wire::Entry(r) => Record::Entry {
            index: Index(r.index),
            entry: entry_from_wire::<R>(need(r.entry, "Logged.entry")?)?,
        },
        Wire::Truncate(r) => Record::Truncate { from: Index(r.from) },
    })
}
