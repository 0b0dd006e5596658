//! Tables indexed by `u32` ids, which the tables assign.

use std::ops::{Index, IndexMut, Range};

/// A table whose indices are ids.
///
/// Ids come from [`Dense::push`] or from the length given to [`Dense::filled`], never from outside
/// the program. So an id out of range is a bug in this crate, and indexing may panic. Data from a
/// history file becomes an id only by a lookup that can fail.
#[derive(Clone, Debug)]
pub(crate) struct Dense<T>(Vec<T>);

impl<T> Default for Dense<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Dense<T> {
    /// Adds a row; returns its id. Callers keep tables below `u32::MAX` rows
    /// ([`super::compact::LIMIT_OPS`]).
    pub(crate) fn push(&mut self, row: T) -> u32 {
        let id = self.len();
        self.0.push(row);
        id
    }

    /// The number of rows, which is also the next id.
    pub(crate) fn len(&self) -> u32 {
        self.0.len() as u32
    }

    /// All ids.
    pub(crate) fn ids(&self) -> Range<u32> {
        0..self.len()
    }

    /// The rows in the order of their ids.
    pub(crate) fn rows(&self) -> &[T] {
        &self.0
    }

    /// The rows with these ids.
    #[expect(clippy::indexing_slicing, reason = "ids are handed out by the table itself")]
    pub(crate) fn slice(&self, ids: Range<u32>) -> &[T] {
        &self.0[ids.start as usize..ids.end as usize]
    }
}

impl<T: Clone> Dense<T> {
    /// `len` equal rows.
    pub(crate) fn filled(row: T, len: u32) -> Self {
        Self(vec![row; len as usize])
    }
}

impl<T> From<Vec<T>> for Dense<T> {
    fn from(rows: Vec<T>) -> Self {
        Self(rows)
    }
}

impl<T> Index<u32> for Dense<T> {
    type Output = T;

    #[expect(clippy::indexing_slicing, reason = "ids are handed out by the table itself")]
    fn index(&self, id: u32) -> &T {
        &self.0[id as usize]
    }
}

impl<T> IndexMut<u32> for Dense<T> {
    #[expect(clippy::indexing_slicing, reason = "ids are handed out by the table itself")]
    fn index_mut(&mut self, id: u32) -> &mut T {
        &mut self.0[id as usize]
    }
}
