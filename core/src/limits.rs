//! The maximum sizes of a single record and of a single message, and the resulting sizes of
//! batches.
//!
//! Many bounded items add up. So code that puts several transactions into one record or one message
//! counts bytes, and begins a new one at [`Limits::batch_bytes`]. Only a single transaction may be
//! larger, and [`TXN_BYTES_MAX`] bounds it.

use crate::machine::Lane;
use crate::txn::{Value, Writes};

/// The largest record and the largest message that a host accepts from its machines, and the most
/// that waits for one connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// The largest record, in bytes. A host that is given a larger one cannot continue.
    pub record_bytes: usize,
    /// The largest message, in bytes. A host that is given a larger one drops it.
    pub message_bytes: usize,
    /// The most that waits for the connection to one node, in bytes. A host drops what has no room;
    /// see [`Self::has_room`].
    pub queue_bytes: usize,
}

/// A message of at most this size is a small one.
const SMALL_BYTES: usize = 4 << 10;

impl Limits {
    /// The limits of servers. Their configuration may set another `queue_bytes`.
    pub const SERVER: Self =
        Self { record_bytes: 64 << 20, message_bytes: 16 << 20, queue_bytes: 64 << 20 };

    /// Whether a message of `bytes` bytes has room in the queue of a connection for which `waiting`
    /// bytes wait. Control, and small messages such as votes and answers, find some room in a full
    /// queue: no series of large messages silences everybody else.
    #[must_use]
    pub fn has_room(&self, lane: Lane, waiting: usize, bytes: usize) -> bool {
        let is_favoured = lane == Lane::Control || bytes <= SMALL_BYTES;
        let spare = if is_favoured { self.queue_bytes / 8 } else { 0 };
        waiting.saturating_add(bytes) <= self.queue_bytes.saturating_add(spare)
    }

    /// The size at which a record or a message with several transactions must end: half of the
    /// smaller bound, so that approximate sizes do no harm.
    #[must_use]
    pub fn batch_bytes(&self) -> usize {
        self.record_bytes.min(self.message_bytes) / 2
    }

    /// The size of pieces of large data, such as a copied state. It is small compared with
    /// [`Limits::batch_bytes`], because other messages wait behind a piece on a slow link.
    #[must_use]
    pub fn piece_bytes(&self) -> usize {
        self.batch_bytes() / 8
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self::SERVER
    }
}

/// The largest total of keys and values that one transaction may write, in bytes. Hosts may allow
/// less. Together with the names and versions that the transaction read, they still fit into one
/// message.
pub const TXN_BYTES_MAX: usize = 8 << 20;

/// The number of bytes of these keys and values.
#[must_use]
pub fn bytes_of(writes: &Writes) -> usize {
    writes.iter().map(|(key, value)| key.len() + value.as_ref().map_or(0, Value::len)).sum()
}

/// A state in pieces. Each has at most a given number of bytes, unless a single item is larger.
#[derive(Debug)]
pub struct Pieces<S> {
    /// The content of each piece besides its items.
    empty: S,
    bytes_max: usize,
    /// The pieces; the last one is still being filled.
    pieces: Vec<S>,
    bytes: usize,
}

impl<S: Clone> Pieces<S> {
    /// Starts with one piece, a clone of `empty`, as every later piece.
    pub fn new(empty: S, bytes_max: usize) -> Self {
        Self { pieces: vec![empty.clone()], empty, bytes_max, bytes: 0 }
    }

    /// The piece for the next item, which has `bytes` bytes.
    pub fn of(&mut self, bytes: usize) -> &mut S {
        if self.bytes > 0 && self.bytes + bytes > self.bytes_max {
            self.pieces.push(self.empty.clone());
            self.bytes = 0;
        }
        self.bytes += bytes;
        match self.pieces.last_mut() {
            Some(last) => last,
            None => &mut self.empty,
        }
    }

    /// All pieces; at least one.
    #[must_use]
    pub fn finish(self) -> Vec<S> {
        self.pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_hold_everything_in_order_and_are_bounded() {
        let sizes = [3_usize, 3, 3, 20, 1, 9, 1];
        let mut pieces = Pieces::new(Vec::new(), 10);
        for size in sizes {
            pieces.of(size).push(size);
        }
        let pieces = pieces.finish();
        assert_eq!(pieces, [vec![3, 3, 3], vec![20], vec![1, 9], vec![1]]);
        assert_eq!(pieces.concat(), sizes);
        assert_eq!(
            Pieces::new(Vec::<u8>::new(), 10).finish().len(),
            1,
            "an empty whole is a piece"
        );
    }

    #[test]
    fn what_batches_stays_far_below_both_limits() {
        let limits = Limits::SERVER;
        assert_eq!(limits.batch_bytes(), 8 << 20);
        assert_eq!(limits.piece_bytes(), 1 << 20);
    }
}
