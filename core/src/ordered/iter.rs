//! The entries of a map, one after the other.

use std::fmt;

/// Entries of a map.
#[derive(Debug)]
pub struct Iter<'a, K, V> {
    pub(super) front: std::slice::Iter<'a, (K, V)>,
    pub(super) lists: std::slice::Iter<'a, Vec<(K, V)>>,
    pub(super) back: std::slice::Iter<'a, (K, V)>,
}

impl<K, V> Clone for Iter<'_, K, V> {
    fn clone(&self) -> Self {
        let Self { front, lists, back } = self;
        Self { front: front.clone(), lists: lists.clone(), back: back.clone() }
    }
}

impl<'a, K, V> Iterator for Iter<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<(&'a K, &'a V)> {
        loop {
            if let Some((key, value)) = self.front.next() {
                return Some((key, value));
            }
            match self.lists.next() {
                Some(list) => self.front = list.iter(),
                None => return self.back.next().map(|(key, value)| (key, value)),
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let mut len = self.front.len() + self.back.len();
        for list in self.lists.clone() {
            len += list.len();
        }
        (len, Some(len))
    }

    fn count(self) -> usize {
        self.len()
    }

    fn last(mut self) -> Option<(&'a K, &'a V)> {
        self.next_back()
    }
}

impl<'a, K, V> DoubleEndedIterator for Iter<'a, K, V> {
    fn next_back(&mut self) -> Option<(&'a K, &'a V)> {
        loop {
            if let Some((key, value)) = self.back.next_back() {
                return Some((key, value));
            }
            match self.lists.next_back() {
                Some(list) => self.back = list.iter(),
                None => return self.front.next_back().map(|(key, value)| (key, value)),
            }
        }
    }
}

impl<K, V> ExactSizeIterator for Iter<'_, K, V> {}
impl<K, V> std::iter::FusedIterator for Iter<'_, K, V> {}

/// Keys of a map.
pub struct Keys<'a, K, V>(pub(super) Iter<'a, K, V>);

impl<K: fmt::Debug, V> fmt::Debug for Keys<'_, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone()).finish()
    }
}

impl<K, V> Clone for Keys<'_, K, V> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<'a, K, V> Iterator for Keys<'a, K, V> {
    type Item = &'a K;

    fn next(&mut self) -> Option<&'a K> {
        Some(self.0.next()?.0)
    }

    fn count(self) -> usize {
        self.len()
    }

    fn last(mut self) -> Option<&'a K> {
        self.next_back()
    }

    fn min(mut self) -> Option<&'a K>
    where
        &'a K: Ord,
    {
        self.next()
    }

    fn max(mut self) -> Option<&'a K>
    where
        &'a K: Ord,
    {
        self.next_back()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<'a, K, V> DoubleEndedIterator for Keys<'a, K, V> {
    fn next_back(&mut self) -> Option<&'a K> {
        Some(self.0.next_back()?.0)
    }
}

impl<K, V> ExactSizeIterator for Keys<'_, K, V> {}

/// Values of a map.
pub struct Values<'a, K, V>(pub(super) Iter<'a, K, V>);

impl<K, V: fmt::Debug> fmt::Debug for Values<'_, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone()).finish()
    }
}

impl<K, V> Clone for Values<'_, K, V> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<'a, K, V> Iterator for Values<'a, K, V> {
    type Item = &'a V;

    fn next(&mut self) -> Option<&'a V> {
        Some(self.0.next()?.1)
    }

    fn count(self) -> usize {
        self.len()
    }

    fn last(mut self) -> Option<&'a V> {
        self.next_back()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<'a, K, V> DoubleEndedIterator for Values<'a, K, V> {
    fn next_back(&mut self) -> Option<&'a V> {
        Some(self.0.next_back()?.1)
    }
}

impl<K, V> ExactSizeIterator for Values<'_, K, V> {}

/// Entries of a map; the values can be changed.
#[derive(Debug)]
pub struct IterMut<'a, K, V> {
    pub(super) front: std::slice::IterMut<'a, (K, V)>,
    pub(super) lists: std::slice::IterMut<'a, Vec<(K, V)>>,
    pub(super) back: std::slice::IterMut<'a, (K, V)>,
}

impl<'a, K, V> Iterator for IterMut<'a, K, V> {
    type Item = (&'a K, &'a mut V);

    fn next(&mut self) -> Option<(&'a K, &'a mut V)> {
        loop {
            if let Some((key, value)) = self.front.next() {
                return Some((key, value));
            }
            match self.lists.next() {
                Some(list) => self.front = list.iter_mut(),
                None => return self.back.next().map(|(key, value)| (&*key, value)),
            }
        }
    }
}

impl<'a, K, V> DoubleEndedIterator for IterMut<'a, K, V> {
    fn next_back(&mut self) -> Option<(&'a K, &'a mut V)> {
        loop {
            if let Some((key, value)) = self.back.next_back() {
                return Some((key, value));
            }
            match self.lists.next_back() {
                Some(list) => self.back = list.iter_mut(),
                None => return self.front.next_back().map(|(key, value)| (&*key, value)),
            }
        }
    }
}

/// The entries of a map that is used up.
pub struct IntoIter<K, V> {
    pub(super) len: usize,
    pub(super) front: std::vec::IntoIter<(K, V)>,
    pub(super) lists: std::vec::IntoIter<Vec<(K, V)>>,
    pub(super) back: std::vec::IntoIter<(K, V)>,
}

impl<K, V> fmt::Debug for IntoIter<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IntoIter").field("len", &self.len).finish_non_exhaustive()
    }
}

impl<K, V> Iterator for IntoIter<K, V> {
    type Item = (K, V);

    fn next(&mut self) -> Option<(K, V)> {
        self.len = self.len.saturating_sub(1);
        loop {
            if let Some(entry) = self.front.next() {
                return Some(entry);
            }
            match self.lists.next() {
                Some(list) => self.front = list.into_iter(),
                None => return self.back.next(),
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.len, Some(self.len))
    }
}

impl<K, V> DoubleEndedIterator for IntoIter<K, V> {
    fn next_back(&mut self) -> Option<(K, V)> {
        self.len = self.len.saturating_sub(1);
        loop {
            if let Some(entry) = self.back.next_back() {
                return Some(entry);
            }
            match self.lists.next_back() {
                Some(list) => self.back = list.into_iter(),
                None => return self.front.next_back(),
            }
        }
    }
}

impl<K, V> ExactSizeIterator for IntoIter<K, V> {}
