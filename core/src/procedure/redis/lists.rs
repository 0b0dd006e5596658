//! Commands on lists.

use std::collections::VecDeque;

use bytes::Bytes;

use super::entry::cost_of;
use super::number;
use super::reply::{Answer, Failure, NOT_INTEGER, Reply};
use super::state::{Context, Slot};
use super::{Use, keys};
use crate::wire::Wire;

/// An end of a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum End {
    /// The first element.
    Left,
    /// The last element.
    Right,
}

/// A command on one list.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Lists {
    /// `LRANGE`: first and last element.
    Range(i64, i64),
    /// `LLEN`
    Length,
    /// `LINDEX`: the number of the element, as text. It counts only if the key exists.
    At(Bytes),
    /// `LPUSH`, `RPUSH`; `LPUSHX`, `RPUSHX` if true.
    Push(End, Vec<Bytes>, bool),
    /// `LPOP`, `RPOP`, of one element or of several.
    Pop(End, Option<u64>),
    /// `LSET`: the number of the element, as text, and the element.
    Set(Bytes, Bytes),
    /// `LTRIM`
    Trim(i64, i64),
    /// `LREM`: how many, and which; from the end if the number is negative; all if it is 0.
    Remove(i64, Bytes),
}

const NO_KEY: Failure = Failure::new("ERR no such key");
const NO_INDEX: Failure = Failure::new("ERR index out of range");

impl Lists {
    pub(super) fn uses(&self) -> Use {
        match self {
            Self::Range(..) | Self::Length | Self::At(_) => Use::Read,
            Self::Push(..) | Self::Pop(..) | Self::Set(..) | Self::Trim(..) | Self::Remove(..) => {
                Use::Change
            }
        }
    }

    pub(super) fn execute(&self, slot: &mut Slot, cx: Context) -> Answer {
        let list = slot.list()?;
        let length = list.map_or(0, VecDeque::len);
        match self {
            Self::Range(first, last) => {
                let part = keys::span(*first, *last, length);
                let elements = list.into_iter().flatten();
                Ok(Reply::bulks(elements.skip(part.start).take(part.len())))
            }
            Self::Length => Ok(Reply::count(length)),
            Self::At(at) => {
                let Some(list) = list else { return Ok(Reply::Nil) };
                let at = number::integer(at).ok_or(NOT_INTEGER)?;
                let place = keys::position(at, length);
                Ok(Reply::bulk_or_nil(place.and_then(|place| list.get(place))))
            }
            Self::Push(end, elements, only_existing) => {
                if list.is_none() && *only_existing {
                    return Ok(Reply::Integer(0));
                }
                push(slot, cx, *end, elements).map(Reply::count)
            }
            Self::Pop(end, count) => pop(slot, cx, *end, *count),
            Self::Set(at, element) => {
                if list.is_none() {
                    return Err(NO_KEY);
                }
                let at = number::integer(at).ok_or(NOT_INTEGER)?;
                let place = keys::position(at, length).ok_or(NO_INDEX)?;
                slot.check_room(cost_of([element]))?;
                let (list, cost) = slot.list_mut()?;
                if let Some(old) = list.get_mut(place) {
                    *cost = (*cost + element.len()).saturating_sub(old.len());
                    *old = element.clone();
                }
                slot.changed(cx);
                Ok(Reply::OK)
            }
            Self::Trim(first, last) => {
                let part = keys::span(*first, *last, length);
                if part.len() < length {
                    let (list, cost) = slot.list_mut()?;
                    list.truncate(part.end);
                    list.drain(..part.start);
                    *cost = cost_of(list.iter());
                    slot.changed(cx);
                }
                Ok(Reply::OK)
            }
            Self::Remove(count, element) => {
                if !list.is_some_and(|list| list.contains(element)) {
                    return Ok(Reply::Integer(0));
                }
                let gone = remove(slot, *count, element)?;
                slot.changed(cx);
                Ok(Reply::count(gone))
            }
        }
    }
}

/// Adds elements at one end, one after the other; returns the new length.
pub(super) fn push(
    slot: &mut Slot,
    cx: Context,
    end: End,
    elements: &[Bytes],
) -> Result<usize, Failure> {
    slot.check_room(cost_of(elements))?;
    let (list, cost) = slot.list_mut()?;
    for element in elements {
        match end {
            End::Left => list.push_front(element.clone()),
            End::Right => list.push_back(element.clone()),
        }
    }
    *cost += cost_of(elements);
    let length = list.len();
    slot.changed(cx);
    Ok(length)
}

/// Takes one element from an end; none if the key does not exist.
pub(super) fn take(slot: &mut Slot, cx: Context, end: End) -> Result<Option<Bytes>, Failure> {
    if slot.list()?.is_none() {
        return Ok(None);
    }
    let (list, cost) = slot.list_mut()?;
    let taken = match end {
        End::Left => list.pop_front(),
        End::Right => list.pop_back(),
    };
    *cost = cost.saturating_sub(cost_of(&taken));
    slot.changed(cx);
    Ok(taken)
}

/// Moves one element of a list from an end to an end.
pub(super) fn rotate(slot: &mut Slot, cx: Context, from: End, to: End) -> Result<(), Failure> {
    let (list, _) = slot.list_mut()?;
    match (from, to) {
        (End::Left, End::Right) => list.rotate_left(usize::from(!list.is_empty())),
        (End::Right, End::Left) => list.rotate_right(usize::from(!list.is_empty())),
        (End::Left, End::Left) | (End::Right, End::Right) => {}
    }
    slot.changed(cx);
    Ok(())
}

fn pop(slot: &mut Slot, cx: Context, end: End, count: Option<u64>) -> Answer {
    let Some(many) = count else {
        return Ok(take(slot, cx, end)?.map_or(Reply::Nil, Reply::Bulk));
    };
    if slot.list()?.is_none() {
        return Ok(Reply::NilArray);
    }
    let mut taken = Vec::new();
    while (taken.len() as u64) < many {
        let Some(element) = take(slot, cx, end)? else { break };
        taken.push(Reply::Bulk(element));
    }
    Ok(Reply::Array(taken))
}

fn remove(slot: &mut Slot, count: i64, element: &Bytes) -> Result<usize, Failure> {
    let (list, cost) = slot.list_mut()?;
    let many = match usize::try_from(count.unsigned_abs()) {
        Ok(0) | Err(_) => usize::MAX,
        Ok(many) => many,
    };
    let mut gone = 0;
    let mut keeps = |other: &Bytes| {
        let goes = other == element && gone < many;
        gone += usize::from(goes);
        !goes
    };
    if count < 0 {
        let kept: VecDeque<Bytes> =
            list.iter().rev().filter(|other| keeps(other)).cloned().collect();
        *list = kept.into_iter().rev().collect();
    } else {
        list.retain(|other| keeps(other));
    }
    *cost = cost_of(list.iter());
    Ok(gone)
}
