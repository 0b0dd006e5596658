//! Ordered sets.

use std::borrow::Borrow;
use std::fmt;
use std::ops::RangeBounds;

use serde::ser::{Serialize, Serializer};

use super::{IntoIter, Keys, OrdMap};

/// A set whose elements are ordered.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OrdSet<T>(OrdMap<T, ()>);

impl<T> OrdSet<T> {
    /// An empty set.
    #[must_use]
    pub const fn new() -> Self {
        Self(OrdMap::new())
    }

    /// The number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes all elements.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// All elements, in ascending order.
    #[must_use]
    pub fn iter(&self) -> Keys<'_, T, ()> {
        self.0.keys()
    }

    /// The smallest element.
    #[must_use]
    pub fn first(&self) -> Option<&T> {
        self.0.first_key_value().map(|(element, ())| element)
    }

    /// The largest element.
    #[must_use]
    pub fn last(&self) -> Option<&T> {
        self.0.last_key_value().map(|(element, ())| element)
    }

    /// Removes the smallest element.
    pub fn pop_first(&mut self) -> Option<T> {
        self.0.pop_first().map(|(element, ())| element)
    }

    /// Removes the largest element.
    pub fn pop_last(&mut self) -> Option<T> {
        self.0.pop_last().map(|(element, ())| element)
    }

    /// Keeps the elements of which `keeps` is true, and removes the others.
    pub fn retain(&mut self, mut keeps: impl FnMut(&T) -> bool) {
        self.0.retain(|element, ()| keeps(element));
    }
}

impl<T: Ord> OrdSet<T> {
    /// Whether `element` is in the set.
    #[must_use]
    pub fn contains<Q: Ord + ?Sized>(&self, element: &Q) -> bool
    where
        T: Borrow<Q>,
    {
        self.0.contains_key(element)
    }

    /// The element that equals `element`.
    #[must_use]
    pub fn get<Q: Ord + ?Sized>(&self, element: &Q) -> Option<&T>
    where
        T: Borrow<Q>,
    {
        self.0.get_key_value(element).map(|(element, ())| element)
    }

    /// Adds an element. Returns whether it is new; an equal one that is there stays.
    pub fn insert(&mut self, element: T) -> bool {
        self.0.insert(element, ()).is_none()
    }

    /// Removes an element. Returns whether it was there.
    pub fn remove<Q: Ord + ?Sized>(&mut self, element: &Q) -> bool
    where
        T: Borrow<Q>,
    {
        self.0.remove(element).is_some()
    }

    /// Removes the element that equals `element`, and returns it.
    pub fn take<Q: Ord + ?Sized>(&mut self, element: &Q) -> Option<T>
    where
        T: Borrow<Q>,
    {
        self.0.remove_entry(element).map(|(element, ())| element)
    }

    /// The elements in `range`; none if it ends before it begins.
    pub fn range<Q: Ord + ?Sized, R: RangeBounds<Q>>(&self, range: R) -> Keys<'_, T, ()>
    where
        T: Borrow<Q>,
    {
        Keys(self.0.range(range))
    }

    /// Removes the elements from `element` on, and returns them.
    pub fn split_off<Q: Ord + ?Sized>(&mut self, element: &Q) -> Self
    where
        T: Borrow<Q>,
    {
        Self(self.0.split_off(element))
    }

    /// Moves all elements of `other` into this set.
    pub fn append(&mut self, other: &mut Self) {
        self.0.append(&mut other.0);
    }

    /// Removes the elements in `range` of which `takes` is true, and returns them.
    pub fn extract_if<Q: Ord + ?Sized>(
        &mut self,
        range: impl RangeBounds<Q>,
        mut takes: impl FnMut(&T) -> bool,
    ) -> impl Iterator<Item = T>
    where
        T: Borrow<Q>,
    {
        let taken = self.0.extract_if(range, |element, ()| takes(element));
        taken.map(|(element, ())| element)
    }

    /// The elements that are not in `other`.
    pub fn difference<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = &'a T> + Clone {
        self.iter().filter(|element| !other.contains(*element))
    }

    /// The elements that are in `other`, too.
    pub fn intersection<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = &'a T> + Clone {
        self.iter().filter(|element| other.contains(*element))
    }

    /// The elements of both, in ascending order.
    pub fn union<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = &'a T> {
        let mut all: OrdSet<&T> = self.iter().collect();
        all.extend(other);
        all.into_iter()
    }

    /// Whether no element is in `other`.
    #[must_use]
    pub fn is_disjoint(&self, other: &Self) -> bool {
        self.intersection(other).next().is_none()
    }

    /// Whether each element is in `other`.
    #[must_use]
    pub fn is_subset(&self, other: &Self) -> bool {
        self.difference(other).next().is_none()
    }

    /// Whether each element of `other` is here.
    #[must_use]
    pub fn is_superset(&self, other: &Self) -> bool {
        other.is_subset(self)
    }
}

impl<T> Default for OrdSet<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: fmt::Debug> fmt::Debug for OrdSet<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self).finish()
    }
}

impl<T: Serialize> Serialize for OrdSet<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self)
    }
}

impl<T: Ord> Extend<T> for OrdSet<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, elements: I) {
        self.0.extend(elements.into_iter().map(|element| (element, ())));
    }
}

impl<'a, T: Ord + Copy + 'a> Extend<&'a T> for OrdSet<T> {
    fn extend<I: IntoIterator<Item = &'a T>>(&mut self, elements: I) {
        self.extend(elements.into_iter().copied());
    }
}

impl<T: Ord> FromIterator<T> for OrdSet<T> {
    fn from_iter<I: IntoIterator<Item = T>>(elements: I) -> Self {
        Self(elements.into_iter().map(|element| (element, ())).collect())
    }
}

impl<T: Ord, const N: usize> From<[T; N]> for OrdSet<T> {
    fn from(elements: [T; N]) -> Self {
        Self::from_iter(elements)
    }
}

impl<T> IntoIterator for OrdSet<T> {
    type Item = T;
    type IntoIter = SetIntoIter<T>;

    fn into_iter(self) -> SetIntoIter<T> {
        SetIntoIter(self.0.into_iter())
    }
}

impl<'a, T> IntoIterator for &'a OrdSet<T> {
    type Item = &'a T;
    type IntoIter = Keys<'a, T, ()>;

    fn into_iter(self) -> Keys<'a, T, ()> {
        self.iter()
    }
}

/// The elements of a set that is used up.
#[derive(Debug)]
pub struct SetIntoIter<T>(IntoIter<T, ()>);

impl<T> Iterator for SetIntoIter<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        Some(self.0.next()?.0)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<T> DoubleEndedIterator for SetIntoIter<T> {
    fn next_back(&mut self) -> Option<T> {
        Some(self.0.next_back()?.0)
    }
}

impl<T> ExactSizeIterator for SetIntoIter<T> {}
