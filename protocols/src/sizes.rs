//! Sizes that a machine needs before it has what is to be encoded.

/// Of a transaction's name, with its field header.
pub(crate) const TXN: usize = 12;

/// Keys and values of one partition that one answer may hold, in bytes: with what stands around them
/// it still fits into one message.
pub(crate) const READ_BYTES_MAX: usize = 15 << 20;
