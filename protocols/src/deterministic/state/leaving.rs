//! Sends a state in pieces to a server that lags too far behind.

use std::sync::Arc;

use orthodrome_core::store::{Versions, piece_len};
use orthodrome_core::txn::Key;

use super::super::message::{Chunk, Image};

/// The keys of a state from `from` on, at most so many with so many bytes together, and where the
/// next piece starts.
pub(super) fn piece_from(
    all: &[(Key, Versions)],
    from: usize,
    (keys_max, bytes_max): (usize, usize),
) -> (Vec<(Key, Versions)>, Option<usize>) {
    let rest = all.get(from..).unwrap_or_default();
    let rest = rest.get(..keys_max).unwrap_or(rest);
    let keys = rest.get(..piece_len(rest, bytes_max)).unwrap_or(rest).to_vec();
    let next = Some(from + keys.len()).filter(|&next| next < all.len());
    (keys, next)
}

/// A state that is being sent in pieces.
#[derive(Clone, Debug)]
pub struct Leaving {
    images: Vec<Arc<Image>>,
    keys: Vec<(Key, Versions)>,
}

impl Leaving {
    /// An image in pieces, and its data.
    #[must_use]
    pub fn new(images: Vec<Arc<Image>>, keys: Vec<(Key, Versions)>) -> Self {
        Self { images, keys }
    }

    /// The piece from `at` on, with at most so many keys and about so many bytes of data, and where
    /// the next one starts. Data comes with the last piece of the image, and after it.
    #[must_use]
    pub fn piece(&self, at: usize, bounds: (usize, usize)) -> (Chunk, Option<usize>) {
        let image = self.images.get(at).cloned();
        let last = self.images.len().saturating_sub(1);
        let Some(from) = at.checked_sub(last) else {
            return (Chunk { image, keys: Vec::new() }, Some(at + 1));
        };
        let (keys, next) = piece_from(&self.keys, from, bounds);
        (Chunk { image, keys }, next.map(|next| next + last))
    }
}
