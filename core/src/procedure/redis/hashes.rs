//! Commands on hashes.

use bytes::Bytes;

use super::entry::cost_of;
use super::number::{self, Decimal};
use super::reply::{Answer, Failure, NOT_FLOAT, OVERFLOW, Reply};
use super::state::{Context, Slot};
use super::{Use, random};
use crate::wire::Wire;

/// A command on one hash.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Hashes {
    /// `HGET`
    Get(Bytes),
    /// `HMGET`
    GetSeveral(Vec<Bytes>),
    /// `HGETALL`
    All,
    /// `HKEYS`
    Fields,
    /// `HVALS`
    Values,
    /// `HEXISTS`
    Has(Bytes),
    /// `HLEN`
    Length,
    /// `HSTRLEN`
    ValueLength(Bytes),
    /// `HSET`, and `HMSET` if true.
    Set(Vec<(Bytes, Bytes)>, bool),
    /// `HSETNX`
    SetIfAbsent(Bytes, Bytes),
    /// `HDEL`
    Delete(Vec<Bytes>),
    /// `HINCRBY`
    Add(Bytes, i64),
    /// `HINCRBYFLOAT`: a field and a decimal number.
    AddDecimal(Bytes, Bytes),
    /// `HRANDFIELD`: how many, and whether with their values.
    Random(Option<i64>, bool),
}

const NOT_INTEGER: Failure = Failure::new("ERR hash value is not an integer");
const NOT_DECIMAL: Failure = Failure::new("ERR hash value is not a float");

impl Hashes {
    pub(super) fn uses(&self) -> Use {
        match self {
            Self::Get(_)
            | Self::GetSeveral(_)
            | Self::All
            | Self::Fields
            | Self::Values
            | Self::Has(_)
            | Self::Length
            | Self::ValueLength(_)
            | Self::Random(..) => Use::Read,
            Self::Set(..)
            | Self::SetIfAbsent(..)
            | Self::Delete(_)
            | Self::Add(..)
            | Self::AddDecimal(..) => Use::Change,
        }
    }

    pub(super) fn execute(&self, slot: &mut Slot, cx: Context) -> Answer {
        let fields = slot.hash()?;
        let get = |field: &Bytes| fields.and_then(|fields| fields.get(field));
        match self {
            Self::Get(field) => Ok(Reply::bulk_or_nil(get(field))),
            Self::GetSeveral(names) => {
                Ok(Reply::Array(names.iter().map(|name| Reply::bulk_or_nil(get(name))).collect()))
            }
            Self::All => {
                let pair = |(name, value): (&Bytes, &Bytes)| {
                    (Reply::Bulk(name.clone()), Reply::Bulk(value.clone()))
                };
                Ok(Reply::Map(fields.into_iter().flatten().map(pair).collect()))
            }
            Self::Fields => Ok(Reply::bulks(fields.into_iter().flatten().map(|(name, _)| name))),
            Self::Values => Ok(Reply::bulks(fields.into_iter().flatten().map(|(_, value)| value))),
            Self::Has(field) => Ok(Reply::flag(get(field).is_some())),
            Self::Length => Ok(Reply::count(fields.map_or(0, |fields| fields.len()))),
            Self::ValueLength(field) => Ok(Reply::count(get(field).map_or(0, Bytes::len))),
            Self::Set(pairs, is_status) => {
                let new = put(slot, cx, pairs)?;
                Ok(if *is_status { Reply::OK } else { Reply::count(new) })
            }
            Self::SetIfAbsent(name, value) => {
                if get(name).is_some() {
                    return Ok(Reply::Integer(0));
                }
                put(slot, cx, &[(name.clone(), value.clone())])?;
                Ok(Reply::Integer(1))
            }
            Self::Delete(names) => {
                if fields.is_none() {
                    return Ok(Reply::Integer(0));
                }
                let (fields, cost) = slot.hash_mut()?;
                let mut gone = 0;
                for name in names {
                    if let Some((name, value)) = fields.remove_entry(name) {
                        *cost = cost.saturating_sub(cost_of([&name, &value]));
                        gone += 1;
                    }
                }
                if gone > 0 {
                    slot.changed(cx);
                }
                Ok(Reply::count(gone))
            }
            Self::Add(name, amount) => {
                let old = match get(name) {
                    Some(text) => number::integer(text).ok_or(NOT_INTEGER)?,
                    None => 0,
                };
                let sum = old.checked_add(*amount).ok_or(OVERFLOW)?;
                put(slot, cx, &[(name.clone(), sum.to_string().into())])?;
                Ok(Reply::Integer(sum))
            }
            Self::AddDecimal(name, amount) => {
                let amount = Decimal::parse(amount).ok_or(NOT_FLOAT)?;
                let old = match get(name) {
                    Some(text) => Decimal::parse(text).ok_or(NOT_DECIMAL)?,
                    None => Decimal::ZERO,
                };
                let sum = Bytes::from(old.plus(amount).ok_or(OVERFLOW)?.to_string());
                put(slot, cx, &[(name.clone(), sum.clone())])?;
                Ok(Reply::Bulk(sum))
            }
            Self::Random(None, _) => {
                let one = fields.and_then(|fields| random::one(cx.stamp, fields.keys()));
                Ok(Reply::bulk_or_nil(one))
            }
            Self::Random(Some(count), has_values) => {
                let all = fields.into_iter().flatten().collect();
                let chosen = random::choose(cx.stamp, *count, all).into_iter();
                Ok(if *has_values {
                    let pair = |(name, value): (&Bytes, &Bytes)| (name.clone(), value.clone());
                    Reply::Couples(chosen.map(pair).collect())
                } else {
                    Reply::bulks(chosen.map(|(name, _)| name))
                })
            }
        }
    }
}

/// Sets fields; returns how many are new.
fn put(slot: &mut Slot, cx: Context, pairs: &[(Bytes, Bytes)]) -> Result<usize, Failure> {
    slot.check_room(pairs.iter().map(|(name, value)| cost_of([name, value])).sum())?;
    let (fields, cost) = slot.hash_mut()?;
    let mut new = 0;
    for (name, value) in pairs {
        match fields.insert(name.clone(), value.clone()) {
            Some(old) => *cost = (*cost + value.len()).saturating_sub(old.len()),
            None => {
                *cost += cost_of([name, value]);
                new += 1;
            }
        }
    }
    slot.changed(cx);
    Ok(new)
}
