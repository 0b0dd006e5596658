//! Encoded sizes of what most messages are made of, for the bandwidth model.

use orthodrome_core::store::Versions;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Key, Read, Value, Version, Writes};

use crate::gateway::Participant;

/// Of a transaction's name, with its field header.
pub(crate) const TXN: usize = 12;
/// Of a version, with its field header: writer and timestamp.
pub(crate) const VERSION: usize = 10 + TXN;

/// Keys and values of one partition that one answer may tell, in bytes: with what stands around them it still fits
/// into one message.
pub(crate) const READ_BYTES_MAX: usize = 15 << 20;

pub(crate) fn value_size(value: &Option<Value>) -> usize {
    value.as_ref().map_or(0, Value::len)
}

pub(crate) fn keys_size(keys: &[Key]) -> usize {
    keys.iter().map(|key| 2 + key.len()).sum()
}

pub(crate) fn participant_size(participant: &Participant) -> usize {
    let floor = if participant.floor == Timestamp::ZERO { 0 } else { 9 };
    6 + floor + keys_size(&participant.reads) + keys_size(&participant.writes)
}

pub(crate) fn reads_size(reads: &[(Key, Read)]) -> usize {
    reads.iter().map(|(key, read)| 8 + key.len() + VERSION + value_size(&read.value)).sum()
}

pub(crate) fn versions_size(versions: &[(Key, Version)]) -> usize {
    versions.iter().map(|(key, _)| 6 + key.len() + VERSION).sum()
}

pub(crate) fn writes_size(writes: &Writes) -> usize {
    writes.iter().map(|(key, value)| 8 + key.len() + value_size(value)).sum()
}

/// Of keys with all their versions, in a piece of a snapshot.
pub(crate) fn data_size(keys: &[(Key, Versions)]) -> usize {
    let one = |(_, value): &(Version, Option<Value>)| VERSION + 4 + value_size(value);
    keys.iter().map(|(key, versions)| 8 + key.len() + versions.iter().map(one).sum::<usize>()).sum()
}
