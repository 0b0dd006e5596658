//! What the messages and records of every protocol are made of.

use orthodrome_core::procedure::{Call, Procedure};
use orthodrome_core::session::Floor;
use orthodrome_core::store::{Versioned, Versions};
use orthodrome_core::txn::{AbortReason, Kind, Op, Priority, Read, Reads, Version, Writes};
use orthodrome_core::{
    ClientId, Decision, Key, NodeId, Outcome, PartitionId, RegionId, Time, Timestamp, Txn, TxnId,
    Value,
};
use orthodrome_protocols::Portion;
use orthodrome_protocols::gateway::{Participant, Snapshot};

use super::{WireError, internal as wire};

/// A field that the schema leaves optional and the protocol does not.
///
/// # Errors
/// It is not there.
pub fn need<T>(field: Option<T>, name: &'static str) -> Result<T, WireError> {
    field.ok_or(WireError::Missing(name))
}

/// A number of the width that `core` gives it.
///
/// # Errors
/// It is too large.
pub fn narrow<T: TryFrom<u32>>(value: u32, field: &'static str) -> Result<T, WireError> {
    let wanted = "a number of that field's width";
    T::try_from(value).map_err(|_| WireError::Value { field, found: value.to_string(), wanted })
}

/// To the wire.
#[must_use]
pub fn txn_id_to_wire(id: &TxnId) -> wire::TxnId {
    wire::TxnId { client: id.client.0, counter: id.counter, attempt: id.attempt }
}

/// From the wire.
#[must_use]
pub fn txn_id_from_wire(id: &wire::TxnId) -> TxnId {
    TxnId { client: ClientId(id.client), counter: id.counter, attempt: id.attempt }
}

/// To the wire.
#[must_use]
pub fn version_to_wire(version: &Version) -> wire::Version {
    let Version { timestamp, writer: TxnId { client, counter, attempt } } = *version;
    wire::Version { timestamp: timestamp.0, client: client.0, counter, attempt }
}

/// From the wire.
#[must_use]
pub fn version_from_wire(version: &wire::Version) -> Version {
    let wire::Version { timestamp, client, counter, attempt } = *version;
    let writer = TxnId { client: ClientId(client), counter, attempt };
    Version { timestamp: Timestamp(timestamp), writer }
}

/// To the wire.
#[must_use]
pub fn portion_to_wire(portion: Portion) -> Option<wire::Portion> {
    let Portion { sent_at, number, of } = portion;
    (portion != Portion::WHOLE).then_some(wire::Portion { sent_at: sent_at.0, number, of })
}

/// From the wire.
#[must_use]
pub fn portion_from_wire(portion: Option<wire::Portion>) -> Portion {
    let whole = portion.is_none_or(|portion| portion.of == 0);
    let portion = portion.filter(|_| !whole);
    portion.map_or(Portion::WHOLE, |wire::Portion { sent_at, number, of }| Portion {
        sent_at: Time(sent_at),
        number,
        of,
    })
}

/// To the wire.
#[must_use]
pub fn versioned_to_wire((version, value): &Versioned) -> wire::Versioned {
    let value = value.as_ref().map(|value| value.0.clone());
    wire::Versioned { version: Some(version_to_wire(version)), value }
}

/// From the wire.
///
/// # Errors
/// There is no version.
pub fn versioned_from_wire(versioned: wire::Versioned) -> Result<Versioned, WireError> {
    let version = need(versioned.version, "Versioned.version")?;
    Ok((version_from_wire(&version), versioned.value.map(Value)))
}

/// To the wire.
#[must_use]
pub fn key_versions_to_wire((key, versions): &(Key, Versions)) -> wire::KeyVersions {
    let versions = versions.iter().map(versioned_to_wire).collect();
    wire::KeyVersions { key: key.0.clone(), versions }
}

/// From the wire.
///
/// # Errors
/// A version is missing, or versions are out of order.
pub fn key_versions_from_wire(entry: wire::KeyVersions) -> Result<(Key, Versions), WireError> {
    let versions = entry.versions.into_iter().map(versioned_from_wire);
    let versions = versions.collect::<Result<Versions, _>>()?;
    if !versions.is_sorted_by(|(a, _), (b, _)| a < b) {
        let (field, found) = ("KeyVersions.versions", "versions out of order".into());
        return Err(WireError::Value { field, found, wanted: "oldest first, each once" });
    }
    Ok((Key(entry.key), versions))
}

/// To the wire.
#[must_use]
pub fn writes_to_wire(writes: &Writes) -> Vec<wire::Write> {
    let write = |(key, value): (&Key, &Option<Value>)| wire::Write {
        key: key.0.clone(),
        value: value.as_ref().map(|value| value.0.clone()),
    };
    writes.iter().map(write).collect()
}

/// From the wire.
///
/// # Errors
/// A key is there twice.
pub fn writes_from_wire(writes: Vec<wire::Write>) -> Result<Writes, WireError> {
    let mut all = Writes::new();
    for write in writes {
        if all.insert(Key(write.key), write.value.map(Value)).is_some() {
            return Err(twice("Write.key"));
        }
    }
    Ok(all)
}

fn twice(field: &'static str) -> WireError {
    WireError::Value { field, found: "one key twice".into(), wanted: "a set of keys" }
}

fn read_to_wire((key, read): (&Key, &Read)) -> wire::Read {
    wire::Read {
        key: key.0.clone(),
        value: read.value.as_ref().map(|value| value.0.clone()),
        version: Some(version_to_wire(&read.version)),
    }
}

fn read_from_wire(read: wire::Read) -> Result<(Key, Read), WireError> {
    let version = version_from_wire(&need(read.version, "Read.version")?);
    Ok((Key(read.key), Read { value: read.value.map(Value), version }))
}

/// To the wire.
#[must_use]
pub fn reads_to_wire(reads: &Reads) -> Vec<wire::Read> {
    reads.iter().map(read_to_wire).collect()
}

/// From the wire.
///
/// # Errors
/// A key is there twice, or a version is missing.
pub fn reads_from_wire(reads: Vec<wire::Read>) -> Result<Reads, WireError> {
    let mut all = Reads::new();
    for read in reads {
        let (key, read) = read_from_wire(read)?;
        if all.insert(key, read).is_some() {
            return Err(twice("Read.key"));
        }
    }
    Ok(all)
}

/// To the wire.
#[must_use]
pub fn read_list_to_wire(reads: &[(Key, Read)]) -> Vec<wire::Read> {
    reads.iter().map(|(key, read)| read_to_wire((key, read))).collect()
}

/// From the wire: in any order.
///
/// # Errors
/// A version is missing.
pub fn read_list_from_wire(reads: Vec<wire::Read>) -> Result<Vec<(Key, Read)>, WireError> {
    reads.into_iter().map(read_from_wire).collect()
}

/// To the wire.
#[must_use]
pub fn versions_to_wire(versions: &[(Key, Version)]) -> Vec<wire::KeyVersion> {
    let version = |(key, version): &(Key, Version)| wire::KeyVersion {
        key: key.0.clone(),
        version: Some(version_to_wire(version)),
    };
    versions.iter().map(version).collect()
}

/// From the wire.
///
/// # Errors
/// A version is missing.
pub fn versions_from_wire(
    versions: Vec<wire::KeyVersion>,
) -> Result<Vec<(Key, Version)>, WireError> {
    let version = |entry: wire::KeyVersion| {
        let version = need(entry.version, "KeyVersion.version")?;
        Ok((Key(entry.key), version_from_wire(&version)))
    };
    versions.into_iter().map(version).collect()
}

/// To the wire.
#[must_use]
pub fn participant_to_wire(participant: &Participant) -> wire::Participant {
    let Participant { partition, reads, writes, floor } = participant;
    wire::Participant {
        partition: partition.0,
        reads: keys_to_wire(reads),
        writes: keys_to_wire(writes),
        floor: floor.0,
    }
}

/// From the wire.
#[must_use]
pub fn participant_from_wire(participant: wire::Participant) -> Participant {
    Participant {
        partition: PartitionId(participant.partition),
        reads: keys_from_wire(participant.reads),
        writes: keys_from_wire(participant.writes),
        floor: Timestamp(participant.floor),
    }
}

/// To the wire.
#[must_use]
pub fn snapshot_to_wire(snapshot: &Snapshot) -> wire::Snapshot {
    let Snapshot { reads, valid_until } = snapshot;
    wire::Snapshot { reads: read_list_to_wire(reads), valid_until: valid_until.0 }
}

/// From the wire.
///
/// # Errors
/// A version is missing.
pub fn snapshot_from_wire(snapshot: wire::Snapshot) -> Result<Snapshot, WireError> {
    let reads = read_list_from_wire(snapshot.reads)?;
    Ok(Snapshot { reads, valid_until: Timestamp(snapshot.valid_until) })
}

/// To the wire: three numbers to a name, half the bytes of a list of messages.
#[must_use]
pub fn txns_to_wire(txns: &[TxnId]) -> Vec<u64> {
    txns.iter().flat_map(|txn| [txn.client.0, txn.counter, txn.attempt.into()]).collect()
}

/// From the wire.
///
/// # Errors
/// A name is not whole, or its attempt too large.
pub fn txns_from_wire(numbers: &[u64]) -> Result<Vec<TxnId>, WireError> {
    let (names, rest) = numbers.as_chunks();
    if !rest.is_empty() {
        let found = format!("{} numbers", numbers.len());
        return Err(WireError::Value { field: "txns", found, wanted: "three to a name" });
    }
    let name = |&[client, counter, attempt]: &[u64; 3]| {
        let attempt = u32::try_from(attempt).map_err(|_| WireError::Value {
            field: "txns",
            found: attempt.to_string(),
            wanted: "an attempt of 32 bits",
        })?;
        Ok(TxnId { client: ClientId(client), counter, attempt })
    };
    names.iter().map(name).collect()
}

/// To the wire.
#[must_use]
pub fn acknowledged_to_wire(
    clients: impl IntoIterator<Item = (ClientId, u64)>,
) -> Vec<wire::Acknowledged> {
    let one = |(client, below): (ClientId, u64)| wire::Acknowledged { client: client.0, below };
    clients.into_iter().map(one).collect()
}

/// From the wire.
pub fn acknowledged_from_wire(
    clients: Vec<wire::Acknowledged>,
) -> impl Iterator<Item = (ClientId, u64)> {
    clients.into_iter().map(|entry| (ClientId(entry.client), entry.below))
}

/// To the wire.
#[must_use]
pub fn keys_to_wire(keys: &[Key]) -> Vec<bytes::Bytes> {
    keys.iter().map(|key| key.0.clone()).collect()
}

/// From the wire: a list of keys in any order.
#[must_use]
pub fn keys_from_wire(keys: Vec<bytes::Bytes>) -> Vec<Key> {
    keys.into_iter().map(Key).collect()
}

/// From the wire: sorted keys, each once.
///
/// # Errors
/// They are not.
pub fn key_set_from_wire(
    keys: Vec<bytes::Bytes>,
    field: &'static str,
) -> Result<Vec<Key>, WireError> {
    let keys = keys_from_wire(keys);
    if keys.is_sorted_by(|a, b| a < b) {
        Ok(keys)
    } else {
        let found = "keys out of order".into();
        Err(WireError::Value { field, found, wanted: "sorted keys, each once" })
    }
}

/// To the wire.
#[must_use]
pub fn nodes_to_wire<'a>(nodes: impl IntoIterator<Item = &'a NodeId>) -> Vec<u32> {
    nodes.into_iter().map(|node| node.0).collect()
}

/// From the wire.
pub fn nodes_from_wire(nodes: Vec<u32>) -> impl Iterator<Item = NodeId> {
    nodes.into_iter().map(NodeId)
}

/// To the wire.
#[must_use]
pub fn partitions_to_wire<'a>(ids: impl IntoIterator<Item = &'a PartitionId>) -> Vec<u32> {
    ids.into_iter().map(|id| id.0).collect()
}

/// From the wire.
pub fn partitions_from_wire(ids: Vec<u32>) -> impl Iterator<Item = PartitionId> {
    ids.into_iter().map(PartitionId)
}

/// To the wire.
#[must_use]
pub fn reason_to_wire(reason: AbortReason) -> i32 {
    let reason = match reason {
        AbortReason::Conflict => wire::AbortReason::Conflict,
        AbortReason::StaleRead => wire::AbortReason::StaleRead,
        AbortReason::Client => wire::AbortReason::Client,
        AbortReason::Guard => wire::AbortReason::Guard,
        AbortReason::Recovery => wire::AbortReason::Recovery,
        AbortReason::Abandoned => wire::AbortReason::Abandoned,
        AbortReason::Overload => wire::AbortReason::Overload,
        AbortReason::Invalid => wire::AbortReason::Invalid,
        AbortReason::TooLarge => wire::AbortReason::TooLarge,
    };
    reason as i32
}

/// From the wire.
///
/// # Errors
/// A reason that this version does not know.
pub fn reason_from_wire(reason: i32) -> Result<AbortReason, WireError> {
    let known = wire::AbortReason::try_from(reason).ok();
    Ok(match known {
        Some(wire::AbortReason::Conflict) => AbortReason::Conflict,
        Some(wire::AbortReason::StaleRead) => AbortReason::StaleRead,
        Some(wire::AbortReason::Client) => AbortReason::Client,
        Some(wire::AbortReason::Guard) => AbortReason::Guard,
        Some(wire::AbortReason::Recovery) => AbortReason::Recovery,
        Some(wire::AbortReason::Abandoned) => AbortReason::Abandoned,
        Some(wire::AbortReason::Overload) => AbortReason::Overload,
        Some(wire::AbortReason::Invalid) => AbortReason::Invalid,
        Some(wire::AbortReason::TooLarge) => AbortReason::TooLarge,
        Some(wire::AbortReason::Unspecified) | None => {
            let wanted = "a reason that this version knows";
            return Err(WireError::Value {
                field: "AbortReason",
                found: reason.to_string(),
                wanted,
            });
        }
    })
}

/// To the wire.
#[must_use]
pub fn outcome_to_wire(outcome: Outcome) -> wire::Outcome {
    use wire::outcome::Outcome as Wire;
    let outcome = match outcome {
        Outcome::Committed(timestamp) => Wire::Committed(timestamp.0),
        Outcome::Aborted(reason) => Wire::Aborted(reason_to_wire(reason)),
        Outcome::Unknown => Wire::Unknown(wire::outcome::Unknown {}),
    };
    wire::Outcome { outcome: Some(outcome) }
}

/// From the wire.
///
/// # Errors
/// An outcome that this version does not know.
pub fn outcome_from_wire(outcome: wire::Outcome) -> Result<Outcome, WireError> {
    use wire::outcome::Outcome as Wire;
    Ok(match need(outcome.outcome, "Outcome.outcome")? {
        Wire::Committed(timestamp) => Outcome::Committed(Timestamp(timestamp)),
        Wire::Aborted(reason) => Outcome::Aborted(reason_from_wire(reason)?),
        Wire::Unknown(wire::outcome::Unknown {}) => Outcome::Unknown,
    })
}

/// From the wire: a commit or an abort, nothing between.
///
/// # Errors
/// It is neither, or not there.
pub fn decided_from_wire(outcome: Option<wire::Outcome>) -> Result<Outcome, WireError> {
    let outcome = outcome_from_wire(need(outcome, "outcome")?)?;
    if outcome == Outcome::Unknown {
        let (field, found) = ("outcome", "unknown".into());
        return Err(WireError::Value { field, found, wanted: "a commit or an abort" });
    }
    Ok(outcome)
}

/// To the wire.
#[must_use]
pub fn decision_to_wire(decision: &Decision) -> wire::Decision {
    use wire::decision::Decision as Wire;
    let decision = match decision {
        Decision::Commit(writes) => {
            Wire::Commit(wire::decision::Commit { writes: writes_to_wire(writes) })
        }
        Decision::Abort => Wire::Abort(wire::decision::Abort {}),
    };
    wire::Decision { decision: Some(decision) }
}

/// From the wire.
///
/// # Errors
/// It has none of the known forms, or writes a key twice.
pub fn decision_from_wire(decision: wire::Decision) -> Result<Decision, WireError> {
    use wire::decision::Decision as Wire;
    Ok(match need(decision.decision, "Decision.decision")? {
        Wire::Commit(commit) => Decision::Commit(writes_from_wire(commit.writes)?),
        Wire::Abort(wire::decision::Abort {}) => Decision::Abort,
    })
}

/// To the wire.
#[must_use]
pub fn op_to_wire(op: &Op) -> wire::Op {
    use wire::op::Op as Wire;
    let bytes = |key: &Key| key.0.clone();
    let op = match op {
        Op::Get(key) => Wire::Get(wire::op::Get { key: bytes(key) }),
        Op::Compare(key, expected) => {
            let expected = expected.as_ref().map(|value| value.0.clone());
            Wire::Compare(wire::op::Compare { key: bytes(key), expected })
        }
        Op::Put(key, value) => Wire::Put(wire::op::Put { key: bytes(key), value: value.0.clone() }),
        Op::Add(key, amount) => Wire::Add(wire::op::Add { key: bytes(key), amount: *amount }),
        Op::Append(key, value) => {
            Wire::Append(wire::op::Append { key: bytes(key), value: value.0.clone() })
        }
        Op::Delete(key) => Wire::Delete(wire::op::Delete { key: bytes(key) }),
        Op::Call(call) => Wire::Call(wire::op::Call {
            procedure: call.procedure.name().into(),
            reads: call.reads.iter().map(bytes).collect(),
            writes: call.writes.iter().map(bytes).collect(),
            arguments: call.arguments.0.clone(),
        }),
    };
    wire::Op { op: Some(op) }
}

/// From the wire.
///
/// # Errors
/// An operation that this version does not know.
pub fn op_from_wire(op: wire::Op) -> Result<Op, WireError> {
    use wire::op::Op as Wire;
    Ok(match need(op.op, "Op.op")? {
        Wire::Get(op) => Op::Get(Key(op.key)),
        Wire::Compare(op) => Op::Compare(Key(op.key), op.expected.map(Value)),
        Wire::Put(op) => Op::Put(Key(op.key), Value(op.value)),
        Wire::Add(op) => Op::Add(Key(op.key), op.amount),
        Wire::Append(op) => Op::Append(Key(op.key), Value(op.value)),
        Wire::Delete(op) => Op::Delete(Key(op.key)),
        Wire::Call(op) => Op::Call(Call {
            procedure: Procedure::find(&op.procedure).ok_or(WireError::Value {
                field: "Call.procedure",
                found: op.procedure,
                wanted: "a procedure that this version knows",
            })?,
            reads: op.reads.into_iter().map(Key).collect(),
            writes: op.writes.into_iter().map(Key).collect(),
            arguments: Value(op.arguments),
        }),
    })
}

/// To the wire.
#[must_use]
pub fn kind_to_wire(kind: &Kind) -> wire::txn::Kind {
    match kind {
        Kind::Interactive => wire::txn::Kind::Interactive(wire::txn::Interactive {}),
        Kind::General => wire::txn::Kind::General(wire::txn::General {}),
        Kind::Procedure(ops) => {
            let ops = ops.iter().map(op_to_wire).collect();
            wire::txn::Kind::Procedure(wire::txn::Procedure { ops })
        }
        Kind::ReadOnly => wire::txn::Kind::ReadOnly(wire::txn::ReadOnly { stale: false }),
        Kind::StaleReadOnly => wire::txn::Kind::ReadOnly(wire::txn::ReadOnly { stale: true }),
    }
}

/// From the wire.
///
/// # Errors
/// An operation that this version does not know.
pub fn kind_from_wire(kind: wire::txn::Kind) -> Result<Kind, WireError> {
    Ok(match kind {
        wire::txn::Kind::Interactive(wire::txn::Interactive {}) => Kind::Interactive,
        wire::txn::Kind::General(wire::txn::General {}) => Kind::General,
        wire::txn::Kind::Procedure(procedure) => {
            let ops = procedure.ops.into_iter().map(op_from_wire);
            Kind::Procedure(ops.collect::<Result<_, _>>()?)
        }
        wire::txn::Kind::ReadOnly(wire::txn::ReadOnly { stale: false }) => Kind::ReadOnly,
        wire::txn::Kind::ReadOnly(wire::txn::ReadOnly { stale: true }) => Kind::StaleReadOnly,
    })
}

/// To the wire.
#[must_use]
pub fn txn_to_wire(txn: &Txn) -> wire::Txn {
    let Txn { id, home, priority, kind, reads, writes, acknowledged_below, floors } = txn;
    let floor = |(key, floor): (&Key, &Floor)| wire::Floor {
        key: key.0.clone(),
        timestamp: floor.timestamp.0,
        is_deletion: floor.is_deletion,
    };
    wire::Txn {
        id: Some(txn_id_to_wire(id)),
        home: home.0.into(),
        priority: priority.0.into(),
        kind: Some(kind_to_wire(kind)),
        reads: keys_to_wire(reads),
        writes: keys_to_wire(writes),
        acknowledged_below: *acknowledged_below,
        floors: floors.iter().map(floor).collect(),
    }
}

/// From the wire.
///
/// # Errors
/// A field is missing or holds what it cannot hold.
pub fn txn_from_wire(txn: wire::Txn) -> Result<Txn, WireError> {
    let floor = |floor: wire::Floor| {
        let (timestamp, is_deletion) = (Timestamp(floor.timestamp), floor.is_deletion);
        (Key(floor.key), Floor { timestamp, is_deletion })
    };
    Ok(Txn {
        id: txn_id_from_wire(&need(txn.id, "Txn.id")?),
        home: RegionId(narrow(txn.home, "Txn.home")?),
        priority: Priority(narrow(txn.priority, "Txn.priority")?),
        kind: kind_from_wire(need(txn.kind, "Txn.kind")?)?,
        reads: key_set_from_wire(txn.reads, "Txn.reads")?,
        writes: key_set_from_wire(txn.writes, "Txn.writes")?,
        acknowledged_below: txn.acknowledged_below,
        floors: txn.floors.into_iter().map(floor).collect(),
    })
}
