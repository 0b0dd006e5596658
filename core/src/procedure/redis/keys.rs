//! Commands on keys of any type, and what several types share.

use std::ops::Range;

use super::Use;
use super::parse::Args;
use super::reply::{Answer, Failure, Reply};
use super::state::{Context, Slot};
use super::strings::Lifetime;
use crate::wire::Wire;

/// When `EXPIRE` changes the lifetime.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum ExpireCondition {
    /// Always.
    Always,
    /// Only if the key does not expire yet.
    IfForever,
    /// Only if the key expires.
    IfExpires,
    /// Only if it expires later than before.
    IfLater,
    /// Only if it expires earlier than before.
    IfEarlier,
}

/// A command on one key of any type.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Keys {
    /// `TYPE`
    Type,
    /// `EXPIRE`, `PEXPIRE`, `EXPIREAT`, `PEXPIREAT`
    Expire(Lifetime, ExpireCondition),
    /// `PERSIST`
    Persist,
    /// `TTL`, `PTTL`, `EXPIRETIME`, `PEXPIRETIME`
    Remaining {
        /// In seconds, otherwise in milliseconds.
        is_seconds: bool,
        /// Since 1970, otherwise from now on.
        is_absolute: bool,
    },
}

impl Keys {
    pub(super) fn uses(&self) -> Use {
        match self {
            Self::Type | Self::Remaining { .. } => Use::Read,
            Self::Expire(..) | Self::Persist => Use::Change,
        }
    }

    pub(super) fn execute(&self, slot: &mut Slot, cx: Context) -> Answer {
        let before = slot.expires_ms();
        match self {
            Self::Type => Ok(Reply::Status(slot.type_name().unwrap_or("none"))),
            Self::Expire(lifetime, condition) => {
                let Some(before) = before else { return Ok(Reply::Integer(0)) };
                let at = deadline(*lifetime, before, cx);
                let changes = match condition {
                    ExpireCondition::Always => true,
                    ExpireCondition::IfForever => before == 0,
                    ExpireCondition::IfExpires => before != 0,
                    ExpireCondition::IfLater => before != 0 && at > before,
                    ExpireCondition::IfEarlier => before == 0 || at < before,
                };
                if changes {
                    expire_at(slot, at, cx);
                }
                Ok(Reply::flag(changes))
            }
            Self::Persist => {
                let changes = before.is_some_and(|at| at != 0);
                if changes {
                    slot.set_expires_ms(0, cx);
                }
                Ok(Reply::flag(changes))
            }
            Self::Remaining { is_seconds, is_absolute } => Ok(Reply::Integer(match before {
                None => -2,
                Some(0) => -1,
                Some(at) => {
                    let millis = if *is_absolute { at } else { at.saturating_sub(cx.now_ms) };
                    let round = if *is_absolute { 0 } else { 500 };
                    let shown =
                        if *is_seconds { millis.saturating_add(round) / 1_000 } else { millis };
                    i64::try_from(shown).unwrap_or(i64::MAX)
                }
            })),
        }
    }
}

/// The time of an expiry; 0 for never. A time before 1970 is the first millisecond after it.
pub(super) fn deadline(lifetime: Lifetime, before: u64, cx: Context) -> u64 {
    match lifetime {
        Lifetime::Forever => 0,
        Lifetime::Keep => before,
        Lifetime::In(millis) => cx.now_ms.saturating_add_signed(millis).max(1),
        Lifetime::At(millis) => u64::try_from(millis).unwrap_or(0).max(1),
    }
}

/// Sets the time of expiry of a key. If it has passed already, the key is removed.
pub(super) fn expire_at(slot: &mut Slot, at: u64, cx: Context) {
    if at != 0 && at <= cx.now_ms {
        slot.remove();
    } else {
        slot.set_expires_ms(at, cx);
    }
}

/// `EXPIRE key time [NX | XX | GT | LT]` and its relatives.
pub(super) fn parse_expire(
    args: &mut Args<'_>,
    is_seconds: bool,
    is_absolute: bool,
) -> Result<(u32, Keys), Failure> {
    let invalid = Failure::of(format!("ERR invalid expire time in '{}' command", args.name()));
    let (key, amount) = (args.key()?, args.integer()?);
    let millis = amount.checked_mul(if is_seconds { 1_000 } else { 1 }).ok_or(invalid)?;
    let lifetime = if is_absolute { Lifetime::At(millis) } else { Lifetime::In(millis) };
    let condition = [
        ("NX", ExpireCondition::IfForever),
        ("XX", ExpireCondition::IfExpires),
        ("GT", ExpireCondition::IfLater),
        ("LT", ExpireCondition::IfEarlier),
    ];
    let given = condition.into_iter().find(|(word, _)| args.takes(word));
    let condition = given.map_or(ExpireCondition::Always, |(_, condition)| condition);
    Ok((key, Keys::Expire(lifetime, condition)))
}

/// The part of a list from `first` to `last`, both included; negative numbers count from the end.
pub(super) fn span(first: i64, last: i64, length: usize) -> Range<usize> {
    let place = |at: i64| {
        if at >= 0 {
            return usize::try_from(at).unwrap_or(usize::MAX);
        }
        let back = usize::try_from(at.unsigned_abs()).unwrap_or(usize::MAX);
        length.saturating_sub(back)
    };
    let is_before = |at: i64| at < 0 && at.unsigned_abs() > length as u64;
    if is_before(last) {
        return 0..0;
    }
    let (first, end) = (place(first), place(last).saturating_add(1).min(length));
    if first >= end { 0..0 } else { first..end }
}

/// One element of a list; negative numbers count from the end.
pub(super) fn position(at: i64, length: usize) -> Option<usize> {
    let place = if at >= 0 {
        usize::try_from(at).ok()?
    } else {
        length.checked_sub(usize::try_from(at.unsigned_abs()).ok()?)?
    };
    (place < length).then_some(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_those_of_redis() {
        let cases = [
            (0, -1, 5, 0..5),
            (1, 3, 5, 1..4),
            (-2, -1, 5, 3..5),
            (-9, 1, 5, 0..2),
            (3, 1, 5, 0..0),
            (5, 9, 5, 0..0),
            (0, -6, 5, 0..0),
            (0, i64::MAX, 5, 0..5),
            (i64::MIN, i64::MIN, 5, 0..0),
            (0, -1, 0, 0..0),
        ];
        for (first, last, length, wanted) in cases {
            assert_eq!(span(first, last, length), wanted, "{first} {last} {length}");
        }
        assert_eq!(position(-1, 3), Some(2));
        assert_eq!(position(-4, 3), None);
        assert_eq!(position(3, 3), None);
    }
}
