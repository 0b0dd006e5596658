//! Messages and records of the deterministic protocols, which share them.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use orthodrome_core::{NodeId, PartitionId, Timestamp, TxnId};
use orthodrome_protocols::deterministic::merge::Place;
use orthodrome_protocols::deterministic::{
    Chunk, Command, Deterministic, Ended, Image, Log, Msg, Record, Sequenced, StreamImage,
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
    let Sequenced { functor, homes, due } = entry;
    let functor = Some(functor_to_wire(functor));
    wire::Sequenced { functor, homes: partitions_to_wire(homes), due: due.0 }
}

/// Homes are in order, each once: how many there are says when a transaction is complete.
fn sequenced_from_wire(entry: Option<wire::Sequenced>) -> Result<Arc<Sequenced>, WireError> {
    let entry = need(entry, "entry")?;
    let homes: Vec<PartitionId> = partitions_from_wire(entry.homes).collect();
    if homes.is_empty() || !homes.is_sorted_by(|a, b| a < b) {
        let (field, found) = ("Sequenced.homes", format!("{homes:?}"));
        return Err(WireError::Value { field, found, wanted: "ascending, at least one" });
    }
    let functor = functor_from_wire(entry.functor)?;
    Ok(Arc::new(Sequenced { functor, homes, due: Timestamp(entry.due) }))
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
    })
}

fn image_to_wire(image: &Image) -> wire::Image {
    use wire::image as i;
    let Image { number, streams, pending, ended } = image;
    let streams = streams.iter().map(|(stream, image)| {
        let StreamImage { applied, stamp, seen, acknowledged } = image;
        i::Stream {
            stream: stream.0,
            applied: applied.0,
            stamp: stamp.0,
            seen: seen.iter().map(txn_id_to_wire).collect(),
            acknowledged: acknowledged_to_wire(acknowledged.iter().map(|(&c, &below)| (c, below))),
        }
    });
    let pending = pending.iter().map(|(stream, place, entry)| i::Pending {
        stream: stream.0,
        index: place.index.0,
        offset: place.offset,
        stamp: place.stamp.0,
        entry: Some(sequenced_to_wire(entry)),
    });
    let ended = ended.iter().map(|(txn, ended)| i::Ended {
        txn: Some(txn_id_to_wire(txn)),
        outcome: Some(outcome_to_wire(ended.outcome)),
        reads: reads_to_wire(&ended.reads),
    });
    wire::Image {
        number: *number,
        streams: streams.collect(),
        pending: pending.collect(),
        ended: ended.collect(),
    }
}

fn image_from_wire(image: wire::Image) -> Result<Image, WireError> {
    let streams = image.streams.into_iter().map(|stream| {
        let image = StreamImage {
            applied: Index(stream.applied),
            stamp: Timestamp(stream.stamp),
            seen: stream.seen.iter().map(txn_id_from_wire).collect(),
            acknowledged: acknowledged_from_wire(stream.acknowledged).collect(),
        };
        Ok((PartitionId(stream.stream), image))
    });
    let pending = image.pending.into_iter().map(|pending| {
        let place = Place {
            index: Index(pending.index),
            offset: pending.offset,
            stamp: Timestamp(pending.stamp),
        };
        Ok((PartitionId(pending.stream), place, sequenced_from_wire(pending.entry)?))
    });
    let ended = image.ended.into_iter().map(|ended| {
        let txn = txn_id_from_wire(&need(ended.txn, "Image.txn")?);
        let (outcome, reads) = (decided_from_wire(ended.outcome)?, reads_from_wire(ended.reads)?);
        Ok((txn, Ended { outcome, reads }))
    });
    Ok(Image {
        number: image.number,
        streams: keyed(streams, "Image.streams")?,
        pending: pending.collect::<Result<_, WireError>>()?,
        ended: keyed(ended, "Image.ended")?,
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
        let Chunk { image, keys } = chunk;
        let image = image.as_ref().map(|image| image_to_wire(image));
        let keys = keys.iter().map(key_versions_to_wire).collect();
        wire::Chunk { image, keys }.encode_to_vec().into()
    }

    fn decode_chunk(bytes: Bytes) -> Result<Chunk, WireError> {
        let chunk = wire::Chunk::decode(bytes)?;
        let image = chunk.image.map(image_from_wire).transpose()?.map(Arc::new);
        let keys = chunk.keys.into_iter().map(key_versions_from_wire);
        Ok(Chunk { image, keys: keys.collect::<Result<_, _>>()? })
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
