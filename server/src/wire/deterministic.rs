//! Messages and records of the deterministic protocols, which share them.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use orthodrome_core::{Key, NodeId, PartitionId, RegionId, Timestamp, TxnId};
use orthodrome_protocols::deterministic::checks::Span;
use orthodrome_protocols::deterministic::merge::Place;
use orthodrome_protocols::deterministic::{
    Chunk, Command, Deterministic, Due, Ended, Home, Image, Log, Msg, Name, Part, Record,
    Sequenced, StreamImage, Turn,
};
use orthodrome_protocols::replication::Index;
use prost::Message as _;

use super::common::{
    acknowledged_from_wire, acknowledged_to_wire, decided_from_wire, key_versions_from_wire,
    key_versions_to_wire, keys_from_wire, keys_to_wire, need, outcome_to_wire,
    partitions_from_wire, partitions_to_wire, reads_from_wire, reads_to_wire, txn_id_from_wire,
    txn_id_to_wire,
};
use super::ocean_vista::{functor_from_wire, functor_to_wire, keyed};
use super::replication::{
    WireReplicated, message_from_wire, message_to_wire, record_from_wire, record_to_wire,
};
use super::{WireError, WireProtocol, deterministic_schema as wire};

fn sequenced_to_wire(entry: &Sequenced) -> wire::Sequenced {
    let Sequenced { functor, homes, due, moved, target, origin, is_piece } = entry;
    wire::Sequenced {
        functor: Some(functor_to_wire(functor)),
        homes: partitions_to_wire(homes),
        due: due.0,
        is_piece: *is_piece,
        moved: moved.iter().map(|(key, home)| moved_to_wire(key, home)).collect(),
        target: target.map(|stream| stream.0),
        origin: u32::from(origin.0),
    }
}

/// Homes are in order, each once: how many there are says when a transaction is complete.
fn sequenced_from_wire(entry: Option<wire::Sequenced>) -> Result<Arc<Sequenced>, WireError> {
    let entry = need(entry, "entry")?;
    let homes: Vec<PartitionId> = partitions_from_wire(entry.homes).collect();
    if homes.is_empty() || !homes.is_sorted_by(|a, b| a < b) {
        let (field, found) = ("Sequenced.homes", format!("{homes:?}"));
        return Err(WireError::Value { field, found, wanted: "ascending, at least one" });
    }
    let origin = u16::try_from(entry.origin).map_err(|_| WireError::Value {
        field: "Sequenced.origin",
        found: entry.origin.to_string(),
        wanted: "a region's number, below 65536",
    })?;
    Ok(Arc::new(Sequenced {
        functor: functor_from_wire(entry.functor)?,
        homes,
        due: Timestamp(entry.due),
        moved: entry.moved.into_iter().map(moved_from_wire).collect(),
        target: entry.target.map(PartitionId),
        origin: RegionId(origin),
        is_piece: entry.is_piece,
    }))
}

fn moved_to_wire(key: &Key, home: &Home) -> wire::Moved {
    let Home { counter, stream, since } = *home;
    wire::Moved { key: key.0.clone(), counter, stream: stream.0, since: since.0 }
}

fn moved_from_wire(moved: wire::Moved) -> (Key, Home) {
    let (stream, since) = (PartitionId(moved.stream), Timestamp(moved.since));
    (Key(moved.key), Home { counter: moved.counter, stream, since })
}

fn name_to_wire(name: &Name) -> wire::Name {
    wire::Name { txn: Some(txn_id_to_wire(&name.txn)), map: name.map }
}

fn name_from_wire(name: wire::Name) -> Result<Name, WireError> {
    Ok(Name { txn: txn_id_from_wire(&need(name.txn, "Name.txn")?), map: name.map })
}

fn turn_to_wire(turn: &Turn) -> wire::Turn {
    let Turn { stream, index, name } = turn;
    wire::Turn { stream: stream.0, index: index.0, name: Some(name_to_wire(name)) }
}

fn turn_from_wire(turn: wire::Turn) -> Result<Turn, WireError> {
    let (stream, index) = (PartitionId(turn.stream), Index(turn.index));
    Ok(Turn { stream, index, name: name_from_wire(need(turn.name, "Turn.name")?)? })
}

fn turns_to_wire(turns: &[Turn]) -> wire::msg::Turns {
    wire::msg::Turns { turns: turns.iter().map(turn_to_wire).collect() }
}

fn turns_from_wire(turns: wire::msg::Turns) -> Result<Vec<Turn>, WireError> {
    turns.turns.into_iter().map(turn_from_wire).collect()
}

fn part_to_wire((turn, part): (&Turn, &Part)) -> wire::Part {
    let Part { reads, newest } = part;
    let (turn, reads) = (Some(turn_to_wire(turn)), reads_to_wire(reads));
    wire::Part { turn, reads, newest: newest.0 }
}

fn part_from_wire(part: wire::Part) -> Result<(Turn, Arc<Part>), WireError> {
    let turn = turn_from_wire(need(part.turn, "Part.turn")?)?;
    let (reads, newest) = (reads_from_wire(part.reads)?, Timestamp(part.newest));
    Ok((turn, Arc::new(Part { reads, newest })))
}

fn due_to_wire(due: &Due) -> wire::image::Due {
    let Due { entry, stamp, places } = due;
    let places = places.iter().map(|(stream, place)| {
        let Place { index, offset, stamp, is_late } = *place;
        let (stream, index, stamp) = (stream.0, index.0, stamp.0);
        wire::image::Place { stream, index, offset, stamp, is_late }
    });
    let (entry, places) = (Some(sequenced_to_wire(entry)), places.collect());
    wire::image::Due { entry, stamp: stamp.0, places }
}

fn due_from_wire(due: wire::image::Due) -> Result<Due, WireError> {
    let places = due.places.into_iter().map(|place| {
        let wire::image::Place { stream, index, offset, stamp, is_late } = place;
        let (index, stamp) = (Index(index), Timestamp(stamp));
        (PartitionId(stream), Place { index, offset, stamp, is_late })
    });
    let places = places.collect();
    let (entry, stamp) = (sequenced_from_wire(due.entry)?, Timestamp(due.stamp));
    Ok(Due { entry, stamp, places })
}

fn chunk_to_wire(chunk: &Chunk) -> wire::Chunk {
    let Chunk { image, keys } = chunk;
    let image = image.as_ref().map(|image| image_to_wire(image));
    wire::Chunk { image, keys: keys.iter().map(key_versions_to_wire).collect() }
}

fn chunk_from_wire(chunk: wire::Chunk) -> Result<Chunk, WireError> {
    let image = chunk.image.map(image_from_wire).transpose()?.map(Arc::new);
    let keys = chunk.keys.into_iter().map(key_versions_from_wire);
    Ok(Chunk { image, keys: keys.collect::<Result<_, _>>()? })
}

/// Where in a state a piece begins.
fn cursor_from_wire(cursor: Option<u64>) -> Result<Option<usize>, WireError> {
    let as_place = |at: u64| {
        usize::try_from(at).map_err(|_| WireError::Value {
            field: "cursor",
            found: at.to_string(),
            wanted: "a place in a state",
        })
    };
    cursor.map(as_place).transpose()
}

fn span_to_wire((span, digest): &(Span, u64)) -> wire::msg::digests::Span {
    let Span { stream, first, last } = *span;
    let (stream, first, last) = (stream.0, first.0, last.0);
    wire::msg::digests::Span { stream, first, last, digest: *digest }
}

fn span_from_wire(span: wire::msg::digests::Span) -> (Span, u64) {
    let wire::msg::digests::Span { stream, first, last, digest } = span;
    let (stream, first, last) = (PartitionId(stream), Index(first), Index(last));
    (Span { stream, first, last }, digest)
}

fn msg_to_wire(msg: &Msg) -> wire::Msg {
    use wire::msg as m;
    use wire::msg::Msg as Wire;
    let (txn, msg) = match msg {
        Msg::Submit { functor } => {
            (None, Wire::Submit(m::Submit { functor: Some(functor_to_wire(functor)) }))
        }
        Msg::Answer { txn, outcome, reads } => {
            let outcome = Some(outcome_to_wire(*outcome));
            (Some(txn), Wire::Answer(m::Answer { outcome, reads: reads_to_wire(reads) }))
        }
        Msg::Look { txn, round, keys } => {
            (Some(txn), Wire::Look(m::Look { round: *round, keys: keys_to_wire(keys) }))
        }
        Msg::Found { txn, round, reads } => {
            (Some(txn), Wire::Found(m::Found { round: *round, reads: reads_to_wire(reads) }))
        }
        Msg::Sequence { stream, entry } => {
            let entry = Some(sequenced_to_wire(entry));
            (None, Wire::Sequence(m::Sequence { stream: stream.0, entry }))
        }
        Msg::NotLeader { partition, leader, txn } => {
            let leader = leader.map(|node| node.0);
            (txn.as_ref(), Wire::NotLeader(m::NotLeader { partition: partition.0, leader }))
        }
        Msg::Replication { partition, message } => {
            let message = Some(message_to_wire(message));
            (None, Wire::Replication(m::Replication { partition: partition.0, message }))
        }
        Msg::RemoteReads { parts } => {
            let parts = parts.iter().map(|(turn, part)| part_to_wire((turn, part))).collect();
            (None, Wire::RemoteReads(m::RemoteReads { parts }))
        }
        Msg::WantReads { turns } => (None, Wire::WantReads(turns_to_wire(turns))),
        Msg::ReadsGone { turns } => (None, Wire::ReadsGone(turns_to_wire(turns))),
        Msg::Covered { through } => {
            let through = through
                .iter()
                .map(|(stream, index)| m::covered::Stream { stream: stream.0, index: index.0 });
            (None, Wire::Covered(m::Covered { through: through.collect() }))
        }
        Msg::WantState { number, past, cursor } => {
            let (past, cursor) = (Some(turn_to_wire(past)), cursor.map(|at| at as u64));
            (None, Wire::WantState(m::WantState { number: *number, past, cursor }))
        }
        Msg::StatePiece { number, chunk, next } => {
            let (chunk, next) = (Some(chunk_to_wire(chunk)), next.map(|at| at as u64));
            (None, Wire::StatePiece(m::StatePiece { number: *number, chunk, next }))
        }
        Msg::TooOld { txn, outcome } => {
            let outcome = outcome.map(outcome_to_wire);
            (Some(txn), Wire::TooOld(m::TooOld { outcome }))
        }
        Msg::Digests { digests } => {
            let spans = digests.iter().map(span_to_wire).collect();
            (None, Wire::Digests(m::Digests { spans }))
        }
    };
    wire::Msg { txn: txn.map(txn_id_to_wire), msg: Some(msg) }
}

fn msg_from_wire(msg: wire::Msg) -> Result<Msg, WireError> {
    use wire::msg::Msg as Wire;
    let known: Option<TxnId> = msg.txn.as_ref().map(txn_id_from_wire);
    let txn = || need(known, "Msg.txn");
    Ok(match need(msg.msg, "Msg.msg")? {
        Wire::Submit(m) => Msg::Submit { functor: functor_from_wire(m.functor)? },
        Wire::Answer(m) => Msg::Answer {
            txn: txn()?,
            outcome: decided_from_wire(m.outcome)?,
            reads: reads_from_wire(m.reads)?,
        },
        Wire::Look(m) => Msg::Look { txn: txn()?, round: m.round, keys: keys_from_wire(m.keys) },
        Wire::Found(m) => {
            Msg::Found { txn: txn()?, round: m.round, reads: reads_from_wire(m.reads)? }
        }
        Wire::Sequence(m) => {
            Msg::Sequence { stream: PartitionId(m.stream), entry: sequenced_from_wire(m.entry)? }
        }
        Wire::NotLeader(m) => Msg::NotLeader {
            partition: PartitionId(m.partition),
            leader: m.leader.map(NodeId),
            txn: known,
        },
        Wire::Replication(m) => Msg::Replication {
            partition: PartitionId(m.partition),
            message: message_from_wire(need(m.message, "Msg.message")?)?,
        },
        Wire::RemoteReads(m) => {
            let parts = m.parts.into_iter().map(part_from_wire).collect::<Result<_, _>>()?;
            Msg::RemoteReads { parts }
        }
        Wire::WantReads(m) => Msg::WantReads { turns: turns_from_wire(m)? },
        Wire::ReadsGone(m) => Msg::ReadsGone { turns: turns_from_wire(m)? },
        Wire::Covered(m) => {
            let of = |of: wire::msg::covered::Stream| Ok((PartitionId(of.stream), Index(of.index)));
            Msg::Covered { through: keyed(m.through.into_iter().map(of), "Covered.through")? }
        }
        Wire::WantState(m) => Msg::WantState {
            number: m.number,
            past: turn_from_wire(need(m.past, "WantState.past")?)?,
            cursor: cursor_from_wire(m.cursor)?,
        },
        Wire::StatePiece(m) => Msg::StatePiece {
            number: m.number,
            chunk: chunk_from_wire(need(m.chunk, "StatePiece.chunk")?)?,
            next: cursor_from_wire(m.next)?,
        },
        Wire::TooOld(m) => Msg::TooOld {
            txn: txn()?,
            outcome: m.outcome.map(|outcome| decided_from_wire(Some(outcome))).transpose()?,
        },
        Wire::Digests(m) => {
            Msg::Digests { digests: m.spans.into_iter().map(span_from_wire).collect() }
        }
    })
}

fn command_to_wire(command: &Command) -> wire::Command {
    use wire::command as c;
    use wire::command::Command as Wire;
    let command = match command {
        Command::Batch { stamp, entries } => {
            let entries = entries.iter().map(|entry| sequenced_to_wire(entry)).collect();
            Wire::Batch(c::Batch { stamp: stamp.0, entries })
        }
        Command::Acknowledge(clients) => {
            let clients = acknowledged_to_wire(clients.iter().copied());
            Wire::Acknowledge(c::Acknowledge { clients })
        }
        Command::Forget(clients) => {
            let clients = acknowledged_to_wire(clients.iter().copied());
            Wire::Forget(c::Acknowledge { clients })
        }
    };
    wire::Command { command: Some(command) }
}

fn command_from_wire(command: wire::Command) -> Result<Command, WireError> {
    use wire::command::Command as Wire;
    Ok(match need(command.command, "Command.command")? {
        Wire::Batch(c) => {
            let entries = c.entries.into_iter().map(|entry| sequenced_from_wire(Some(entry)));
            let entries = entries.collect::<Result<_, _>>()?;
            Command::Batch { stamp: Timestamp(c.stamp), entries }
        }
        Wire::Acknowledge(c) => Command::Acknowledge(acknowledged_from_wire(c.clients).collect()),
        Wire::Forget(c) => Command::Forget(acknowledged_from_wire(c.clients).collect()),
    })
}

fn image_to_wire(image: &Image) -> wire::Image {
    use wire::image as i;
    let Image { number, piece, pieces, streams, pending, ended, .. } = image;
    let Image { moved, ran, shares, due, kept, .. } = image;
    let streams = streams.iter().map(|(stream, image)| {
        let StreamImage { applied, stamp, seen, acknowledged, forgotten, moves } = image;
        let moves = moves.iter().map(|(key, &count)| wire::Moves { key: key.0.clone(), count });
        i::Stream {
            stream: stream.0,
            applied: applied.0,
            stamp: stamp.0,
            seen: seen.iter().map(name_to_wire).collect(),
            acknowledged: acknowledged_to_wire(acknowledged.iter().map(|(&c, &below)| (c, below))),
            forgotten: acknowledged_to_wire(forgotten.iter().map(|(&c, &below)| (c, below))),
            moves: moves.collect(),
        }
    });
    let pending = pending.iter().map(|(stream, place, entry)| i::Pending {
        stream: stream.0,
        index: place.index.0,
        offset: place.offset,
        stamp: place.stamp.0,
        is_late: place.is_late,
        entry: Some(sequenced_to_wire(entry)),
    });
    let ended = ended.iter().map(|(txn, ended)| i::Ended {
        txn: Some(txn_id_to_wire(txn)),
        outcome: Some(outcome_to_wire(ended.outcome)),
        reads: ended.reads.as_ref().map_or_else(Vec::new, reads_to_wire),
        reads_forgotten: ended.reads.is_none(),
        stamp: ended.stamp.0,
    });
    wire::Image {
        number: *number,
        piece: *piece,
        pieces: *pieces,
        streams: streams.collect(),
        pending: pending.collect(),
        ended: ended.collect(),
        moved: moved.iter().map(|(key, home)| moved_to_wire(key, home)).collect(),
        ran: ran.iter().map(txn_id_to_wire).collect(),
        shares: *shares,
        due: due.iter().map(due_to_wire).collect(),
        kept: kept.iter().map(|(turn, part)| part_to_wire((turn, part))).collect(),
    }
}

fn image_from_wire(image: wire::Image) -> Result<Image, WireError> {
    let streams = image.streams.into_iter().map(|stream| {
        let seen = stream.seen.into_iter().map(name_from_wire);
        let image = StreamImage {
            applied: Index(stream.applied),
            stamp: Timestamp(stream.stamp),
            seen: seen.collect::<Result<_, _>>()?,
            acknowledged: acknowledged_from_wire(stream.acknowledged).collect(),
            forgotten: acknowledged_from_wire(stream.forgotten).collect(),
            moves: stream.moves.into_iter().map(|moves| (Key(moves.key), moves.count)).collect(),
        };
        Ok((PartitionId(stream.stream), image))
    });
    let pending = image.pending.into_iter().map(|pending| {
        let place = Place {
            index: Index(pending.index),
            offset: pending.offset,
            stamp: Timestamp(pending.stamp),
            is_late: pending.is_late,
        };
        Ok((PartitionId(pending.stream), place, sequenced_from_wire(pending.entry)?))
    });
    let ended = image.ended.into_iter().map(|ended| {
        let txn = txn_id_from_wire(&need(ended.txn, "Image.txn")?);
        let (outcome, reads) = (decided_from_wire(ended.outcome)?, reads_from_wire(ended.reads)?);
        let reads = (!ended.reads_forgotten).then_some(reads);
        Ok((txn, Ended { outcome, reads, stamp: Timestamp(ended.stamp) }))
    });
    Ok(Image {
        number: image.number,
        piece: image.piece,
        pieces: image.pieces,
        streams: keyed(streams, "Image.streams")?,
        pending: pending.collect::<Result<_, WireError>>()?,
        ended: keyed(ended, "Image.ended")?,
        moved: keyed(
            image.moved.into_iter().map(|moved| Ok(moved_from_wire(moved))),
            "Image.moved",
        )?,
        ran: image.ran.iter().map(txn_id_from_wire).collect(),
        shares: image.shares,
        due: image.due.into_iter().map(due_from_wire).collect::<Result<_, _>>()?,
        kept: keyed(image.kept.into_iter().map(part_from_wire), "Image.kept")?,
    })
}

impl WireReplicated for Log {
    fn encode_command(command: &Command) -> Bytes {
        command_to_wire(command).encode_to_vec().into()
    }

    fn decode_command(bytes: Bytes) -> Result<Command, WireError> {
        command_from_wire(wire::Command::decode(bytes)?)
    }

    fn encode_chunk(chunk: &Chunk) -> Bytes {
        chunk_to_wire(chunk).encode_to_vec().into()
    }

    fn decode_chunk(bytes: Bytes) -> Result<Chunk, WireError> {
        chunk_from_wire(wire::Chunk::decode(bytes)?)
    }
}

impl WireProtocol for Deterministic {
    fn encode_msg(msg: &Msg, out: &mut BytesMut) {
        msg_to_wire(msg).encode_raw(out);
    }

    fn decode_msg(bytes: Bytes) -> Result<Msg, WireError> {
        msg_from_wire(wire::Msg::decode(bytes)?)
    }

    fn encode_record(record: &Record, out: &mut BytesMut) {
        use wire::record as r;
        let record = match record {
            Record::Image(image) => r::Record::Image(image_to_wire(image)),
            Record::Replication(partition, record) => {
                let record = Some(record_to_wire(record));
                r::Record::Replication(r::Replication { partition: partition.0, record })
            }
        };
        wire::Record { record: Some(record) }.encode_raw(out);
    }

    fn decode_record(bytes: Bytes) -> Result<Record, WireError> {
        use wire::record as r;
        let record = wire::Record::decode(bytes)?;
        Ok(match need(record.record, "Record.record")? {
            r::Record::Image(image) => Record::Image(Arc::new(image_from_wire(image)?)),
            r::Record::Replication(record) => {
                let partition = PartitionId(record.partition);
                let record = need(record.record, "Record.replication")?;
                Record::Replication(partition, record_from_wire(record)?)
            }
        })
    }
}
