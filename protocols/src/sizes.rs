//! Sizes that a machine needs before it has the value to encode.

/// Size of a transaction's name, with its field header.
pub(crate) const TXN: usize = 12;

/// The most bytes of keys and values of one partition in one answer. With the rest of the answer
/// they still fit into one message.
pub(crate) const READ_BYTES_MAX: usize = 15 << 20;
