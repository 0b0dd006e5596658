//! Encoded sizes of what most messages are made of, for the bandwidth model.

use orthodrome_core::txn::{Value, Writes};

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

pub(crate) fn writes_size(writes: &Writes) -> usize {
    writes.iter().map(|(key, value)| 8 + key.len() + value_size(value)).sum()
}
