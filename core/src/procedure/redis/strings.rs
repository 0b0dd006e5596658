//! Commands on strings and counters.

use bytes::Bytes;

use super::bits;
use super::entry::{Content, cost_of};
use super::number::{self, Decimal};
use super::parse::Args;
use super::reply::{Answer, Failure, NOT_FLOAT, NOT_INTEGER, OVERFLOW, Reply, SYNTAX, TOO_LARGE};
use super::state::{Context, Slot};
use super::{Use, keys};
use crate::wire::Wire;

/// When `SET` sets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum Condition {
    /// Always.
    Always,
    /// Only if the key does not exist.
    IfAbsent,
    /// Only if the key exists.
    IfPresent,
}

/// What `SET` answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum SetAnswer {
    /// OK or nothing.
    Status,
    /// 1 or 0.
    Flag,
    /// The old value.
    Old,
}

/// When a key expires after a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum Lifetime {
    /// Never.
    Forever,
    /// When it did before.
    Keep,
    /// So many milliseconds after the command.
    In(i64),
    /// At this time, in milliseconds since 1970.
    At(i64),
}

/// The longest lifetime, in milliseconds. The time of expiry has 63 bits for clients.
const LIFETIME_MS_MAX: i64 = 1 << 62;

impl Lifetime {
    /// The lifetime that a command names; none if it is too long.
    pub(super) fn parse(amount: i64, is_seconds: bool, is_absolute: bool) -> Option<Self> {
        let millis = amount.checked_mul(if is_seconds { 1_000 } else { 1 })?;
        if is_absolute {
            return Some(Self::At(millis));
        }
        (millis <= LIFETIME_MS_MAX).then_some(Self::In(millis))
    }
}

/// A command on one string.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Strings {
    /// `GET`
    Get,
    /// `STRLEN`
    Length,
    /// `GETRANGE`: first and last byte.
    Range(i64, i64),
    /// `SET` and its relatives.
    Set {
        /// The value.
        value: Bytes,
        /// When it sets.
        condition: Condition,
        /// When the key expires.
        lifetime: Lifetime,
        /// What it answers.
        answer: SetAnswer,
    },
    /// `GETDEL`
    GetDelete,
    /// `GETEX`
    GetExpire(Lifetime),
    /// `APPEND`
    Append(Bytes),
    /// `SETRANGE`: offset and bytes.
    SetRange(u64, Bytes),
    /// `INCR`, `DECR`, `INCRBY`, `DECRBY`
    Add(i64),
    /// `INCRBYFLOAT`: a decimal number.
    AddDecimal(Bytes),
    /// `GETBIT`: an offset.
    GetBit(u64),
    /// `SETBIT`: an offset and the bit.
    SetBit(u64, bool),
    /// `BITCOUNT`: which part of the string, as text. It counts only if the key exists.
    CountBits(Vec<Bytes>),
}

impl Strings {
    pub(super) fn uses(&self) -> Use {
        match self {
            Self::Get
            | Self::Length
            | Self::Range(..)
            | Self::GetExpire(Lifetime::Keep)
            | Self::GetBit(_)
            | Self::CountBits(_) => Use::Read,
            Self::Set {
                condition: Condition::Always, lifetime, answer: SetAnswer::Status, ..
            } if *lifetime != Lifetime::Keep => Use::Replace,
            Self::Set { .. }
            | Self::GetDelete
            | Self::GetExpire(_)
            | Self::Append(_)
            | Self::SetRange(..)
            | Self::Add(_)
            | Self::AddDecimal(_)
            | Self::SetBit(..) => Use::Change,
        }
    }

    pub(super) fn execute(&self, slot: &mut Slot, cx: Context) -> Answer {
        match self {
            Self::Get => Ok(Reply::bulk_or_nil(slot.string()?)),
            Self::Length => Ok(Reply::count(slot.string()?.map_or(0, Bytes::len))),
            Self::Range(start, end) => {
                let text = slot.string()?.cloned().unwrap_or_default();
                let part = keys::byte_span(*start, *end, text.len());
                Ok(Reply::Bulk(text.slice(part)))
            }
            Self::Set { value, condition, lifetime, answer } => {
                set(slot, cx, value, *condition, *lifetime, *answer)
            }
            Self::GetDelete => {
                let old = Reply::bulk_or_nil(slot.string()?);
                slot.remove();
                Ok(old)
            }
            Self::GetExpire(lifetime) => {
                let old = Reply::bulk_or_nil(slot.string()?);
                let before = slot.expires_ms().unwrap_or(0);
                let at = keys::deadline(*lifetime, before, cx);
                if at != before {
                    keys::expire_at(slot, at, cx);
                }
                Ok(old)
            }
            Self::Append(more) => {
                slot.string()?;
                slot.check_room(cost_of([more]))?;
                let (text, cost) = slot.string_mut()?;
                let mut all = text.to_vec();
                all.extend_from_slice(more);
                let length = all.len();
                *cost += more.len();
                *text = all.into();
                slot.changed(cx);
                Ok(Reply::count(length))
            }
            Self::SetRange(offset, part) => set_range(slot, cx, *offset, part),
            Self::Add(amount) => {
                let old = match slot.string()? {
                    Some(text) => number::integer(text).ok_or(NOT_INTEGER)?,
                    None => 0,
                };
                let sum = old.checked_add(*amount).ok_or(OVERFLOW)?;
                put(slot, cx, sum.to_string().into())?;
                Ok(Reply::Integer(sum))
            }
            Self::AddDecimal(amount) => {
                let old = match slot.string()? {
                    Some(text) => Decimal::parse(text).ok_or(NOT_FLOAT)?,
                    None => Decimal::ZERO,
                };
                let amount = Decimal::parse(amount).ok_or(NOT_FLOAT)?;
                let sum = old.plus(amount).ok_or(OVERFLOW)?;
                let text = Bytes::from(sum.to_string());
                put(slot, cx, text.clone())?;
                Ok(Reply::Bulk(text))
            }
            Self::GetBit(offset) => {
                Ok(Reply::flag(slot.string()?.is_some_and(|text| bits::get(text, *offset))))
            }
            Self::SetBit(offset, bit) => set_bit(slot, cx, *offset, *bit),
            Self::CountBits(part) => {
                let Some(text) = slot.string()? else { return Ok(Reply::Integer(0)) };
                let many = bits::count(text, bits::span(part)?);
                Ok(Reply::Integer(i64::try_from(many).unwrap_or(i64::MAX)))
            }
        }
    }
}

/// Sets the string of a key, which keeps its lifetime.
fn put(slot: &mut Slot, cx: Context, value: Bytes) -> Result<(), Failure> {
    let (text, cost) = slot.string_mut()?;
    *cost = cost_of([&value]);
    *text = value;
    slot.changed(cx);
    Ok(())
}

fn set(
    slot: &mut Slot,
    cx: Context,
    value: &Bytes,
    condition: Condition,
    lifetime: Lifetime,
    answer: SetAnswer,
) -> Answer {
    let old = match answer {
        SetAnswer::Old => Reply::bulk_or_nil(slot.string()?),
        SetAnswer::Status | SetAnswer::Flag => Reply::Nil,
    };
    let sets = match condition {
        Condition::Always => true,
        Condition::IfAbsent => !slot.exists(),
        Condition::IfPresent => slot.exists(),
    };
    if sets {
        let content = Content::String(value.clone());
        if content.cost() > super::entry::COST_MAX {
            return Err(TOO_LARGE);
        }
        let at = keys::deadline(lifetime, slot.expires_ms().unwrap_or(0), cx);
        slot.replace(content, 0, cx);
        if at != 0 {
            keys::expire_at(slot, at, cx);
        }
    }
    Ok(match answer {
        SetAnswer::Old => old,
        SetAnswer::Flag => Reply::flag(sets),
        SetAnswer::Status if sets => Reply::OK,
        SetAnswer::Status => Reply::Nil,
    })
}

fn set_range(slot: &mut Slot, cx: Context, offset: u64, part: &Bytes) -> Answer {
    let old = slot.string()?.cloned();
    let length = old.as_ref().map_or(0, Bytes::len);
    if part.is_empty() {
        return Ok(Reply::count(length));
    }
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    let end = offset.saturating_add(part.len());
    if end > super::entry::COST_MAX {
        return Err(TOO_LARGE);
    }
    let mut text = old.map(|text| text.to_vec()).unwrap_or_default();
    if text.len() < end {
        text.resize(end, 0);
    }
    if let Some(range) = text.get_mut(offset..end) {
        range.copy_from_slice(part);
    }
    if cost_of([&Bytes::copy_from_slice(&text)]) > super::entry::COST_MAX {
        return Err(TOO_LARGE);
    }
    let length = text.len();
    put(slot, cx, text.into())?;
    Ok(Reply::count(length))
}

fn set_bit(slot: &mut Slot, cx: Context, offset: u64, bit: bool) -> Answer {
    let old = slot.string()?;
    if offset / 8 >= super::entry::COST_MAX as u64 {
        return Err(TOO_LARGE);
    }
    let before = old.is_some_and(|text| bits::get(text, offset));
    let text = bits::with(old, offset, bit);
    if cost_of([&text]) > super::entry::COST_MAX {
        return Err(TOO_LARGE);
    }
    put(slot, cx, text)?;
    Ok(Reply::flag(before))
}

/// A lifetime as an argument: a positive number of seconds or milliseconds.
pub(super) fn lifetime(
    args: &mut Args<'_>,
    is_seconds: bool,
    is_absolute: bool,
) -> Result<Lifetime, Failure> {
    let invalid = Failure::of(format!("ERR invalid expire time in '{}' command", args.name()));
    let amount = Some(args.integer()?).filter(|amount| *amount > 0);
    amount.and_then(|amount| Lifetime::parse(amount, is_seconds, is_absolute)).ok_or(invalid)
}

/// One of the words `EX`, `PX`, `EXAT` and `PXAT` with its number.
fn lifetime_option(args: &mut Args<'_>) -> Result<Option<Lifetime>, Failure> {
    for (word, is_seconds, is_absolute) in
        [("EX", true, false), ("PX", false, false), ("EXAT", true, true), ("PXAT", false, true)]
    {
        if args.takes(word) {
            return lifetime(args, is_seconds, is_absolute).map(Some);
        }
    }
    Ok(None)
}

/// `SET key value [NX | XX] [GET] [EX s | PX ms | EXAT s | PXAT ms | KEEPTTL]`
pub(super) fn parse_set(args: &mut Args<'_>) -> Result<(u32, Strings), Failure> {
    let (key, value) = (args.key()?, args.bytes()?);
    let (mut condition, mut answer) = (Condition::Always, SetAnswer::Status);
    let mut life = None;
    while args.left() > 0 {
        let wanted = if args.takes("NX") {
            Some(Condition::IfAbsent)
        } else if args.takes("XX") {
            Some(Condition::IfPresent)
        } else {
            None
        };
        if let Some(wanted) = wanted {
            if condition != Condition::Always && condition != wanted {
                return Err(SYNTAX);
            }
            condition = wanted;
        } else if args.takes("GET") {
            answer = SetAnswer::Old;
        } else if life.is_some() {
            return Err(SYNTAX);
        } else if args.takes("KEEPTTL") {
            life = Some(Lifetime::Keep);
        } else {
            life = Some(lifetime_option(args)?.ok_or(SYNTAX)?);
        }
    }
    let lifetime = life.unwrap_or(Lifetime::Forever);
    Ok((key, Strings::Set { value, condition, lifetime, answer }))
}

/// `GETEX key [EX s | PX ms | EXAT s | PXAT ms | PERSIST]`
pub(super) fn parse_get_expire(args: &mut Args<'_>) -> Result<(u32, Strings), Failure> {
    let key = args.key()?;
    let lifetime = if args.takes("PERSIST") {
        Lifetime::Forever
    } else {
        lifetime_option(args)?.unwrap_or(Lifetime::Keep)
    };
    Ok((key, Strings::GetExpire(lifetime)))
}
