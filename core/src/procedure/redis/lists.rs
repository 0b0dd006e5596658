//! Commands on lists.

use std::collections::VecDeque;

use bytes::Bytes;

use super::entry::cost_of;
use super::number;
use super::parse::Args;
use super::reply::{Answer, Failure, NOT_INTEGER, Reply, SYNTAX};
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
    /// `LPOS`
    Find {
        /// The element.
        element: Bytes,
        /// The first match to answer, counted from 1; from the end if the number is negative.
        rank: i64,
        /// How many matches to answer, 0 for all; only one, and not in a list, if there is none.
        count: Option<u64>,
        /// How many elements to compare; 0 for all.
        compared_max: u64,
    },
    /// `LINSERT`
    Insert {
        /// Before the pivot; otherwise after it.
        is_before: bool,
        /// The element beside which the new one is put.
        pivot: Bytes,
        /// The new element.
        element: Bytes,
    },
}

const NO_KEY: Failure = Failure::new("ERR no such key");
const NO_INDEX: Failure = Failure::new("ERR index out of range");

impl Lists {
    pub(super) fn uses(&self) -> Use {
        match self {
            Self::Range(..) | Self::Length | Self::At(_) | Self::Find { .. } => Use::Read,
            Self::Push(..)
            | Self::Pop(..)
            | Self::Set(..)
            | Self::Trim(..)
            | Self::Remove(..)
            | Self::Insert { .. } => Use::Change,
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
            Self::Find { element, rank, count, compared_max } => {
                let many = match count {
                    None => 1,
                    Some(count) => nonzero_or_all(*count),
                };
                let found = find(list, element, *rank, many, nonzero_or_all(*compared_max));
                let mut found = found.into_iter().map(Reply::count);
                Ok(match count {
                    None => found.next().unwrap_or(Reply::Nil),
                    Some(_) => Reply::Array(found.collect()),
                })
            }
            Self::Insert { is_before, pivot, element } => {
                let Some(list) = list else { return Ok(Reply::Integer(0)) };
                let Some(place) = list.iter().position(|other| other == pivot) else {
                    return Ok(Reply::Integer(-1));
                };
                slot.check_room(cost_of([element]))?;
                let (list, cost) = slot.list_mut()?;
                list.insert(place + usize::from(!is_before), element.clone());
                *cost += cost_of([element]);
                slot.changed(cx);
                Ok(Reply::count(length + 1))
            }
        }
    }
}

/// All, if the number is 0.
fn nonzero_or_all(many: u64) -> usize {
    match usize::try_from(many) {
        Ok(0) | Err(_) => usize::MAX,
        Ok(many) => many,
    }
}

/// The places of an element: at most `many`, beginning with the match `rank`, among the first (or
/// last) `compared_max` elements.
fn find(
    list: Option<&VecDeque<Bytes>>,
    element: &Bytes,
    rank: i64,
    many: usize,
    compared_max: usize,
) -> Vec<usize> {
    let skipped = usize::try_from(rank.unsigned_abs()).unwrap_or(usize::MAX).saturating_sub(1);
    let places = list.into_iter().flatten().enumerate();
    let is_match = |(_, other): &(usize, &Bytes)| *other == element;
    if rank < 0 {
        let length = list.map_or(0, VecDeque::len);
        let back = list.into_iter().flat_map(|list| list.iter().rev()).enumerate();
        let back = back.take(compared_max).filter(is_match).skip(skipped).take(many);
        return back.map(|(place, _)| length - 1 - place).collect();
    }
    let found = places.take(compared_max).filter(is_match).skip(skipped).take(many);
    found.map(|(place, _)| place).collect()
}

const ZERO_RANK: Failure = Failure::new(
    "ERR RANK can't be zero: use 1 to start from the first match, 2 from the second ... or use \
     negative to start from the end of the list",
);
const RANK_RANGE: Failure = Failure::new(
    "ERR value is out of range, value must between -9223372036854775807 and 9223372036854775807",
);

/// `LPOS key element [RANK rank] [COUNT count] [MAXLEN len]`
pub(super) fn parse_find(args: &mut Args<'_>) -> Result<(u32, Lists), Failure> {
    let (key, element) = (args.key()?, args.bytes()?);
    let (mut rank, mut count, mut compared_max) = (1, None, 0);
    while args.left() > 1 {
        if args.takes("RANK") {
            rank = args.integer()?;
            if rank == i64::MIN {
                return Err(RANK_RANGE);
            }
            if rank == 0 {
                return Err(ZERO_RANK);
            }
        } else if args.takes("COUNT") {
            let negative = Failure::new("ERR COUNT can't be negative");
            count = Some(args.count().map_err(|_| negative)?);
        } else if args.takes("MAXLEN") {
            let negative = Failure::new("ERR MAXLEN can't be negative");
            compared_max = args.count().map_err(|_| negative)?;
        } else {
            return Err(SYNTAX);
        }
    }
    Ok((key, Lists::Find { element, rank, count, compared_max }))
}

/// `LINSERT key BEFORE | AFTER pivot element`
pub(super) fn parse_insert(args: &mut Args<'_>) -> Result<(u32, Lists), Failure> {
    let key = args.key()?;
    let is_before = args.takes("BEFORE");
    if !is_before && !args.takes("AFTER") {
        return Err(SYNTAX);
    }
    Ok((key, Lists::Insert { is_before, pivot: args.bytes()?, element: args.bytes()? }))
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
