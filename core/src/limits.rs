//! How large a single record and a single message may be, and what follows from that for what batches
//! several transactions.
//!
//! Many things that are each bounded add up. So whatever puts several transactions into one record or
//! one message counts bytes, and begins another at [`Limits::batch_bytes`]: only a single transaction
//! may be larger, and [`TXN_BYTES_MAX`] bounds that one.

use crate::txn::{Value, Writes};

/// The largest single record and the largest single message that a host takes from its machines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Of a record, in bytes. A host that is given a larger one cannot go on.
    pub record_bytes: usize,
    /// Of a message, in bytes. A host that is given a larger one drops it.
    pub message_bytes: usize,
}

impl Limits {
    /// What servers hold machines to.
    pub const SERVER: Self = Self { record_bytes: 64 << 20, message_bytes: 16 << 20 };

    /// Where a record or a message that holds several transactions must end: half of the smaller bound,
    /// so that sizes which are only nearly right do no harm.
    #[must_use]
    pub fn batch_bytes(&self) -> usize {
        self.record_bytes.min(self.message_bytes) / 2
    }

    /// How large pieces are that somebody waits for, such as those of a copied state: small beside
    /// [`Limits::batch_bytes`], for what waits behind them on a slow link.
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

/// Keys and values that one transaction may write, in bytes; hosts may allow their callers less. With the
/// names and versions of what it read they still fit into one message.
pub const TXN_BYTES_MAX: usize = 8 << 20;

/// Bytes of these keys and values.
#[must_use]
pub fn bytes_of(writes: &Writes) -> usize {
    writes.iter().map(|(key, value)| key.len() + value.as_ref().map_or(0, Value::len)).sum()
}

/// A state in pieces, each with at most so many bytes unless one item alone has more.
#[derive(Debug)]
pub struct Pieces<S> {
    /// What each piece has besides its items.
    empty: S,
    bytes_max: usize,
    /// Those that are full, and last the one that is being filled.
    pieces: Vec<S>,
    bytes: usize,
}

impl<S: Clone> Pieces<S> {
    /// One piece, which is `empty`; so is every further one until it is filled.
    pub fn new(empty: S, bytes_max: usize) -> Self {
        Self { pieces: vec![empty.clone()], empty, bytes_max, bytes: 0 }
    }

    /// The piece that the next item, of so many bytes, goes into.
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

    /// All of them, at least one.
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
